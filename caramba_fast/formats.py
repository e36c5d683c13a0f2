"""The storage formats, bit by bit: one table for all kernels and caches.

A quantized tensor is divided into blocks of 32, 64 or 128 neighbouring values; each block has one fp16 scale ``d``.
What is stored, and what it decodes to:

    q8_0   int8 code in [-127, 127], d = amax / 127            value = code * d
    q4_0   4-bit code, d = (element of largest magnitude) / -8   value = (code - 8) * d
    nf4    4-bit index of the nearest level to x / amax          value = level[code] * d

q8_0 and q4_0 are GGML's (``ggml-quants.c``), bit for bit; nf4 is the 4-bit NormalFloat of QLoRA (arXiv:2305.14314,
appendix E). Two 4-bit codes share a byte: byte ``j`` of a block of ``n`` values holds value ``j`` in its low nibble and
value ``j + n/2`` in its high one.

Per-channel kinds suit keys (KIVI, arXiv:2402.02750); values may use them, too. A group is 32, 64 or 128 consecutive
tokens, aligned to a multiple of its size; each channel of a group has its own fp16 scale and fp16 zero:

    q8_channel   8-bit code   value = zero + scale * code
    q4_channel   4-bit code   zero = the channel's least value, scale = (its largest - zero) / largest code

Codes are packed token by token, like those of q8_0, and of q4_0 in blocks of 32. The scales of a group are in one row:
all scales, then all zeros. In q4_channel the two channels of a byte divide its bits, per group: a channel whose stored
scale is negative lends the other one bit, or two if the last bit of that scale is 1. The first channel has the low
bits, as a code in units of ``|scale|``. The other has the bits above; its code is the byte with the low bits cleared,
in units of ``|scale| / 16``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "ALIASES",
    "BLOCK_SIZES",
    "CHANNEL_KINDS",
    "FORMATS",
    "KIND_NAMES",
    "NF4_LEVELS",
    "PACKED_TOGETHER",
    "QUANTIZED_KINDS",
    "SCALE_DTYPE",
    "Format",
    "check_block",
    "resolve",
]

#: q4_channel: thresholds for taking one bit, and two bits, from the channel that shares the byte: this channel's range
#: times the root mean square of its queries, relative to the other's. They minimize the squared error of scores.
WIDER = (2.1875, 10.75)

#: The 16 quantiles of QLoRA's NormalFloat, ascending, exact in float32.
NF4_LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

BLOCK_SIZES: tuple[int, ...] = (32, 64, 128)
SCALE_DTYPE = torch.float16
#: Values whose nibbles are packed together in per-channel kinds.
PACKED_TOGETHER = 32


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        name: canonical kind name, as used by ops and in files.
        index: the number that kernels switch on (``FORMAT`` in Triton, ``Format`` in C++).
        bits: bits of one stored code.
        dtype: dtype of the codes tensor.
        quantized: whether blocks have scales; if not, the codes are the values.
        by_channel: whether scale and zero are per channel of a group of tokens, instead of a scale per block of a
            token.
    """

    name: str
    index: int
    bits: int
    dtype: torch.dtype
    quantized: bool
    by_channel: bool = False

    def code_width(self, dim: int) -> int:
        """Elements of the codes tensor that hold ``dim`` values."""
        return dim * self.bits // 8 if self.quantized else dim

    def value_width(self, code_width: int) -> int:
        """Values held by ``code_width`` elements of the codes tensor."""
        return code_width * 8 // self.bits if self.quantized else code_width

    def bytes_per_vector(self, dim: int, block: int) -> int:
        """Bytes stored for ``dim`` values of one token, including its share of scales and zeros."""
        scales = self.scales_width(dim, block) * SCALE_DTYPE.itemsize if self.quantized else 0
        return dim * self.bits // 8 + scales // (block if self.by_channel else 1)

    def scales_width(self, dim: int, block: int) -> int:
        """Elements of a row of the scales tensor: of one token, or of one group for per-channel kinds."""
        return 2 * dim if self.by_channel else dim // block


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("fp32", 0, 32, torch.float32, quantized=False),
        Format("fp16", 1, 16, torch.float16, quantized=False),
        Format("bf16", 2, 16, torch.bfloat16, quantized=False),
        Format("q8_0", 3, 8, torch.int8, quantized=True),
        Format("q4_0", 4, 4, torch.uint8, quantized=True),
        Format("nf4", 5, 4, torch.uint8, quantized=True),
        Format("q8_channel", 6, 8, torch.uint8, quantized=True, by_channel=True),
        Format("q4_channel", 7, 4, torch.uint8, quantized=True, by_channel=True),
    )
}

ALIASES: dict[str, str] = {"q8": "q8_0", "q4": "q4_0"}
KIND_NAMES: tuple[str, ...] = (*FORMATS, *ALIASES)
#: Kinds with a scale per block of a token's values.
QUANTIZED_KINDS: tuple[str, ...] = tuple(
    name for name, row in FORMATS.items() if row.quantized and not row.by_channel
)
#: Kinds with a scale and a zero per channel of a group of tokens.
CHANNEL_KINDS: tuple[str, ...] = tuple(name for name, row in FORMATS.items() if row.by_channel)


def resolve(kind: object) -> Format:
    """The format of a kind name, alias or ``KVCacheKind`` member; raises ValueError, listing the known, for others."""
    name = getattr(kind, "value", kind)
    found = FORMATS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"unknown cache kind {kind!r}; known kinds are {', '.join(KIND_NAMES)}")
    return found


def check_block(dim: int, block: int, argument: str = "block") -> None:
    """Raises ValueError unless ``block`` is a supported size that divides ``dim``."""
    if block not in BLOCK_SIZES:
        raise ValueError(f"{argument} is {block!r}; allowed are {', '.join(map(str, BLOCK_SIZES))}")
    if dim % block:
        fitting = [size for size in BLOCK_SIZES if dim % size == 0]
        hint = f"sizes that do: {', '.join(map(str, fitting))}" if fitting else "no block size does"
        raise ValueError(f"{argument}={block} does not divide {dim} values; {hint}")
