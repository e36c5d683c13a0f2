"""Layers for the tests of the C++ kernels, and allowed differences from the reference."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from support import cases
from support.cases import OPTIONS, Case
from support.isas import multiplies_integers

from caramba_fast.ops import (
    append_,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    extend_attention,
    use_backend,
)

EVERYTHING = [option for option in OPTIONS if option != "window"]


DBA = {"k_sem": 8, "k_geo": 16, "v": 32}


#: By kind of a stream: relative L2 error that integer arithmetic may add (for nf4, its levels are integers too, and the
#: smallest of four partial products is dropped), and the error of the lse, absolute and relative. With 4-bit streams
#: queries have 8 bits.
ALLOWED = {"q8_0": 2e-4, "q4_0": 1e-2, "nf4": 1e-2}


ALLOWED_LSE = {"q8_0": 1e-3, "q4_0": 2e-2, "nf4": 2e-2}


def build(options: Collection[str] = (), *, decoupled: bool = False, **changes: Any) -> Case:
    if decoupled:
        changes = {"dims": DBA, "kinds": ("q8_0", "q4_0", "nf4"), **changes}
    with use_backend("reference"):
        return cases.build(options, **changes).append(appending(decoupled))


def appending(decoupled: bool) -> Any:
    return decoupled_append_ if decoupled else append_


def attend(case: Case, *, extends: bool = False, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ops = (
        (extend_attention, decoupled_extend_attention)
        if extends
        else (decode_attention, decoupled_decode_attention)
    )
    with use_backend("cpp"):
        return case.attend(ops[len(case.streams) == 3], **more)


def check(case: Case, **more: Any) -> None:
    found, expected = attend(case, **more), case.expected()
    kinds = {stream.view.kind for stream in case.streams.values()}
    added = max(ALLOWED.get(kind, 0.0) for kind in kinds)
    if added == 0.0 or not multiplies_integers():
        cases.check(found, expected)
        return
    out, lse = found
    assert out.isfinite().all() and lse.dtype == torch.float32
    assert cases.relative_l2(out, expected[0]) <= cases.RELATIVE_L2[out.dtype] + added
    close = max(ALLOWED_LSE.get(kind, 0.0) for kind in kinds)
    torch.testing.assert_close(lse.double(), expected[1], rtol=close, atol=close)
    assert (out[expected[1] == -torch.inf] == 0).all()
