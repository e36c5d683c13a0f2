"""Kinds by channel: the format, the ops on every backend that serves them, and what they refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support import dense
from support.isas import multiplies_integers
from support.tolerances import relative_l2

from caramba_fast.cache import DecoupledLayerKVCache, LayerKVCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.formats import CHANNEL_KINDS, FORMATS
from caramba_fast.ops import (
    KVView,
    append_,
    decode_attention,
    dequantize,
    quantize,
    use_backend,
)
from caramba_fast.ops.quantize import FITS, encode_groups, low_masks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def loudness(*shape: int) -> torch.Tensor:
    """As root mean squares of queries are: some of a few times the others, the same at each call."""
    draw = torch.Generator().manual_seed(5)
    return 2 ** torch.randint(-3, 4, shape, generator=draw).float()


def written_out(
    x: torch.Tensor, bits: int, group: int, *, divides: bool, rms: torch.Tensor | None = None
) -> torch.Tensor:
    """(T, D) through the format, one channel of one group at a time, in float64 but for what is stored."""
    found = torch.empty_like(x)
    for start in range(0, len(x), group):
        rows = x[start : start + group]
        extent = [float(part.max() - part.min().half().float()) for part in rows.T]
        weight = (
            extent if rms is None else [e * r for e, r in zip(extent, rms.tolist(), strict=True)]
        )
        for d, part in enumerate(rows.T):
            mate = d + 16 if d % 32 < 16 else d - 16
            pairs = ((weight[mate], weight[d]), (weight[d], weight[mate]))
            lent, taken = (
                divides * sum(a > wider * b for wider in (2.1875, 10.75)) for a, b in pairs
            )
            own, unit = bits - lent + taken, 1.0
            if bits == 4 and d % 32 >= 16:  # it stays above the other in its byte
                unit = 2.0 ** (4 - own)
            most = (2**own - 1) * unit
            scale = (torch.tensor(extent[d]) / torch.tensor(most)).half()
            if lent and int(scale.view(torch.int16)) % 2 != lent - 1:
                scale = (scale.view(torch.int16) + (1 if lent == 2 else -1)).view(torch.float16)
            scale, zero = scale.float(), part.min().half().float()
            codes = ((part - zero) / scale if scale > 0 else part * 0).div(unit).add(0.5).floor()
            found[start : start + group, d] = zero + scale * (codes * unit).clamp(0, most)
    return found


@pytest.mark.parametrize("kind", CHANNEL_KINDS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("fit", FITS)
def test_what_is_stored_is_what_the_format_says(kind, group, fit):
    x = torch.randn(2, 256, 64) * loudness(64) + 10 * torch.randn(1, 1, 64)
    codes, scales = quantize(x, kind, group, fit)
    form = FORMATS[kind]
    assert codes.dtype == torch.uint8 and codes.shape == (2, 256, form.code_width(64))
    assert scales.dtype == torch.float16 and scales.shape == (2, 256 // group, 128)
    values = dequantize(codes, scales, kind, 64)
    divides = (kind, fit) == ("q4_channel", "mse")
    assert bool(scales.signbit()[..., :64].any()) == divides
    expected = torch.stack([written_out(row, form.bits, group, divides=divides) for row in x])
    step = scales[..., :64].float().abs()
    if kind == "q4_channel":  # a code of a high channel counts more or less than a scale
        unit = (low_masks(scales[..., :64]).float() + 1).div(16).unflatten(-1, (-1, 16))
        step *= torch.stack((torch.ones_like(unit), unit), dim=-2).flatten(-3)
    step = step.repeat_interleave(group, 1)
    assert ((values - expected).abs() <= 1.01 * step).all()  # a code beside it at most, at ties
    assert (values != expected).float().mean() < 1e-3
    assert ((values - x).abs() <= 0.51 * step + 0.02).all()
    assert torch.equal(values.double(), dense.decoded(codes, scales, kind).float().double())


def test_a_byte_divides_its_bits_by_the_ranges_of_its_two_channels():
    """Each way to divide, beside values that say how exact it is; scales of nothing lent read as they always did."""
    extents = torch.tensor([1.0, 1.0, 2.1, 1.0, 2.3, 1.0, 10.5, 1.0, 11.0, 1.0, 50.0, 0.0])
    x = torch.zeros(32, 32)
    low, high = extents[0::2], extents[1::2]
    ramp = torch.arange(32) / 31
    x[:, :6], x[:, 16:22] = ramp[:, None] * low, ramp[:, None] * high
    x[:, 8:14], x[:, 24:30] = x[:, 16:22], x[:, :6]  # and the other way round
    codes, scales = quantize(x, "q4_channel", 32, "mse")
    masks = low_masks(scales[0, :32]).tolist()
    assert masks[:6] == [15, 15, 31, 31, 63, 63] and masks[8:14] == [15, 15, 7, 7, 3, 3]
    assert scales[0, [*range(6), *range(24, 30)]].signbit().sum() == 0
    error = (dequantize(codes, scales, "q4_channel", 32) - x).abs().amax(0)
    low = torch.tensor(masks).add(1).log2()
    bits = torch.cat((low, 8 - low))
    assert (error <= 0.51 * x.amax(0) / (2**bits - 1) + 1e-3 * x.amax(0)).all()
    assert error[5] < 0.5 and error[4] < 0.1


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("heads", [2, 1])
@torch.no_grad()
def test_bytes_are_divided_by_what_queries_make_of_errors(group, heads):
    """What a cache stores is what the format says of ranges times queries; known queries make errors of scores less."""
    x = (torch.randn(1, heads, 2 * group, 64) * loudness(64)).half().float()
    q = torch.randn(1, heads, 500, 64)
    rms = loudness(heads, 64).roll(7, -1)
    found = {}
    for known in (True, False):
        cache = LayerKVCache(
            1, 128, heads * 64, heads * 64, KVCacheTensorConfig(kind="q4_channel", qblock=group, fit="mse"),
            n_kv_heads=heads, query_rms=(lambda: {"k": rms}) if known else None,
        )  # fmt: skip
        cache.append(x, x)
        found[known] = cache.get()[0]
    for head in range(heads):
        wanted = written_out(x[0, head], 4, group, divides=True, rms=rms[head])
        assert (found[True][0, head] != wanted).float().mean() < 1e-3
    error = {known: ((q * rms[:, None]) @ (k - x).mT).square().mean() for known, k in found.items()}
    assert error[True] < 0.8 * error[False]


def test_a_constant_channel_and_an_empty_one_come_back():
    x = torch.zeros(32, 32)
    x[:, 3] = 7.5
    codes, scales = quantize(x, "q4_channel", 32)
    assert torch.equal(dequantize(codes, scales, "q4_channel", 32), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2e6])
def test_damage_stays_in_its_channel_of_its_group(bad):
    x = torch.randn(96, 32)
    x[40, 5] = bad
    values = dequantize(*quantize(x, "q4_channel", 32), "q4_channel", 32)
    wrong = ~values.isfinite()
    assert wrong[32:64, 5].all() and wrong.sum() == 32


def test_tokens_that_do_not_count_leave_the_range_alone():
    x = torch.randn(1, 32, 32)
    loud = x.clone()
    loud[:, :4] = torch.tensor([1e9, -1e9, torch.nan, torch.inf])[:, None]
    counted = torch.arange(32)[None] >= 4
    (a, scales), (b, other) = (encode_groups(v, "q4_channel", counted, "mse") for v in (x, loud))
    assert torch.equal(scales, other) and torch.equal(a[:, 4:], b[:, 4:])
    nothing = encode_groups(loud, "q4_channel", torch.zeros(1, 32, dtype=torch.bool))[1]
    assert (nothing == 0).all()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: quantize(torch.ones(32), "q4_channel"), r"needs \(..., tokens, dim\)"),
    (lambda: quantize(torch.ones(32, 40), "q4_channel"), "dim a multiple of 32"),
    (lambda: quantize(torch.ones(48, 32), "q4_channel"), "block=32 does not divide 48 values"),
    (
        lambda: dequantize(torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(2, 32).half(), "q4_channel", 32),
        r"needs \(..., N \* G, 16\) and \(..., N, 64\)",
    ),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("rms", "message"),
    [
        (torch.ones(1, 64), r"k_query_rms is \(1, 64\) torch.float32; \(2, 64\) float32 is needed"),
        (torch.ones(2, 64).half(), r"k_query_rms is \(2, 64\) torch.float16; \(2, 64\) float32"),
        (torch.ones(2, 64, device="meta"), "tensors must share one device; .*k_query_rms on meta"),
    ],
)  # fmt: skip
def test_queries_that_do_not_fit_are_named(rms, message):
    k, v = views()
    start = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        append_(replace(k, fit="mse", query_rms=rms), v, *torch.ones(2, 2, 2, 32, 64), start)


def hard_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Groups of values in which something is at an edge of the format."""
    x = torch.randn(shape)
    loud = 2 ** torch.randint(-30, 9, shape[-1:]).float()
    if name == "damaged":
        x[..., 3, 7], x[..., 4, 23], x[..., 5] = torch.inf, -torch.inf, torch.nan
    return {
        "ordinary": x, "damaged": x, "tiny": x * 1e-6, "too large": x * 1e5, "apart": x * loud + 10,
        "a range below its zero": torch.full_like(x, 0.99985), "negative zeros": x * 0 - 0.0, "ties": x.round(),
    }[name]  # fmt: skip


HARD = (
    "ordinary", "damaged", "tiny", "too large", "apart", "a range below its zero", "negative zeros", "ties"
)  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = a.isnan() & b.isnan()
    a, b = (x.masked_fill(nan, 0).contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("shape", [(128, 32), (1, 2, 256, 160), (0, 128, 64), (2, 0, 64)])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", CHANNEL_KINDS)
def test_cpp_does_what_the_reference_does_with_whole_groups(kind, fit, shape):
    """Bit for bit, in every dtype and group."""
    for name, group, dtype in itertools.product(
        HARD if 0 not in shape else HARD[:1], (32, 64, 128), DTYPES
    ):
        x = hard_values(name, shape).to(dtype)
        with use_backend("reference"):
            stored = quantize(x, kind, group, fit)
            values = [dequantize(*stored, kind, shape[-1], to) for to in DTYPES]
        with use_backend("cpp"):
            found = quantize(x.mT.contiguous().mT, kind, group, fit)
            back = [dequantize(*stored, kind, shape[-1], to) for to in DTYPES]
        pairs = zip((*stored, *values), (*found, *back), strict=True)
        assert [same_bits(a, b) for a, b in pairs] == [True] * 5, (name, group, dtype)


@pytest.mark.parametrize(("call", "message"), [
    (lambda ops: ops.quantize(torch.ones(32, 40), "q4_channel", 32), "40 channels; a multiple of 32"),
    (lambda ops: ops.quantize(torch.ones(48, 32), "q4_channel", 32), "block=32 does not divide the 48 tokens"),
    (lambda ops: ops.quantize(torch.ones(48, 32), "q4_channel", 48), "block is 48; allowed are 32, 64, 128"),
    (lambda ops: ops.quantize(torch.ones(32), "q8_channel", 32), r"\(..., tokens, dim\) is needed"),
    (
        lambda ops: ops.dequantize(
            torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(2, 32).half(), "q4_channel", 32, torch.float32
        ),
        "codes of 16 bytes and 32 scales do not fit head_dim=32",
    ),
    (
        lambda ops: ops.dequantize(
            torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(3, 64).half(), "q4_channel", 32, torch.float32
        ),
        "64 tokens cannot have 3 groups",
    ),
])  # fmt: skip
def test_cpp_refuses_what_would_be_read_beyond_its_end(call, message):
    """The op itself, without the checks of the public function."""
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.caramba_fast)


#: q8_channel has one way, q4_channel may divide its bytes, by what queries make of errors if that is known.
WEIGHED = "mse, queries known"
STORED = (
    ("q8_channel", "amax"),
    ("q4_channel", "amax"),
    ("q4_channel", "mse"),
    ("q4_channel", WEIGHED),
)


def layer(
    kind: str, group: int = 32, residual: int = 8, fit: str = "amax", **more: object
) -> LayerKVCache:
    shared = {"residual_len": residual, "sink_len": 2}
    if fit == WEIGHED:
        fit, more = "mse", {"query_rms": lambda: {"k": loudness(2, 64)}, **more}
    return LayerKVCache(
        2, 384, 128, 128, KVCacheTensorConfig(kind=kind, qblock=group, fit=fit, **shared),
        KVCacheTensorConfig(kind="fp16", **shared), n_kv_heads=2, **more,
    )  # fmt: skip


STEPS = (1, 30, 3, 64, 1, 100, 20, 1)


def run(
    backend: str, make, new, queries, pad, steps=STEPS
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What steps of many sizes give, and the keys that are stored then."""
    cache, found, start = make(), [], 0
    with use_backend(backend):
        for step, count in enumerate(steps):
            part = slice(start, start + count)
            lens = [count, count - count // 3]
            cache.append(*(x[:, :, part] for x in new), lens, cache_leftpad=pad)
            options = {"window_size": (70, 0)} if step % 3 == 2 else {}
            asked = [q[:, :, part] for q in queries]
            found += cache.attend(*asked, cache_leftpad=pad, return_softmax_lse=True, **options)
            start += count
    with use_backend("auto"):
        return found, cache.get(cache_leftpad=pad)[0]


#: Relative L2 error that queries may add where they meet codes as integers.
AS_INTEGERS = 1e-4


def close(found, expected, allowed: float = 1e-5) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        finite = theirs.isfinite()
        assert torch.equal(finite, ours.isfinite())
        assert relative_l2(ours[finite], theirs[finite]) <= allowed
    assert torch.equal(found[1], expected[1])


def cpp_is_close(make, *args: object) -> None:
    allowed = AS_INTEGERS if multiplies_integers() else 1e-5
    close(run("cpp", make, *args), run("reference", make, *args), allowed)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("kind", "fit"), STORED)
@torch.no_grad()
def test_cpp_does_what_the_reference_does(kind, fit, group, paged, padded):
    new = [
        torch.randn(2, 2, 220, 64) * 3 + 30 * torch.randn(1, 2, 1, 64),
        torch.randn(2, 2, 220, 64),
    ]
    queries = [torch.randn(2, 6, 220, 64) / 8]
    pad = torch.tensor([0, 5], dtype=torch.int32) if padded else None
    size = {"page_size": max(group, 64)} if paged else {}

    def make() -> LayerKVCache:
        return layer(kind, group, 0 if paged else 8, fit, **size)

    cpp_is_close(make, new, queries, pad)


@pytest.mark.parametrize(("kind", "fit"), STORED)
@pytest.mark.parametrize("loud", [1, 40])
@torch.no_grad()
def test_queries_of_16_bits_lose_less_than_an_output_of_them_rounds(kind, fit, loud):
    """Their products are integers of fewer bytes, where the keys allow it."""
    new = [torch.randn(2, 2, 220, 64) * loud, torch.randn(2, 2, 220, 64)]
    queries = [torch.randn(2, 6, 220, 64).half()]
    found = run("cpp", lambda: layer(kind, fit=fit), new, queries, None)[0]
    exact = run("reference", lambda: layer(kind, fit=fit), new, [queries[0].float()], None)[0]
    for out, wanted in zip(found[::2], exact[::2], strict=True):
        assert relative_l2(out.float(), wanted) <= 5e-4
    for lse, wanted in zip(found[1::2], exact[1::2], strict=True):
        seen = wanted.isfinite()
        assert torch.equal(seen, lse.isfinite())
        assert (lse - wanted)[seen].abs().max() <= 2e-3


@pytest.mark.parametrize(("kind", "fit"), STORED)
@torch.no_grad()
def test_queries_of_32_bits_take_what_one_integer_leaves(kind, fit):
    """Scores of loud keys in the hundreds: a word, or two bytes, of a query would show."""
    new = [torch.randn(2, 2, 220, 64) * 40, torch.randn(2, 2, 220, 64)]
    cpp_is_close(lambda: layer(kind, fit=fit), new, [torch.randn(2, 6, 220, 64)], None)


@pytest.mark.parametrize("fit", FITS)
@torch.no_grad()
def test_cpp_does_what_the_reference_does_in_shared_lanes(fit):
    """Heads of 8 and 16 share a lane; values may be by channel too."""
    dims = (8, 16, 32)
    configs = [
        KVCacheTensorConfig(kind=kind, residual_len=5, fit=fit) for kind in ("q4_channel", "q4_channel", "q8_channel")
    ]  # fmt: skip
    rms = {"k_sem": loudness(4, 8), "k_geo": loudness(4, 16)}
    new = [torch.randn(2, 4, 220, dim) + 10 * torch.randn(1, 4, 1, dim) for dim in dims]
    queries = [torch.randn(2, 8, 220, dim) / 8 for dim in dims[:2]]

    def make() -> DecoupledLayerKVCache:
        return DecoupledLayerKVCache(
            2, 384, *(4 * dim for dim in dims), *configs, n_kv_heads=4, query_rms=lambda: rms
        )

    cpp_is_close(make, new, queries, None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter
@pytest.mark.skipif("os.environ.get('TRITON_INTERPRET') != '1'", reason="built on the CPU")
@pytest.mark.parametrize(
    ("kind", "fit", "group", "paged"),
    [
        ("q4_channel", WEIGHED, 32, False),
        ("q4_channel", "amax", 32, False),
        ("q8_channel", "amax", 64, True),
    ],
)
@torch.no_grad()
def test_triton_does_what_the_reference_does(kind, fit, group, paged):
    """The default caches' streams over steps of many sizes, padded; out within fp16, what is stored bit for bit."""
    pytest.importorskip("triton")
    new = [
        torch.randn(2, 2, 220, 64) * 3 + 30 * torch.randn(1, 2, 1, 64),
        torch.randn(2, 2, 220, 64),
    ]
    queries, pad = [torch.randn(2, 6, 220, 64) / 8], torch.tensor([0, 5], dtype=torch.int32)

    def make() -> LayerKVCache:
        return layer(kind, group, fit=fit, **({"page_size": 64} if paged else {}))

    steps = (1, 30, 3, 32, 12)  # more queries go through extend_attention
    close(*(run(backend, make, new, queries, pad, steps) for backend in ("triton", "reference")))


def views() -> tuple[KVView, KVView]:
    cache = layer("q4_channel")
    for stream in cache.streams.values():
        for buffer in stream.buffers:
            buffer.zero_()
    return cache.k.view, cache.v.view


def test_opcheck():
    k, v = views()
    new = torch.randn(2, 2, 40, 64)
    start = torch.tensor([3, 40], dtype=torch.int32)
    stored = (k.codes, k.scales, v.codes, v.scales)
    kinds = (k.kind, v.kind)
    sides = {**k.options("k"), **v.options("v")}
    ops = torch.ops.caramba_fast
    torch.library.opcheck(ops.quantize.default, (new[:, :, :32], "q4_channel", 32, "amax"))
    torch.library.opcheck(
        ops.append_.default, (*stored, new, new, start, *kinds),
        {**sides, "fit_k": "mse", "k_query_rms": torch.rand(k.codes.shape[1], k.lane_dim)},
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    torch.library.opcheck(
        ops.decode_attention.default, (torch.randn(2, 4, 3, 64), *stored, start + 3, *kinds),
        {**sides, "n_kv_heads": 2, "residual_len": 8},
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_step_compiles_whole(dynamic):
    k, v = views()

    def step(q, new, start):
        append_(k, v, new, new, start)
        return decode_attention(q, k, v, start + 1, n_kv_heads=2, residual_len=8)

    start = torch.tensor([40, 31], dtype=torch.int32)
    q, new = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 1, 64)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")(
        q, new, start
    )
    torch.testing.assert_close(compiled, step(q, new, start))
