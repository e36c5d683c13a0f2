"""Compares quantize and dequantize with the reference, bit for bit, on a grid of inputs that break kernels.

Used by the tests, and by `check` (with attention's grid) where pytest is not installed. The reference is computed on
the CPU whatever the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from caramba_fast.formats import (
    BLOCK_SIZES,
    CHANNEL_KINDS,
    NF4_LEVELS,
    PACKED_TOGETHER,
    QUANTIZED_KINDS,
    resolve,
)
from caramba_fast.ops.dequantize import dequantize
from caramba_fast.ops.dequantize import reference as dequantize_reference
from caramba_fast.ops.quantize import FITS, quantize
from caramba_fast.ops.quantize import reference as quantize_reference
from caramba_fast.ops.registry import BackendError, use_backend, why_not

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIM = 256
#: Characters of an exception's message that are printed.
MOST_TEXT = 500
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal bits (so -0.0 differs from 0.0), or both NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    equal = a.view(_BITS[a.itemsize]) == b.view(_BITS[b.itemsize])
    return equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal


def inputs(dim: int = DIM) -> dict[str, Tensor]:
    """Named rows (rows, dim) of float32: ordinary ones, and edge cases of each format."""
    normal = torch.randn(5, dim)
    ties = torch.randn(4, dim).clamp(-2, 2)
    ties[0, 3::32], ties[0, 20::32] = 3.0, -3.0
    ties[1, 3::32], ties[1, 20::32] = -3.0, 3.0
    ties[2, 20::32], ties[2, 29::32] = 3.0, -3.0
    ties[3] = torch.where(torch.rand(dim) < 0.5, -1.0, 1.0)
    halves = torch.arange(dim).remainder(32).mul(4).sub(62.5).expand(1, -1).clone()
    halves[:, ::32] = 127.0  # q8_0's scale becomes 1, everything else lies between two codes
    levels = torch.tensor(NF4_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    midpoints = torch.cat((levels, middles, torch.zeros(1)))
    damaged = torch.randn(6, dim)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
        damaged[row, 7 + 11 * row] = value
    damaged[4, 0], damaged[4, 1] = torch.inf, -torch.inf
    damaged[5] = torch.nan
    extremes = torch.where(torch.rand(2, dim) < 0.5, -1.0, 1.0) * torch.finfo(torch.float32).max
    return {
        "normal": normal,
        "graded": normal * torch.logspace(-9, 6, dim),
        "huge": normal.sign() * 1e38 * torch.rand(5, dim),
        "extremes": extremes,
        "tiny": normal * 1e-38,
        "subnormal": normal * 1e-42,
        # The reciprocal of a scale overflows below 2^-128; magnitudes on both sides of that.
        "no reciprocal": torch.linspace(-1, 1, dim) * torch.logspace(-41, -35, 24)[:, None],
        "fp16 scale underflow": normal * torch.logspace(-9, -4, 5)[:, None],
        "zero": torch.zeros(1, dim),
        "negative zero": torch.full((1, dim), -0.0),
        "mixed zeros": torch.tensor([-0.0, 0.0]).repeat(1, dim // 2),
        "ties": ties,
        "halves": halves,
        "undecided q8_0": _undecided((torch.arange(-127, 127) + 0.5) / 127, dim),
        "undecided q4_0": _undecided((torch.arange(-8, 8) + 0.5) / 8, dim),
        "undecided nf4": _undecided(middles, dim),
        "midpoints": midpoints.repeat(dim // 32)[None] * torch.tensor([[1.0], [-1.0], [2.0]]),
        "damaged": damaged,
    }


def _undecided(fractions: Tensor, dim: int) -> Tensor:
    """Blocks of 32 whose values are ``fractions`` of the largest; halfway values show an error of the last bit."""
    largest = torch.rand(8, dim // 32, 1) + 0.5
    chosen = fractions[torch.randint(len(fractions), (8, dim // 32, 31))]
    return torch.cat((largest, chosen * largest), dim=-1).flatten(1)


def undecided_scales(kind: str, block: int, rows: int, dim: int = DIM) -> Tensor:
    """(rows, dim) whose least-squares scales lie between two fp16 numbers, to the last bit of fp32.

    With fit "mse" a different order of summation changes 5% (q4_0) to 25% (nf4) of the stored scales.
    """
    x = torch.randn(rows, dim // block, block)
    codes, stored = quantize_reference(x.flatten(1), kind, block, "mse")
    ones = torch.ones_like(stored)
    q = dequantize_reference(codes, ones, kind, dim, torch.float32).view_as(x).double()
    scale = (x * q).sum(-1, keepdim=True) / q.square().sum(-1, keepdim=True)
    nearby = stored.view(torch.int16)[..., None]
    above = (nearby + 1).view(torch.float16).double()
    middle = (stored[..., None].double() + above) / 2
    return (x * (middle / scale)).float().flatten(1)


def backend_error(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot run quantize and dequantize on this device, or None."""
    try:
        with use_backend(backend):
            codes, scales = quantize(torch.zeros(1, 32, device=device), "q8_0", 32)
            dequantize(codes, scales, "q8_0", 32)
    except BackendError as error:
        return str(error)
    return None


def quantize_failures(
    backend: str,
    device: torch.device,
    kind: str,
    block: int,
    dtype: torch.dtype,
    fit: str = "amax",
) -> list[str]:
    """Quantizes all inputs together; returns a line for each input that differs."""
    named = inputs() | {"undecided scales": undecided_scales(kind, block, rows=32)}
    x = torch.cat(list(named.values())).to(dtype)
    with use_backend(backend):
        codes, scales = (part.cpu() for part in quantize(x.to(device), kind, block, fit))
    wanted_codes, wanted_scales = quantize_reference(x, kind, block, fit)
    good_codes = same_bits(codes, wanted_codes).all(-1)
    good_scales = same_bits(scales, wanted_scales).all(-1)
    where = f"{backend} quantize {kind} block {block} {fit} {dtype}"
    found = []
    first = 0
    for name, rows in named.items():
        span = slice(first, first + len(rows))
        first += len(rows)
        for part, good in (("codes", good_codes), ("scales", good_scales)):
            if not good[span].all():
                found.append(f"{where}: {part} of {name!r} differ")
    return found


def dequantize_failures(
    backend: str, device: torch.device, kind: str, block: int, dtype: torch.dtype
) -> list[str]:
    """Dequantizes random bytes with scales of every bit pattern; one line if values differ."""
    form = resolve(kind)
    codes = torch.randint(0, 256, (301, form.code_width(DIM)), dtype=torch.uint8).view(form.dtype)
    scales = torch.randint(-(2**15), 2**15, (301, DIM // block), dtype=torch.int16)
    scales = scales.view(torch.float16)
    with use_backend(backend):
        got = dequantize(codes.to(device), scales.to(device), kind, DIM, dtype).cpu()
    good = same_bits(got, dequantize_reference(codes, scales, kind, DIM, dtype))
    where = f"{backend} dequantize {kind} block {block} {dtype}"
    return [] if good.all() else [f"{where}: {int((~good).sum())} values differ"]


def channel_failures(
    backend: str, device: torch.device, kind: str, group: int, dtype: torch.dtype
) -> list[str]:
    """Both ops by channel: each input is a channel of a group that lies beside a group of random ones."""
    if why_not("quantize", backend, device.type) is not None:
        return []
    named = inputs()
    rows = torch.cat([x.repeat(1, 2)[:, :group] for x in named.values()])
    names = [name for name, x in named.items() for _ in x]
    ordinary = torch.randn(-len(rows) % PACKED_TOGETHER, group)
    channels = torch.cat((rows, ordinary)).T
    x = torch.stack((channels, torch.randn(channels.shape))).flatten(0, 1).to(dtype)
    codes, scales = quantize_reference(x, kind, group)
    with use_backend(backend):
        got = [part.cpu() for part in quantize(x.to(device), kind, group)]
        width = x.shape[-1]
        back = dequantize(codes.to(device), scales.to(device), kind, width, dtype).cpu()
    wanted = (codes, scales, dequantize_reference(codes, scales, kind, width, dtype))
    found = []
    for part, a, b in zip(("codes", "scales", "values"), (*got, back), wanted, strict=True):
        good = same_bits(a, b).flatten(0, -2).all(0)
        if not good.all():
            at = {names[c] if c < len(names) else "normal" for c in _channels(~good, width)}
            found.append(
                f"{backend} {kind} group {group} {dtype}: {part} differ, of {', '.join(sorted(at))}"
            )
    return found


def _channels(wrong: Tensor, width: int) -> list[int]:
    """The channels of differing columns: a column of codes has two channels, one of scales, zeros or values has one."""
    columns = wrong.nonzero()[:, 0]
    if len(wrong) < width:
        half = PACKED_TOGETHER // 2
        columns = columns // half * PACKED_TOGETHER + columns % half
        columns = torch.cat((columns, columns + half))
    return sorted({*(columns % width).tolist()})


def settings(quick: bool) -> list[tuple[str, int, torch.dtype]]:
    """(kind, block, dtype) of the grid."""
    return [
        (kind, block, dtype)
        for kind in (QUANTIZED_KINDS[:1] if quick else (*QUANTIZED_KINDS, *CHANNEL_KINDS))
        for block in (BLOCK_SIZES[:1] if quick else BLOCK_SIZES)
        for dtype in (DTYPES[:1] if quick else DTYPES)
    ]


def described(error: Exception) -> str:
    """An exception in one line, with its origin; a long message is shortened in the middle."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_TEXT else f"{text[:150]} [...] {text[150 - MOST_TEXT :]}"
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {text}"


def failures(
    backend: str, device: torch.device, chosen: Iterable[tuple[str, int, torch.dtype]]
) -> Iterator[str]:
    """One line per disagreement; a setting that raises is one too, and the others still run."""
    for kind, block, dtype in chosen:
        try:
            yield from _failures_of(backend, device, kind, block, dtype)
        except Exception as error:  # any failure is this setting's result
            yield f"{backend} {kind} block {block} {dtype}: {described(error)}"


def _failures_of(
    backend: str, device: torch.device, kind: str, block: int, dtype: torch.dtype
) -> Iterator[str]:
    if kind in CHANNEL_KINDS:
        yield from channel_failures(backend, device, kind, block, dtype)
        return
    for fit in FITS:
        yield from quantize_failures(backend, device, kind, block, dtype, fit)
    yield from dequantize_failures(backend, device, kind, block, dtype)
