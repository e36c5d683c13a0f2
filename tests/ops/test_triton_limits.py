"""Where the Triton attention must not go wrong: large offsets, empty batches, odd queries, old GPUs, graphs."""

from __future__ import annotations

import pytest
import torch
from support import cases
from support.launches import Launches
from support.triton_cases import attend, build, check

pytest.importorskip("triton")

from caramba_fast.kernels import splits_launch
from caramba_fast.ops import KVView, append_, use_backend

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, under the interpreter
    pytest.mark.skipif(
        "os.environ.get('TRITON_INTERPRET') != '1'", reason="the cases are built on the CPU"
    ),
]


def far_apart(x: torch.Tensor, apart: int) -> torch.Tensor:
    """x (B, lanes, S, n) with its rows ``apart`` elements from each other; memory is taken when touched."""
    room = torch.empty(apart * (len(x) - 1) + x[0].numel(), dtype=x.dtype)
    spread = room.as_strided(x.shape, (apart, *x.stride()[1:]))
    return spread.copy_(x)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_offsets_beyond_2_to_the_31(kind):
    """Rows 2^31 elements apart, in codes and in scales: 32-bit products would wrap into row 0."""
    case = build(kinds=(kind, kind), heads=2, lengths=(40, 33))
    wanted = attend(case)
    views = {}
    for name, stream in case.streams.items():
        view = stream.view
        views[name] = KVView(
            far_apart(view.codes, 2**31 + 128), far_apart(view.scales, 2**31 + 32), view.kind
        )
    for found, one in zip(attend(case, views=views), wanted, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize(
    "options", [(), ("pages",), ("tail", "sinks", "rotate_k"), ("null", "s_aux")]
)
def test_a_batch_that_holds_nothing(options):
    """No token in any row, no split with work: out 0 and lse -inf, or what null keys and sinks give."""
    case = build(options, lengths=(3, 1, 2), heads=2)
    case.lengths = [0, 0, 0]
    out, lse = attend(case)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected)
    torch.testing.assert_close(lse.double(), expected_lse)
    if "null" not in options:
        assert not out.any() and (lse == -torch.inf).all()


def test_queries_of_any_layout():
    """Sliced, transposed and strided queries are read where they are or copied, never misread."""
    case = build(["rotate_k"], tokens=3)
    wanted = attend(case)
    q = case.queries["k"]
    layouts = {
        "heads last": q.transpose(1, 2).contiguous().transpose(1, 2),
        "dims apart": torch.stack((q, torch.full_like(q, torch.nan)), -1)[..., 0],
        "backwards in memory": q.transpose(2, 3).contiguous().transpose(2, 3),
        "part of a projection": torch.cat((q, torch.full_like(q, torch.nan)), 1)[:, : q.shape[1]],
    }
    for name, odd in layouts.items():
        assert not odd.is_contiguous(), name
        case.queries["k"] = odd
        for found, one in zip(attend(case), wanted, strict=True):
            assert torch.equal(found, one), name


def test_a_gpu_older_than_sm_80_is_refused(monkeypatch):
    case = build(heads=2)
    monkeypatch.setattr(splits_launch, "capability", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match=r"the GPU is sm_75; sm_80 and newer"):
        attend(case)


@pytest.mark.parametrize(
    "options", [("tail", "sinks", "rotate_k", "window"), ("pages", "leftpad"), ()]
)
def test_a_launch_depends_on_shapes_and_never_on_lengths(options, monkeypatch):
    """So that one CUDA graph serves a cache while it grows."""
    case = build(options, slots=1024, lengths=(40, 3, 25), heads=2)
    seen = []
    for lengths in ((3, 3, 3), (900, 2, 1000)):
        noted = Launches()
        for name in ("prepare_kernel", "partials_kernel", "merge_kernel"):
            monkeypatch.setattr(splits_launch, name, noted)
        attend(case, cache_seqlens=cases.rows(*lengths))
        seen.append(noted.seen)
    assert len(seen[0]) >= 2 and seen[0] == seen[1]


def test_lengths_that_end_with_the_last_slot():
    check(build(kinds=("q4_0", "q8_0"), slots=256, lengths=(256, 255, 129), heads=2))


@pytest.mark.parametrize("size", [1e-8, 1e-3, 6.55e4, 1e6])
@pytest.mark.parametrize("options", [(), ("rotate_k", "null")], ids=len)
def test_queries_of_any_size(options, size):
    """Operands of products are fp16 for bf16 queries: each row is divided by a power of two first."""
    case = build(options, kinds=("q8_0", "q4_0"), heads=2, lengths=(45,))
    case.queries["k"] = (case.queries["k"] * size).bfloat16()
    case.queries["k"][:, 1] *= 1e-3  # rows have sizes of their own
    case.options["softmax_scale"] = 0.2 / size
    check(case)


def sized(kind: str, size: float, dtype: torch.dtype) -> cases.Case:
    """Keys and values whose largest in each token is ``size``."""
    lengths = (101,) if kind.endswith("channel") else (45,)
    case = cases.build(kinds=(kind, kind), heads=2, lengths=lengths, slots=128)
    for stream in case.streams.values():
        stream.given.div_(stream.given.abs().amax(-1, keepdim=True)).mul_(size)
    with use_backend("reference"):
        case.append(append_)
    case.queries["k"] = case.queries["k"].to(dtype)
    case.options["softmax_scale"] = 1 / size
    return case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4", "fp16"])
@pytest.mark.parametrize("size", [1e-5, 65000.0])
def test_keys_and_values_of_any_size_that_fp16_holds(size, kind, dtype):
    check(sized(kind, size, dtype))


@pytest.mark.parametrize("kind", ["q8_channel", "q4_channel"])
@pytest.mark.parametrize(("size", "dtype"), [
    (1e-3, torch.bfloat16), (65000.0, torch.bfloat16), (1e-5, torch.float32), (65000.0, torch.float32),
])  # fmt: skip
def test_keys_and_values_by_channel_of_any_size(size, kind, dtype):
    """Scales up to 8664 are folded into fp16 queries; of channels below 5e-4 a half-precision query loses bits."""
    check(sized(kind, size, dtype))


def test_larger_keys_and_values_are_right_for_float32_queries_and_never_silently_wrong():
    """What is dequantized for half-precision queries is fp16, whatever the scales could say."""
    check(sized("q8_0", 1e6, torch.float32))
    out, lse = attend(sized("q8_0", 1e6, torch.bfloat16))
    assert not out.isfinite().any() and not lse.isfinite().any()


@pytest.mark.parametrize(
    "kinds",
    ["q8_0/q8_0", "q8_0/nf4", "fp16/fp16", "q4_0/q4_0", "q8_channel/q8_0", "q4_channel/q4_0"],
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_launch_fits_the_shared_memory_of_its_device(kinds, dim, monkeypatch):
    """Of 99 KiB (sm_86, sm_89, sm_120) what its stages need; a device with more runs what it ran."""
    monkeypatch.setattr(splits_launch, "partials_kernel", Launches())
    monkeypatch.setattr(splits_launch, "merge_kernel", Launches())
    case = build(
        kinds=kinds.split("/"), dims={"k": dim, "v": dim}, slots=1024, lengths=(9,), heads=4, kv_heads=1, tokens=3
    )  # fmt: skip
    case.queries["k"] = case.queries["k"].half()
    found = {}
    for limit in (163, 99):
        monkeypatch.setattr(splits_launch, "shared_memory", lambda _, limit=limit: limit * 1024)
        attend(case)
        _, args, options = splits_launch.partials_kernel.seen[-1]
        shape, stages = args[-1], options["num_stages"]
        streams = (case.streams["k"].view, case.streams["v"].view)
        token = sum(
            x[0, 0, 0].nbytes // (1 if x is v.codes else v.group)
            for v in streams
            for x in (v.codes, v.scales)
            if x is not None
        )
        assert stages * shape.tile * token <= limit * 1024
        found[limit] = shape.tile, stages
    assert found[99] == found[163] or "q8" in kinds or dim == 256
    if kinds == "q8_0/q8_0" and dim == 128:
        assert found[163] == (128, 3) and found[99] == (128, 2)
