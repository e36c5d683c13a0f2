"""RoPE of accelerated models as one op (`ops.apply_rotary_emb`) instead of about sixteen.

Most transformers decoders call a function ``apply_rotary_pos_emb`` of their own module. If it is bit-identical to our
op, `fuse` replaces it by a function that calls the op when no gradient is needed and the arguments have the tested
form, and the original otherwise. Other models of the module get the same numbers; `unfuse` restores the original.

In a decode step on CUDA whose queries and keys go straight to one of our layers, even that op is skipped: the function
returns lazy `RotatedStates`, and the layer's append applies RoPE (`ops.append_` with ``rotary_q``). Whether they go
there is learned from earlier calls, since the function does not know its model's cache.

A function object that layers hold themselves (at least transformers 5.0 to 5.3, and with the package ``kernels``) is
not replaced: pickle finds functions by name in their module, so no model of that module could be pickled meanwhile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import Rope
from caramba_fast.hf.lazy_tensors import LazyTensor, values_of
from caramba_fast.ops import apply_rotary_emb
from caramba_fast.ops.apply_rotary_emb import rotary_op
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS
from caramba_fast.ops.checks import FLOATS, tangents_go_along

NAME = "apply_rotary_pos_emb"
#: Attribute of rotated keys: the `Destination` of the function that rotated them.
DESTINATION = "_caramba_destination"
#: Attribute of our functions: (the function itself, the module's own, which it has replaced).
OWN = "_caramba_own"
#: Names of modules whose function is replaced.
_replaced: set[str] = set()


def fuse(model: nn.Module) -> list[str]:
    """Replaces the RoPE function of the Python modules that define ``model``, where possible; returns their names."""
    modules = sorted({type(part).__module__ for part in model.modules()})
    found = []
    for name in modules:
        module = sys.modules.get(name)
        current: Any = getattr(module, NAME, None)
        own = own_function(current)
        if own is None or is_held(model, own):
            continue
        if own is current:
            if not is_ours(own):
                continue
            setattr(module, NAME, _fused(own))
        _replaced.add(name)
        found.append(name)
    return found


def own_function(function: Any) -> Any:
    """What one of our functions has replaced; any other function unchanged, one that wraps ours too."""
    ours, own = getattr(function, OWN, (None, None))  # functools.wraps copies attributes
    return own if ours is function else function


def fused() -> set[str]:
    """Names of the modules whose RoPE function is replaced."""
    return set(_replaced)


def unfuse(modules: Iterable[str]) -> None:
    """Restores the original functions in ``modules``, except where somebody else has replaced ours."""
    for name in modules:
        _replaced.discard(name)
        module = sys.modules.get(name)
        current = getattr(module, NAME, None)
        if own_function(current) is not current:
            setattr(module, NAME, own_function(current))


def is_held(model: nn.Module, own: Callable[..., Any]) -> bool:
    """Whether a layer of ``model`` holds the function as an attribute or submodule."""
    return any(
        own is value
        for part in model.modules()
        for value in (part, *vars(part).values(), *vars(part).get("_kernel_funcs", {}).values())
    )


@torch.no_grad()
def is_ours(own: Callable[..., Any]) -> bool:
    """Whether a model's function is bit-identical to our op, for queries and keys with the strides of projections."""
    given = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (
            torch.randn(2, 3, heads, 16, generator=given, device="cpu").to(dtype).transpose(1, 2)
            for heads in (4, 2)
        )
        cos, sin = (
            torch.randn(2, 3, 16, generator=given, device="cpu").to(dtype) for _ in range(2)
        )
        try:
            found = own(q, k, cos, sin)
            wanted = apply_rotary_emb(q, k, cos, sin)
            same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        except (TypeError, ValueError, RuntimeError, IndexError):  # another function of that name
            return False
        if not same:
            return False
    return True


#: A turned pair is up to √2 times as large as its larger part, and the scalings of YaRN and LongRoPE are below 2.
ROTATION_GROWTH = 4.0


@dataclass
class Destination:
    """Whether the keys that a RoPE function rotates go straight to one of our layers, as learned from its calls."""

    is_append: bool = False


class Turn:
    """A deferred RoPE of queries and keys: applied by an append, or by calling the op.

    ``destination`` is updated when anything but an append needs the values; other arguments as in
    `ops.apply_rotary_emb`.
    """

    __slots__ = ("cos", "destination", "found", "k", "q", "sin")

    def __init__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, destination: Destination
    ) -> None:
        self.q, self.k, self.cos, self.sin, self.destination = q, k, cos, sin, destination
        #: Rotated queries and keys computed so far.
        self.found: dict[str, Tensor] = {}

    def values(self, part: str) -> Tensor:
        """The rotated queries ("q") or keys ("k")."""
        if part not in self.found:
            self.destination.is_append = False
            self.found["q"], self.found["k"] = rotary_op.call(self.q, self.k, self.cos, self.sin)
        return self.found[part]

    def rope(self) -> Rope | None:
        """The RoPE arguments for an append of ``k`` that rotates both; None if they are already rotated."""
        return None if self.found else Rope(self.q, self.cos, self.sin)


class RotatedStates(LazyTensor):
    """Queries or keys (B, H, T, D), rotated when their values are needed."""

    turn: Turn
    part: str

    @classmethod
    def both(cls, turn: Turn) -> tuple[RotatedStates, RotatedStates]:
        """Lazy queries and keys."""
        dtype, device = turn.q.dtype, turn.q.device
        q, k = (cls._empty(x.shape, dtype, device) for x in (turn.q, turn.k))
        q.turn, q.part, k.turn, k.part = turn, "q", turn, "k"
        return q, k

    def _make(self) -> Tensor:
        return self.turn.values(self.part)


def to_append(keys: Tensor) -> tuple[Tensor, Rope | None]:
    """What one of our layers appends for ``keys``: themselves and None, or unrotated keys and the RoPE to apply.

    Call `appended` after the append.
    """
    if type(keys) is RotatedStates:
        rope = keys.turn.rope() if keys.part == "k" else None
        return (keys.dense(), None) if rope is None else (keys.turn.k, rope)
    if destination := getattr(keys, DESTINATION, None):
        destination.is_append = True
    return keys, None


def appended(keys: Tensor, rope: Rope) -> None:
    """Records that an append has rotated the queries that belong to ``keys``, as `to_append` requested."""
    if TYPE_CHECKING:
        assert isinstance(keys, RotatedStates)
    keys.turn.found["q"] = rope.out


def before_rotation(keys: Tensor) -> tuple[Tensor, float]:
    """``keys``, or what they are rotated from, and how many times as large the rotated ones may be."""
    if type(keys) is RotatedStates and keys.part not in keys.turn.found:
        return keys.turn.k, ROTATION_GROWTH
    return values_of(keys), 1.0


def rotated_keys(keys: Tensor) -> Tensor:
    """The values of ``keys``, for a check: other than `values_of`, later ones still go to an append unrotated."""
    if type(keys) is RotatedStates and keys.part not in keys.turn.found:
        turn = keys.turn
        return rotary_op.call(turn.q, turn.k, turn.cos, turn.sin)[1]
    return values_of(keys)


def is_recorded() -> bool:
    """Whether ops are being traced (`torch.jit.trace`, `make_fx`): no traced op would produce a lazy tensor."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    destination = Destination()

    @functools.wraps(own)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            args
            or kwargs
            or torch.is_grad_enabled()
            or tangents_go_along()
            or torch.compiler.is_compiling()
        ):
            return own(q, k, cos, sin, *args, **kwargs)
        dtype, dim = q.dtype, q.shape[-1]
        plain = type(q) is type(k) is type(cos) is type(sin) is Tensor and dtype in FLOATS
        fits = q.ndim == 4 and cos.ndim == 3 and dim == cos.shape[-1] == k.shape[-1]
        if not (plain and fits and dtype == k.dtype == cos.dtype == sin.dtype):
            return own(q, k, cos, sin)
        # The op's overhead does not matter in a prompt.
        if q.shape[2] > MAX_QUERY_TOKENS or q.device.type not in Rope.FASTER_ON:
            return rotary_op.call(q, k, cos, sin)
        if destination.is_append and not is_recorded():
            return RotatedStates.both(Turn(q, k, cos, sin, destination))
        q, k = rotary_op.call(q, k, cos, sin)
        setattr(k, DESTINATION, destination)
        return q, k

    setattr(rotary, OWN, (rotary, own))
    return rotary
