"""A transformers ``Cache`` over our own caches, for one forward pass.

Three ways to read: packed, with right-padded rows (`StepCache`); packed, with tokens of many requests in one sequence
(`RaggedCache`, a varlen batch); dequantized, with left-padded rows (`DenseCache`), for any model that calls
``cache.update``.
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
    """One layer of one forward pass over rows; if ``exact``, an empty cache returns K and V unquantized."""

    is_sliding = False  # all tokens are kept; windows are in the mask

    def __init__(self, store: LayerKVCache, rows: RowLayout, exact: bool) -> None:
        CacheLayerMixin.__init__(self)
        self.store, self.rows = store, rows
        self.exact = exact and store.is_empty
        self.is_initialized = not store.is_empty

    def lazy_initialization(self, *_: Any) -> None:
        """Does nothing: our cache is already allocated."""

    def get_seq_length(self, *_: Any) -> int:
        return self.rows.past

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.rows.total, 0

    def get_max_length(self) -> int:
        return self.store.max_seq_len

    get_max_cache_shape = get_max_length  # its name in transformers 4


class StepLayer(_RowsLayer, PackedLayer):
    """A layer whose rows are read packed; its masks do not fit dequantized tensors."""

    rows: RightPadded

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.store.pos

    @property
    def real_queries(self) -> list[int]:  # type: ignore[override]
        """Per row, the number of query columns that are not padding."""
        return self.rows.new

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        new = self.rows.new if self.rows.padded_queries else None
        self.store.append(keys, values, new, will_attend=not self.exact, rope=rope)
        return self.exact

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """Per row: where it starts, and the index of its token in the first of the ``tokens`` newest columns."""
        assert tokens == self.rows.tokens and leftpad is None
        return [0] * len(self.rows.held), self.rows.held


class DenseLayer(_RowsLayer):
    """A layer whose rows are dequantized to tensors that live only for its attention call."""

    rows: LeftPadded

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T', D) keys and values; returns those of all columns, left-padded."""
        rows, store = self.rows, self.store
        new = values_of(key_states), value_states
        k, v = (rows.from_layout(x, 2).to(store.device) for x in new)
        store.append(k, v, rows.new if rows.padded_queries else None, will_attend=not self.exact)
        if self.exact:
            return key_states, value_states
        stored = store.get(key_states.dtype, as_read=True, queries=k.shape[2])
        store.narrow_tails()
        k, v = (rows.keys_to_front(x).to(key_states.device) for x in stored)
        return k, v


class _Pages:
    """Adapts one layer of a ragged batch to the signature of `LayerKVCache.attend`."""

    ring_len = 0

    def __init__(self, layer: RaggedLayer) -> None:
        self.layer = layer

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """(1, H_q, N, D) -> (1, H_q, N, D_v)."""
        out = self.layer.attend_tokens(query[0].transpose(0, 1), **options)
        return out.transpose(0, 1)[None]


class RaggedStepLayer(PackedLayer):
    """A layer over the pages of many sequences, whose tokens arrive concatenated as one row of N.

    ``longest`` is the number of tokens of the longest sequence, new ones included.
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
        """Does nothing: the pages are already allocated."""

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
        """0: every token brings its own position."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Tokens of the longest sequence: as far as a window can reach back."""
        return self.length, 0


class PackedCache(Cache):
    """Base of our caches that are read packed."""

    layers: list[Any]

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Number of tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0], getattr(self.layers[layer_idx], "sliding_window", None))
        return sizes

    def check_rows(self, rows: int, config: Any = None) -> None:
        """Raises ValueError if the cache holds another number of rows; one of a single pass is made for its own."""

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Whether rows can start at ``leftpad``, (B,) or None for slot 0; here only slot 0 is supported."""
        return leftpad is None


class StepCache(PackedCache):
    """Right-padded rows, read packed.

    Args:
        kv_cache: our caches, one for each of ``places``, the model layers they belong to.
        rows: the row layout.
        lenders: model layers whose keys and values later layers also attend to.
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
    """Tokens of many requests, concatenated: one sequence to the model, with per-request positions (varlen batch).

    Attention reads, for each token, the pages of its request. Nothing is padded and no mask is built.
    """

    has_padding = False  # ignore padding masks that a model makes itself (BioGPT)

    def __init__(self, batch: RaggedBatch, places: Sequence[int]) -> None:
        layers = [RaggedStepLayer(layer, batch.longest) for layer in batch.layers]
        super().__init__(layers=_layers_at(places, layers))


class DenseCache(Cache):
    """Left-padded rows, read as dequantized tensors; arguments as in `StepCache`."""

    def __init__(self, kv_cache: ModelKVCache, rows: LeftPadded, places: Sequence[int]) -> None:
        exact = kv_cache.prefill == "exact"
        stores: Any = list(kv_cache)
        super().__init__(
            layers=_layers_at(places, [DenseLayer(store, rows, exact) for store in stores])
        )


def _layers_at(places: Sequence[int], layers: list[Any]) -> list[Any]:
    """One layer per model layer; model layers without K and V of their own get the first, which answers for lengths."""
    found = dict(zip(places, layers, strict=True))
    return [found.get(i, layers[0]) for i in range(max(places) + 1)]
