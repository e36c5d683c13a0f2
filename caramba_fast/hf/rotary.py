"""RoPE of accelerated models in one op (`ops.apply_rotary_emb`) instead of some sixteen.

Most decoders of transformers call a function ``apply_rotary_pos_emb`` of their own module, and most of these are the
same. Where one gives the bits of our op, `fuse` puts a function into its place that calls the op when no derivative is
wanted and the arguments are those that were tried, and the model's own otherwise. Other models of the module get the
same numbers from it; `unfuse` puts the model's own function back.

Of a decode step on CUDA, whose queries and keys go to one of our layers next, not even that op runs: the function gives
out `RotatedStates`, and the layer's append turns them on the way to the cache (`ops.append_` with ``rotary_q``).
Whether they do is learned from the calls before, as the function does not know which cache its model has.

Where the layers of a model hold the function itself (transformers 5.0 to 5.3 at least, and with the package
``kernels``), it stays: pickle finds functions by the name in their module, and no model of that module could be pickled
while another function has this name.
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
from caramba_fast.hf.lazy_tensors import LazyTensor
from caramba_fast.ops import apply_rotary_emb
from caramba_fast.ops.apply_rotary_emb import rotary_op
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS
from caramba_fast.ops.checks import FLOATS, tangents_go_along

NAME = "apply_rotary_pos_emb"
#: Of keys that were turned: the `Destination` of the function that did it.
DESTINATION = "_caramba_destination"
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


@dataclass
class Destination:
    """Whether the keys of a model's rope go straight to a layer of ours, as far as its calls have shown."""

    is_append: bool = False


class Turn:
    """Queries and keys that are to be turned to their positions: by an append, or by a call of the op.

    Args:
        q, k, cos, sin: as of `ops.apply_rotary_emb`.
        destination: is told when something else than an append asks for values.
    """

    __slots__ = ("cos", "destination", "found", "k", "q", "sin")

    def __init__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, destination: Destination
    ) -> None:
        self.q, self.k, self.cos, self.sin, self.destination = q, k, cos, sin, destination
        #: Queries and keys, where they are known.
        self.found: dict[str, Tensor] = {}

    def values(self, part: str) -> Tensor:
        """The turned queries ("q") or keys ("k")."""
        if part not in self.found:
            self.destination.is_append = False
            self.found["q"], self.found["k"] = rotary_op.call(self.q, self.k, self.cos, self.sin)
        return self.found[part]

    def rope(self) -> Rope | None:
        """For an append of ``k`` that turns both; None where that is done."""
        return None if self.found else Rope(self.q, self.cos, self.sin)


class RotatedStates(LazyTensor):
    """Queries or keys (B, H, T, D), turned when their values are needed."""

    turn: Turn
    part: str

    @classmethod
    def both(cls, turn: Turn) -> tuple[RotatedStates, RotatedStates]:
        """Queries and keys."""
        dtype, device = turn.q.dtype, turn.q.device
        q, k = (cls._empty(x.shape, dtype, device) for x in (turn.q, turn.k))
        q.turn, q.part, k.turn, k.part = turn, "q", turn, "k"
        return q, k

    def _make(self) -> Tensor:
        return self.turn.values(self.part)


def to_append(keys: Tensor) -> tuple[Tensor, Rope | None]:
    """What a layer of ours is to append for ``keys``: them and None, or keys as they were and the rope that is missing.

    `appended` comes after the append.
    """
    if type(keys) is RotatedStates:
        rope = keys.turn.rope() if keys.part == "k" else None
        return (keys.dense(), None) if rope is None else (keys.turn.k, rope)
    if destination := getattr(keys, DESTINATION, None):
        destination.is_append = True
    return keys, None


def appended(keys: Tensor, rope: Rope) -> None:
    """An append has turned the queries of ``keys``, as `to_append` had asked for."""
    if TYPE_CHECKING:
        assert isinstance(keys, RotatedStates)
    keys.turn.found["q"] = rope.out


def is_recorded() -> bool:
    """Whether something records the ops that run (`torch.jit.trace`, `make_fx`): a lazy tensor comes from none."""
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
        if q.shape[2] > MAX_QUERY_TOKENS:  # of a prompt: the op is not what takes time
            return rotary_op.call(q, k, cos, sin)
        if destination.is_append and q.device.type in Rope.FASTER_ON and not is_recorded():
            return RotatedStates.both(Turn(q, k, cos, sin, destination))
        q, k = rotary_op.call(q, k, cos, sin)
        setattr(k, DESTINATION, destination)
        return q, k

    return rotary
