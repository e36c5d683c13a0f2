"""Layers that keep both K and V of tokens and a linear-attention state (FalconH1): packed K and V, unchanged state.

As in transformers (from 5.1 on) they inherit from both kinds of layer, because its `Cache` checks classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from caramba_fast.hf.compat import (
    HYBRIDS,
    LinearAttentionLayer,
    is_chunked,
    is_hybrid,
    keeps_only_tokens,
    lenders,
    stock_layers,
)
from caramba_fast.hf.growing_layer import CarambaLayer
from caramba_fast.hf.layers import Common

#: What such a layer keeps besides K and V, by number of the state.
STATES = (
    "conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size",
)  # fmt: skip
TENSORS = STATES[:2]


class HybridLayer(CarambaLayer):
    """Our base of the hybrid layers; the other base is a stock class of `HYBRIDS`."""

    def __init__(self, states: int, *args: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        super().__init__(*args)

    def lazy_initialization(self, *tensors: Tensor, **states: Any) -> None:  # type: ignore[override]
        """transformers calls this for both parts: with K and V by position, with states by name."""
        if tensors:
            super().lazy_initialization(*tensors)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the state can be rolled back; K and V always can."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def can_take_back(self, tokens: int) -> bool:  # noqa: ARG002
        """False: the state has no way back of its own."""
        return False

    def crop(self, count: int) -> None:
        """Removes the newest tokens; from the state first, which may refuse."""
        LinearAttentionLayer.crop(self, count)
        super().crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]``."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)

    def _take(self, rows: list[int]) -> None:
        for name in TENSORS:
            states = getattr(self, name)
            for i, state in states.items():
                states[i] = None if state is None else state[rows]
        super()._take(rows)

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        LinearAttentionLayer.reset(self)
        super().reset()

    def offload(self) -> None:
        """Moves everything to the CPU."""
        LinearAttentionLayer.offload(self)
        super().offload()

    def prefetch(self) -> None:
        """Moves it back to the device of the model's keys."""
        LinearAttentionLayer.prefetch(self)
        super().prefetch()


_OURS = {stock: type(f"Caramba{stock.__name__}", (HybridLayer, stock), {}) for stock in HYBRIDS}


def packed_layers(common: Common, kind: Callable[..., Any]) -> list[Any]:
    """The layers of a cache: packed where stock layers keep K and V of tokens, else the stock layers themselves.

    ``kind`` makes a layer that keeps only K and V; its arguments are those of `StoringLayer`.
    """
    config = common.config
    lending = lenders(config)
    layers = stock_layers(config)
    for i, stock in enumerate(layers):
        window = getattr(stock, "sliding_window", None)
        given = (i, common, window, is_chunked(config, i), i in lending)
        if keeps_only_tokens(stock):
            layers[i] = kind(*given)
        elif is_hybrid(stock):
            layers[i] = _OURS[type(stock)](stock.number_of_states, *given)
    return layers
