"""KIVI as in its paper (https://arxiv.org/abs/2402.02750), for the tasks of `tasks`: its quality, not its speed.

Keys are quantized by channel over 32 tokens, values by token over 32 channels, between the least and the largest value.
Unquantized are keys after the last multiple of 128 tokens, and values of the newest 128. The package has no such
format: an fp16 cache holds the dequantized values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from caramba_fast.cache import LayerKVCache, LayerShape
from caramba_fast.cache.interface import Rope

GROUP, RESIDUAL = 32, 128


def quantized(x: Tensor, bits: int, dim: int) -> Tensor:
    """x quantized to so many bits and dequantized, each group along ``dim`` with a scale and a zero in fp16."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low).float() / (2**bits - 1)).to(x.dtype).float()
    codes = (x - low).float() / scale.clamp(min=1e-30)
    return (codes.round().clamp(0, 2**bits - 1) * scale + low).to(x.dtype)


class KiviCache(LayerKVCache):
    """One layer's cache, contiguous and in fp16."""

    bits = 2

    def append_streams(
        self,
        new: dict[str, Tensor],
        new_lens: Sequence[int] | None,
        cache_leftpad: Tensor | None,
        will_attend: bool,
        rope: Rope | None = None,
    ) -> None:
        """Appends as any cache; then replaces values that are now old enough by their dequantized ones."""
        before = list(self.lengths.host)
        super().append_streams(new, new_lens, cache_leftpad, will_attend, rope)
        for row, (held, holds) in enumerate(zip(before, self.lengths.host, strict=True)):
            first, last = (length // RESIDUAL * RESIDUAL for length in (held, holds))
            keys = self.k.codes[row, :, first:last].unflatten(1, (-1, GROUP))
            self.k.codes[row, :, first:last] = quantized(keys, self.bits, 2).flatten(1, 2)
            first, last = (max(length - RESIDUAL, 0) for length in (held, holds))
            values = self.v.codes[row, :, first:last].unflatten(2, (-1, GROUP))
            self.v.codes[row, :, first:last] = quantized(values, self.bits, 3).flatten(2)


@dataclass(frozen=True)
class KiviShape(LayerShape):
    """A layer whose cache is a `KiviCache`."""

    bits: int = 2

    def new_cache(self, **sizes: Any) -> KiviCache:
        """A cache of this shape."""
        made = KiviCache(k_dim=self.k_dim, v_dim=self.v_dim, n_kv_heads=self.n_kv_heads, **sizes)
        made.bits = self.bits
        return made


def with_kivi(model: Any, bits: int) -> Any:
    """The same `LanguageModel` with fp16 caches that have KIVI's errors."""
    layout = [
        KiviShape(shape.k_dim, shape.v_dim, shape.n_kv_heads, bits=bits)
        for shape in model.cache_layout
    ]
    made = copy.copy(model)
    made.__class__ = type("Kivi", (type(model),), {"cache_layout": property(lambda _: layout)})
    return made
