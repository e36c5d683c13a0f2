"""The rotation: exact in real arithmetic, what is stored, and the matrix."""

import pytest
import torch
from support import cases, dense
from support.tolerances import relative_l2

from caramba_fast.ops import append_, decode_attention, use_backend
from caramba_fast.ops.hadamard import _matrices, hadamard, rotated

ROTATIONS = [("rotate_k",), ("rotate_v",), ("rotate_k", "rotate_v")]


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


# -- in a cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [8, 16, 80, 96, 112])
@pytest.mark.parametrize("options", ROTATIONS, ids="+".join)
def test_an_unquantized_cache_answers_as_if_there_were_no_rotation(options, dim):
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


@pytest.mark.parametrize("dim", [8, 80])
@pytest.mark.parametrize("options", ROTATIONS, ids="+".join)
def test_what_is_stored_is_what_the_documentation_says(options, dim):
    """H k and H v, and H of those is k and v again."""
    case = cases.build(options, dims={"k": dim, "v": dim}, kinds=("fp32", "fp32")).append(append_)
    for stream in case.streams.values():
        found = dense.by_head(dense.decoded(stream.view.codes, None, "fp32"), 2, dim)
        expected = dense.turned(stream.given, stream.view.rotate)
        for b, length in enumerate(case.lengths):
            stored = found[b, :, :length]
            assert relative_l2(stored, expected[b, :, :length]) <= 1e-6
            back = rotated(stored.float(), stream.view.rotate)
            assert relative_l2(back, stream.given[b, :, :length]) <= 1e-5


# -- the matrix ---------------------------------------------------------------------------------


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
    found = hadamard(x)
    assert (found[:64] == 1 / 8).all() and (found[64:] == 0).all()


def test_a_matrix_made_under_inference_mode_serves_gradients():
    _matrices.clear()
    x = torch.randn(3, 24)
    with torch.inference_mode():
        hadamard(x)
    x.requires_grad_()
    hadamard(x).sum().backward()
    assert x.grad is not None
