"""Tensor subclasses without storage, materialized when an op needs their values.

``Cache.update`` has to return tensors. Ours refer to a cache layer (or a mask pattern), which our attention reads
directly; any other op gets the materialized values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from caramba_fast.ops.gradients import requiring, tied

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=Tensor)


class LazyTensor(torch.Tensor):
    """A tensor with a shape, dtype and device whose values are computed on demand."""

    _made: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dense(self) -> Tensor:
        """The values as an ordinary tensor, computed once."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs any op on the values."""
        args, kwargs = tree_map_only(LazyTensor, lambda x: x.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def _empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._made = None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"


class HasStates(Protocol):
    """What `PackedStates` asks of a layer (`caramba_fast.hf.layers.PackedLayer`)."""

    packed_only: bool

    @property
    def length(self) -> int:
        """Tokens of a row."""

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be queries."""

    def dequantized(self, stream: str, dtype: torch.dtype, length: int) -> Tensor:
        """The first ``length`` keys ("k") or values ("v") of every row, as a tensor."""


class PackedStates(LazyTensor):
    """Packed keys ("k") or values ("v") of a layer, with the shape (B, H_kv, L, D) of the dequantized tensor."""

    layer: HasStates
    stream: str

    @classmethod
    def of(
        cls, layer: HasStates, stream: str, like: Tensor, length: int | None = None
    ) -> PackedStates:
        """Everything ``layer`` holds, in the dtype and on the device of ``like`` (B, H_kv, T, D), its newest tokens."""
        batch, heads, _, dim = like.shape
        length = layer.length if length is None else length
        made = cls._empty((batch, heads, length, dim), like.dtype, like.device)
        made.layer, made.stream = layer, stream
        return without_gradient(made, like) if torch.is_grad_enabled() else made

    @classmethod
    def both(
        cls, layer: HasStates, keys: Tensor, values: Tensor
    ) -> tuple[PackedStates, PackedStates]:
        """Keys and values that ``layer`` holds; see `of`."""
        length = layer.length
        return cls.of(layer, "k", keys, length), cls.of(layer, "v", values, length)

    def _make(self) -> Tensor:
        return self.layer.dequantized(self.stream, self.dtype, self.shape[2])


def without_gradient(made: T, *sources: Tensor) -> T:
    """Marks ``made`` as computed from ``sources`` through the cache: a backward pass through it raises."""
    wanted = requiring(*sources)
    return _tied(made, wanted) if wanted else made


@torch.compiler.disable(  # else the backward pass would be compiled along, wanted or not
    reason="no gradient flows through stored keys and values: compile under torch.no_grad()"
)
def _tied(made: T, sources: list[Tensor]) -> T:
    return tied(made, sources)


def values_of(x: Any) -> Any:
    """``x``, materialized if it is lazy; a backward pass through what a cache stores raises then, too."""
    return without_gradient(x.dense(), x) if isinstance(x, LazyTensor) else x
