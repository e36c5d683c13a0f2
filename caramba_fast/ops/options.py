"""The keyword options of the attention ops and of a cache's ``attend``, for editors and type checkers."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class CommonOptions(TypedDict, total=False):
    """Options of every attention op, documented in `decode_attention`. None means not given."""

    block_table: Tensor | None
    cache_leftpad: Tensor | None
    query_lens: Tensor | None
    residual_len: int | None
    s_aux: Tensor | None
    window_size: tuple[int, int] | None
    num_sink_tokens: int | None
    softcap: float | None
    num_splits: int | None


class AttentionOptions(CommonOptions, total=False):
    """Options of `decode_attention`, documented there."""

    null_k: Tensor | None
    null_v: Tensor | None
    softmax_scale: float | None


class DecoupledAttentionOptions(CommonOptions, total=False):
    """Options of `decoupled_decode_attention`, documented there."""

    null_k_sem: Tensor | None
    null_k_geo: Tensor | None
    null_v: Tensor | None
    sem_scale: float | None
    geo_scale: float | None


class ExtendOptions(AttentionOptions, total=False):
    """Options of `extend_attention`, documented there."""

    q_chunk: int | None
    batch_invariant: bool | None
    local_window: int | None


class DecoupledExtendOptions(DecoupledAttentionOptions, total=False):
    """Options of `decoupled_extend_attention`, documented there."""

    q_chunk: int | None
    batch_invariant: bool | None
    local_window: int | None


class AttendOptions(AttentionOptions, total=False):
    """Options of `LayerKVCache.attend`: those of `decode_attention`, and for prompts ``q_chunk``."""

    q_chunk: int | None
    return_softmax_lse: bool


class DecoupledAttendOptions(DecoupledAttentionOptions, total=False):
    """Options of `DecoupledLayerKVCache.attend`: those of `decoupled_decode_attention`, and for prompts ``q_chunk``."""

    q_chunk: int | None
    return_softmax_lse: bool
