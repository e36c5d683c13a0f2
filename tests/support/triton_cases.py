"""Layers for the Triton kernels' tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from support import cases
from support.cases import OPTIONS, Case

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


def build(options: Collection[str] = (), *, decoupled: bool = False, **changes: Any) -> Case:
    if decoupled:
        changes = {"dims": DBA, "kinds": ("q8_0", "q4_0", "nf4"), **changes}
    with use_backend("reference"):
        append = decoupled_append_ if decoupled else append_
        return cases.build(options, **changes).append(append)


def attend(case: Case, *, extends: bool = False, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    decode, extend = (
        (decoupled_decode_attention, decoupled_extend_attention)
        if len(case.streams) == 3
        else (decode_attention, extend_attention)
    )
    with use_backend("triton"):
        return case.attend(extend if extends else decode, **more)


def check(case: Case, **more: Any) -> None:
    found = attend(case, **more)
    out, lse = found
    expected = case.expected()
    if out.dtype == torch.float32:
        cases.check(found, expected)
    else:  # the query is rounded again after a transform, which shows in lse too
        assert out.isfinite().all()
        assert cases.relative_l2(out, expected[0]) <= cases.RELATIVE_L2[out.dtype]
        torch.testing.assert_close(lse.double(), expected[1], rtol=2e-3, atol=5e-3)
