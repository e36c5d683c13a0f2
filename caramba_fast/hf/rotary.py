"""RoPE of accelerated models in one op (`ops.apply_rotary_emb`) instead of some sixteen.

Most decoders of transformers call a function ``apply_rotary_pos_emb`` of their own module, and most of these are the
same. Where one gives the bits of our op, `fuse` puts a function into its place that calls the op when no gradient is
wanted and the arguments are those that were tried, and the model's own otherwise. Other models of the module get the
same numbers from it; `unfuse` puts the model's own function back. Where the layers of a model hold the function itself
(transformers 5.0 to 5.3 at least, and with the package ``kernels``), it stays: pickle finds functions by the name in
their module, and no model of that module could be pickled while another function has this name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.ops import apply_rotary_emb
from caramba_fast.ops.apply_rotary_emb import rotary_op

NAME = "apply_rotary_pos_emb"
#: The functions that were replaced, by the name of their module.
_own: dict[str, Callable[..., Any]] = {}


def fuse(model: nn.Module) -> list[str]:
    """Replaces the rope of the modules that ``model`` is made of, where it can be; their names."""
    modules = sorted({type(part).__module__ for part in model.modules()})
    found = []
    for name in modules:
        module = sys.modules.get(name)
        own = getattr(module, NAME, None)
        if own is None or is_held(model, _own.get(name, own)):
            continue
        if name in _own:
            found.append(name)
        elif is_ours(own):
            _own[name] = own
            setattr(module, NAME, _fused(own))
            found.append(name)
    return found


def fused() -> set[str]:
    """The modules whose rope is replaced."""
    return set(_own)


def unfuse(modules: Iterable[str]) -> None:
    """Puts back what `fuse` replaced in ``modules``."""
    for name in modules:
        own = _own.pop(name, None)
        if own is not None and name in sys.modules:
            setattr(sys.modules[name], NAME, own)


def is_held(model: nn.Module, own: Callable[..., Any]) -> bool:
    """Whether a layer of ``model`` has the function as an attribute or a part."""
    return any(
        own is value
        for part in model.modules()
        for value in (part, *vars(part).values(), *vars(part).get("_kernel_funcs", {}).values())
    )


@torch.no_grad()
def is_ours(own: Callable[..., Any]) -> bool:
    """Whether a model's function gives the bits of our op, for queries and keys that lie as projections leave them."""
    given = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (
            torch.randn(2, 3, heads, 16, generator=given).to(dtype).transpose(1, 2)
            for heads in (4, 2)
        )
        cos, sin = (torch.randn(2, 3, 16, generator=given).to(dtype) for _ in range(2))
        try:
            found = own(q, k, cos, sin)
            wanted = apply_rotary_emb(q, k, cos, sin)
            same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        except (TypeError, ValueError, RuntimeError, IndexError):  # another function of that name
            return False
        if not same:
            return False
    return True


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return own(q, k, cos, sin, *args, **kwargs)
        dtype, dim = q.dtype, q.shape[-1]
        plain = type(q) is type(k) is type(cos) is type(sin) is Tensor
        fits = q.ndim == 4 and cos.ndim == 3 and dim == cos.shape[-1] == k.shape[-1]
        if not (plain and fits and dtype == k.dtype == cos.dtype == sin.dtype):
            return own(q, k, cos, sin)
        return rotary_op.call(q, k, cos, sin)

    return rotary
