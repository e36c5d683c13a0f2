"""Which dims of a key RoPE turns, and how fast: what a cache must know to center and scale keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of one key stream (RoFormer, arXiv:2104.09864).

    Attributes:
        pairs: the two dims of each pair; dims in no pair are not turned.
        inv_freq: radians per token of each pair, the model's own (after llama3 or yarn scaling).
    """

    pairs: tuple[tuple[int, int], ...]
    inv_freq: tuple[float, ...]

    def __post_init__(self) -> None:
        dims = [dim for pair in self.pairs for dim in pair]
        if len(self.pairs) != len(self.inv_freq):
            raise ValueError(
                f"pairs has {len(self.pairs)} entries and inv_freq {len(self.inv_freq)}; one frequency a "
                "pair is needed"
            )
        if len(set(dims)) != len(dims) or min(dims, default=0) < 0:
            raise ValueError("pairs names a dim twice, or one below 0")

    @classmethod
    def half_split(cls, inv_freq: Sequence[float], first: int = 0) -> Rotary:
        """Pairs (i, i + n/2) of the n dims from ``first`` on: Llama, Mistral, Qwen, GPT-NeoX."""
        half = len(inv_freq)
        return cls(tuple((first + i, first + i + half) for i in range(half)), _floats(inv_freq))

    @classmethod
    def interleaved(cls, inv_freq: Sequence[float], first: int = 0) -> Rotary:
        """Pairs (2i, 2i + 1) of the dims from ``first`` on: GPT-J, the original RoFormer."""
        count = len(inv_freq)
        return cls(
            tuple((first + 2 * i, first + 2 * i + 1) for i in range(count)), _floats(inv_freq)
        )

    @property
    def width(self) -> int:
        """Dims a head needs at least."""
        return 1 + max((dim for pair in self.pairs for dim in pair), default=-1)


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
