"""Serialization of a `CarambaCache` to tensors and plain values, safe under ``torch.load(weights_only=True)``.

Of the stock layers of hybrid models (linear attention, convolutions) all attributes are saved, because their names
differ between versions of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.state import described, is_stored
from caramba_fast.config.files import shown
from caramba_fast.hf.growing_layer import CarambaLayer
from caramba_fast.hf.hybrid_layer import STATES, HybridLayer
from caramba_fast.hf.layers import Common

PLAIN = (bool, int, float, str, torch.dtype, type(None))

Place = torch.device | str | None


def state_of_stock(layer: Any) -> dict[str, Any]:
    """Copies of a layer's attributes; raises ValueError if one is not a tensor, number or name."""
    fields = {name: copied(value, name, layer, None) for name, value in vars(layer).items()}
    return {"stock": type(layer).__name__, "fields": fields}


def load_stock(layer: Any, state: dict[str, Any], device: Place) -> None:
    """Restores a state into a layer, its tensors on ``device`` if one is given.

    Raises ValueError if the state is of another layer class, or of another version of it.
    """
    kind, fields = state.get("stock"), state.get("fields", {})
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(
            f"the fields of a {shown(kind)} are {shown(fields)}; names and values are needed"
        )
    own, more = set(vars(layer)), set(fields) - set(vars(layer))
    if kind != type(layer).__name__ or own - set(fields) or more - _names_used(type(layer)):
        raise ValueError(
            f"the state has a {kind or 'packed layer'} of {', '.join(sorted(fields)) or 'keys and values'}; "
            f"this cache has a {type(layer).__name__} of {', '.join(sorted(vars(layer)))}"
        )
    for name, value in fields.items():
        setattr(layer, name, copied(value, name, layer, device))


def _names_used(kind: type) -> set[str]:
    """The attributes that methods of a class use; some set a part of them with the first token only."""
    methods = (x for base in kind.__mro__ for x in vars(base).values())
    return {
        name
        for method in methods
        if isinstance(method, FunctionType)
        for name in method.__code__.co_names
    }


def move_stock(layer: Any, device: torch.device | str) -> None:
    """Moves a layer's tensors to a device."""
    for name, value in vars(layer).items():
        setattr(layer, name, copied(value, name, layer, device))


def copied(value: Any, name: str, layer: Any, device: Place) -> Any:
    """A copy, on ``device`` if one is given.

    Raises ValueError for what is no tensor, number or name, and for a tensor without memory for its values.
    """
    if isinstance(value, Tensor):
        if not is_stored(value):
            raise ValueError(f"{type(layer).__name__}.{name} is {described(value)}")
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, torch.device):
        return value if device is None else torch.device(device)
    if isinstance(value, dict):
        return {key: copied(x, name, layer, device) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(x, name, layer, device) for x in value)
    if isinstance(value, PLAIN):
        return value
    raise ValueError(
        f"{type(layer).__name__}.{name} is a {type(value).__name__}; a layer of tensors, numbers and names can be "
        "saved, loaded and moved"
    )


#: Format tag of a state.
FORMAT = "caramba_fast.hf.cache.1"
#: Dtypes that a model may compute keys and values in.
DTYPES = ("float32", "float16", "bfloat16", "float64")


def state_of(common: Common, layers: Sequence[Any]) -> dict[str, Any]:
    """The state of a cache: our layers and, in a hybrid model, the stock layers between them."""
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
    """Restores a state into layers of the same sizes and storage.

    Raises ValueError, with the layers unchanged, if the state has another format, number or kind of layers, or storage,
    or its sizes contradict its tensors.
    """
    _check(common, layers, state)
    made = []
    for layer, part in zip(layers, state["layers"], strict=True):
        scratch = copy.copy(layer)
        if isinstance(layer, CarambaLayer):
            _load_layer(scratch, part, device)
        else:
            load_stock(scratch, part, device)
        made.append(scratch)
    leftpad = state["leftpad"]
    if leftpad is not None and device is not None:
        leftpad = leftpad.to(device)
    # Nothing below can fail.
    for layer, scratch in zip(layers, made, strict=True):
        vars(layer).update(vars(scratch))
    common.leftpad = leftpad


def _check(common: Common, layers: Sequence[Any], state: Any) -> None:
    """Raises ValueError, before allocating anything, if this cannot be the state of such a cache."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise ValueError(f"the state has format {shown(found)}; {FORMAT!r} is needed")
    if "leftpad" not in state:
        raise ValueError("the state lacks 'leftpad'")
    kept, leftpad = state.get("layers"), state["leftpad"]
    if not isinstance(kept, list) or not all(isinstance(part, dict) for part in kept):
        raise ValueError("the state's layers are no list of dicts")
    if len(kept) != len(layers):
        raise ValueError(f"the state has {len(kept)} layers; {common.model} has {len(layers)}")
    rows, held = set(), set()
    # Mllama's layers for images hold as many states as an image has.
    images = getattr(common.config, "cross_attention_layers", None) or ()
    for layer, part in zip(layers, kept, strict=True):
        if not isinstance(layer, CarambaLayer):
            continue
        if "stock" in part:
            raise ValueError(
                f"layer {layer.index} of the state is a {shown(part['stock'])}; {common.model} has attention there"
            )
        if not part:  # some decoders have fewer layers than their config says
            continue
        problem = _problem(layer, part)
        if problem:
            raise ValueError(f"layer {layer.index} of the state: {problem}")
        rows.add(part["store"]["batch_size"])
        # What are no lengths is refused by the store.
        lengths = part["store"].get("lengths")
        if isinstance(lengths, (list, tuple)) and all(type(x) is int for x in lengths):
            common.check_length(part["dropped"] + max(lengths, default=0))
            if layer.index not in images and any(lengths):
                held.add(tuple(part["dropped"] + x for x in lengths))
    if len(rows) > 1:
        raise ValueError(f"the state's layers have {', '.join(map(str, sorted(rows)))} rows")
    if len(held) > 1:
        found = " and ".join(str(list(x)) for x in sorted(held))
        raise ValueError(f"the state's layers hold {found} tokens; all need the same")
    if leftpad is not None and not (
        is_stored(leftpad)
        and leftpad.dtype == torch.int32
        and {tuple(leftpad.shape)} == {(n,) for n in rows}
    ):
        raise ValueError("the state's leftpad is no int32 tensor with a number for each row")


def _problem(layer: CarambaLayer, part: dict[str, Any]) -> str | None:
    """What makes a layer's state unusable; None if its store can be created (the store checks the rest)."""
    wanted = {"dropped", "dtype", "store"} | (
        {"states"} if isinstance(layer, HybridLayer) else set()
    )
    if part.keys() != wanted:
        return f"it has {shown(sorted(part))}; {', '.join(sorted(wanted))} are needed"
    if part["dtype"] not in DTYPES:
        return f"dtype is {shown(part['dtype'])}; {', '.join(DTYPES)} are known"
    if type(part["dropped"]) is not int or not 0 <= part["dropped"] < 2**31:
        return f"dropped is {shown(part['dropped'])}; a whole number from 0 on is needed"
    states = part.get("states")
    if "states" in wanted and not (isinstance(states, dict) and set(states) == set(STATES)):
        return f"states needs {', '.join(STATES)}"
    store = part["store"]
    streams = store.get("streams") if isinstance(store, dict) else None
    if not isinstance(streams, dict) or not {"k", "v"} <= streams.keys():
        return "its store has no streams k and v"
    sizes = [store.get("batch_size"), store.get("n_kv_heads")]
    for name in ("k", "v"):
        codes = streams[name].get("codes") if isinstance(streams[name], dict) else None
        if not is_stored(codes):
            return f"codes of {name} is {described(codes)}"
        if codes.ndim != 4:
            return (
                f"codes of {name} are {tuple(codes.shape)}; (rows, lanes, tokens, bytes) are needed"
            )
        numbers = [*sizes, streams[name].get("head_dim")]
        if not all(type(x) is int and x > 0 for x in numbers):
            return f"rows, heads and head_dim of {name} are {shown(numbers)}; positive numbers are needed"
        # at most two values per byte, so the state cannot ask for more memory than its tensors justify
        if (
            numbers[0] != len(codes)
            or numbers[1] * numbers[2] > 2 * codes.shape[1] * codes.shape[3]
        ):
            return (
                f"rows, heads and head_dim of {name} are {numbers}, its codes {tuple(codes.shape)}"
            )
    return None


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
    layer.dropped = state["dropped"]
    if isinstance(layer, HybridLayer):
        for name in STATES:
            setattr(layer, name, copied(state["states"][name], name, layer, place))
