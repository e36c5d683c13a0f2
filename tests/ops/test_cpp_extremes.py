"""The C++ decode attention where integers have least room: large biases, sinks, outliers, peaked softmaxes.

Seeded random layers of nine classes against dense float64 attention over the same bytes. What integers may add is
the same here as anywhere (`ALLOWED`): it is a promise about every key, not about ordinary ones.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from support import cases
from support.cases import Case
from support.cpp import ALLOWED_LSE, attend
from support.isas import ISA_VARIABLE, expected_isas, in_subprocess, isa_in_use

from caramba_fast.ops import append_, use_backend

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
        integers = isa_in_use() == "avx512_vnni"
        allowed = FLOAT + integers * max(ALLOWED.get(kind, 0.0) for kind in kinds)
        close = 1e-4 if not integers else max(ALLOWED_LSE.get(kind, 0.0) for kind in kinds)
        error = cases.relative_l2(out, expected)
        off = ((lse - expected_lse).abs() / (1 + expected_lse.abs())).max()
        worst = max(worst, error / allowed)
        if not error <= allowed or not off <= close:
            wrong.append(f"seed {seed}, {kinds}: out {error:.1e} of {allowed:.1e}, lse {off:.1e}")
    print(f"{of}: at worst {worst:.0%} of what is allowed")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(ISA_VARIABLE in os.environ, reason="this run is about one instruction set")
@pytest.mark.parametrize("isa", expected_isas()[:-1])
def test_every_instruction_set(isa):
    """This file once more, with the instruction set forced; the widest is the one used unforced."""
    result = in_subprocess(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    assert result.returncode == 0, result.stdout + result.stderr
