"""Layers for the Triton kernels' tests, and what two PTX instructions do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
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
    """A layer written by the reference."""
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
    else:  # the query is rounded again after a transform: that shows in lse too
        assert out.isfinite().all()
        assert cases.relative_l2(out, expected[0]) <= cases.RELATIVE_L2[out.dtype]
        torch.testing.assert_close(lse.double(), expected[1], rtol=2e-3, atol=5e-3)


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX prmt: four bytes of a and b by four indices; bit 3 of one repeats the byte's sign."""
    both, result = a | (b << 32), np.zeros_like(selector)
    for lane in range(4):
        index = (selector >> 4 * lane) & 15
        byte = (both >> (index & 7) * 8) & 255
        byte = np.where(index & 8, (byte >> 7) * 255, byte)
        result = result | (byte << 8 * lane)
    return result


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """PTX lop3: any logic function of three bits, given by its truth table."""
    result = np.zeros_like(a)
    for row in range(8):
        x, y, z = (v if row & bit else ~v for v, bit in ((a, 4), (b, 2), (c, 1)))
        result = result | np.where((table >> row) & 1, x & y & z, 0)
    return result
