"""How text is run through a cache to be measured: teacher-forced, every token attends to what is stored.

The figures of this package are computed from a `Forward`, a callable, and never see a model: whatever can
run tokens through a cache can be measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from caramba_fast.cache import AnyLayerShape, Calibration, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.models import LanguageModel

#: Tokens of each row computed at once; 128 is the fastest on a CPU. Figures depend on it only where a
#: transform takes its constants from the first tokens, which are the first chunk.
CHUNK = 128
#: Logits held of one cache at a time: 2^25 float32 take 128 MiB.
MOST_LOGITS = 2**25


class Forward(Protocol):
    """Runs tokens through a new cache stored as a spec says."""

    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of consecutive stretches of ``ids`` (B, T) int64, T positions in all.

        How T is cut into stretches depends on the shape of ``ids`` alone, so that several specs can be
        advanced in step.
        """


class ModelForward(Forward, Protocol):
    """A `Forward` that also says what model it runs, as `caramba_fast.quality.measure` needs."""

    @property
    def layout(self) -> Sequence[AnyLayerShape]:
        """What each layer caches."""

    @property
    def identity(self) -> str:
        """Text that differs between models whose figures differ."""


@dataclass(frozen=True)
class CacheSize:
    """What a cache of one row takes, over all layers.

    Attributes:
        bytes_per_token: codes and scales of one token.
        bits_per_value: the same for each cached number.
        cache_bytes_per_token: everything a cache of the whole context allocates (tail, sinks and unused
            slots too), divided by the context.
    """

    bytes_per_token: float
    bits_per_value: float
    cache_bytes_per_token: float


def cache_size(layout: Sequence[AnyLayerShape], spec: str, context: int) -> CacheSize:
    """Bytes of a cache of ``context`` tokens stored as ``spec``; nothing is allocated.

    Raises:
        ValueError: an unknown spec, or one that does not fit the layers.
    """
    configs: dict[str, Any] = cache_configs(spec)
    cache = ModelKVCache(layout, 1, context, device="meta", **configs)
    values = sum(sum(_widths(shape).values()) for shape in layout)
    per_token = cache.bytes_per_token
    return CacheSize(per_token, 8 * per_token / values, cache.nbytes / context)


def _widths(shape: AnyLayerShape) -> dict[str, int]:
    """Numbers cached of each stream for one token."""
    return {name: size for name, size in vars(shape).items() if name.endswith("_dim")}


class CachedForward:
    """The `ModelForward` of a `LanguageModel`; see `cached_forward`."""

    def __init__(self, model: LanguageModel, chunk: int, calibration: Calibration | None) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; a positive int is needed")
        self.model, self.chunk, self.calibration = model, chunk, calibration

    @property
    def layout(self) -> Sequence[AnyLayerShape]:
        """What each layer caches."""
        return self.model.cache_layout

    @cached_property
    def identity(self) -> str:
        """Class, cache widths, chunk, and a digest of the weights and of the calibration."""
        digest = hashlib.sha256()
        if isinstance(self.model, nn.Module):
            for name, value in self.model.state_dict().items():
                _update(digest, name, value)
        _update_from(digest, self.calibration)
        name, widths = type(self.model).__name__, _widths(self.layout[0])
        layers = f"{len(self.layout)} layers of {widths}"
        return f"{name}, {layers}, chunk {self.chunk}, {digest.hexdigest()[:16]}"

    @torch.no_grad()
    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of consecutive chunks of ``ids`` (B, T)."""
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"ids has shape {tuple(ids.shape)}; (B, T) with T >= 1 is needed")
        rows, length = ids.shape
        chunk = max(1, min(self.chunk, MOST_LOGITS // (rows * self.model.vocab_size)))
        cache = ModelKVCache(
            self.layout, rows, length, device=self.model.device, prefill="stored", constants_from_prompt=True,
            calibration=self.calibration, **_with_room(cache_configs(spec), chunk),
        )  # fmt: skip
        for part in ids.to(self.model.device).split(chunk, dim=1):
            yield self.model.forward(part, cache)


def cached_forward(
    model: LanguageModel, chunk: int = CHUNK, calibration: Calibration | None = None
) -> CachedForward:
    """Runs text through a `ModelKVCache` of ``model`` with ``prefill="stored"``.

    Args:
        model: the model.
        chunk: tokens of each row computed at once at most; fewer where the vocabulary is large.
        calibration: statistics for the caches' transforms, handed on to `ModelKVCache`. Without, the
            caches that need any take them from the first chunk of the batch.
    """
    return CachedForward(model, chunk, calibration)


def _with_room(configs: dict[str, KVCacheTensorConfig], chunk: int) -> dict[str, Any]:
    """The same storage with a ring that takes ``chunk`` tokens at once; what is read stays the same."""
    return {
        name: config.model_copy(update={"tail_slack": max(config.tail_slack, chunk)})
        for name, config in configs.items()
    }


def _update_from(digest: Any, value: Any) -> None:
    """Adds the tensors and the text of a (nested) dataclass, mapping or sequence."""
    if isinstance(value, Tensor):
        _update(digest, "", value)
    elif isinstance(value, dict):
        for name, item in value.items():
            digest.update(str(name).encode())
            _update_from(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update_from(digest, item)
    elif hasattr(value, "__dict__"):
        _update_from(digest, vars(value))
    else:
        digest.update(repr(value).encode())


def _update(digest: Any, name: str, value: Tensor, most: int = 2**16) -> None:
    """Adds name, shape and evenly spread values of a tensor, all of them if it is small."""
    flat = value.detach().reshape(-1)
    step = max(1, flat.numel() // most)
    digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
    digest.update(flat[::step].to("cpu", torch.float32).contiguous().numpy().tobytes())
