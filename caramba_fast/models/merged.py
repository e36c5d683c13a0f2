"""Projections of one input as one product: q, k and v, and an MLP's gate and up.

They are vLLM's ``qkv_proj`` and ``gate_up_proj``. In a decode step of a small model a product is as much call as bytes,
so one costs less than three. State dicts keep the names and the order that the projections have by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

#: What is merged, and into what.
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

M = TypeVar("M", bound=nn.Module)


class MergedLinear(nn.Linear):
    """Linear layers of one input, their outputs side by side.

    Args:
        into: its name in the module that has it.
        names: of the layers, in that module.
        parts: the layers.
    """

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
        """Name and value of every parameter of the layers, in their order; views."""
        split = {name: x.split(self.widths) for name, x in self.named_parameters()}
        for index, name in enumerate(self.names):
            yield from ((f"{name}.{kind}", parts[index]) for kind, parts in split.items())

    def gather(self, state: dict[str, Any], prefix: str) -> None:
        """Puts what a state dict has of the layers together, in place; ``prefix`` is that of the module around it."""
        for kind, _ in self.named_parameters():
            names = [f"{prefix}{name}.{kind}" for name in self.names]
            if all(name in state for name in names):
                state[f"{prefix}{self.into}.{kind}"] = torch.cat([state.pop(n) for n in names])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not is_plain(self):  # quantized weights are not cut
            return super()._save_to_state_dict(destination, prefix, keep_vars)
        around = prefix.removesuffix(f"{self.into}.")
        for name, value in self.pieces():
            destination[around + name] = value if keep_vars else value.detach()
        return None


class Projecting(nn.Module):
    """A module whose projections may be merged: reads state dicts of either layout."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for child in self._modules.values():
            if isinstance(child, MergedLinear):
                child.gather(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_plain(linear: nn.Linear) -> bool:
    """Whether weights are numbers as they are, not quantized or spread over devices."""
    return all(type(x.data) is Tensor for x in linear.parameters())


def merge_projections(model: M) -> M:
    """Merges q, k and v, and gate and up, of a native model in place, for inference.

    Call it before weights are quantized. `caramba_fast.models.load` has done so. `split_projections` undoes it;
    hooks and parametrizations of the layers are lost.

    Args:
        model: a `caramba_fast.models.Transformer`; of others nothing changes, nor of decoupled attention.

    Raises:
        TypeError: weights are quantized or spread over devices.
    """
    for module in list(model.modules()):
        for into, names in PARTS.items() if isinstance(module, Projecting) else ():
            parts = [module._modules.get(name) for name in names]
            if all(isinstance(part, nn.Linear) for part in parts):
                linears: Any = parts
                if not all(is_plain(part) for part in linears):
                    raise TypeError(
                        f"{', '.join(names)}: quantized or spread weights are not merged; merge before quantizing"
                    )
                _replace(module, names, {into: MergedLinear(into, names, linears)})
    return model


def split_projections(model: M) -> M:
    """The inverse of `merge_projections`: each projection is a linear layer of its own again.

    Raises:
        TypeError: weights are quantized or spread over devices.
    """
    for module in list(model.modules()):
        for merged in [x for x in module._modules.values() if isinstance(x, MergedLinear)]:
            if not is_plain(merged):
                raise TypeError(f"{merged.into}: quantized or spread weights are not split")
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
    """Puts ``new`` where the first of ``names`` is among the children, for their order is that of state dicts."""
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
