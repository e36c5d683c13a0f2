"""Layers that keep K and V of tokens beside a state of linear attention (FalconH1): K and V packed, the state as it is.

transformers has them from 5.1 on, as one class of both kinds of layer; ours are of both kinds as well, since its
`Cache` asks layers for their classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import cache_utils

from caramba_fast.hf.compat import HYBRIDS
from caramba_fast.hf.layers import CarambaLayer

_LINEAR: Any = getattr(cache_utils, "LinearAttentionLayer", object)
#: What such a layer keeps beside K and V, by number of the state.
STATES = (
    "conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size",
)  # fmt: skip
TENSORS = STATES[:2]


class HybridLayer(CarambaLayer):
    """The part of `hybrid` that is ours."""

    def __init__(self, states: int, *args: Any) -> None:
        _LINEAR.__init__(self, number_of_states=states)
        super().__init__(*args)

    def lazy_initialization(self, *tensors: Tensor, **states: Any) -> None:  # type: ignore[override]
        """K and V come by position, states by name: so transformers tells them apart."""
        if tensors:
            super().lazy_initialization(*tensors)
        else:
            _LINEAR.lazy_initialization(self, **states)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the state can be put back as it was; K and V can."""
        return bool(_LINEAR.is_croppable.fget(self))

    def crop(self, count: int) -> None:
        """Takes tokens off the end, of the state first: it may refuse."""
        _LINEAR.crop(self, count)
        super().crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        _LINEAR.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)

    def _take(self, rows: list[int]) -> None:
        for name in TENSORS:
            states = getattr(self, name)
            for i, state in states.items():
                states[i] = None if state is None else state[rows]
        super()._take(rows)

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        _LINEAR.reset(self)
        super().reset()

    def offload(self) -> None:
        """Moves everything to the CPU."""
        _LINEAR.offload(self)
        super().offload()

    def prefetch(self) -> None:
        """Moves it back to where the model's keys are."""
        _LINEAR.prefetch(self)
        super().prefetch()


_OURS = {stock: type(f"Caramba{stock.__name__}", (HybridLayer, stock), {}) for stock in HYBRIDS}


def hybrid(layer: Any, *args: Any) -> CarambaLayer:
    """What takes the place of a stock ``layer`` that `is_hybrid`; ``args`` as for `CarambaLayer`."""
    made: CarambaLayer = _OURS[type(layer)](layer.number_of_states, *args)
    return made
