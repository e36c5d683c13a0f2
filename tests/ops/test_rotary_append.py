"""RoPE as a part of append_ and decoupled_append_: the bits of `apply_rotary_emb` and an append behind it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.append_layers import Layer, buffers, layer
from support.blocks import same_bits
from torch import Tensor

from caramba_fast.ops import append_, apply_rotary_emb, use_backend
from caramba_fast.ops.append import append_op, decoupled_append_op
from caramba_fast.ops.apply_rotary_emb import ROTARY

BF16 = torch.bfloat16
#: Settings of a layer, and what of a head its angles say: all of it, or half.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "a step": ({"tokens": 1, "heads": 3}, 1),
    "bfloat16": ({"dtype": BF16, "kinds": ("fp16", "nf4"), "tokens": 5}, 2),
    "padded and paged": (
        {"kinds": ("nf4", "q8_0"), "tokens": 4, "heads": 2, "ring": 5, "sink": 3, "fit": "mse",
         "pages": [[4, 1], [0, 2]], "query_lens": (4, 2), "cache_leftpad": (4, 3)}, 1,
    ),
    "by channel": (
        {"kinds": ("q4_channel", "q4_0"), "ring": 45, "tokens": 12, "rotate": "v", "sink": 4,
         "dtype": torch.float16}, 1,
    ),
    "more than a ring": ({"kinds": ("q4_channel", "q8_channel"), "ring": 33, "tokens": 34}, 2),
    "rotated lanes": (
        {"kinds": ("q4_0", "q8_0"), "dims": (80, 80), "heads": 5, "tokens": 2, "rotate": "kv",
         "per_lane": 2}, 2,
    ),
    "decoupled": (
        {"kinds": ("q8_0", "q4_0", "nf4"), "dims": (8, 32, 64), "heads": 4, "tokens": 2, "rotate": "k"}, 1,
    ),
    "decoupled by channel": (
        {"kinds": ("q4_channel", "q4_channel", "q4_0"), "dims": (32, 32, 64), "ring": 45, "tokens": 9}, 2,
    ),
}  # fmt: skip


def turned(given: Layer, share: int, rows: int, query_heads: int = 3) -> dict[str, Tensor]:
    """Queries as a projection leaves them (heads behind tokens), and angles of ``rows`` rows."""
    *_, keys, _ = given.new.values()
    batch, heads, tokens, dim = keys.shape
    source = torch.Generator().manual_seed(1)
    q = torch.randn(batch, tokens, heads * query_heads, dim, generator=source)
    cos, sin = torch.randn(2, rows, tokens, dim // share, generator=source)
    return {
        name: x.to(keys.dtype) for name, x in (("q", q.transpose(1, 2)), ("cos", cos), ("sin", sin))
    }


def in_two_calls(given: Layer, angles: dict[str, Tensor]) -> Tensor:
    """Appends what `apply_rotary_emb` makes of the keys; the turned queries."""
    name = [*given.new][-2]
    q, given.new[name] = apply_rotary_emb(
        angles["q"], given.new[name], angles["cos"], angles["sin"]
    )
    given.append()
    return q


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_one_call_writes_what_two_write(backend, rows, name, device, monkeypatch):
    settings, share = SETTINGS[name]
    on = device if backend == "triton" else torch.device("cpu")
    if backend == "triton":
        pytest.importorskip("triton")
        from caramba_fast.kernels import append

        monkeypatch.setattr(append, "PROMPT_TOKENS", 4)
    given = layer(**settings).to(on)
    angles = {n: x.to(on) for n, x in turned(given, share, rows).items()}
    with use_backend(backend):
        wanted = copy.deepcopy(given)
        q = in_two_calls(wanted, angles)
        given.place |= {f"rotary_{n}": x for n, x in angles.items()}
        given.append()
    assert torch.equal(given.queries, q)
    found, expected = buffers(given), buffers(wanted)
    assert [n for n in expected if not same_bits(found[n].cpu(), expected[n].cpu())] == []


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_strides_of_every_tensor(backend, device):
    """Keys, queries and angles that lie anyhow; the query heads are no multiple of a program's."""
    on = device if backend == "triton" else torch.device("cpu")
    given = layer(tokens=3, heads=2).to(on)
    angles = {n: x.to(on) for n, x in turned(given, 1, 2, query_heads=7).items()}
    wanted = copy.deepcopy(given)
    with use_backend("reference"):
        q = in_two_calls(wanted, angles)
    wide = torch.zeros(2, 3, 14, 64, dtype=angles["q"].dtype, device=on)
    wide[..., ::2] = angles["q"].transpose(1, 2)
    angles["q"] = wide[..., ::2].transpose(1, 2)
    keys = given.new["k"]
    given.new["k"] = keys.transpose(2, 3).contiguous().transpose(2, 3)
    angles["cos"] = angles["cos"].transpose(1, 2).contiguous().transpose(1, 2)
    given.place |= {f"rotary_{n}": x for n, x in angles.items()}
    with use_backend(backend):
        assert torch.equal(given.append().queries, q)
    found, expected = buffers(given), buffers(wanted)
    assert all(same_bits(found[n].cpu(), expected[n].cpu()) for n in expected)


@pytest.mark.parametrize(
    ("op", "name"),
    [(append_op, "a step"), (append_op, "by channel"), (decoupled_append_op, "decoupled"),
     (decoupled_append_op, "decoupled by channel")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_opcheck(op, name):
    settings, share = SETTINGS[name]
    args, options = flat(layer(**settings), share)
    torch.library.opcheck(op.overload, args, options)


def flat(given: Layer, share: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of the op itself."""
    stored = [part for view in given.views.values() for part in (view.codes, view.scales)]
    kinds = [view.kind for view in given.views.values()]
    options: dict[str, Any] = {f"rotary_{n}": x for n, x in turned(given, share, 1).items()}
    options["rotary_out"] = options["rotary_q"].new_zeros(options["rotary_q"].shape)
    for stream, view in given.views.items():
        options |= view.options(stream)
    return (*stored, *given.new.values(), given.start, *kinds), options


def refused(given: Layer, call: Any, message: str) -> None:
    """The call raises, and no buffer changes."""
    before = {n: x.clone() for n, x in buffers(given).items()}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()
    assert all(same_bits(x, before[n]) for n, x in buffers(given).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x.half()}, "rotary_q has dtype torch.float16; torch.float32, that of the keys"),
        ({"q": lambda x: x.tolist()}, "rotary_q is a list"),
        ({"cos": lambda x: x.double()}, "rotary_cos has dtype torch.float64"),
        ({"q": lambda x: x[:, :, :1]}, r"rotary_q has shape \(2, 3, 1, 32\) and keys \(2, 1, 3, 32\)"),
        ({"cos": lambda x: x[:, :2]}, r"rotary_cos has shape \(1, 2, 32\)"),
        ({"sin": lambda x: x[..., :8], "cos": lambda x: x[..., :8]}, "2 or 1, 3, 32 or 16"),
        ({"sin": lambda _: None}, "rotary_sin is missing"),
        ({"q": lambda _: None}, "rotary_q is missing"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_nothing_is_written(change, message):
    given = layer()
    angles = turned(given, 1, 1)
    angles |= {n: make(angles[n]) for n, make in change.items()}
    rotary = {f"rotary_{n}": x for n, x in angles.items()}
    views, new = given.views.values(), given.new.values()
    refused(given, lambda: append_(*views, *new, given.start, **rotary), message)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("missing", ROTARY)
def test_the_op_itself_takes_all_of_its_options_or_none(missing, backend, device):
    given = layer().to(device if backend == "triton" else torch.device("cpu"))
    args, options = flat(given)
    del options[missing]
    with use_backend(backend):
        refused(given, lambda: append_op(*args, **options), "missing|given together")


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize(
    "change",
    [
        {"cos": lambda x: x[:, :1], "sin": lambda x: x[:, :1]},
        {"cos": lambda x: x[..., :8], "sin": lambda x: x[..., :8]},
        {"sin": lambda x: x[..., :16]},
        {"q": lambda x: x[..., :16], "out": lambda x: x[..., :16].contiguous()},
        {"q": lambda x: x[:1], "out": lambda x: x[:1]},
        {"out": lambda x: x[:, :1].contiguous()},
        {"out": lambda x: x.half()},
        {"out": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)},
    ],
)
def test_the_op_itself_refuses_what_does_not_belong_together(change, backend, device):
    given = layer().to(device if backend == "triton" else torch.device("cpu"))
    args, options = flat(given)
    options |= {f"rotary_{n}": make(options[f"rotary_{n}"]) for n, make in change.items()}
    with use_backend(backend):
        refused(given, lambda: append_op(*args, **options), "rotary|cos")


@pytest.mark.parametrize("name", ["a step", "by channel", "decoupled"])
def test_on_amd_keys_are_turned_first(name, device, monkeypatch):
    """In a launch of its own; the results are those of one call."""
    pytest.importorskip("triton")
    settings, share = SETTINGS[name]
    given = layer(**settings).to(device)
    angles = {n: x.to(device) for n, x in turned(given, share, 2).items()}
    with use_backend("triton"):
        wanted = copy.deepcopy(given)
        q = in_two_calls(wanted, angles)
        monkeypatch.setattr(torch.version, "hip", "as if")
        given.place |= {f"rotary_{n}": x for n, x in angles.items()}
        given.append()
    assert torch.equal(given.queries, q)
    found, expected = buffers(given), buffers(wanted)
    assert all(same_bits(found[n].cpu(), expected[n].cpu()) for n in expected)


def test_heads_two_gigabytes_apart(device):
    """Strides fit into 32 bits, offsets do not; what lies between is reserved, not used."""
    pytest.importorskip("triton")
    heads, step = 3, 2**30 + 64
    room = torch.empty(2 * step + 32, dtype=torch.float16, device=device)
    q = room.as_strided((1, heads, 1, 32), (0, step, 0, 1)).copy_(torch.randn(1, heads, 1, 32))
    k, cos, sin = (
        torch.randn(1, 1, 1, 32).half().to(device),
        *torch.randn(2, 1, 1, 32).half().to(device),
    )
    with use_backend("reference"):
        wanted = apply_rotary_emb(q, k, cos, sin)
    with use_backend("triton"):
        found = apply_rotary_emb(q, k, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
