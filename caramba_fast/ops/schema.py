"""Schemas of the append and attention ops, put together from the streams they read.

A standard cache has the streams k and v; a decoupled one k_sem, k_geo and v. Options of a stream carry
its name, so the four schemas say the same things in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

STANDARD = ("k", "v")
DECOUPLED = ("k_sem", "k_geo", "v")


def _constants(stream: str) -> list[str]:
    """The transform of a stream (see `caramba_fast.ops.transform`)."""
    key_only = ("mean", "bias", "pairs", "phases") if stream != "v" else ()
    tensors = [f"Tensor? {stream}_{part}=None" for part in (*key_only, "scale")]
    return [*tensors, f"bool rotate_{stream}=False"]


def append_schema(streams: Sequence[str]) -> str:
    """Buffers are mutated in place; nothing is returned."""
    alias = iter("abcdefghijklmnopqrstuvwxyz")
    parts: list[str] = []
    for stream in streams:
        parts += [
            f"Tensor({next(alias)}!) {stream}_codes",
            f"Tensor({next(alias)}!)? {stream}_scales",
        ]
    parts += [f"Tensor {stream}_new" for stream in streams]
    parts += ["Tensor start", *[f"str {stream}_kind" for stream in streams], "*"]
    parts += ["Tensor? block_table=None", "Tensor? cache_leftpad=None", "Tensor? query_lens=None"]
    for stream in streams:
        parts += [
            f"Tensor({next(alias)}!)? {stream}_tail=None",
            f"Tensor({next(alias)}!)? {stream}_sink=None",
        ]
        parts += [*_constants(stream), f'str fit_{stream}="amax"']
    return f"({', '.join(parts)}) -> ()"


def attention_schema(
    streams: Sequence[str], scales: Sequence[str], extra: Sequence[str] = ()
) -> str:
    """``scales`` names the factor of each key stream's q·k."""
    keys = streams[:-1]
    parts = (
        ["Tensor q"] if len(keys) == 1 else [f"Tensor q_{key.removeprefix('k_')}" for key in keys]
    )
    for stream in streams:
        parts += [f"Tensor {stream}_codes", f"Tensor? {stream}_scales"]
    parts += ["Tensor cache_seqlens", *[f"str {stream}_kind" for stream in streams], "*"]
    parts += ["int n_kv_heads", "Tensor? block_table=None", "Tensor? cache_leftpad=None"]
    parts += ["Tensor? query_lens=None", "int residual_len=0"]
    for stream in streams:
        parts += [f"Tensor? {stream}_tail=None", f"Tensor? {stream}_sink=None", *_constants(stream)]
    parts += [f"Tensor? null_{stream}=None" for stream in streams]
    parts += ["Tensor? s_aux=None", *[f"float? {scale}=None" for scale in scales]]
    parts += ["SymInt[2] window_size=[-1, -1]", "int num_sink_tokens=0", "float softcap=0.0"]
    parts += ["int num_splits=0", *extra]
    return f"({', '.join(parts)}) -> (Tensor out, Tensor lse)"
