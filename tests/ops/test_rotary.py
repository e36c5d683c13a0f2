"""apply_rotary_emb: the bits of a model's own function, from every backend."""

from __future__ import annotations

import pytest
import torch

from caramba_fast.models.rope import rotate
from caramba_fast.ops import apply_rotary_emb, use_backend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made(dtype=torch.float32, dim=64, width=None, rows=2, seed=0):
    """Queries and keys as projections leave them (heads behind tokens), and angles of 3 tokens."""
    source = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=source).to(dtype)

    q, k = (numbers(2, 3, heads, dim).transpose(1, 2) for heads in (9, 2))
    return q, k, *(numbers(rows, 3, dim if width is None else width) for _ in range(2))


def by_hand(x, cos, sin):
    """As transformers writes it."""
    half = x.shape[-1] // 2
    cos, sin = (t if t.shape[-1] == x.shape[-1] else torch.cat((t, t), -1) for t in (cos, sin))
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "halved", "rows"), [(64, False, 2), (80, True, 1), (6, False, 1)])
def test_every_backend_gives_the_bits_of_torch(backend, dtype, dim, halved, rows, device):
    given = made(dtype, dim, dim // 2 if halved else dim, rows)
    on = device if backend == "triton" else torch.device("cpu")
    if backend == "triton":
        pytest.importorskip("triton")
    with use_backend(backend):
        found = apply_rotary_emb(*[x.to(on) for x in given])
    for got, x in zip(found, given[:2], strict=True):
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), by_hand(x, *given[2:]))


def test_it_is_the_native_model_s():
    q, k, cos, sin = made(width=32)
    for got, x in zip(apply_rotary_emb(q, k, cos, sin), (q, k), strict=True):
        assert torch.equal(got, rotate(x, cos[:, None], sin[:, None]))


def test_numbers_that_are_none_stay_in_their_pairs():
    q, k, cos, sin = made()
    q[0, 0, 0, 5] = torch.nan
    k[1, 1, 2, 40] = torch.inf
    (a, b), (wanted, _) = apply_rotary_emb(q, k, cos, sin), (by_hand(q, cos, sin), None)
    assert torch.equal(a.isnan(), wanted.isnan()) and a.isnan().sum() == 2
    assert not b[1, 1, 2, [8, 40]].isfinite().any() and b.isfinite().sum() == b.numel() - 2


def test_nothing_to_turn():
    q, k, cos, sin = made()
    a, b = apply_rotary_emb(q[:, :, :0], k[:, :0, :0], cos[:, :0], sin[:, :0])
    assert a.shape == (2, 9, 0, 64) and b.shape == (2, 0, 0, 64)


def test_opcheck():
    torch.library.opcheck(torch.ops.caramba_fast.apply_rotary_emb.default, made())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x.double(), "q has dtype torch.float64"),
        ("k", lambda x: x.half(), "k has dtype torch.float16; torch.float32, that of q"),
        ("k", lambda x: x[..., :32], "that differ in heads alone"),
        ("q", lambda x: x[0], r"q has shape \(9, 3, 64\) and k .*\(B, H, T, D\)"),
        ("cos", lambda x: x[:, :2], "cos has shape"),
        ("sin", lambda x: x[..., :16], "cos has shape"),
        ("cos", lambda x: x[None], r"\(2 or 1, 3, 64 or 32\)"),
    ],
)
def test_bad_input_is_named(name, change, message):
    given = dict(zip(("q", "k", "cos", "sin"), made(), strict=True))
    given[name] = change(given[name])
    with pytest.raises((TypeError, ValueError), match=message):
        apply_rotary_emb(**given)
