"""Size of a cache: by the usual formulas, as the package computes it, and by how much the process really grows.

The usual formulas are ``2 * 2 * batch * tokens * layers * d_model`` (fp16, as many key heads as query heads) and
``2 * layers * tokens * kv_heads * head_dim * bytes``. Neither counts scales, an fp16 tail or rounded-up slots.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caramba_fast.cache import AnyLayerShape, DecoupledLayerShape, LayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.formats import resolve
from caramba_fast.models import ModelConfig, demo_path

KINDS = ("fp32", "fp16", "q8", "q4", "nf4")
BATCH, TOKENS = 16, 2048
#: The small model of the second formula's usual example: layers, kv heads, head width, tokens.
EXAMPLE = (16, 6, 64, 512)
#: A wide layer, and the decoupled one that replaces it (semantic, geometric, values).
WIDE, DECOUPLED = 2048, (128, 256, 256)
COLUMNS = (
    "what", "kind", "batch", "tokens", "formula_d_model", "formula_kv_heads", "bytes_per_token", "nbytes", "allocated",
    "threads", "device", "torch", "commit", "source",
)  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
    """One row per cache: the demo model's, the example's, and one layer of each attention."""
    config = ModelConfig.from_file(demo_path() / "config.json")
    heads, width = config.num_key_value_heads, config.num_key_value_heads * config.head_dim
    layers = config.num_hidden_layers
    for kind in KINDS:
        yield _row("demo", [LayerShape(width, width, heads)] * layers, kind, BATCH, TOKENS,
                   2 * 2 * BATCH * TOKENS * layers * config.hidden_size,
                   _by_kv_heads(layers, BATCH * TOKENS, width, kind))  # fmt: skip
    layers, heads, dim, count = EXAMPLE
    for kind in ("bf16", "q8", "q4"):
        yield _row("example", [LayerShape(heads * dim, heads * dim, heads)] * layers, kind, 1, count,
                   2 * 2 * count * layers * heads * dim, _by_kv_heads(layers, count, heads * dim, kind))  # fmt: skip
    for kind in ("fp16", "q8", "q4"):
        yield _row("standard", [LayerShape(WIDE, WIDE, 16)], kind, 1, TOKENS,
                   2 * 2 * TOKENS * WIDE, _by_kv_heads(1, TOKENS, WIDE, kind))  # fmt: skip
        yield _row("decoupled", [DecoupledLayerShape(*DECOUPLED, 16)], kind, 1, TOKENS, "", "")


def _by_kv_heads(layers: int, tokens: int, width: int, kind: str) -> int:
    """The second formula, with the bits of a code for ``bytes``."""
    return 2 * layers * tokens * width * resolve(kind).bits // 8


def _row(
    what: str, layout: Sequence[AnyLayerShape], kind: str, batch: int, tokens: int, first: Any, second: Any
) -> dict[str, Any]:  # fmt: skip
    configs: dict[str, Any] = cache_configs(kind)
    _give_back()
    before = resident()
    cache = ModelKVCache(layout, batch, tokens, **configs)
    for layer in cache:
        for stream in layer.streams.values():
            for buffer in stream.buffers:
                buffer.fill_(1)  # a page is only allocated when it is written
    grown = resident() - before
    return {
        "what": what, "kind": kind, "batch": batch, "tokens": tokens, "formula_d_model": first,
        "formula_kv_heads": second, "bytes_per_token": round(cache.bytes_per_token), "nbytes": cache.nbytes,
        "allocated": grown,
    }  # fmt: skip


def resident() -> int:
    """Resident bytes of this process; 0 where unknown (outside Linux)."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return 0
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _give_back() -> None:
    """Returns freed memory to the system, or the next cache would reuse it."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
