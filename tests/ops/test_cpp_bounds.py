"""The C++ attention and append touch no byte outside their tensors: each lies between two pages that fault.

Sanitizers (`make sanitize`) see every plain access, but not the masked loads of AVX-512; the CPU sees those
too. A test that fails here ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from typing import Any

import pytest
import torch
from support import cases
from support.cpp import DBA, EVERYTHING, build
from torch import Tensor

from caramba_fast.ops import registry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect through libc")
PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
EXTREMES = (-(2**31), -1, 0, 1, 31, 32, 33, 63, 64, 65, 160, 10**6, 2**31 - 1)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """No skip: without the extension, nothing here may pass."""
    assert registry.load_error() is None, registry.load_error()


def fenced(x: Tensor, *, at_end: bool) -> Tensor:
    """A copy whose last byte, or first, is beside a page that must not be touched."""
    x = x.contiguous()
    if x.numel() == 0:
        return x
    inner = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + PAGE + inner):
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS) == 0
    offset = PAGE + (inner - x.nbytes if at_end else 0)
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset)
    return flat.view(x.shape).copy_(x)


def fence(value: Any, at_end: bool) -> Any:
    return fenced(value, at_end=at_end) if isinstance(value, Tensor) else value


def call(op: Any, args: list[Any], options: dict[str, Any], at_end: bool) -> Any:
    args = [fence(value, at_end) for value in args]
    options = {name: fence(value, at_end) for name, value in options.items()}
    return args, op(*args, **options)


def ops_of(case: cases.Case) -> tuple[Any, Any]:
    ops = torch.ops.caramba_fast
    if len(case.streams) == 3:
        return ops.decoupled_decode_attention, ops.decoupled_append_
    return ops.decode_attention, ops.append_


def layers() -> dict[str, dict[str, Any]]:
    """Shapes whose last vectors are partial in many ways."""
    found: dict[str, dict[str, Any]] = {
        f"{kinds[0]}/{kinds[1]} {dim}": dict(dims={"k": dim, "v": dim}, kinds=kinds, heads=6, kv_heads=3)
        for kinds in (("q8_0", "q4_0"), ("nf4", "q8_0"), ("fp16", "nf4"), ("bf16", "fp32"))
        for dim in (8, 32, 80, 96, 128, 512)
    }  # fmt: skip
    found["block 128"] = dict(dims={"k": 128, "v": 256}, block=128, kinds=("q4_0", "nf4"))
    found["everything"] = dict(options=EVERYTHING, tokens=3, heads=3, kv_heads=3)
    found["two keys"] = dict(options=EVERYTHING, decoupled=True, tokens=2)
    return found


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("name", layers())
def test_nothing_outside_the_tensors_is_touched(name, at_end):
    chosen = dict(layers()[name])
    options = [option for option in chosen.pop("options", ()) if option != "pages"]
    case = build(options, lengths=(19, 33), slots=33, **chosen)
    attention, append = ops_of(case)
    for op, (args, keywords) in ((attention, case.flat()), (append, case.flat_append())):
        wanted = op(*args, **keywords)
        written, found = call(op, args, keywords, at_end)
        for ours, given in zip(written, args, strict=True):
            if isinstance(ours, Tensor):
                assert torch.equal(ours.nan_to_num(9), given.nan_to_num(9))
        if wanted is not None:
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("seed", range(6))
def test_lengths_paddings_and_tables_of_any_content_stay_inside(seed, at_end):
    """What a caller may not pass is answered somehow, from inside the tensors."""
    draw = random.Random(seed)
    options = draw.sample(EVERYTHING, 6)
    tokens = draw.choice((1, 4, 8))
    changes = dict(decoupled=True, dims=DBA) if seed % 2 else dict(kinds=("q4_0", "q8_0"))
    case = build(options, tokens=tokens, lengths=(90, 70, 160), slots=160, ring=30, **changes)
    attention, append = ops_of(case)
    (args, keywords), (new, kept) = case.flat(), case.flat_append()
    lengths, start = len(case.queries) + 2 * len(case.streams), 3 * len(case.streams)

    def any_rows() -> Tensor:
        return cases.rows(*(draw.choice(EXTREMES) for _ in range(3)))

    for _ in range(40):
        args[lengths], new[start] = any_rows(), any_rows()
        for name in ("cache_leftpad", "query_lens"):
            keywords[name] = kept[name] = any_rows() if draw.random() < 0.7 else None
        if case.table is not None:
            garbage = [draw.choice(EXTREMES) for _ in range(case.table.numel())]
            keywords["block_table"] = cases.rows(*garbage).view_as(case.table)
            kept["block_table"] = keywords["block_table"]
        keywords["window_size"] = (draw.choice((-1, 0, 5, 2**63 - 1)), 0)
        keywords["num_sink_tokens"] = draw.choice((0, 3, 2**63 - 1))
        keywords["num_splits"] = draw.choice((0, 1, 3))
        call(attention, args, keywords, at_end)
        call(append, new, kept, at_end)
