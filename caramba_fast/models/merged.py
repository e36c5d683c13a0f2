"""Merged projections: q, k and v, and an MLP's gate and up, as vLLM's ``qkv_proj`` and ``gate_up_proj``.

In a decode step of a small model the overhead of a matrix product is as large as its memory traffic, so one costs less
than three. State dicts keep the names and the order of the separate projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

#: Merged layer -> the layers it replaces.
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

M = TypeVar("M", bound=nn.Module)


class MergedLinear(nn.Linear):
    """Linear layers ``names`` of one input as one layer, named ``into``, with their outputs side by side."""

    def __init__(self, into: str, names: Sequence[str], parts: Sequence[nn.Linear]) -> None:
        self.into, self.names = into, tuple(names)
        self.widths = [part.out_features for part in parts]
        biased = parts[0].bias is not None
        super().__init__(parts[0].in_features, sum(self.widths), bias=biased, device="meta")
        for kind in ("weight", "bias") if biased else ("weight",):
            given = [getattr(part, kind) for part in parts]
            whole = torch.cat([x.detach() for x in given])
            setattr(self, kind, nn.Parameter(whole, requires_grad=given[0].requires_grad))

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value (a view) of every parameter of the original layers, in their order."""
        split = {name: x.split(self.widths) for name, x in self.named_parameters()}
        for index, name in enumerate(self.names):
            yield from ((f"{name}.{kind}", parts[index]) for kind, parts in split.items())

    def gather(self, state: dict[str, Any], prefix: str) -> None:
        """Merges the original layers' entries of a state dict in place; ``prefix`` is that of the parent module."""
        for kind, _ in self.named_parameters():
            names = [f"{prefix}{name}.{kind}" for name in self.names]
            if all(name in state for name in names):
                state[f"{prefix}{self.into}.{kind}"] = torch.cat([state.pop(n) for n in names])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # quantized weights are not split; packed ones are, as copies
        if not all(type(x.detach()) is Tensor for x in self.parameters()):
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        around = prefix.removesuffix(f"{self.into}.")
        for name, value in self.pieces():
            destination[around + name] = value if keep_vars else value.detach()
        return None


class Projecting(nn.Module):
    """A module whose projections may be merged; loads state dicts of either layout."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for child in self._modules.values():
            if isinstance(child, MergedLinear):
                child.gather(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_plain(linear: nn.Linear) -> bool:
    """Whether the weights are plain tensors, not quantized, packed or spread over devices."""
    return all(type(x.data) is Tensor for x in linear.parameters())


def merge_projections(model: M) -> M:
    """Merges q, k and v, and gate and up, of a native model in place, for inference.

    Call it before weights are quantized; `caramba_fast.models.load` already does. `split_projections` undoes it. Hooks
    and parametrizations of the layers are lost. Other models and decoupled attention are left as they are.

    Raises:
        TypeError: weights are quantized, packed or spread over devices.
    """
    for module in list(model.modules()):
        for into, names in PARTS.items() if isinstance(module, Projecting) else ():
            parts = [module._modules.get(name) for name in names]
            if all(isinstance(part, nn.Linear) for part in parts):
                linears: Any = parts
                if not all(is_plain(part) for part in linears):
                    raise TypeError(
                        f"{', '.join(names)}: quantized, packed or spread weights are not merged; "
                        "merge before quantizing or packing"
                    )
                _replace(module, names, {into: MergedLinear(into, names, linears)})
    return model


def split_projections(model: M) -> M:
    """Undoes `merge_projections`: each projection is a linear layer of its own again.

    Raises:
        TypeError: weights are quantized, packed or spread over devices.
    """
    for module in list(model.modules()):
        for merged in [x for x in module._modules.values() if isinstance(x, MergedLinear)]:
            if not is_plain(merged):
                raise TypeError(f"{merged.into}: quantized, packed or spread weights are not split")
            pieces = {
                name: nn.Parameter(x.detach().clone(), requires_grad=merged.weight.requires_grad)
                for name, x in merged.pieces()
            }
            linears: dict[str, nn.Module] = {}
            for name in merged.names:
                weight, bias = pieces[f"{name}.weight"], pieces.get(f"{name}.bias")
                width, hidden = weight.shape
                linear = nn.Linear(hidden, width, bias=bias is not None, device="meta")
                linear.weight = weight
                if bias is not None:
                    linear.bias = bias
                linears[name] = linear
            _replace(module, [merged.into], linears)
    return model


def _replace(module: nn.Module, names: Sequence[str], new: dict[str, nn.Module]) -> None:
    """Replaces children ``names`` by ``new``, in the same place, since state dicts follow the order of children."""
    children = dict(module._modules)
    for name in children:
        delattr(module, name)
    for name, child in children.items():
        if name == names[0]:
            for other, made in new.items():
                setattr(module, other, made)
        if name not in names:
            setattr(module, name, child)
    module.train(module.training)
