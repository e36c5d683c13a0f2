"""What a stock layer of a hybrid model holds (linear attention, convolutions), as tensors and plain values.

Such layers keep a few tensors and flags about them as attributes, named differently from version to version: all of
them are taken as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, torch.dtype, type(None))

Place = torch.device | str | None


def state_of_stock(layer: Any) -> dict[str, Any]:
    """Copies of a layer's attributes, safe under ``torch.load(weights_only=True)``.

    Raises:
        ValueError: one is no tensor, number or name.
    """
    fields = {name: copied(value, name, layer, None) for name, value in vars(layer).items()}
    return {"stock": type(layer).__name__, "fields": fields}


def load_stock(layer: Any, state: dict[str, Any], device: Place) -> None:
    """Puts a state into a layer of the same class.

    Args:
        device: where tensors go; None for where they are.

    Raises:
        ValueError: the state of another class of layer, or of another version of it.
    """
    kind, fields = state.get("stock"), state.get("fields", {})
    if kind != type(layer).__name__ or set(fields) != set(vars(layer)):
        raise ValueError(
            f"the state has a {kind or 'packed layer'} of {', '.join(sorted(fields)) or 'keys and values'}; "
            f"this cache has a {type(layer).__name__} of {', '.join(sorted(vars(layer)))}"
        )
    for name, value in fields.items():
        setattr(layer, name, copied(value, name, layer, device))


def move_stock(layer: Any, device: torch.device | str) -> None:
    """Moves a layer's tensors to a device."""
    for name, value in vars(layer).items():
        setattr(layer, name, copied(value, name, layer, device))


def copied(value: Any, name: str, layer: Any, device: Place) -> Any:
    """A copy, on ``device`` where one is given."""
    if isinstance(value, Tensor):
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
