"""The reference quantize and dequantize against GGML's and bitsandbytes' own code, and against float64."""

import gguf
import numpy as np
import pytest
import torch
from support.blocks import awkward_blocks, damaged_blocks, same_bits

from caramba_fast.formats import FORMATS, NF4_LEVELS
from caramba_fast.ops import dequantize, quantize, use_backend
from caramba_fast.ops.quantize import CANDIDATES, FITS

QUANTIZED = ("q8_0", "q4_0", "nf4")
both_fits = pytest.mark.parametrize("fit", FITS)
GGML = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("name", sorted(set(awkward_blocks()) - {"subnormal"}))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_codes_and_scales_are_ggmls_bit_for_bit(kind, name):
    """Subnormal blocks aside: GGML's reciprocal overflows there, which its code leaves undefined."""
    x = awkward_blocks()[name]
    codes, scales = quantize(x, kind)
    packed = torch.from_numpy(gguf.quants.quantize(x.numpy(), GGML[kind])).view(x.shape[0], 2, -1)
    assert same_bits(scales, packed[..., :2].contiguous().view(torch.float16).squeeze(-1))
    assert torch.equal(codes.view(torch.uint8).unflatten(-1, (2, -1)), packed[..., 2:])


@pytest.mark.parametrize("kind", GGML)
def test_dequantize_gives_ggmls_values(kind):
    x = awkward_blocks()["random"]
    packed = gguf.quants.quantize(x.numpy(), GGML[kind])
    expected = torch.from_numpy(gguf.quants.dequantize(packed, GGML[kind]))
    assert torch.equal(dequantize(*quantize(x, kind), kind, x.shape[-1]), expected)


def test_nf4_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.randn(512, 64)
    theirs, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    pairs = theirs.view(-1)
    expected = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).view(512, 64)
    codes, scales = quantize(x, "nf4", block=64)
    ours = torch.cat((codes & 0xF, codes >> 4), dim=-1)
    scaled = x / x.abs().amax(-1, keepdim=True)
    levels = torch.tensor(NF4_LEVELS)
    midpoint = ((scaled[..., None] - (levels[1:] + levels[:-1]) / 2).abs() < 1e-6).any(-1)
    assert torch.equal(ours[~midpoint], expected[~midpoint])
    assert torch.equal(scales.view(-1), state.absmax.half())


def test_nf4_takes_the_nearest_level():
    x = torch.rand(256, 32) * 2 - 1
    x[:, 0] = 1.0
    codes, _ = quantize(x, "nf4")
    ours = torch.cat((codes & 0xF, codes >> 4), dim=-1).long()
    levels = np.asarray(NF4_LEVELS)
    best = np.abs(x.numpy()[..., None].astype(np.float64) - levels).min(-1)
    reached = np.abs(x.numpy().astype(np.float64) - levels[ours.numpy()])
    assert np.allclose(best, reached, atol=1e-7)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shapes_error_bound_and_second_pass(kind, block, dtype):
    x = torch.randn(2, 3, 5, 256).to(dtype)
    codes, scales = quantize(x, kind, block)
    assert codes.shape == (2, 3, 5, FORMATS[kind].code_width(256))
    assert scales.shape == (2, 3, 5, 256 // block) and scales.dtype == torch.float16
    back = dequantize(codes, scales, kind, 256)
    amax = x.float().unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True)
    # Half the widest step of the code, and the rounding of the scale to fp16.
    half_step = {"q8_0": 0.5 / 127, "q4_0": 1.0 / 8, "nf4": 0.1520}[kind]
    error = (back - x.float()).unflatten(-1, (-1, block)).abs()
    assert (error <= amax * (half_step + 2**-10)).all()
    assert torch.equal(dequantize(codes, scales, kind, 256, dtype), back.to(dtype))


def distributions(block):
    """(rows, block) float32 that differ in where their largest values lie."""
    normal = torch.randn(300, block)
    sparse = normal * (torch.rand(300, block) < 0.1)
    heavy = (normal / torch.randn(300, block).abs().clamp(min=1e-2)).clamp(-1000, 1000)
    steps = torch.randint(-9, 10, (300, block)).float()
    graded = normal * torch.logspace(-3, 4, 300)[:, None]
    return torch.cat((normal, sparse, heavy, steps, graded, torch.rand(300, block) + 1))


def squared_error(x, kind, block, fit):
    """(rows,) float64."""
    back = dequantize(*quantize(x, kind, block, fit), kind, block)
    return (back.double() - x.double()).square().sum(-1)


def rounding_noise(x):
    """What fp16 scales and fp32 sums may add to the squared error of a block."""
    return 2**-20 * x.double().square().sum(-1) + 128 * (127 * 2**-25) ** 2


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_mse_has_no_larger_error_than_amax(kind, block):
    x = distributions(block)
    ours, amax = (squared_error(x, kind, block, fit) for fit in ("mse", "amax"))
    assert (ours <= amax + rounding_noise(x)).all()
    normal = slice(0, 300)
    assert ours[normal].sum() < amax[normal].sum() * {"q8_0": 1.0, "q4_0": 0.95, "nf4": 0.95}[kind]


def least_error(x, step, values):
    """(rows,) float64: x rounded to the nearest of ``values * step``, with the best scale for that."""
    q = values[torch.bucketize(x / step, (values[1:] + values[:-1]) / 2)]
    scale = (x * q).sum(-1, keepdim=True) / q.square().sum(-1, keepdim=True).clamp(min=1e-30)
    return (x - scale * q).square().sum(-1)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("block", [32, 128])
def test_mse_is_the_best_of_its_candidates(kind, block):
    """A float64 search that shares no code with the reference.

    Where a value lies halfway between two codes (q4_0's largest one does, as code 7.5), either will do.
    """
    codes = {"q8_0": range(-127, 128), "q4_0": range(-8, 8), "nf4": NF4_LEVELS}[kind]
    values = torch.tensor(codes, dtype=torch.float64)
    x = distributions(block)
    x = x * (1 + 0.01 * torch.rand_like(x))
    top = x.double().gather(-1, x.abs().argmax(-1, keepdim=True))
    top = -top if kind == "q4_0" else top.abs()
    top = torch.where(top == 0, 1.0, top)
    errors = [
        torch.maximum(
            *(least_error(x.double(), top / c * (1 + nudge), values) for nudge in (-1e-6, 1e-6))
        )
        for c in CANDIDATES[kind]
    ]
    best = torch.stack(errors).amin(0)
    assert (squared_error(x, kind, block, "mse") <= best + rounding_noise(x)).all()


@both_fits
@pytest.mark.parametrize("kind", QUANTIZED)
def test_damage_stays_visible_and_in_its_block(kind, fit):
    codes, scales = quantize(damaged_blocks(), kind, fit=fit)
    assert scales[:, 0].isnan().all() and scales[:, 1].isfinite().all()
    back = dequantize(codes, scales, kind, 64)
    assert back[:, :32].isnan().all() and back[:, 32:].isfinite().all()


@both_fits
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("name", ["zero", "negative zero", "subnormal"])
def test_blocks_too_small_for_a_scale_decode_to_zeros(kind, name, fit):
    back = dequantize(*quantize(awkward_blocks()[name], kind, fit=fit), kind, 64)
    assert (back == 0).all()


@both_fits
@pytest.mark.parametrize("kind", QUANTIZED)
def test_opcheck_and_fullgraph(kind, fit):
    x = torch.randn(4, 64)
    torch.library.opcheck(torch.ops.caramba_fast.quantize.default, (x, kind, 32, fit))
    codes, scales = quantize(x, kind, fit=fit)
    torch.library.opcheck(
        torch.ops.caramba_fast.dequantize.default, (codes, scales, kind, 64, torch.float16)
    )
    compiled = torch.compile(
        lambda x: dequantize(*quantize(x, kind, fit=fit), kind, 64), fullgraph=True
    )
    with use_backend("auto"):
        assert torch.equal(compiled(x), dequantize(codes, scales, kind, 64))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize([1.0], "q8"), TypeError, "x is a list"),
        (lambda: quantize(torch.ones(32, dtype=torch.int64), "q8"), TypeError, "x has dtype torch.int64"),
        (lambda: quantize(torch.ones(32, dtype=torch.float64), "q8"), TypeError, "float64; allowed"),
        (lambda: quantize(torch.ones(()), "q8"), ValueError, "x is a scalar"),
        (lambda: quantize(torch.ones(48), "q8"), ValueError, "block=32 does not divide 48"),
        (lambda: quantize(torch.ones(64), "q8", 16), ValueError, "allowed are 32, 64, 128"),
        (lambda: quantize(torch.ones(64), "q4", fit="max"), ValueError, "fit is 'max'; allowed are amax, mse"),
        (lambda: quantize(torch.ones(64), "q5"), ValueError, "unknown cache kind 'q5'"),
        (lambda: quantize(torch.ones(64), "fp16"), ValueError, "quantized kinds are q8_0, q4_0, nf4"),
        (lambda: dequantize(*quantize(torch.ones(64), "q4"), "q8", 64), TypeError, "q8_0 stores torch.int8"),
        (lambda: dequantize(*quantize(torch.ones(64), "q4"), "q4", 32), ValueError, "not head_dim=32"),
        (lambda: dequantize(*quantize(torch.ones(64), "q4"), "q4", 64, torch.int8), TypeError, "dtype is"),
        (
            lambda: dequantize(quantize(torch.ones(64), "q4")[0], torch.ones(5).half(), "q4", 64),
            ValueError,
            "no block of 32, 64 or 128",
        ),
    ],
)  # fmt: skip
def test_bad_input_says_what_is_wrong_and_what_is_allowed(call, error, message):
    with pytest.raises(error, match=message):
        call()


@both_fits
@pytest.mark.parametrize("kind", QUANTIZED)
def test_empty_and_strided_tensors(kind, fit):
    codes, scales = quantize(torch.ones(0, 64), kind, fit=fit)
    assert codes.shape[0] == scales.shape[0] == 0
    wide = torch.randn(4, 128)
    strided = wide[:, ::2]
    dense = strided.contiguous()
    assert all(map(same_bits, quantize(strided, kind, fit=fit), quantize(dense, kind, fit=fit)))
