"""The Triton kernels of quantize and dequantize against the reference, bit for bit.

On the CPU they run interpreted; ``--device cuda`` compiles them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.ptx_instructions import lop3, prmt

from caramba_fast.bench.kernels.parity import (
    DTYPES,
    channel_failures,
    dequantize_failures,
    inputs,
    quantize_failures,
    same_bits,
)
from caramba_fast.formats import BLOCK_SIZES, CHANNEL_KINDS, NF4_LEVELS, QUANTIZED_KINDS, resolve
from caramba_fast.ops.dequantize import dequantize
from caramba_fast.ops.dequantize import reference as dequantize_reference
from caramba_fast.ops.quantize import CANDIDATES, FITS, quantize
from caramba_fast.ops.quantize import reference as quantize_reference
from caramba_fast.ops.registry import use_backend

pytest.importorskip("triton")
pytestmark = [  # numpy, under the interpreter: scales beyond fp16, inf * 0
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
quantized = pytest.mark.parametrize("kind", QUANTIZED_KINDS)
all_blocks = pytest.mark.parametrize("block", BLOCK_SIZES)
both_fits = pytest.mark.parametrize("fit", FITS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "one row": lambda: torch.randn(64),
    "odd rows, several programs": lambda: torch.randn(131, 96),
    "four dimensions": lambda: torch.randn(2, 3, 5, 64),
    "rows of a wider tensor": lambda: torch.randn(7, 200)[:, 40:136],
    "odd row stride": lambda: torch.randn(7, 101)[:, 1:97],
    "heads before tokens": lambda: torch.randn(2, 9, 3, 64).transpose(1, 2),
    "last dimension strided": lambda: torch.randn(64, 7).t(),
    "one row repeated": lambda: torch.randn(1, 64).expand(6, 64),
}


@pytest.fixture(autouse=True)
def _triton(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        assert os.environ.get("TRITON_INTERPRET") != "1", "--device cuda must compile the kernels"
    with use_backend("triton"):
        yield


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert same_bits(got.cpu(), wanted).all()


@both_fits
@quantized
@all_blocks
@all_dtypes
def test_quantize(
    kind: str, block: int, dtype: torch.dtype, fit: str, device: torch.device
) -> None:
    assert not quantize_failures("triton", device, kind, block, dtype, fit)


@pytest.mark.parametrize("kind", CHANNEL_KINDS)
@all_blocks
@all_dtypes
def test_by_channel(kind: str, block: int, dtype: torch.dtype, device: torch.device) -> None:
    assert not channel_failures("triton", device, kind, block, dtype)


@pytest.mark.parametrize("kind", CHANNEL_KINDS)
@pytest.mark.parametrize("dim", [32, 96, 320])
def test_by_channel_of_any_width_and_layout(kind: str, dim: int, device: torch.device) -> None:
    """Widths that no power of 2 is, and tokens of heads that lie apart."""
    x = torch.randn(2, 64, 3, dim).transpose(1, 2)
    codes, scales = quantize_reference(x, kind, 32)
    got = quantize(x.to(device), kind, 32)
    assert_same_bits(got[0], codes)
    assert_same_bits(got[1], scales)
    apart = (
        torch.cat((part, part), -1)[..., : part.shape[-1]].to(device) for part in (codes, scales)
    )
    values = dequantize_reference(codes, scales, kind, dim, torch.float16)
    assert_same_bits(dequantize(*apart, kind, dim, torch.float16), values)


@quantized
@all_blocks
@all_dtypes
def test_dequantize(kind: str, block: int, dtype: torch.dtype, device: torch.device) -> None:
    assert not dequantize_failures("triton", device, kind, block, dtype)


def test_fits_and_candidates_are_the_reference_ones() -> None:
    from caramba_fast.kernels import formats

    assert formats.FITS == FITS
    rows = {kind: formats.CANDIDATES.value[resolve(kind).index] for kind in QUANTIZED_KINDS}
    assert rows == CANDIDATES


def test_an_unknown_fit_is_refused(device: torch.device) -> None:
    from caramba_fast.kernels import quantize as launcher

    with pytest.raises(ValueError, match="fit is 'max'; allowed are amax, mse"):
        launcher.quantize(torch.ones(32, device=device), "q8_0", 32, "max")


@both_fits
@quantized
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind: str, layout: str, fit: str, device: torch.device) -> None:
    x = LAYOUTS[layout]()
    for got, wanted in zip(
        quantize(x.to(device), kind, 32, fit), quantize_reference(x, kind, 32, fit), strict=True
    ):
        assert_same_bits(got, wanted)


@quantized
def test_dequantize_reads_strided_codes_and_scales(kind: str, device: torch.device) -> None:
    codes, scales = quantize_reference(torch.randn(2, 3, 9, 192), kind, 32)
    width = codes.shape[-1] // 3
    for part in (
        (codes[:, :, ::2], scales[:, :, ::2]),
        (codes[0, 0, :, width : 3 * width], scales[0, 0, :, 2:]),
        (codes.transpose(1, 2), scales.transpose(1, 2)),
    ):
        dim = 32 * part[1].shape[-1]
        got = dequantize(*(tensor.to(device) for tensor in part), kind, dim, torch.float16)
        assert_same_bits(got, dequantize_reference(*part, kind, dim, torch.float16))


@quantized
def test_empty(kind: str, device: torch.device) -> None:
    codes, scales = quantize(torch.empty(0, 3, 64, device=device), kind, 32)
    assert scales.shape == (0, 3, 2)
    assert dequantize(codes, scales, kind, 64).shape == (0, 3, 64)


@quantized
def test_offsets_beyond_32_bits(kind: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs 4 GiB of device memory")
    far = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    x = far.as_strided((2, 64), (2**31, 1)).copy_(torch.randn(2, 64))
    for got, wanted in zip(
        quantize(x, kind, 32), quantize_reference(x.cpu(), kind, 32), strict=True
    ):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_agrees_with_ggml(kind: str, device: torch.device) -> None:
    gguf = pytest.importorskip("gguf")
    named = inputs()
    finite = ("normal", "graded", "zero", "negative zero", "ties", "halves", "midpoints")
    undecided = ("undecided q8_0", "undecided q4_0")
    x = torch.cat([named[name] for name in (*finite, *undecided)])
    stored = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    stored = torch.from_numpy(stored).unflatten(-1, (x.shape[-1] // 32, -1))
    codes, scales = quantize(x.to(device), kind, 32)
    assert_same_bits(codes.view(torch.uint8), stored[..., 2:].flatten(-2))
    assert_same_bits(scales, stored[..., :2].contiguous().view(torch.float16).squeeze(-1))


def test_agrees_with_bitsandbytes(device: torch.device) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(64, 256)
    packed, _ = functional.quantize_4bit(
        x, blocksize=64, quant_type="nf4", quant_storage=torch.uint8
    )
    packed = packed.flatten().reshape(64, 128)
    theirs = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(-2)  # neighbours share a byte
    codes = quantize(x.to(device), "nf4", 64)[0].cpu().unflatten(-1, (4, 32))
    ours = torch.cat((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    midpoints = torch.tensor(NF4_LEVELS).unfold(0, 2, 1).mean(-1)
    blocks = x.unflatten(-1, (4, 64))
    relative = (blocks / blocks.abs().amax(-1, keepdim=True)).flatten(-2)
    decided = (relative[..., None] - midpoints).abs().amin(-1) > 1e-6
    assert decided.float().mean() > 0.999
    assert torch.equal(ours[decided], theirs[decided])


PTX = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "prmt": prmt,
    "lop3": lop3,
}


def run_ptx(program: str, word: np.ndarray) -> list[np.ndarray]:
    """Executes straight-line PTX on input $8; returns outputs $0 to $7."""
    registers = {"$8": word.astype(np.uint32)}
    for name, operands in re.findall(r"^(\w+)\.[bu]32 (.+);$", program, re.MULTILINE):
        target, *sources = operands.split(", ")
        values = (
            registers[s] if s in registers else np.full(word.shape, int(s, 0), np.uint32)
            for s in sources
        )
        registers[target] = PTX[name](*values)
    return [registers[f"${index}"] for index in range(8)]


def test_nf4_look_up_in_ptx() -> None:
    from caramba_fast.kernels.nf4_asm import NF4_LOOKUP

    packed = np.stack([np.roll(np.arange(256), shift) for shift in (0, 1, 77, 130)])
    word = sum(packed[lane] << 8 * lane for lane in range(4))
    outputs = np.stack(run_ptx(NF4_LOOKUP, word)).astype(np.uint32).view(np.float32)
    levels = np.array(NF4_LEVELS, dtype=np.float32)
    np.testing.assert_array_equal(outputs[:4], levels[packed & 15])
    np.testing.assert_array_equal(outputs[4:], levels[packed >> 4])
