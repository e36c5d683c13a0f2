"""A `CarambaCache` as tensors and plain values, and back: safe under ``torch.load(weights_only=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from caramba_fast.hf.common import Common
from caramba_fast.hf.hybrid_layer import STATES, HybridLayer
from caramba_fast.hf.packed_layer import CarambaLayer
from caramba_fast.hf.stock_state import copied, load_stock, state_of_stock

#: What a state says it is.
FORMAT = "caramba_fast.hf.cache.1"


def state_of(common: Common, layers: Sequence[Any]) -> dict[str, Any]:
    """The state of a cache: of our layers and, in a hybrid model, of the stock ones between them."""
    return {
        "format": FORMAT,
        "leftpad": common.leftpad,
        "layers": [
            _layer_state(layer) if isinstance(layer, CarambaLayer) else state_of_stock(layer)
            for layer in layers
        ],
    }


def _layer_state(layer: CarambaLayer) -> dict[str, Any]:
    if layer.store is None:
        return {}
    dtype = str(layer.dtype).removeprefix("torch.")
    state = {"dropped": layer.dropped, "dtype": dtype, "store": layer.store.state_dict()}
    if isinstance(layer, HybridLayer):
        state["states"] = {name: copied(getattr(layer, name), name, layer, None) for name in STATES}
    return state


def load_state(
    common: Common,
    layers: Sequence[Any],
    state: dict[str, Any],
    device: torch.device | str | None,
) -> None:
    """Puts a state into layers of the same sizes and storage.

    Raises:
        ValueError: a state of another format, number or kind of layers, or storage.
    """
    if state.get("format") != FORMAT:
        raise ValueError(f"the state has format {state.get('format')!r}; {FORMAT!r} is needed")
    kept, leftpad = state["layers"], state["leftpad"]
    if len(kept) != len(layers):
        raise ValueError(f"the state has {len(kept)} layers; {common.model} has {len(layers)}")
    for layer, part in zip(layers, kept, strict=True):
        if not isinstance(layer, CarambaLayer):
            load_stock(layer, part, device)
        elif "stock" in part:
            raise ValueError(
                f"layer {layer.index} of the state is a {part['stock']}; {common.model} has attention there"
            )
        else:
            _load_layer(layer, part, device)
    common.leftpad = leftpad if leftpad is None or device is None else leftpad.to(device)


def _load_layer(
    layer: CarambaLayer, state: dict[str, Any], device: torch.device | str | None
) -> None:
    if not state:
        layer.store = None
        return
    store = state["store"]
    streams, dtype = store["streams"], getattr(torch, state["dtype"])
    place = device or streams["k"]["codes"].device
    lead = (store["batch_size"], store["n_kv_heads"], 0)
    layer.lazy_initialization(
        *(torch.empty(*lead, streams[s]["head_dim"], dtype=dtype, device=place) for s in ("k", "v"))
    )
    assert layer.store is not None
    layer.store.load_state_dict(store)
    layer.dropped = int(state["dropped"])
    if isinstance(layer, HybridLayer):
        for name in STATES:
            setattr(layer, name, copied(state["states"][name], name, layer, place))
