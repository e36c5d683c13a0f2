"""One stream of a call as the launcher sees it: its tensors, its layout, and the operands it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from caramba_fast.formats import PACKED_TOGETHER, Format

from .casts import INTERPRETED
from .tiles_layout import Stream, segments

#: Codes of quantized values, and scales of 4-bit keys by channel, are read in words of so many bytes.
WORD_BYTES = 4
#: Options of a stream, as ``<name>_<part>``.
PARTS = ("tail", "sink")


def dot_dtype(form: Format, query: torch.dtype) -> Any:
    """Operands of ``tl.dot``: float16 wherever it can hold the format and is as good as the query.

    bfloat16 keys meet bfloat16 queries as they are; a float16 query would lose bits, so that mix takes
    float32 (three TF32 products), like everything of a float32 query. The interpreter has no bfloat16.
    """
    if query == torch.float32 or form.name == "fp32":
        return tl.float32
    if form.name == "bf16":
        return tl.bfloat16 if query == torch.bfloat16 and not INTERPRETED.value else tl.float32
    return tl.float16


@dataclass
class Stored:
    """One stream as the op got it: codes, scales, and what describes it; keys with their queries."""

    codes: Tensor
    scales: Tensor | None
    form: Format
    options: dict[str, Any]
    query: Tensor | None = None
    factor: float = 1.0
    null: Tensor | None = None

    @property
    def width(self) -> int:
        """Values of a lane."""
        return self.form.value_width(self.codes.shape[3])

    @property
    def group(self) -> int:
        """Tokens that share scales and zeros; 1 for a kind by token."""
        if self.scales is None or not self.form.by_channel:
            return 1
        return self.codes.shape[2] // self.scales.shape[2]

    @property
    def pointers(self) -> tuple[Any, ...]:
        """Codes and scales, and the strides of B and of lanes of each."""
        scales = (0, 0) if self.scales is None else self.scales.stride()[:2]
        return (self.codes, self.scales, *self.codes.stride()[:2], *scales)

    @property
    def strided_query(self) -> tuple[Any, ...]:
        """The query and its strides of B, H and T."""
        if self.query is None:
            return (None, 0, 0, 0)
        return (self.query, *self.query.stride()[:3])

    def record(self, per_lane: int, query: torch.dtype) -> Stream:
        """What the kernel is specialized for."""
        block = PACKED_TOGETHER
        if self.scales is not None and not self.form.by_channel:
            block = self.width // self.scales.shape[3]
        return Stream(
            self.form.index, block, dot_dtype(self.form, query), self.width, self.width // per_lane,
            segments(self.width), self.group,
        )  # fmt: skip

    def problems(self, name: str) -> list[str]:
        """Layouts a kernel would misread."""
        found = []
        for part, x in (("codes", self.codes), ("scales", self.scales)):
            if x is None:
                continue
            # The stride of a dimension of size 1 is arbitrary.
            apart = x.stride(3) != 1 and x.shape[3] > 1
            if apart or (x.stride(2) != x.shape[3] and x.shape[2] > 1):
                found.append(
                    f"{name}_{part} of strides {x.stride()}: a lane's slots must be contiguous"
                )
        in_words = {
            "codes": self.codes if name == "v" and self.form.quantized else None,
            "scales": self.scales if self.form.by_channel and self.form.bits == 4 else None,
        }
        for part, x in in_words.items():
            if x is None:
                continue
            size = x.element_size()
            places = (x.data_ptr(), *(stride * size for stride in x.stride()[:2]))
            if any(place % WORD_BYTES for place in places):
                found.append(
                    f"{name}_{part} at address {places[0]:#x}, strides {x.stride()}: lanes must begin at a multiple of "
                    f"{WORD_BYTES} bytes"
                )
        return found
