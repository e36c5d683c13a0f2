"""A transformers ``Cache`` over a `ModelKVCache` for one forward pass that reads it as it is stored.

K and V go in as the model makes them; what comes back stands for the layer, and our attention function reads that
packed. Rows stay as they lie in our caches, padded at the end.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import LayerKVCache, ModelKVCache
from caramba_fast.hf.deferred import PackedStates
from caramba_fast.hf.end_frame import EndFrame
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.probe import Findings


class TensorsNeededError(RuntimeError):
    """A model's own code has asked for keys and values of a packed read as tensors."""


class DropoutActiveError(TensorsNeededError):
    """A packed read with dropout, which a model has in train mode alone."""


def check_no_dropout(key: Any) -> None:
    """Raises DropoutActiveError for keys that can only be read as they are stored."""
    if isinstance(key, PackedStates) and key.layer.packed_only:
        raise DropoutActiveError("dropout is active, and packed reads have none: model.eval()")


class StepLayer(CacheLayerMixin):
    """One layer of one forward pass.

    Args:
        store: our cache of the layer; it may hold tokens.
        frame: how rows lie in this forward pass.
        exact: on an empty cache, hand back K and V as they came, not as they are stored.
    """

    is_sliding = False  # windows are in the mask: all tokens are kept
    packed_only = True  # tensors would be laid out in another frame

    def __init__(self, store: LayerKVCache, frame: EndFrame, exact: bool) -> None:
        super().__init__()
        self.store, self.frame = store, frame
        self.exact = exact and store.is_empty
        self.is_initialized = not store.is_empty

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: our cache has its memory already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T', D) keys and values; what it returns stands for all that are stored."""
        frame = self.frame
        self.store.append(
            key_states.detach(), value_states.detach(),
            frame.new if frame.padded_queries else None,
            will_attend=not self.exact,
        )  # fmt: skip
        if self.exact:
            return key_states, value_states
        return PackedStates.of(self, "k", key_states), PackedStates.of(self, "v", value_states)

    # -- what is asked of it --------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.store.pos

    def get_seq_length(self, *_: Any) -> int:
        """Columns before the queries."""
        return self.frame.past

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Tokens of the longest row after `update`, and the first one's slot."""
        return self.frame.total, 0

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.store.max_seq_len

    get_max_cache_shape = get_max_length  # the name it had in transformers 4

    # -- reading --------------------------------------------------------------------------

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be attended from."""
        return not self.store.residual_len or tokens <= self.store.attendable

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Places in a row -> slots: the same, since nothing is left behind."""
        return tokens

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """For each row where it starts, and its token that is the first of the ``tokens`` newest columns."""
        assert tokens == self.frame.tokens and leftpad is None
        return [0] * len(self.frame.held), self.frame.held

    @property
    def real_queries(self) -> list[int]:
        """Of the query columns of each row, how many are no padding."""
        return self.frame.new

    def dequantized(self, *_: Any) -> NoReturn:
        """Masks of this frame do not fit tensors.

        Raises:
            TensorsNeededError: always.
        """
        raise TensorsNeededError("its attention (or its mask) needs keys and values as tensors")


class StepCache(Cache):
    """What a model is given as ``past_key_values`` in one forward pass.

    Args:
        kv_cache: our caches, one for each layer that has one.
        frame: how rows lie.
        findings: which of the model's layers each of our caches belongs to.
    """

    def __init__(self, kv_cache: ModelKVCache, frame: EndFrame, findings: Findings) -> None:
        exact, places = kv_cache.prefill == "exact", findings.places
        found: dict[int, StepLayer] = {}
        for place, store in zip(places, kv_cache, strict=True):
            assert isinstance(store, LayerKVCache)
            store.attended_again = place in findings.lenders
            found[place] = StepLayer(store, frame, exact)
        some = found[places[0]]  # layers without K and V of their own answer about lengths
        super().__init__(layers=[found.get(i, some) for i in range(max(places) + 1)])

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0])
        return sizes

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Rows start at the first slot; False for anything else."""
        return leftpad is None
