"""quantize: values to codes and block scales (the formats of `caramba_fast.formats`).

Scales are computed in float32 and used unrounded for the codes; they are stored rounded to fp16. A block of zeros gets
scale 0; a block with a NaN or an infinity gets a NaN scale, so that damage stays visible.

``fit`` is how a scale is chosen. "amax", the rule of GGML and QLoRA, derives it from the block's largest value. "mse"
rounds the block with each of the `CANDIDATES`, refits the scale to those codes by least squares, and keeps the best, as
GGML's importance-weighted quantizers do with more candidates. Storage layout and reading are the same.

Per-channel kinds use the full range of each channel over a group of tokens; a narrower range made real models worse.
Codes are computed with the rounded scale and zero. A channel with a NaN or an infinity gets a NaN scale and zero in
that group; other channels are not affected. In q4_channel two channels share a byte, and with "mse" the more important
one may take five or six of its bits (`WIDER`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from caramba_fast.formats import (
    NF4_LEVELS,
    PACKED_TOGETHER,
    SCALE_DTYPE,
    WIDER,
    check_block,
    resolve,
)
from caramba_fast.ops import checks
from caramba_fast.ops.gradients import result_of
from caramba_fast.ops.registry import register

SCHEMA = '(Tensor x, str kind, int block, str fit="amax") -> (Tensor codes, Tensor scales)'
FITS = ("amax", "mse")

#: Candidates of "mse": the code (q4_0: amax uses -8) or level that the largest value of a block maps to. Four to five
#: achieve nine tenths of the gain of twenty. None is halfway between two codes (as 7.5 would be), where the last bit of
#: the input would decide.
CANDIDATES: dict[str, tuple[float, ...]] = {
    "q8_0": (127.0,),
    "q4_0": (8.0, 7.25, 8.5, 9.0, 9.5),
    "nf4": (1.0, 1.0869565, 1.1904762, 1.3157895),
}


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale; 0 for a scale of 0 or below 3e-39, whose reciprocal overflows and whose fp16 is 0 anyway."""
    inverse = 1.0 / scale
    return torch.where(inverse.isinf(), torch.zeros_like(scale), inverse)


def largest(blocks: Tensor, kind: str) -> Tensor:
    """The value that scales derive from, (..., 1): the largest magnitude; for q4_0 the first value of it, negated."""
    if kind == "q4_0":
        return -blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    return blocks.abs().amax(-1, keepdim=True)


def round_to_codes(scaled: Tensor, kind: str) -> Tensor:
    """x / scale -> unpacked codes: int8 for q8_0, else uint8 in 0..15."""
    if kind == "q8_0":
        whole = scaled.trunc()  # round half away from zero, without the double rounding of x + 0.5
        away = ((scaled - whole).abs() >= 0.5).to(scaled.dtype)
        return (whole + away.copysign(scaled)).clamp(-127, 127).to(torch.int8)
    if kind == "q4_0":
        return (scaled + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    levels = nf4_levels(scaled.device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(scaled.contiguous(), midpoints, out_int32=True).to(torch.uint8)


def nf4_levels(device: torch.device) -> Tensor:
    """(16,) float32."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


def code_values(codes: Tensor, kind: str) -> Tensor:
    """Unpacked codes -> the float32 values that the scale multiplies."""
    if kind == "nf4":
        return nf4_levels(codes.device)[codes.to(torch.int64)]
    return codes.to(torch.float32) - (8.0 if kind == "q4_0" else 0.0)


def encode_amax(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """blocks (..., n) fp32 -> unpacked codes (..., n) and unrounded scale (..., 1)."""
    # Divide by a tensor: for a Python number CUDA multiplies by the reciprocal, which rounds differently.
    scale = largest(blocks, kind) / blocks.new_full((), CANDIDATES[kind][0])
    return round_to_codes(blocks * _reciprocal(scale), kind), scale


def encode_mse(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """As `encode_amax`, with the scale of least squared error among the candidates.

    For codes of values q the best scale is x·q / q·q and leaves the error x·x - (x·q)² / q·q: the candidate of largest
    (x·q)² / q·q wins, the first of equals.
    """
    top = largest(blocks, kind)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for candidate in CANDIDATES[kind]:
        codes = round_to_codes(blocks * _reciprocal(top / blocks.new_full((), candidate)), kind)
        values = code_values(codes, kind)
        product, square = halving_sum(blocks * values), halving_sum(values * values)
        scale = torch.where(square > 0, product / square, torch.zeros_like(product))
        gain = product * scale
        if best is None:
            best = gain, codes, scale
            continue
        better = gain > best[0]
        best = (
            torch.where(better, gain, best[0]),
            torch.where(better, codes, best[1]),
            torch.where(better, scale, best[2]),
        )
    assert best is not None
    return best[1], best[2]


def halving_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension (a power of two), keeping it: the second half is added to the first
    until one value is left. Every backend adds in this order."""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes (..., n) in 0..15 -> bytes (..., n/2): value j low, value j + n/2 high."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def encode_groups(
    groups: Tensor,
    kind: str,
    counted: Tensor | None = None,
    fit: str = "amax",
    query_rms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encodes groups of tokens per channel.

    Args:
        groups: (..., N, G, D) float32, D a multiple of 32.
        kind: one of `CHANNEL_KINDS`.
        counted: (..., N, G) bool, broadcastable, the tokens that determine the range; others get the nearest code.
        fit: "mse" lets the two channels in a byte of 4-bit codes divide its bits.
        query_rms: (..., D) float32, broadcastable to (..., N, D), weight of the errors of each channel; default equal.

    Returns:
        codes (..., N, G, width) uint8 and scales (..., N, 2 * D) float16: all scales, then all zeros.
    """
    form = resolve(kind)
    low = high = groups
    if counted is not None:
        low = torch.where(counted[..., None], groups, torch.inf)
        high = torch.where(counted[..., None], groups, -torch.inf)
    low, high = low.amin(-2), high.amax(-2)
    none = low > high  # no token is counted
    low, high = torch.where(none, 0.0, low), torch.where(none, 0.0, high)
    zero = low.to(SCALE_DTYPE) + 0.0  # either of -0.0 and 0.0 may be the minimum: store 0.0
    extent = high - zero.float() + 0.0
    most = torch.full_like(extent, 2**form.bits - 1)
    damaged = ~(zero.isfinite() & (extent / most).to(SCALE_DTYPE).isfinite())
    unit, lent = torch.ones_like(extent), torch.zeros_like(extent, dtype=torch.int32)
    if form.bits == 4 and fit == "mse":
        lent = _lent(extent if query_rms is None else extent * query_rms, damaged)
        unit, most = _units(lent)
    scale = _with_lent((extent / most).to(SCALE_DTYPE), lent)
    step, unit, most = scale.float().abs()[..., None, :], unit[..., None, :], most[..., None, :]
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    scaled = (groups - zero.float()[..., None, :]) * inverse
    scaled = scaled.nan_to_num(0.0).clamp(min=0).minimum(most)
    codes = (scaled / unit + 0.5).floor() * unit
    if form.bits == 4:
        low, high = _byte_mates(codes)
        codes = (low + 16 * high).flatten(-2)
    pair = torch.cat((scale, zero), dim=-1)
    return codes.to(torch.uint8), torch.where(
        torch.cat((damaged, damaged), dim=-1), torch.nan, pair
    )


def _byte_mates(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., D) -> the channels in low nibbles, j of each 32, and in high nibbles, j + 16: (..., D / 32, 16) each."""
    low, high = x.unflatten(-1, (-1, 2, PACKED_TOGETHER // 2)).unbind(-2)
    return low, high


def _lent(weight: Tensor, damaged: Tensor) -> Tensor:
    """q4_channel: weights of channels (..., D) -> bits that each lends to the channel it shares bytes with, int32."""
    low, high = _byte_mates(weight)
    sound = ~torch.logical_or(*_byte_mates(damaged))

    def given(mine: Tensor, other: Tensor) -> Tensor:
        one, two = (sound & (other > wider * mine) for wider in WIDER)
        return one.to(torch.int32) + two.to(torch.int32)

    return torch.stack((given(low, high), given(high, low)), dim=-2).flatten(-3)


def _units(lent: Tensor) -> tuple[Tensor, Tensor]:
    """q4_channel: lent bits (..., D) -> the value of code 1 in scales, and the largest code, float32."""
    low, high = _byte_mates(lent)
    size = (1 << (4 - low + high)).to(
        torch.float32
    )  # codes of the low channel; of the high one the bits above
    unit = torch.stack((torch.ones_like(size), size / 16), dim=-2)
    most = torch.stack((size - 1, 16 - size / 16), dim=-2)
    return unit.flatten(-3), most.flatten(-3)


def _with_lent(scale: Tensor, lent: Tensor) -> Tensor:
    """Encodes lent bits in float16 scales: a negative sign means 1 or 2 bits, and the last bit tells which."""
    bits = scale.view(torch.int16)
    marked = (bits & ~1) | (lent - 1).to(torch.int16) | -0x8000
    return torch.where(lent > 0, marked, bits).view(SCALE_DTYPE)


def low_masks(scale: Tensor) -> Tensor:
    """q4_channel: stored scales (..., D) -> uint8 (..., D / 2), masks of the bits that belong to the low channel."""
    low, high = _byte_mates(scale.view(torch.int16).to(torch.int32))
    given = torch.where(low < 0, 8 | ((low & 1) << 2), 0)
    taken = torch.where(high < 0, 16 | ((high & 1) << 5), 0)
    return (15 ^ given ^ taken).to(torch.uint8).flatten(-2)


_ENCODERS = {"amax": encode_amax, "mse": encode_mse}


def _encoder(fit: str) -> Callable[[Tensor, str], tuple[Tensor, Tensor]]:
    if fit not in _ENCODERS:
        raise ValueError(f"fit is {fit!r}; allowed are {', '.join(FITS)}")
    return _ENCODERS[fit]


def reference(x: Tensor, kind: str, block: int, fit: str = "amax") -> tuple[Tensor, Tensor]:
    form, encode = checks.quantized_kind(kind), _encoder(fit)
    if form.by_channel:
        groups = x.to(torch.float32).unflatten(-2, (x.shape[-2] // block, block))
        codes, scales = encode_groups(groups, form.name, fit=fit)
        return codes.flatten(-3, -2).contiguous(), scales.contiguous()
    blocks = x.to(torch.float32).unflatten(-1, (x.shape[-1] // block, block))
    finite = blocks.isfinite().all(-1, keepdim=True)
    blocks = torch.where(finite, blocks, torch.zeros_like(blocks))
    codes, scale = encode(blocks, form.name)
    if form.bits == 4:
        codes = pack_nibbles(codes)
    scale = torch.where(finite, scale, torch.full_like(scale, torch.nan))
    return codes.flatten(-2).contiguous(), scale.squeeze(-1).to(SCALE_DTYPE).contiguous()


def fake(x: Tensor, kind: str, block: int, fit: str = "amax") -> tuple[Tensor, Tensor]:
    form = checks.quantized_kind(kind)
    _encoder(fit)
    *lead, dim = x.shape
    codes = x.new_empty((*lead, form.code_width(dim)), dtype=form.dtype)
    if form.by_channel:
        lead[-1] //= block
    return codes, x.new_empty((*lead, form.scales_width(dim, block)), dtype=SCALE_DTYPE)


op = register("quantize", SCHEMA, reference=reference, fake=fake)


def quantize(x: Tensor, kind: object, block: int = 32, fit: str = "amax") -> tuple[Tensor, Tensor]:
    """Quantizes ``x`` in blocks along the last dimension, or for per-channel kinds in groups along the one before.

    Args:
        x: (..., dim) float32, float16 or bfloat16; dim must be a multiple of ``block``. For per-channel kinds
            (..., tokens, dim): tokens must be a multiple of ``block``, and dim of 32.
        kind: "q8_0" ("q8"), "q4_0" ("q4"), "nf4", "q8_channel", "q4_channel", or the `KVCacheKind`.
        block: values per scale, 32, 64 or 128, along dim, or along tokens for per-channel kinds.
        fit: "amax" or "mse", how a scale is chosen. No effect for q8_channel; for q4_channel, how bytes are divided.

    Returns:
        codes (..., dim) int8 for q8_0, (..., dim / 2) uint8 for q4_0 and nf4, and scales (..., dim / block) float16.
        For per-channel kinds codes (..., tokens, dim) or (..., tokens, dim / 2) uint8, and scales
        (..., tokens / block, 2 * dim) float16, all scales before all zeros.

    Raises:
        TypeError: ``x`` is not a tensor of an allowed dtype.
        ValueError: an unknown or unquantized kind, an unknown fit, a block other than 32, 64 or 128, or a shape that it
            (or, for per-channel kinds, 32) does not divide.
        RuntimeError: in a backward pass through the scales; the op has no derivative.
    """
    form = checks.quantized_kind(kind)
    checks.float_tensor("x", x)
    if x.ndim == 0:
        raise ValueError("x is a scalar; at least one dimension is needed")
    if form.by_channel:
        if x.ndim < 2 or x.shape[-1] % PACKED_TOGETHER:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; {form.name} needs (..., tokens, dim) with dim a multiple of "
                f"{PACKED_TOGETHER}"
            )
        check_block(x.shape[-2], block)
    else:
        check_block(x.shape[-1], block)
    _encoder(fit)
    codes, scales = op(x, form.name, block, fit)
    return codes, result_of("quantize", scales, x)
