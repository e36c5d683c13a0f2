"""Runs kernels compiled for sm_80 with `ptx_driver` on small tensors: ``python -m support.compiled_cases [NAME ...]``.

A process of its own, since the tests' process interprets kernels. Prints the faults of each case as JSON.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support import cases, ptx_driver, stored, triton_cases
from support.blocks import same_bits
from support.tolerances import RELATIVE_L2, relative_l2
from torch import Tensor

from caramba_fast.formats import CHANNEL_KINDS, QUANTIZED_KINDS
from caramba_fast.ops import (
    append_,
    apply_rotary_emb,
    dequantize,
    merge_state,
    quantize,
    use_backend,
)

Change = Callable[[str, str], str]
#: Absolute error of the lse where queries are fp16 or bf16: scales are multiplied with keys or queries in that type.
LSE_OF_HALVES = 2e-3


def both(op: Callable[..., Any], *given: Any, change: Change, **options: Any) -> None:
    """Asserts that compiled kernels give the reference's bits and leave no byte unwritten."""
    with use_backend("reference"):
        wanted = op(*given, **options)
    with use_backend("triton"), ptx_driver.emulated(change) as emulator:
        found = op(*given, **options)
    for got, x in zip(_tuple(found), _tuple(wanted), strict=True):
        assert emulator.missing(got) == 0, "bytes of the result were not written"
        assert same_bits(got, x), "the bits are not those of the reference"


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def quantized(kind: str, dtype: torch.dtype, fit: str = "amax", *, change: Change) -> None:
    x = stored.spread(torch.randn(5, 32, 64), kind)
    both(quantize, x.to(dtype), kind, fit=fit, change=change)


def restored(kind: str, *, change: Change) -> None:
    with use_backend("reference"):
        codes, scales = quantize(
            stored.spread(torch.randn(1, 1, 64, 64), kind), kind, fit=stored.fit_of(kind)
        )
    both(dequantize, codes, scales, kind, 64, change=change)


def rotated(dtype: torch.dtype, *, change: Change) -> None:
    shapes = (2, 3, 3, 80), (2, 1, 3, 80), (1, 3, 80), (1, 3, 80)
    both(apply_rotary_emb, *(torch.randn(shape).to(dtype) for shape in shapes), change=change)


def merged(dtype: torch.dtype, *, change: Change) -> None:
    """Two partial results, some of which saw nothing, against the reference's."""
    parts = [(torch.randn(3, 5, 2, 80).to(dtype), torch.randn(3, 5, 2)) for _ in range(2)]
    parts[0][1][0] = parts[1][1][1] = parts[0][1][2, 0] = parts[1][1][2, 0] = -torch.inf
    given = [x for part in parts for x in part]
    with use_backend("reference"):
        wanted = merge_state(*given)
    with use_backend("triton"), ptx_driver.emulated(change) as emulator:
        found = merge_state(*given)
    for got, x in zip(found, wanted, strict=True):
        assert emulator.missing(got) == 0, "bytes of the result were not written"
        torch.testing.assert_close(got, x, rtol=2e-3 if dtype == HALF else 1e-5, atol=1e-5)


def appended(
    kinds: tuple[str, str],
    counts: tuple[int, ...],
    *options: str,
    rope: bool = False,
    dtype: torch.dtype = torch.float32,
    change: Change,
) -> None:
    """Several calls; buffers are compared whole, with their earlier contents.

    Rotated values are summed in another order than the reference's: then values are compared, and kinds must be plain.
    ``rope`` rotates keys and queries.
    """
    dims = {"k": 64, "v": 64}
    case = cases.build(options, kinds=kinds, dims=dims, lengths=(sum(counts),) * 2, slots=96)
    views = [stream.view for stream in case.streams.values()]
    twins, start = copy.deepcopy(views), torch.zeros(2, dtype=torch.int32)
    for count in counts:
        first = int(start[0])
        stretch = slice(first, first + count)
        new = [s.given[:, :, stretch].to(dtype) for s in case.streams.values()]
        more = {**case.place, **(_rotary(new[0]) if rope else {})}
        with use_backend("reference"):
            wanted = append_(*views, *new, start, **more)
        with use_backend("triton"), ptx_driver.emulated(change) as emulator:
            found = append_(*twins, *new, start, **more)
        if rope:
            assert found is not None and wanted is not None
            assert emulator.missing(found) == 0, "bytes of the queries were not written"
            assert same_bits(found, wanted), "the queries are not the reference's"
        start += count
    for one, other in zip(views, twins, strict=True):
        for part in ("codes", "scales", "tail", "sink"):
            a, b = getattr(one, part), getattr(other, part)
            if "rotate_k" in options and a is not None:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
                continue
            assert a is b is None or same_bits(a, b), f"{part} is not that of the reference"


def _rotary(keys: Tensor) -> dict[str, Tensor]:
    """Queries at the positions of ``keys``, and angles."""
    batch, heads, tokens, dim = keys.shape
    q = torch.randn(batch, tokens, 9 * heads, dim).to(keys.dtype).transpose(1, 2)
    cos, sin = torch.randn(2, 1, tokens, dim).to(keys.dtype)
    return {"rotary_q": q, "rotary_cos": cos, "rotary_sin": sin}


def attended(
    kinds: tuple[str, ...], *, change: Change, dtype: torch.dtype = torch.float16, dim: int = 64,
    options: tuple[str, ...] = (), extends: bool = False, splits: int = 0, **layer: Any,
) -> None:  # fmt: skip
    """Attention against dense attention in float64 over the same stored bytes."""
    if len(kinds) == 2:
        layer = {"dims": {"k": dim, "v": dim}, "heads": 4, "kv_heads": 1, **layer}
    layer = {"lengths": (100,), "slots": 256, **layer}
    case = triton_cases.build(options, kinds=kinds, decoupled=len(kinds) == 3, **layer)
    case.queries = {name: q.to(dtype) for name, q in case.queries.items()}
    more = {} if extends else {"num_splits": splits}
    with ptx_driver.emulated(change) as emulator:
        found = triton_cases.attend(case, extends=extends, **more)
    for x in found:
        assert emulator.missing(x) == 0, "bytes of the result were not written"
    wanted = case.expected()
    if dtype == torch.float32:
        cases.check(found, wanted)
        return
    error = relative_l2(found[0], wanted[0])
    assert error <= RELATIVE_L2[dtype], f"the output is wrong by {error}"
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=0, atol=LSE_OF_HALVES)


HALF, FULL = torch.float16, torch.float32
EVERYTHING = tuple(triton_cases.EVERYTHING)
STORED = {
    "fp16": ("fp16", "fp16"), "q8_0": ("q8_0", "q8_0"), "q4_0": ("q4_0", "q4_0"), "nf4": ("nf4", "nf4"),
    "q4_channel": ("q4_channel", "q4_0"), "q8_channel": ("q8_channel", "q8_0"),
}  # fmt: skip
LONG = {"lengths": (600,), "slots": 640}
CASES: dict[str, Callable[..., None]] = {
    **{
        f"quantize {kind} {name}": partial(quantized, kind, dtype)
        for kind in QUANTIZED_KINDS for name, dtype in (("fp16", HALF), ("fp32", FULL))
    },
    "quantize q4_0 mse": partial(quantized, "q4_0", HALF, "mse"),
    "quantize q4_channel mse": partial(quantized, "q4_channel", HALF, "mse"),
    **{
        f"{name} {kind}": run for kind in CHANNEL_KINDS
        for name, run in (("quantize", partial(quantized, kind, HALF)), ("dequantize", partial(restored, kind)))
    },
    **{f"dequantize {kind}": partial(restored, kind) for kind in QUANTIZED_KINDS},
    **{
        f"apply_rotary_emb {name}": partial(rotated, dtype)
        for name, dtype in (("fp16", HALF), ("fp32", FULL), ("bf16", torch.bfloat16))
    },
    "append q8_0, q4_0": partial(appended, ("q8_0", "q4_0"), (40, 1)),
    "append nf4, fp16, paged, tail, sinks": partial(
        appended, ("nf4", "fp16"), (2, 1), "pages", "leftpad", "tail", "sinks"),
    "append q4_channel, q8_channel": partial(appended, ("q4_channel", "q8_channel"), (33, 1)),
    "append q4_channel, q4_0, RoPE": partial(appended, ("q4_channel", "q4_0"), (33, 1), rope=True),
    "append q8_0, fp16, paged, tail, RoPE": partial(
        appended, ("q8_0", "fp16"), (2, 1), "pages", "leftpad", "tail", rope=True),
    "append q4_channel, q4_0, RoPE, bf16": partial(
        appended, ("q4_channel", "q4_0"), (3,), rope=True, dtype=torch.bfloat16),
    "append fp16 rotated, tail": partial(appended, ("fp16", "fp16"), (3, 1), "rotate_k", "rotate_v", "tail"),
    "merge_state fp16": partial(merged, HALF), "merge_state fp32": partial(merged, FULL),
    "append a token that fills a group": partial(appended, ("q8_channel", "q4_0"), (31, 1)),
    **{
        f"decode {kind} T {tokens}": partial(attended, STORED[kind], tokens=tokens)
        for kind in STORED for tokens in (1, 8)
    },
    **{f"decode {kind}, a long loop": partial(attended, STORED[kind], splits=1, **LONG) for kind in STORED},
    "decode q4_0, 3 splits": partial(attended, STORED["q4_0"], splits=3, **LONG),
    "decode q4_0 D 128": partial(attended, STORED["q4_0"], dim=128),
    "decode by channel, groups of 128": partial(
        attended, STORED["q4_channel"], dim=128, lengths=(271, 129), slots=384, block=128, splits=2),
    "decode by channel, balanced": partial(
        attended, STORED["q4_channel"], lengths=(271, 33), slots=384, splits=-1),
    "decode by channel, 12 rows": partial(attended, STORED["q4_channel"], tokens=3),
    "decode nf4 and q4_0, lanes of 96 and 128": partial(
        attended, ("nf4", "q4_0"), dims={"k": 96, "v": 128}, heads=4, kv_heads=1),
    **{
        f"decode {'/'.join(kinds)}, keys of 32": partial(attended, kinds, dims={"k": 32, "v": 64})
        for kinds in (("q4_channel", "q8_0"), ("q8_channel", "nf4"))
    },
    "decoupled by channel": partial(
        attended, ("q4_channel", "q4_channel", "q4_0"), dims={"k_sem": 32, "k_geo": 64, "v": 64}, heads=4, kv_heads=2),
    "decoupled by channel, lanes of several heads": partial(
        attended, ("q4_channel", "q4_channel", "q4_0"), dims={"k_sem": 8, "k_geo": 32, "v": 64}, heads=4, kv_heads=2),
    "decode around a tile": partial(attended, STORED["q8_0"], lengths=(128, 0, 1), slots=128, splits=3),
    "decode fp16, fp32 queries": partial(attended, STORED["fp16"], dtype=FULL),
    "decode q4_0, fp32 queries": partial(attended, STORED["q4_0"], dtype=FULL),
    "decode bf16": partial(attended, ("bf16", "bf16"), dtype=torch.bfloat16),
    "decode with a null key": partial(attended, STORED["q4_0"], options=("null",)),
    "decode with everything": partial(attended, ("q8_0", "q4_0"), options=EVERYTHING, tokens=2),
    "decode by channel, tail, window": partial(attended, STORED["q4_channel"], options=("tail", "window"), tokens=2),
    "decoupled with everything": partial(attended, ("q8_0", "q4_0", "nf4"), options=EVERYTHING, tokens=2),
    "extend q4_0": partial(attended, STORED["q4_0"], tokens=70, extends=True, heads=1),
}  # fmt: skip


def edited(kernel: str, pattern: str, by: str, which: int = 0) -> Change:
    """Replaces the ``which``-th match of ``pattern`` in a kernel's text."""

    def change(name: str, text: str) -> str:
        if name != kernel:
            return text
        found = [*re.finditer(pattern, text)][which]
        return text[: found.start()] + found.expand(by) + text[found.end() :]

    return change


QUANTIZE, PARTIALS = "quantize_kernel", "partials_kernel"
SMALL, LOOP = "quantize q4_0 fp16", "decode fp16, a long loop"
#: Faults that have to be found: name -> (a correct case, a change of it, part of the message).
DAMAGED: dict[str, tuple[str, Change, str]] = {
    **{
        f"barrier {n} of the attention is gone": (LOOP, edited(PARTIALS, r"bar\.sync\s+0;", "", n), "race")
        for n in (0, 1, 3, 4, 5)  # Triton 3.6 has one more than necessary
    },
    "a barrier of the merge is gone": (LOOP, edited("merge_kernel", r"bar\.sync\s+0;", "", 1), "race"),
    "a barrier of a warp is gone": (
        "apply_rotary_emb fp16", edited("apply_rotary_emb_kernel", r"bar\.(warp\.)?sync[^;]*;", ""), "race"),
    "a load goes too far": (
        SMALL, edited(QUANTIZE, r"(ld\.global\.v4.*) \+ 0", r"\1 + 4096"), "out of bounds"),
    "a store goes before the tensor": (
        SMALL, edited(QUANTIZE, r"(st\.global.*) \+ 0", r"\1 + -16"), "out of bounds"),
    "a load is not aligned": (
        SMALL, edited(QUANTIZE, r"(ld\.global\.v4.*) \+ 0", r"\1 + 2"), "misaligned"),
    "a store to global memory is gone": (
        SMALL, edited(QUANTIZE, r"@%p\d+ st\.global[^;]*;", ""), "were not written"),
    "a store to shared memory is gone": (
        LOOP, edited(PARTIALS, r"st\.shared[^;]*;", ""), "uninitialized shared"),
    "a partial result is not stored": (
        LOOP, edited(PARTIALS, r"@%p\d+ st\.global[^;]*;", ""), "uninitialized global"),
    "a copy is not waited for": (
        LOOP, edited(PARTIALS, r"cp\.async\.wait_group[^;]*;", ""), "before a copy to it was waited for"),
    "a matrix is not transposed": (LOOP, edited(PARTIALS, r"\.trans", ""), "the output is wrong"),
    "a product is of other halves": (
        LOOP, edited(PARTIALS, r"(mma\.sync.*?f32 \{[^}]*\}, )\{ (\S+), (\S+),", r"\1{ \3, \2,"), "wrong"),
    "an instruction is unknown": (
        SMALL, edited(QUANTIZE, r"cvt\.rzi\.s32\.f32", "cvt.rpi.s32.f32"), "unknown instruction: line"),
}  # fmt: skip


def found_wrong(name: str) -> str:
    """The fault found in a case; "" if there is none."""
    sound, change, _ = DAMAGED.get(name, (name, lambda _, text: text, ""))
    torch.manual_seed(0)
    try:
        CASES[sound](change=change)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    ptx_driver.install()
    print(json.dumps({name: found_wrong(name) for name in sys.argv[1:] or [*CASES, *DAMAGED]}))
