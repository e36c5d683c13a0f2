"""Every tensor of every op, on every backend, in every layout a tensor can have.

A tensor that is strided, expanded, transposed or an offset into garbage holds the same numbers as its contiguous copy:
an op gives the same result, or refuses and names the tensor. Buffers that are written must be written in place, and
nothing beside them. Which tensors there are is read from the schemas, so that a new one is covered, or the test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import cases
from torch import Tensor

from caramba_fast.ops import quantize, registry, use_backend

EVERYTHING = [option for option in cases.OPTIONS if option != "window"]
DBA = {"dims": {"k_sem": 8, "k_geo": 16, "v": 32}, "kinds": ("q8_0", "q4_0", "nf4")}
KINDS = (("q8_0", "q4_0"), ("fp16", "nf4"))
CHANNEL = (("q8_channel", "q4_0"), ("q4_channel", "q4_channel"))
#: Kinds whose bytes are divided by what queries make of errors.
DIVIDED = ("q4_channel",)
#: What lies around a tensor's own numbers: NaN, or integers that are wrong everywhere and in bounds.
POISON = {torch.int32: 1, torch.int8: 85, torch.uint8: 85}
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter


def garbage(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), POISON.get(dtype, torch.nan), dtype=dtype)


# -- layouts: x -> the same numbers, elsewhere in memory ------------------------------------------


def offset(x: Tensor) -> Tensor:
    room = garbage((x.numel() + 7,), x.dtype)
    return room[4 : 4 + x.numel()].view(x.shape).copy_(x)


def every_other_value(x: Tensor) -> Tensor:
    return garbage((*x.shape, 2), x.dtype)[..., 1].copy_(x)


def every_other_row(x: Tensor) -> Tensor:
    return garbage((x.shape[0], 2, *x.shape[1:]), x.dtype)[:, 1].copy_(x)


def part_of_each_row(x: Tensor) -> Tensor:
    """Apart in the second dimension, as one part of a projection is."""
    if x.ndim < 2:
        return offset(x)
    return garbage((x.shape[0], x.shape[1] + 2, *x.shape[2:]), x.dtype)[:, 1:-1].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The last two dimensions the other way round in memory."""
    return x if x.ndim < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)


def backwards(x: Tensor) -> Tensor:
    """All dimensions the other way round in memory."""
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def expanded(x: Tensor) -> Tensor:
    return x[:1].clone().expand_as(x)


def expanded_values(x: Tensor) -> Tensor:
    return x[..., :1].clone().expand_as(x)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    offset, every_other_value, every_other_row, part_of_each_row, transposed, backwards, expanded,
    expanded_values,
)  # fmt: skip


# -- calls: an argument for every tensor of a schema ----------------------------------------------


#: Behind an op's name: with kinds by channel.
BY_CHANNEL = " by channel"


def op_of(name: str) -> registry.Op:
    return registry._ops[name.removesuffix(BY_CHANNEL)]


def schema_of(name: str) -> Any:
    return op_of(name).overload._schema


def by_name(name: str, args: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(name).arguments]
    return {**dict(zip(names, args, strict=False)), **keywords}


def layer(name: str, variant: int) -> dict[str, Any]:
    """The flat arguments of an append or attention op, with everything it can have."""
    paged = variant == 0
    changes = dict(DBA if "decoupled" in name else {"kinds": KINDS[variant]})
    if name.endswith(BY_CHANNEL):
        kinds = ("q4_channel", "q8_channel", "q4_0") if "decoupled" in name else CHANNEL[variant]
        changes |= {"kinds": kinds}
    options = [option for option in EVERYTHING if option != "pages" or paged]
    case = cases.build(options, tokens=2, lengths=(9, 7), slots=32, **changes)
    with use_backend("reference"):
        ops = registry._ops["decoupled_append_" if "decoupled" in name else "append_"]
        args, keywords = case.flat_append()
        ops(*args, **keywords)
    if "append" not in name:
        args, keywords = case.flat()
        return by_name(name, args, keywords)
    call = by_name(name, args, keywords)
    call |= {n: x[:, :, :2].clone() for n, x in call.items() if n.endswith("_new")}
    keys = call["k_geo_new" if "decoupled" in name else "k_new"]
    q = torch.randn(2, 4, *keys.shape[2:])
    angles = {f"rotary_{part}": torch.randn(2, 2, keys.shape[3]) for part in ("cos", "sin")}
    call |= {"rotary_q": q, **angles, "rotary_out": torch.zeros_like(q)}
    for stream, part in case.streams.items():
        lanes, width = part.view.codes.shape[1], part.view.lane_dim
        call[f"{stream}_query_rms"] = 0.5 + torch.rand(lanes, width)
        if part.view.kind in DIVIDED:
            call[f"fit_{stream}"] = "mse"
    return call | {"start": cases.rows(5, 6), "query_lens": cases.rows(2, 1)}


def values_of(name: str, variant: int) -> tuple[Tensor, str]:
    """What is quantized, and to what."""
    if name.endswith(BY_CHANNEL):
        return torch.randn(2, 3, 64, 64), ("q8_channel", "q4_channel")[variant]
    return torch.randn(3, 4, 5, 64), ("q8_0", "nf4")[variant]


def quantized(name: str, variant: int) -> dict[str, Any]:
    x, kind = values_of(name, variant)
    with use_backend("reference"):
        codes, scales = quantize(x, kind)
    return {"codes": codes, "scales": scales, "kind": kind, "head_dim": 64, "dtype": torch.float32}


def call_of(name: str, variant: int) -> dict[str, Any]:
    if op_of(name).name == "quantize":
        x, kind = values_of(name, variant)
        return {"x": x, "kind": kind, "block": 32}
    if op_of(name).name == "dequantize":
        return quantized(name, variant)
    if name == "merge_state":
        out, lse = torch.randn(2, 3, 4, 5, 32), torch.randn(2, 3, 4, 5)
        return {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]}
    if name == "apply_rotary_emb":
        q, k, cos = torch.randn(2, 5, 3, 32), torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32)
        return {"q": q, "k": k, "cos": cos[0], "sin": cos[1]}
    return layer(name, variant)


def tensors_of(name: str) -> dict[str, bool]:
    """The schema's tensors, and whether the op writes to them."""
    return {
        argument.name: bool(argument.alias_info and argument.alias_info.is_write)
        for argument in schema_of(name).arguments
        if "Tensor" in str(argument.type)
    }


def run(name: str, call: dict[str, Any]) -> list[Tensor]:
    """Results, then what the written buffers hold afterwards."""
    positional = [a.name for a in schema_of(name).arguments if not a.kwarg_only]
    args = [call[n] for n in positional if n in call]
    keywords = {n: x for n, x in call.items() if n not in positional}
    found = op_of(name)(*args, **keywords)
    found = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
    written = (call.get(n) for n, is_written in tensors_of(name).items() if is_written)
    return found + [x for x in written if x is not None]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Sums over other strides may differ in the last bits; codes may not, where nothing is rotated."""
    for a, b in zip(found, wanted, strict=True):
        if not a.dtype.is_floating_point:
            if (a != b).double().mean() > 0.002:
                return False
        elif not torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4, equal_nan=True):
            return False
    return True


def around(x: Tensor) -> Tensor:
    """The storage of x with x's own places blanked."""
    room = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
    room.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    return room


def shares_memory(x: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def refused_name(error: Exception, names: list[str]) -> str | None:
    """The tensor a refusal is about: the longest name in its message."""
    named = [name for name in names if name in str(error)]
    return max(named, key=len) if named else None


def laid_out(
    call: dict[str, Any], layouts: dict[str, Callable[[Tensor], Tensor]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call in these layouts, and with contiguous tensors of the same numbers."""
    odd = {n: layouts[n](x) if n in layouts else x for n, x in call.items()}
    plain = {n: x.contiguous().clone() if isinstance(x, Tensor) else x for n, x in odd.items()}
    odd = {
        n: x.clone() if isinstance(x, Tensor) and n not in layouts else x for n, x in odd.items()
    }
    return odd, plain


def wanted(name: str, backend: str, plain: dict[str, Any]) -> list[Tensor]:
    """What contiguous tensors give; in place of Triton, which is interpreted, the reference says what is read.

    Rows that share pages are written in an order of each backend's own.
    """
    writes = any(tensors_of(name).values())
    with use_backend("reference" if backend == "triton" and not writes else backend):
        return run(name, plain)


def differs(name: str, backend: str, call: dict[str, Any], layouts: dict[str, Any]) -> str | None:
    """What is wrong with one call; refused tensors are taken as they were."""
    layouts, written = dict(layouts), tensors_of(name)
    while True:
        odd, plain = laid_out(call, layouts)
        before = {n: around(odd[n]) for n in layouts if written[n]}
        try:
            found = run(name, odd)
        except REFUSALS as error:
            culprit = refused_name(error, list(layouts))
            if culprit is None:
                return f"refused without naming a tensor: {error}"
            del layouts[culprit]
            continue
        for n in layouts:
            if written[n] and shares_memory(odd[n]):
                return f"{n}: written though its elements share memory"
        if not same(found, wanted(name, backend, plain)):
            return "another result than of contiguous tensors"
        for n, room in before.items():
            if not torch.equal(around(odd[n]).nan_to_num(7.0), room.nan_to_num(7.0)):
                return f"{n}: written beside it"
        return None


KINDLESS = {"merge_state", "apply_rotary_emb"}
OPS = (*registry._ops, *(name + BY_CHANNEL for name in registry._ops if name not in KINDLESS))


# Under the interpreter a launch takes half a second: standard attention is paged there, decoupled is not.
@pytest.mark.parametrize(
    ("backend", "variant"),
    [("reference", 0), ("reference", 1), ("cpp", 0), ("cpp", 1), ("triton", None)],
)
@pytest.mark.parametrize("name", OPS)
def test_any_layout_of_any_tensor_gives_the_same_or_is_refused_by_name(name, backend, variant):
    """In trial i tensor j has layout i + j: as many trials as layouts meet every pair."""
    reason = op_of(name).why_not(backend, "cpu")
    if reason is not None:
        assert backend == "triton", reason
        pytest.skip(f"{backend} does not serve {name}")
    variant = int("decoupled" in name) if variant is None else variant
    torch.manual_seed(11 + variant)
    call = call_of(name, variant)
    names = [n for n in tensors_of(name) if isinstance(call.get(n), Tensor)]
    wrong = []
    with use_backend(backend):
        for trial in range(len(LAYOUTS)):
            layouts = {n: LAYOUTS[(trial + j) % len(LAYOUTS)] for j, n in enumerate(names)}
            problem = differs(name, backend, call, layouts)
            if problem is not None:
                wrong.append(
                    f"{trial}: {problem} ({ {n: x.__name__ for n, x in layouts.items()} })"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", ["append_", "decode_attention"])
def test_lengths_and_tables_of_any_layout_are_taken(name, backend):
    if registry.why_not(name, backend, "cpu") is not None:
        pytest.skip(f"{backend} does not serve {name}")
    torch.manual_seed(3)
    call = call_of(name, 0)
    rows = ("cache_seqlens", "start", "cache_leftpad", "query_lens", "block_table")
    layouts = LAYOUTS if backend != "triton" else (every_other_row, part_of_each_row, expanded)
    with use_backend(backend):
        for layout in layouts:  # of Triton, which is interpreted, a few
            odd, plain = laid_out(call, {n: layout for n in rows if n in call})
            assert same(run(name, odd), wanted(name, backend, plain)), layout.__name__


@pytest.mark.parametrize("name", OPS)
def test_every_tensor_of_the_schema_is_laid_out(name):
    """A tensor that a schema gains is in the calls above, or this fails."""
    calls = [call_of(name, variant) for variant in (0, 1)]
    given = {n for call in calls for n, x in call.items() if isinstance(x, Tensor)}
    assert set(tensors_of(name)) == given
