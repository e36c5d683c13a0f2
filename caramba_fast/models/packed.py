"""Weights of linear layers in oneDNN's own layout, as Inductor's freezing packs them.

A decode step on a CPU reads every weight for a few rows, and oneDNN, torch's library for products in half precision,
reads weights faster in its own layout than in their usual one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

M = TypeVar("M", bound=nn.Module)

_mkldnn = torch.ops.mkldnn
#: What packed weights have none of: memory in the usual layout.
_NO_MEMORY = (
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage, Tensor.share_memory_,
    Tensor.is_shared, Tensor.pin_memory, Tensor.numpy, Tensor.__array__,
)  # fmt: skip
_READ_ONLY = (
    "packed weights cannot be changed; call caramba_fast.models.unpack_weights(model) first"
)
_NOT_TRAINED = (
    "packed weights cannot be trained; call caramba_fast.models.unpack_weights(model) first"
)


def _given(x: nn.Parameter) -> nn.Parameter:
    return x


class PackedWeight(Tensor):
    """A linear layer's weight, (out, in), in oneDNN's layout: read-only, without gradient.

    Linear layers multiply it as it is, unless functorch, forward-mode autograd or autocast is at work; all else gets a
    plain copy.
    """

    packed: Tensor
    plain: nn.Parameter | None
    trained: bool

    @staticmethod
    def __new__(cls, packed: Tensor, *_: Any) -> PackedWeight:
        """A tensor that looks like ``packed`` and has no memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        made: PackedWeight = make(cls, packed.shape, dtype=packed.dtype, device="cpu")
        return made

    def __init__(self, packed: Tensor, trained: bool, plain: nn.Parameter | None = None) -> None:
        """``packed``: oneDNN's tensor; ``trained``: whether the weight required a gradient; ``plain``: it, if used."""
        self.packed, self.trained, self.plain = packed, trained, plain
        self._is_param = True  # nn.Parameter would detach it

    @property
    def dense(self) -> Tensor:
        """A copy in the usual layout."""
        made: Tensor = _unpacked(self.packed)
        return made

    def again(self) -> PackedWeight:
        """Another tensor with the same weights."""
        return PackedWeight(self.packed, self.trained, self.plain)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype})"

    def unpacked(self) -> nn.Parameter:
        """The weight as it was."""
        if self.plain is not None:
            return self.plain
        return nn.Parameter(self.dense, requires_grad=self.trained)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as it was, and still tied if it was."""
        if self.plain is not None:
            return _given, (self.plain,)
        return nn.Parameter(self.dense, requires_grad=self.trained).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """The weights cannot change, so they are shared."""
        made = memo[id(self)] = PackedWeight(
            self.packed, self.trained, copy.deepcopy(self.plain, memo)
        )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _NO_MEMORY:
            raise RuntimeError(
                "packed weights have no plain memory; call caramba_fast.models.unpack_weights(model) first"
            )
        if func is Tensor.__setitem__ and isinstance(args[0], PackedWeight):
            raise RuntimeError(_READ_ONLY)
        if func is Tensor.requires_grad_ and kwargs.get("requires_grad", args[1:] != (False,)):
            raise RuntimeError(_NOT_TRAINED)
        if func is torch._has_compatible_shallow_copy_type:
            return args[0] is args[1]  # else a module's `to` makes a parameter
        of = getattr(func, "__self__", None)
        if of is Tensor.requires_grad and func.__name__ == "__set__" and args[1]:
            raise RuntimeError(_NOT_TRAINED)
        if of is Tensor.data:
            if func.__name__ == "__get__":
                return args[0].again()
            if args[0] is args[1]:
                return None
            raise RuntimeError(_READ_ONLY)
        if torch.compiler.is_compiling():  # Inductor would look for memory
            args, kwargs = tree_map_only(PackedWeight, lambda x: x.dense, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = {
                x.name: value for x, value in zip(func._schema.arguments, args, strict=False)
            } | kwargs
            for x in func._schema.arguments:
                written = x.alias_info is not None and x.alias_info.is_write
                if written and isinstance(given.get(x.name), PackedWeight):
                    raise RuntimeError(_READ_ONLY)
        plain = tree_map_only(PackedWeight, lambda x: x.dense, (args, kwargs))
        return func(*plain[0], **plain[1])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with a `PackedWeight` somewhere."""
    if isinstance(weight, PackedWeight) and _takes(weight.packed, input, bias):
        trained = input.requires_grad or (bias is not None and bias.requires_grad)
        product = _packed_linear if torch.compiler.is_compiling() else _product
        if trained and torch.is_grad_enabled():
            product = _trained_linear
        found: Tensor = product(input, weight.packed, bias)
        return found
    plain: Any = [x.dense if isinstance(x, PackedWeight) else x for x in (input, weight, bias)]
    return F.linear(*plain)


def _takes(packed: Tensor, input: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN's product takes these; asked for every product of a step, so it is cheap."""
    dtype = packed.dtype
    if isinstance(input, PackedWeight) or input.dtype != dtype or not input.is_cpu:
        return False
    if bias is not None and (
        isinstance(bias, PackedWeight) or bias.dtype != dtype or not bias.is_cpu
    ):
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return False
    fits = input.numel() > 0 and input.shape[-1:] == packed.shape[1:]
    return fits and not torch.is_autocast_enabled("cpu")


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = _mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return found


#: What is done with packed tensors, as ops that Inductor calls as they are. Of oneDNN's own ones it demands constant
#: weights, and then it keeps no program on disk.
_library = torch.library.Library("caramba_fast", "FRAGMENT")


def _op(schema: str, op: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Any]:
    name = _library.define(schema)
    for key, kernel in {"CPU": op, "MkldnnCPU": op, "Meta": fake}.items():
        _library.impl(name, kernel, key)
    made: Callable[..., Any] = getattr(torch.ops.caramba_fast, name).default
    return made


def _fake_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 - as the op
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


_ARGUMENTS = "(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
_packed_linear = _op(f"packed_linear{_ARGUMENTS}", _product, _fake_product)
#: With a gradient, which takes time even where none is needed.
_trained_linear = _op(f"packed_linear_trained{_ARGUMENTS}", _product, _fake_product)
_unpacked = _op("unpacked(Tensor weight) -> Tensor", Tensor.to_dense, torch.empty_like)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's name
    ctx.weight = inputs[1]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    of_input, _, of_bias = ctx.needs_input_grad
    return (
        grad @ _unpacked(ctx.weight) if of_input else None,
        None,
        grad.reshape(-1, grad.shape[-1]).sum(0) if of_bias else None,
    )


torch.library.register_autograd(
    "caramba_fast::packed_linear_trained", _gradients, setup_context=_keep, lib=_library
)


def _for_inductor(input: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    found: Tensor = _packed_linear(input, weight, bias)
    return found


#: Decompositions for tracing; none if this torch has no oneDNN.
FOR_INDUCTOR: dict[Any, Any] = {}
if hasattr(_mkldnn, "_linear_pointwise"):
    FOR_INDUCTOR[_mkldnn._linear_pointwise.default] = _for_inductor


def why_not_packed(dtype: torch.dtype) -> str | None:
    """Why weights of a dtype cannot be packed on this machine; None if they can."""
    if not torch.backends.mkldnn.is_available() or not hasattr(_mkldnn, "_linear_pointwise"):
        return "this torch has no oneDNN"
    if dtype == torch.float32:
        return None
    checks = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if dtype not in checks:
        return "only float32, bfloat16 and float16 weights are packed"
    if not getattr(_mkldnn, checks[dtype])():
        return f"oneDNN has no fast products in {dtype} on this processor"
    return None


def pack_weights(model: M) -> M:
    """Packs the weights of linear layers of any model on a CPU in place, for inference; `unpack_weights` undoes it.

    Only the packed weights are kept, but where a weight is also used elsewhere (an output layer tied to the embedding)
    both are. Layers whose weights are quantized, parametrized or on other devices are left as they are. State dicts,
    pickles and ``save_pretrained`` have the plain values. Training, ``load_state_dict`` and whatever else writes to
    weights needs `unpack_weights` first.

    Raises:
        TypeError: not a module.
        ValueError: no layer's weights can be packed, with the reason.
        RuntimeError: the model is in training mode.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    if model.training:
        raise RuntimeError("packed weights cannot be trained; call model.eval() first")
    found, reasons = list[nn.Linear](), set[str]()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module._parameters.get("weight") is None:
            continue
        reason = _why_not(module.weight)
        if reason is None:
            found.append(module)
        else:
            reasons.add(reason)
    if not found:
        said = (
            "; ".join(sorted(reasons)) or "the model has no linear layer with a weight of its own"
        )
        raise ValueError(f"no weights to pack: {said}")
    layers = set(map(id, found))
    others = (module for module in model.modules() if id(module) not in layers)
    used = {id(x) for module in others for x in module._parameters.values()}
    made = dict[int, Any]()
    for linear in found:
        weight: Any = linear.weight
        if id(weight) not in made:
            packed = _mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
            plain = weight if id(weight) in used else None
            made[id(weight)] = PackedWeight(packed, weight.requires_grad, plain)
        linear.weight = made[id(weight)]
    return model


def _why_not(weight: Tensor) -> str | None:
    if isinstance(weight, PackedWeight):
        return "weights are packed already"
    if type(weight.data) is not Tensor:
        return f"weights are {type(weight.data).__name__}s"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device.type}, not on a CPU"
    return why_not_packed(weight.dtype)


def unpack_weights(model: M) -> M:
    """Undoes `pack_weights` in place; other models are left as they are."""
    made = dict[int, nn.Parameter]()
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if not isinstance(weight, PackedWeight):
            continue
        if id(weight) not in made:
            made[id(weight)] = weight.unpacked()
        module._parameters["weight"] = made[id(weight)]
    return model


def has_packed_weights(model: object) -> bool:
    """Whether any weight of a module is packed."""
    return isinstance(model, nn.Module) and any(
        isinstance(x, PackedWeight) for x in model.parameters()
    )
