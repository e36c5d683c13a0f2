"""Transforms: exact in real arithmetic, what they store, and the table of phases."""

import pytest
import torch
from support import cases, dense
from support.cases import half_split, interleaved, rows
from support.tolerances import relative_l2

from caramba_fast.ops import Transform, append_, decode_attention, phase_table, use_backend
from caramba_fast.ops.transform import hadamard, phases_at, undo_on_key, undo_on_value

ALL = ("mean", "bias", "k_scale", "v_scale", "rotate_k", "rotate_v")


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


# -- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [8, 16, 80, 96, 112])
@pytest.mark.parametrize(
    "options", [*((one,) for one in ALL), ("bias", "k_scale"), ("mean", "rotate_k"), ALL], ids="+".join
)  # fmt: skip
def test_an_unquantized_cache_answers_as_if_there_were_no_transform(options, dim):
    case = cases.build(
        (*options, "leftpad"), dims={"k": dim, "v": dim}, kinds=("fp32", "fp32"), heads=6, kv_heads=3,
        tokens=2,
    ).append(append_)  # fmt: skip
    out, lse = case.attend(decode_attention)
    k, v = (stream.given for stream in case.streams.values())
    expected, expected_lse = dense.attend(
        case.queries["k"], k, v, case.lengths, leftpad=case.leftpad
    )
    assert relative_l2(out, expected) <= 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairs", [half_split, interleaved])
@pytest.mark.parametrize("rotary", [None, 8])
@pytest.mark.parametrize("options", [("bias",), ("bias", "mean", "k_scale", "rotate_k")], ids=len)
def test_every_layout_of_rope_is_exact(options, pairs, rotary):
    case = cases.build(
        (*options, "leftpad"), dims={"k": 32, "v": 32}, kinds=("fp32", "fp32"), pairs=pairs,
        rotary=rotary,
    ).append(append_)  # fmt: skip
    k, v = (stream.given for stream in case.streams.values())
    expected, _ = dense.attend(case.queries["k"], k, v, case.lengths, leftpad=case.leftpad)
    assert relative_l2(case.attend(decode_attention)[0], expected) <= 1e-5


@pytest.mark.parametrize("dim", [8, 80])
@pytest.mark.parametrize("options", [*((one,) for one in ALL), ALL], ids="+".join)
def test_what_is_stored_is_what_the_documentation_says(options, dim):
    """rotate((k - mean - R_t bias) / scale) and rotate(v / scale), t counted from the padding."""
    case = cases.build(
        (*options, "leftpad"), dims={"k": dim, "v": dim}, kinds=("fp32", "fp32")
    ).append(append_)
    for name, stream in case.streams.items():
        lanes = dense.decoded(stream.view.codes, None, "fp32")
        found = dense.by_head(lanes, 2, dim)
        expected = dense.to_stored(stream.given, stream.basis, case.leftpad)
        for b, (length, pad) in enumerate(zip(case.lengths, case.leftpad, strict=True)):
            assert relative_l2(found[b, :, pad:length], expected[b, :, pad:length]) <= 1e-6
            t = torch.arange(pad, length)[None] - pad
            stored = found[b : b + 1, :, pad:length].float()
            constants = stream.view.transform
            back = (
                undo_on_value(stored, constants)
                if name == "v"
                else undo_on_key(stored, t, constants)
            )
            assert relative_l2(back, stream.given[b : b + 1, :, pad:length]) <= 1e-5


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_centering_takes_a_large_bias_out_of_the_quantization_error(kind):
    """Keys of noise 1 around a turning bias of 100: without centering, 4 bits lose the noise."""
    options = ("bias", "mean")
    errors = []
    for centered in (True, False):
        torch.manual_seed(1)
        case = cases.build(options, kinds=(kind, kind), size=100.0, lengths=(60,))
        stream = case.streams["k"]
        for t in range(60):
            stream.given[0, :, t] += dense.shift(stream.basis, t, 2, 32).float()
        if not centered:
            stream.basis = dense.Basis()
            stream.view = cases.KVView(stream.view.codes, stream.view.scales, kind)
        found = case.append(append_).meaning(stream)["codes"]
        errors.append(float((found[:, :, :60] - stream.given).norm()))
    assert errors[0] < 0.1 * errors[1]


# -- the table of phases ------------------------------------------------------------------------


def test_phases_are_exact_far_out():
    """A hundred thousand tokens, the highest frequency and one of the lowest, to 1e-6."""
    slots = 100_000
    theta = torch.tensor([[1.0, 0.731, 1e-3], [1e-6, 3.0, 0.0]], dtype=torch.float64)
    table = phase_table(theta, slots)
    assert table.shape == (2, 3, 128 + 782, 2) and table.dtype == torch.float32
    t = torch.cat(
        (torch.arange(300), torch.arange(slots - 300, slots), torch.randint(slots, (99,)))
    )
    cos, sin = phases_at(table, t[None])
    angle = torch.remainder(theta[..., None] * t, 2 * torch.pi)
    assert cos.shape == (1, 2, 3, 699)
    assert (cos[0].double() - angle.cos()).abs().max() <= 1e-6
    assert (sin[0].double() - angle.sin()).abs().max() <= 1e-6


def test_phases_of_a_float32_theta_are_those_of_its_exact_value():
    theta = torch.rand(2, 3)
    assert torch.equal(phase_table(theta, 9000), phase_table(theta.double(), 9000))


def test_attention_is_exact_a_hundred_thousand_tokens_in():
    """Only the last two pages exist; a window hides the rest."""
    length, pages = 100_030, 3126
    case = cases.build(ALL, kinds=("fp32", "fp32"), lengths=(length,), tokens=2, slots=32)
    case.table = torch.full((1, pages), -1, dtype=torch.int32)
    case.table[0, -2:] = rows(1, 2)
    for stream in case.streams.values():
        view = stream.view
        codes = torch.full((4, *view.codes.shape[1:]), torch.nan)
        stream.given = torch.randn(1, 2, 60, 32)
        constants = cases.transform(stream.basis, pages * 32)
        stream.view = cases.KVView(codes, None, "fp32", transform=constants)
    k, v = case.streams.values()
    append_(k.view, v.view, k.given, v.given, rows(length - 60), block_table=case.table)
    out, lse = case.attend(decode_attention, window_size=(40, 0))
    expected, expected_lse = dense.attend(case.queries["k"], k.given, v.given, [60], window=(40, 0))
    assert relative_l2(out, expected) <= 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fp32", "q4_0"])
def test_padding_past_the_phases_is_harmless(kind):
    """The padding of a short row may lie past the capacity, where there are no phases either."""
    case = cases.build(["bias", "tail", "sinks"], kinds=(kind, kind), lengths=(128, 20), slots=128)
    case.append(append_)
    new = torch.randn(2, 2, 100, 32)
    views = [stream.view for stream in case.streams.values()]
    append_(*views, new, new, rows(120, 20), query_lens=rows(8, 100))
    case.lengths = [128, 120]
    cases.check(case.attend(decode_attention), case.expected())


@pytest.mark.parametrize("start", [127, 128, 200])
def test_tokens_past_the_capacity_are_dropped_with_phases_too(start):
    case = cases.build(["bias"], lengths=(100, 100), slots=128).append(append_)
    before = [stream.view.codes.clone() for stream in case.streams.values()]
    views = [stream.view for stream in case.streams.values()]
    new = torch.randn(2, 2, 4, 32)
    append_(*views, new, new, rows(start, 200))
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view.codes[:, :, :127], old[:, :, :127])
        assert torch.equal(view.codes[1], old[1])


# -- the rotation -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 8, 32, 64, 80, 96, 112, 128, 192, 256])
def test_the_rotation_is_the_documented_matrix_and_its_own_inverse(width):
    x = torch.randn(3, 5, width)
    matrix = dense.hadamard_matrix(width)
    torch.testing.assert_close(matrix @ matrix, torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-6)


def test_the_rotation_is_cut_largest_power_first():
    """80 = 64 + 16: the first 64 values do not mix with the last 16."""
    x = torch.zeros(80)
    x[0] = 1
    rotated = hadamard(x)
    assert (rotated[:64] == 1 / 8).all() and (rotated[64:] == 0).all()


# -- what it is ---------------------------------------------------------------------------------


def test_only_a_transform_without_constants_is_the_identity():
    assert Transform().is_identity
    assert Transform(pairs=torch.zeros(1, 0, 2, dtype=torch.int32)).is_identity
    for change in (
        dict(rotate=True), dict(mean=torch.zeros(1, 8)), dict(scale=torch.ones(1, 8)),
        dict(bias=torch.zeros(1, 1, 2)),
    ):  # fmt: skip
        assert not Transform(**change).is_identity


def test_a_transform_moves_with_all_of_its_constants():
    constants = cases.transform(cases.random_basis(ALL, "k", 2, 32), 64)
    moved = constants.to("meta")
    for name in ("mean", "bias", "pairs", "phases", "scale"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(constants, name).shape
    assert moved.rotate
