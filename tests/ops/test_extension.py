"""The C++ extension against the oracle: the same bits, on every instruction set the machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.isas import ISA_VARIABLE, expected_isas, in_subprocess, isa_in_use, torch_threads
from torch import Tensor

from caramba_fast import ops
from caramba_fast.bench.kernels.parity import undecided_scales
from caramba_fast.formats import BLOCK_SIZES, FORMATS, NF4_LEVELS, QUANTIZED_KINDS
from caramba_fast.ops import registry
from caramba_fast.ops.dequantize import reference as dequantize_reference
from caramba_fast.ops.quantize import CANDIDATES, FITS
from caramba_fast.ops.quantize import reference as quantize_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
both_fits = pytest.mark.parametrize("fit", FITS)
CSRC = Path(__file__).resolve().parents[2] / "csrc"


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """No skip: without the extension, nothing here may pass."""
    assert registry.load_error() is None, registry.load_error()


def quantize(x: Tensor, kind: str, block: int, fit: str = "amax") -> tuple[Tensor, Tensor]:
    with ops.use_backend("cpp"):
        return ops.quantize(x, kind, block, fit)


def dequantize(codes: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    dim = FORMATS[kind].value_width(codes.shape[-1])
    with ops.use_backend("cpp"):
        return ops.dequantize(codes, scales, kind, dim, dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bits, except that any NaN equals any NaN; -0.0 is not 0.0."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    differ = actual.view(bits) != expected.contiguous().view(bits)
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    where = differ.nonzero()
    assert not len(where), f"{len(where)} differ, first at {where[0].tolist()}"


def check(x: Tensor, kind: str, block: int, fit: str = "amax") -> None:
    codes, scales = quantize(x, kind, block, fit)
    expected_codes, expected_scales = quantize_reference(x, kind, block, fit)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


def hard_values(dim: int) -> Tensor:
    """(rows, dim) fp32; a row is one kind of trouble, so every block size meets all of them."""
    generator = torch.Generator().manual_seed(dim)
    noise = torch.randn(40, dim, generator=generator)
    sizes = torch.tensor([1e38, 3e38, 65504.0, 1e4, 1.0, 1e-3, 1e-7, 1e-30, 1e-36, 1e-38, 1e-42])
    rows = [noise, noise[: len(sizes)] / noise[: len(sizes)].abs().amax(-1, True) * sizes[:, None]]
    rows.append(torch.randint(-4, 5, (60, dim), generator=generator).float())  # many ties
    rows.append(torch.randint(-1, 2, (30, dim), generator=generator) * 127.0)  # only extremes
    rows.append(torch.randint(-254, 255, (60, dim), generator=generator) / 2.0)  # halves, for q8_0
    special = torch.zeros(8, dim)
    special[1] = -0.0
    special[2, ::32], special[2, 5::32] = -0.0, 1e-45
    special[3, 3::32], special[3, 7::32] = 2.0, -2.0  # a tie: the first decides the sign
    special[4, 3::32], special[4, 7::32] = -2.0, 2.0
    special[5] = noise[5]
    special[5, 20], special[5, 0] = torch.nan, torch.inf
    special[6] = -torch.inf
    special[7, -1] = -torch.nan
    midpoints = (torch.tensor(NF4_LEVELS[1:]) + torch.tensor(NF4_LEVELS[:-1])) / 2
    tied = torch.cat((torch.ones(1), midpoints, midpoints.nextafter(torch.tensor(2.0))))
    rows += [special, tied[torch.arange(dim) % 31 * (torch.arange(dim) % 32 > 0)][None]]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
@both_fits
def test_quantize_is_the_reference(fit, kind, block, dtype):
    inputs = (
        hard_values(block).to(dtype),
        hard_values(3 * block).to(dtype),
        undecided_scales(kind, block, rows=100).to(dtype),  # a sum in another order shows here
        torch.randn(7, 999, block).to(dtype),  # several threads, ragged
    )
    for x in inputs:
        expected = quantize_reference(x, kind, block, fit)
        for threads in (1, 2, 3):
            with torch_threads(threads):
                for pair in zip(quantize(x, kind, block, fit), expected, strict=True):
                    assert_same_bits(*pair)


@both_fits
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_few_blocks(kind, fit):
    """Fewer than a vector of blocks, and one more."""
    for blocks in (1, 2, 3, 5, 9, 17):
        check(torch.randn(blocks, 32), kind, 32, fit)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
@both_fits
def test_every_float_pattern_is_quantized_like_the_reference(fit, kind):
    bits = torch.randint(-(2**31), 2**31, (20000, 32), generator=torch.Generator().manual_seed(0))
    exponents = (bits.to(torch.int32) & 0x807FFFFF) | 0x3F000000
    values = bits.to(torch.int32).view(torch.float32)
    check(values, kind, 32, fit)
    check(exponents.view(torch.float32), kind, 32, fit)
    check(values.clamp(-1e-37, 1e-37), kind, 32, fit)
    alone = torch.zeros_like(values)
    alone[:, 11] = values[:, 11]
    check(alone, kind, 32, fit)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_strides_do_not_matter(kind):
    x = torch.randn(3, 5, 4, 64)
    for view in (
        x.transpose(1, 2),
        x[:, ::2],
        x[..., :32],
        x.flip(0),
        x[1:, :, 1:2].expand(2, 5, 6, 64),
    ):
        check(view, kind, 32)
    check(torch.randn(64, 9).t(), kind, 64)
    check(torch.randn(130)[1:129], kind, 128)  # contiguous, but not aligned
    codes, scales = quantize(x, kind, 32)
    for pick in (lambda t: t.transpose(0, 2), lambda t: t[:, 1:, ::3]):
        expected = dequantize_reference(pick(codes), pick(scales), kind, 64, torch.float32)
        assert_same_bits(dequantize(pick(codes), pick(scales), kind, torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_every_scale_with_random_codes(kind, dtype):
    """All 65536 fp16 patterns as scales, hundreds of codes for each byte value."""
    scales = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)[:, None]
    generator = torch.Generator().manual_seed(1)
    for block in BLOCK_SIZES:
        shape = (len(scales), FORMATS[kind].code_width(block))
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        codes = codes.view(FORMATS[kind].dtype)
        expected = dequantize_reference(codes, scales, kind, block, dtype)
        assert_same_bits(dequantize(codes, scales, kind, dtype), expected)


def test_narrowing_rounds_to_even():
    """Scales of nf4 are the values themselves: every fp16, each midpoint, its neighbours, noise."""
    halves = torch.arange(0, 0x7C00).to(torch.int16).view(torch.float16).float()
    middle = (halves[1:] + halves[:-1]) / 2
    above, below = (middle.nextafter(torch.tensor(end)) for end in (1e9, 0.0))
    large = torch.tensor([65519.0, 65519.996, 65520.0, 65536.0, 1e9])
    noise = torch.randint(0, 255 << 23, (100000,)).to(torch.int32).view(torch.float32)
    values = torch.cat((halves, middle, above, below, large, noise))
    x = torch.zeros(len(values), 32)
    x[:, 9] = values
    assert_same_bits(quantize(x, "nf4", 32)[1][:, 0], values.half())


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_empty_tensors(kind):
    for shape in ((0, 64), (3, 0, 64), (2, 0)):
        check(torch.empty(shape), kind, 32)
    codes, scales = quantize(torch.empty(3, 0, 64), kind, 32)
    assert dequantize(codes, scales, kind, torch.bfloat16).shape == (3, 0, 64)


@pytest.mark.parametrize(("kind", "type_name"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_codes_are_ggml_codes(kind, type_name):
    x = torch.cat((torch.randn(2000, 32), torch.randint(-9, 9, (2000, 32)).float()))
    packed = gguf.quants.quantize(x.numpy(), getattr(gguf.GGMLQuantizationType, type_name))
    codes, scales = quantize(x, kind, 32)
    np.testing.assert_array_equal(packed[:, :2], scales.numpy().view(np.uint8))
    np.testing.assert_array_equal(packed[:, 2:], codes.numpy().view(np.uint8))


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_opcheck(kind):
    x = torch.randn(2, 3, 64)
    for arguments in ((x, kind, 32), (x, kind, 32, "mse")):
        torch.library.opcheck(torch.ops.caramba_fast.quantize.default, arguments)
    codes, scales = quantize(x, kind, 32)
    args = (codes, scales, kind, 64, torch.float16)
    torch.library.opcheck(torch.ops.caramba_fast.dequantize.default, args)


def test_bad_arguments_are_named():
    op, back = torch.ops.caramba_fast.quantize.default, torch.ops.caramba_fast.dequantize.default
    x = torch.zeros(2, 96)
    codes, scales = op(x, "q8_0", 32)
    f32 = torch.float32
    for message, call in (
        ("kind is 'q9'", lambda: op(x, "q9", 32)),
        ("fit is 'max'; allowed are amax, mse", lambda: op(x, "q8_0", 32, "max")),
        ("block is 48", lambda: op(x, "q8_0", 48)),
        ("block=64 does not divide the 96 values of x", lambda: op(x, "q8_0", 64)),
        ("x has dtype Double", lambda: op(x.double(), "q8_0", 32)),
        ("x is a scalar", lambda: op(torch.tensor(1.0), "q8_0", 32)),
        ("codes have dtype Char", lambda: back(codes, scales, "q4_0", 96, f32)),
        ("scales have dtype Float", lambda: back(codes, scales.float(), "q8_0", 96, f32)),
        ("not head_dim=64", lambda: back(codes, scales, "q8_0", 64, f32)),
        ("differ in dimension 0", lambda: back(codes, scales[:1], "q8_0", 96, f32)),
        ("96 values cannot have 0 scales", lambda: back(codes, scales[:, :0], "q8_0", 96, f32)),
        ("block is 96", lambda: back(codes, scales[:, :1], "q8_0", 96, f32)),
        ("dtype has dtype Double", lambda: back(codes, scales, "q8_0", 96, torch.double)),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call()


def test_format_table_is_the_python_one():
    text = (CSRC / "formats.h").read_text()
    enumerators = re.search(r"enum class Format : int \{(.*?)\}", text, re.DOTALL).group(1)
    found = {name: int(index) for name, index in re.findall(r"(\w+) = (\d+)", enumerators)}
    assert found == {row.name: row.index for row in FORMATS.values()}
    codes = torch.arange(16, dtype=torch.uint8)[None]  # the low nibbles; the high ones are 0
    values = dequantize(codes, torch.ones(1, 1).half(), "nf4", torch.float32)
    assert values[0, :16].tolist() == list(NF4_LEVELS)


def test_candidates_are_the_python_ones():
    text = (CSRC / "quantize.h").read_text()
    found = re.findall(
        r"struct Encoder<Format::(\w+)> \{\s*static constexpr float kDivisors\[\] = \{(.*?)\}", text
    )
    # q4_0 divides the signed extreme by negative numbers: its code is -8.
    listed = {kind: tuple(abs(float(x.strip(" f"))) for x in row.split(",")) for kind, row in found}
    assert listed == CANDIDATES


def test_the_forced_instruction_set_is_used():
    assert isa_in_use() == os.environ.get(ISA_VARIABLE, expected_isas()[-1])


def test_an_unknown_instruction_set_is_refused():
    script = (
        "import torch, caramba_fast.ops as ops; ops.use_backend('cpp');"
        "ops.quantize(torch.zeros(32), 'q8_0')"
    )
    result = in_subprocess("sse9", "-c", script)
    assert result.returncode != 0
    names = ", ".join(reversed(expected_isas()))
    assert f"{ISA_VARIABLE} is 'sse9'; this build on this CPU runs: {names}" in result.stderr


FIRST = """
import os
import torch
from caramba_fast import ops
from caramba_fast.ops import KVView, use_backend
use_backend("cpp")
def view():
    codes = torch.zeros(1, 1, 32, 32, dtype=torch.int8)
    return KVView(codes, torch.zeros(1, 1, 32, 1, dtype=torch.float16), "q8_0")
x, one = torch.zeros(1, 1, 1, 32), torch.ones(1, dtype=torch.int32)
calls = {
    "append_": lambda: ops.append_(view(), view(), x, x, 0 * one),
    "decode_attention": lambda: ops.decode_attention(x, view(), view(), one, n_kv_heads=1),
    "merge_state": lambda: ops.merge_state(x, x[..., 0].contiguous(), x, x[..., 0].contiguous()),
    "apply_rotary_emb": lambda: ops.apply_rotary_emb(x, x, x[0], x[0]),
    "quantize": lambda: ops.quantize(x, "q8_0"),
}
for name, call in calls.items():
    child = os.fork()
    if not child:
        call()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_any_op_can_be_the_first_of_a_process():
    """Scratch that an earlier op left behind hides a reservation that is too small (`make sanitize` sees it)."""
    result = in_subprocess(isa_in_use(), "-c", FIRST)
    assert result.returncode == 0, result.stdout + result.stderr
