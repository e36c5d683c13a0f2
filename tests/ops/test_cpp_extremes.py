"""The C++ decode attention where integers have least room: large biases, sinks, outliers, peaked softmaxes.

Seeded random layers of nine classes against dense float64 attention over the same bytes. What integers may add is
the same here as anywhere (`ALLOWED`): it is a promise about every key, not about ordinary ones.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import cases
from support.cases import Case
from support.cpp import ALLOWED_LSE, attend
from support.isas import ISA_VARIABLE, expected_isas, in_subprocess, multiplies_integers

from caramba_fast.ops import KVView, append_, use_backend

#: Relative L2 error that integers may add, by kind; for float32 alone, of scores in the hundreds.
ALLOWED = {"q8_0": 1e-4, "q4_0": 1e-2, "nf4": 1e-2}
FLOAT = 1e-5
CLASSES = (
    "plain", "offset", "outlier", "peaked", "sink", "empty sink", "binary",
)  # fmt: skip
KINDS = (
    ("q8_0", "q8_0"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("nf4", "nf4"), ("q4_0", "q8_0"),
    ("q8_0", "q4_0"), ("fp16", "q8_0"), ("q8_0", "fp16"),
)  # fmt: skip
CASES = int(os.environ.get("EXTREME_CASES", "16"))


def shape_keys(case: Case, of: str, size: float) -> None:
    """Makes the class of the given keys (and, of sinks, values)."""
    q, k, v = case.queries["k"], case.streams["k"].given, case.streams["v"].given
    if of == "peaked":
        k *= size
    elif of == "binary":  # the most that codes of a block can be, all of them
        k.sign_()
    elif of == "outlier":
        k[..., :2] *= 5 * size
    elif of == "offset":
        k += torch.randn(k.shape[1], 1, k.shape[3]) * size
    elif of.endswith("sink"):
        # One key that every query of a group is drawn to.
        toward = q.unflatten(1, (k.shape[1], -1))[:, :, 0, 0]
        k[:, :, 0] = toward * (3 * size / toward.norm(dim=-1, keepdim=True))
        v[:, :, 0] *= 0.0 if of == "empty sink" else 0.01


def extreme(of: str, seed: int) -> tuple[Case, tuple[str, str]]:
    """A layer of one class; everything else is drawn."""
    torch.manual_seed(seed)
    draw = random.Random(f"{of} {seed}")
    kinds, size = draw.choice(KINDS), float(draw.choice((1, 3, 10, 30)))
    options = draw.sample(("rotate_k", "rotate_v", "leftpad"), draw.choice((0, 0, 1, 2)))
    dim, length = draw.choice((32, 64, 80, 128)), draw.choice((45, 70, 200, 700))
    with use_backend("reference"):
        case = cases.build(
            options, dims={"k": dim, "v": dim}, kinds=kinds, lengths=(length, max(3, length // 3)),
            slots=-(-length // 64) * 64, tokens=draw.choice((1, 1, 3)),
        )  # fmt: skip
        shape_keys(case, of, size)
        return case.append(append_), kinds


@pytest.mark.parametrize("of", CLASSES)
def test_the_promised_errors_hold_for_extreme_keys(of):
    wrong, worst = [], 0.0
    for seed in range(CASES):
        case, kinds = extreme(of, seed)
        (out, lse), (expected, expected_lse) = attend(case), case.expected()
        integers = multiplies_integers()
        allowed = FLOAT + integers * max(ALLOWED.get(kind, 0.0) for kind in kinds)
        close = 1e-4 if not integers else max(ALLOWED_LSE.get(kind, 0.0) for kind in kinds)
        error = cases.relative_l2(out, expected)
        off = ((lse - expected_lse).abs() / (1 + expected_lse.abs())).max()
        worst = max(worst, error / allowed)
        if not error <= allowed or not off <= close:
            wrong.append(f"seed {seed}, {kinds}: out {error:.1e} of {allowed:.1e}, lse {off:.1e}")
    print(f"{of}: at worst {worst:.0%} of what is allowed")
    assert not wrong, "\n".join(wrong)


#: kind -> the codes that are largest, below zero and above.
LARGEST = {"q8_0": (-128, 127), "q4_0": (0, 15), "nf4": (0, 15)}


def fill_codes(view: KVView, above: torch.Tensor, scale: float) -> None:
    """The largest codes there are: above zero where told (tokens, values), else below."""
    low, high = LARGEST[view.kind]
    codes = torch.where(above, high, low)
    if view.kind != "q8_0":  # value j in the low nibble, j + 16 in the high one
        pairs = codes.unflatten(-1, (-1, 2, 16))
        codes = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
    view.codes[:] = codes.to(view.codes.dtype)
    view.scales.fill_(scale)


@pytest.mark.parametrize("scale", [2.0**-9, 0.25, -0.25])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_integers_are_exact(kind, tokens, scale):
    """Queries, weights and codes at the ends of their ranges: nothing is rounded, so what integers may add is not
    allowed. Sums that saturate or overflow would show as they are: all products of a sum have one sign."""
    torch.manual_seed(0)
    dim = 128
    case = cases.build(
        dims={"k": dim, "v": dim}, kinds=(kind, kind), lengths=(40, 250), slots=256, tokens=tokens
    )
    query = case.queries["k"]
    query.sign_()
    same = query[0, 0, 0] > 0
    query.copy_(query.abs() * query[:1, :1, :1])  # every query has the signs of the first
    turns = torch.arange(256)[:, None] % 2 == 0
    fill_codes(case.streams["k"].view, same ^ turns, scale)
    fill_codes(case.streams["v"].view, torch.rand(dim) < 0.5, scale)
    torch.testing.assert_close(attend(case)[1].double(), case.expected()[1], rtol=FLOAT, atol=FLOAT)
    query.zero_()  # weights are all the same, and as large as their integers get
    assert cases.relative_l2(attend(case)[0], case.expected()[0]) <= 2 * FLOAT


def drawn_to(logits: torch.Tensor, value_kind: str, dim: int = 64) -> Case:
    """One query and one head whose scores are ``logits`` (tokens,); values of about one size."""
    torch.manual_seed(0)
    slots = -(-len(logits) // 64) * 64
    with use_backend("reference"):
        case = cases.build(
            dims={"k": 32, "v": dim}, kinds=("fp32", value_kind), heads=1, kv_heads=1,
            lengths=(len(logits),), slots=slots, tokens=1,
        )  # fmt: skip
        case.queries["k"].zero_()[..., 0] = 1
        case.streams["k"].given.zero_()[..., : len(logits), 0] = logits * 32**0.5
        case.streams["v"].given.copy_(0.5 + torch.rand_like(case.streams["v"].given))
        return case


@pytest.mark.parametrize("place", [0, 17, 69])
@pytest.mark.parametrize("size", [0.0, 1e-3], ids=["values 0", "small values"])
@pytest.mark.parametrize("logit", [8.0, 12.0, 16.0])
@pytest.mark.parametrize("kind", ALLOWED)
def test_tokens_beside_one_whose_weight_is_all_keep_their_bits(kind, logit, size, place):
    """A sink: nearly all of the weight, and values that are next to nothing. What is left is the result."""
    logits = torch.zeros(70)
    logits[place] = logit
    case = drawn_to(logits, kind)
    case.streams["v"].given[:, :, place] *= size
    with use_backend("reference"):
        case.append(append_)
    # All weights but one are the same number and rounded alike: 64 halves of an integer of 15 bits.
    allowed = max(ALLOWED[kind], 1e-3)
    assert cases.relative_l2(attend(case)[0], case.expected()[0]) <= allowed


@pytest.mark.parametrize(
    ("tokens", "logit"), [(30000, 6.28), *((3000, x) for x in (0, 4, 6.28, 8, 9.75, 12))]
)
@pytest.mark.parametrize("kind", ALLOWED)
def test_small_weights_that_are_many_are_not_lost(kind, tokens, logit):
    """One token of 64 weighs up to 160,000 times what each of the others does, which weigh something together."""
    logits = torch.zeros(tokens)
    logits[::64] = logit
    case = drawn_to(logits, kind)
    with use_backend("reference"):
        case.append(append_)
    assert cases.relative_l2(attend(case)[0], case.expected()[0]) <= 1.2e-3


#: Windows of which all or some of four queries see the first tokens, which may be kept, and one behind the last slot.
WINDOWS = {
    "(9, 0)": ({"window_size": (9, 0)}, 60, 128),
    "(57, 0) and a sink": ({"window_size": (57, 0), "num_sink_tokens": 1}, 60, 128),
    "(48, 0) and ten sinks": ({"window_size": (48, 0), "num_sink_tokens": 10}, 60, 128),
    "up to the last slot": ({"window_size": (55, 0)}, 64, 64),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("kinds", "dim"),
    [
        (("fp32", "fp32"), 64), (("q8_0", "fp32"), 64), (("fp32", "q8_0"), 64), (("q8_channel", "nf4"), 64),
        (("q8_0", "fp32"), 32), (("nf4", "fp32"), 32), (("q4_0", "q4_0"), 64),
    ],
)  # fmt: skip
def test_a_window_that_begins_within_a_vector_changes_no_bit(kinds, dim, window):
    """Of four queries each sees other tokens; alone its tiles begin and end elsewhere than beside the others."""
    options, length, slots = WINDOWS[window]
    for seed in range(12):
        torch.manual_seed(seed)
        with use_backend("reference"):
            case = cases.build(
                dims={"k": dim, "v": dim}, kinds=kinds, lengths=(length,), slots=slots, tokens=4, heads=2, kv_heads=1,
            )  # fmt: skip
            case.append(append_)
        together = attend(case, num_splits=1, **options)
        for token in range(4):
            queries = {"k": case.queries["k"][:, :, token : token + 1].contiguous()}
            one = replace(case, queries=queries, lengths=[length - 3 + token])
            alone = attend(one, num_splits=1, **options)
            for mine, all_four in zip(alone, together, strict=True):
                assert torch.equal(mine, all_four[:, :, token : token + 1]), (seed, token)


#: Kinds of keys and values, and values of a head, that take the same integers with VNNI and without, and sum what
#: comes of them in the same order.
SAME = (
    ("q4_0", "fp16", 128),
    ("q4_0", "fp16", 64),
    ("q4_0", "fp32", 80),
    ("q8_0", "fp16", 64),
    ("q8_0", "fp16", 32),
)
DIGEST = f"""
import hashlib, torch
from support.cpp import attend, build
for *kinds, dim in {SAME}:
    for tokens in (1, 3):
        torch.manual_seed(0)
        case = build(dims=dict(k=dim, v=dim), kinds=kinds, lengths=(700, 45), slots=704, tokens=tokens)
        out, lse = attend(case)
        print(kinds, dim, tokens, hashlib.sha256(out.numpy().tobytes() + lse.numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(ISA_VARIABLE in os.environ, reason="this run is about two instruction sets")
@pytest.mark.skipif("avx512_vnni" not in expected_isas(), reason="the CPU has no AVX-512 VNNI")
def test_integers_are_the_same_without_vnni(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    runs = [in_subprocess(isa, "-c", DIGEST) for isa in ("avx512", "avx512_vnni")]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
