"""A transformers ``Cache`` over our own caches, for one forward pass.

K and V go in as the model makes them. What comes back is read in one of three ways: as it is stored, of rows padded
at the end (`StepCache`); as it is stored, of tokens of many requests side by side (`RaggedCache`); or as tensors, of
rows padded at the front (`DenseCache`), which serves every model that calls ``cache.update``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import LayerKVCache, ModelKVCache, RaggedBatch, Rope
from caramba_fast.cache.ragged import RaggedLayer
from caramba_fast.hf.layers import PackedLayer
from caramba_fast.hf.lazy_tensors import values_of
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.row_layout import LeftPadded, RightPadded, RowLayout


class _RowsLayer(CacheLayerMixin):
    """One layer of one forward pass over rows.

    Args:
        store: our cache of the layer; it may hold tokens.
        rows: how rows lie in this forward pass.
        exact: on an empty cache, hand back K and V as they came, not as they are stored.
    """

    is_sliding = False  # windows are in the mask: all tokens are kept

    def __init__(self, store: LayerKVCache, rows: RowLayout, exact: bool) -> None:
        CacheLayerMixin.__init__(self)
        self.store, self.rows = store, rows
        self.exact = exact and store.is_empty
        self.is_initialized = not store.is_empty

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: our cache has its memory already."""

    def get_seq_length(self, *_: Any) -> int:
        """Columns before the queries."""
        return self.rows.past

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Columns after `update`, and the first one's slot."""
        return self.rows.total, 0

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.store.max_seq_len

    get_max_cache_shape = get_max_length  # the name it had in transformers 4


class StepLayer(_RowsLayer, PackedLayer):
    """A layer whose rows are read as they are stored; its masks do not fit tensors."""

    rows: RightPadded

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.store.pos

    @property
    def real_queries(self) -> list[int]:  # type: ignore[override]
        """Of the query columns of each row, how many are no padding."""
        return self.rows.new

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        new = self.rows.new if self.rows.padded_queries else None
        self.store.append(keys, values, new, will_attend=not self.exact, rope=rope)
        return self.exact

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """For each row where it starts, and its token that is the first of the ``tokens`` newest columns."""
        assert tokens == self.rows.tokens and leftpad is None
        return [0] * len(self.rows.held), self.rows.held


class DenseLayer(_RowsLayer):
    """A layer whose rows are read as tensors, which live for its attention only."""

    rows: LeftPadded

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T', D) keys and values and returns those of all columns."""
        rows, store = self.rows, self.store
        new = values_of(key_states), value_states
        k, v = (rows.from_layout(x, 2).to(store.device) for x in new)
        store.append(k, v, rows.new if rows.padded_queries else None, will_attend=False)
        if self.exact:
            return key_states, value_states
        stored = store.get(key_states.dtype, as_read=True)
        k, v = (rows.keys_to_front(x).to(key_states.device) for x in stored)
        return k, v


class _Pages:
    """One layer of a batch with the signature of `LayerKVCache.attend`."""

    ring_len = 0

    def __init__(self, layer: RaggedLayer) -> None:
        self.layer = layer

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """(1, H_q, N, D) -> (1, H_q, N, D_v)."""
        out = self.layer.attend_tokens(query[0].transpose(0, 1), **options)
        return out.transpose(0, 1)[None]


class RaggedStepLayer(PackedLayer):
    """A layer over the pages of many sequences, whose tokens come side by side as one row of N.

    Args:
        layer: its part of the batch.
        longest: tokens of the longest sequence, new ones included.
    """

    is_sliding = False

    def __init__(self, layer: RaggedLayer, longest: int) -> None:
        CacheLayerMixin.__init__(self)
        self.store, self._length = _Pages(layer), longest
        self.is_initialized = True

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self._length

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: the pages are there."""

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        k, v = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        if rope is None:
            self.store.layer.append_tokens(k, v)
            return False
        q, cos, sin = rope.q[0].transpose(0, 1)[:, :, None], rope.cos, rope.sin
        by_token = Rope(q, cos.transpose(0, 1), sin.transpose(0, 1))
        self.store.layer.append_tokens(k, v, rope=by_token)
        rope.out = by_token.out[:, :, 0].transpose(0, 1)[None]
        return False

    def get_seq_length(self, *_: Any) -> int:
        """None before the batch: every token has a position of its own."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Tokens of the longest sequence: as far as a window can reach back."""
        return self.length, 0


class PackedCache(Cache):
    """What our caches that are read packed have in common."""

    layers: list[Any]

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0], getattr(self.layers[layer_idx], "sliding_window", None))
        return sizes

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Whether rows can start there, (B,) or None for the first slot, which it is here."""
        return leftpad is None


class StepCache(PackedCache):
    """Rows padded at the end, read as they are stored.

    Args:
        kv_cache: our caches, one for each of ``places``.
        rows: how rows lie.
        places: which of the model's layers each of our caches belongs to.
        lenders: layers of the model whose keys and values later layers attend to as well.
    """

    def __init__(
        self,
        kv_cache: ModelKVCache,
        rows: RightPadded,
        places: Sequence[int],
        lenders: Collection[int] = (),
    ) -> None:
        exact = kv_cache.prefill == "exact"
        stores: Any = list(kv_cache)
        for place, store in zip(places, stores, strict=True):
            store.attended_again = place in lenders
        super().__init__(
            layers=_layers_at(places, [StepLayer(store, rows, exact) for store in stores])
        )


class RaggedCache(PackedCache):
    """Tokens of many requests side by side: one sequence to the model, with positions of their own.

    Attention takes each token to the pages of its request. Nothing is padded and no mask is built.

    Args:
        batch: where each token belongs.
        places: as of `StepCache`.
    """

    has_padding = False  # what a model makes for itself is of no meaning (BioGPT)

    def __init__(self, batch: RaggedBatch, places: Sequence[int]) -> None:
        layers = [RaggedStepLayer(layer, batch.longest) for layer in batch.layers]
        super().__init__(layers=_layers_at(places, layers))


class DenseCache(Cache):
    """Rows padded at the front, read as tensors.

    Args:
        kv_cache, rows, places: as of `StepCache`.
    """

    def __init__(self, kv_cache: ModelKVCache, rows: LeftPadded, places: Sequence[int]) -> None:
        exact = kv_cache.prefill == "exact"
        stores: Any = list(kv_cache)
        super().__init__(
            layers=_layers_at(places, [DenseLayer(store, rows, exact) for store in stores])
        )


def _layers_at(places: Sequence[int], layers: list[Any]) -> list[Any]:
    """A layer for each of the model's; where it keeps no K and V of its own, one that answers about lengths."""
    found = dict(zip(places, layers, strict=True))
    return [found.get(i, layers[0]) for i in range(max(places) + 1)]
