"""Root mean square of a model's queries per channel, by which 4-bit keys divide their bits (docs/formats.md).

The error of a score is the sum over channels of a key's error times the query, so channels with large queries deserve
more bits. Which ones these are depends on the weights far more than on the text, so tokens from all over the
vocabulary measure it as well as text does.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import AnyLayerShape, DecoupledLayerShape, ModelKVCache

#: Number of tokens in the forward pass, and the distance between their ids.
TOKENS, STEP = 64, 7919
#: Errors of models that do not support such a forward pass.
FAILURES = (RuntimeError, ValueError, AttributeError, TypeError, LookupError, AssertionError)


def probing_ids(vocab_size: int, device: torch.device, most: int | None = None) -> Tensor:
    """(1, T) int64 ids from all over the vocabulary, at most ``most``."""
    count = TOKENS if most is None else min(TOKENS, most)
    return (torch.arange(1, count + 1, device=device) * STEP % vocab_size)[None]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context in eval mode; restores the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class SquareMeans:
    """Accumulates squares of queries, per stream of keys."""

    def __init__(self) -> None:
        self._sums: dict[Any, Tensor] = {}
        self._counts: dict[Any, int] = {}

    def add(self, name: Any, q: Tensor, n_kv_heads: int) -> None:
        """Adds queries (B, H_q, T, D) for keys of ``n_kv_heads`` heads."""
        squares = q.detach().float().square().unflatten(1, (n_kv_heads, -1)).sum((0, 2, 3))
        self._sums[name] = self._sums.get(name, 0) + squares
        self._counts[name] = self._counts.get(name, 0) + q.numel() // squares.numel()

    def roots(self) -> dict[Any, Tensor]:
        """Root mean squares (H_kv, D) float32 of each stream; streams with values that are not finite are left out."""
        found = {name: (x / self._counts[name]).sqrt() for name, x in self._sums.items()}
        return {name: x for name, x in found.items() if bool(x.isfinite().all())}


class _Measured:
    """The result for a model, computed on first use; does not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: list[dict[str, Tensor]] | None = None

    def layer(self, layout: Sequence[AnyLayerShape], index: int) -> Mapping[str, Tensor]:
        """(H_kv, D) of each key stream of a layer; empty if the model is gone or the forward pass failed."""
        if self._found is None:
            model = self._model()
            if model is None:
                return {}
            try:
                self._found = _measure(model, layout)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                warnings.warn(
                    f"{type(model).__name__}: a forward pass over {TOKENS} tokens failed ({error}), so it is not known "
                    "how large its queries are; 4-bit keys divide their bytes by ranges alone",
                    stacklevel=2,
                )
                self._found = [{} for _ in layout]
        return self._found[index]


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Measured] = weakref.WeakKeyDictionary()


def with_query_rms(model: nn.Module, layout: Sequence[AnyLayerShape]) -> list[AnyLayerShape]:
    """A model's layout with shapes that know ``query_rms``, measured by one forward pass on first use."""
    known = _KNOWN.get(model)
    if known is None:
        known = _KNOWN[model] = _Measured(model)
    return [
        replace(shape, query_rms=partial(known.layer, layout, index))
        for index, shape in enumerate(layout)
    ]


def _measure(model: Any, layout: Sequence[AnyLayerShape]) -> list[dict[str, Tensor]]:
    """Runs a `LanguageModel` over a cache that records its queries."""
    with torch.inference_mode(False), torch.no_grad(), without_dropout(model):
        ids = probing_ids(model.vocab_size, model.device, getattr(model, "max_positions", None))
        cache = ModelKVCache(layout, 1, ids.shape[1], device=model.device, prefill="stored")
        means = [SquareMeans() for _ in layout]
        for layer, shape, mean in zip(cache.layers, layout, means, strict=True):
            names = ("k_sem", "k_geo") if isinstance(shape, DecoupledLayerShape) else ("k",)
            layer.attend_from = partial(_listen, layer.attend_from, layer.n_kv_heads, names, mean)  # type: ignore[method-assign]
        model.forward(ids, cache)
        return [mean.roots() for mean in means]


def _listen(
    attend: Any,
    n_kv_heads: int,
    names: Sequence[str],
    means: SquareMeans,
    queries: tuple[Tensor, ...],
    before: int,
    options: dict[str, Any],
) -> Any:
    """`CachedRows.attend_from`, recording the queries."""
    for name, q in zip(names, queries, strict=True):
        means.add(name, q, n_kv_heads)
    return attend(queries, before, options)
