"""Layer caches that grow, lose their front, move and are saved: what is stored stays what it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_at, places_of
from torch import Tensor

from caramba_fast import Generator, LayerKVCache
from caramba_fast.cache import ModelKVCache, stream
from caramba_fast.config import cache_configs
from caramba_fast.models import load_demo

HEADS, DIM = 2, 32
SPECS = ["fp32", "q8", "q4", "nf4:plain,residual_len=8,sink_len=4", "q8/q4:rotate"]


def made(spec: str, room: int, rows: int = 2, **more: Any) -> LayerKVCache:
    return LayerKVCache(
        rows, room, HEADS * DIM, HEADS * DIM, n_kv_heads=HEADS, **cache_configs(spec), **more
    )  # fmt: skip


def states(count: int, seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Keys with a large bias that turns with the position, and values."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(rows, HEADS, count, DIM, generator=generator) for _ in range(2))
    t = torch.arange(count) * 0.3
    k[..., 2] += 40 * t.cos()
    k[..., 18] += 40 * t.sin()
    return k, v


def queries(count: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 4, count, DIM, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_pickle_after_steps_goes_on_as_the_cache_does(spec: str) -> None:
    """Calls that are remembered beside what is stored stay behind."""
    layer = made(spec, 128)
    k, v = states(60)
    for begin, end in ((0, 50), (50, 51), (51, 52), (52, 53)):
        layer.append(k[:, :, begin:end], v[:, :, begin:end])
        layer.attend(queries(end - begin))
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other.attend(queries(1)), layer.attend(queries(1)))
        other.append(k[:, :, 53:], v[:, :, 53:])
        assert (layer.pos, other.pos) == (53, 60)


@torch.no_grad()
def test_the_cache_of_a_conversation_is_pickled() -> None:
    generator = Generator(load_demo(), cache_kind="q4", max_seq_len=64, max_new_tokens=4, seed=0)
    generator.generate(torch.arange(3, 20)[None])
    cache = generator.cache
    assert cache is not None
    other = pickle.loads(pickle.dumps(cache))
    assert isinstance(other, ModelKVCache) and other.row_lengths == cache.row_lengths
    for a, b in zip(cache, other, strict=True):
        assert isinstance(a, LayerKVCache) and isinstance(b, LayerKVCache)
        assert all(map(torch.equal, a.get(), b.get()))


@pytest.mark.parametrize("spec", SPECS)
def test_growing_changes_nothing(spec: str) -> None:
    small, large = made(spec, 100), made(spec, 700)
    k, v = states(500)
    for layer in (small, large):
        layer.append(k[:, :, :90], v[:, :, :90], will_attend=False)
    small.grow(700)
    assert small.max_seq_len == 700
    for layer in (small, large):
        layer.append(k[:, :, 90:], v[:, :, 90:], will_attend=False)
    for a, b in zip(small.get(), large.get(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(small.attend(queries(3)), large.attend(queries(3)))
    small.grow(10)
    assert small.max_seq_len == 700


@pytest.mark.parametrize("spec", ["fp32", "q8", "q4:sink_len=0", "nf4:plain,residual_len=8"])
def test_what_stays_when_the_front_is_dropped_is_read_as_before(spec: str) -> None:
    layer = made(spec, 512)
    layer.append(*states(300), will_attend=False)
    count = 199 // layer.group * layer.group
    expected = layer.attend(queries(2), window_size=(63, 0))
    kept = [x[:, :, count:] for x in layer.get()]
    layer.drop_front(count, 256)
    for found, wanted in zip(layer.get(), kept, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    found = layer.attend(queries(2), window_size=(63, 0))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
    k, v = states(310)
    layer.append(k[:, :, 300:], v[:, :, 300:])
    assert float((layer.get()[0][:, :, -10:] - k[:, :, 300:]).norm() / k.norm()) < 0.1


#: Resizes of a cache with room for 512 tokens: to more room, and without its front in more or the same room.
RESIZES: dict[str, Callable[[LayerKVCache], None]] = {
    "grow": lambda layer: layer.grow(700),
    "drop": lambda layer: layer.drop_front(192, 700),
    "drop in the same room": lambda layer: layer.drop_front(192, 512),
}


@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES)
@pytest.mark.parametrize("spec", ["fp32", "q8:sink_len=0", "nf4:plain,residual_len=8"])
def test_a_resize_that_is_cut_off_is_done_or_has_not_begun(monkeypatch, spec, resize) -> None:
    """By Ctrl-C at any bytecode, or because memory runs out at any buffer."""
    whole = made(spec, 512)
    whole.append(*states(420))
    done = copy.deepcopy(whole)
    resize(done)
    ends = [(x.pos, x.max_seq_len) for x in (whole, done)]
    assert ends[0] != ends[1]

    def check(layer: LayerKVCache, ended: bool) -> None:
        assert (layer.pos, layer.max_seq_len) in (ends if ended else ends[:1])
        if (layer.pos, layer.max_seq_len) == ends[0]:
            assert torch.equal(layer.attend(queries(2)), whole.attend(queries(2)))
            resize(layer)
        for found, wanted in zip(layer.get(), done.get(), strict=True):
            assert torch.equal(found, wanted)
        assert torch.equal(layer.attend(queries(2)), done.attend(queries(2)))

    places = places_of(partial(resize, copy.deepcopy(whole)))
    for position in [*{place: i for i, place in enumerate(places)}.values()][::3]:
        layer = copy.deepcopy(whole)
        if interrupted_at(position, partial(resize, layer)):
            check(layer, ended=True)
    room, new = 0, stream._with_slots

    def limited(*args: Any) -> Tensor:
        nonlocal room
        room -= 1
        if room < 0:
            raise torch.OutOfMemoryError
        return new(*args)

    monkeypatch.setattr(stream, "_with_slots", limited)
    for count in range(sum(len(x.token_buffers) for x in whole.streams.values())):
        layer, room = copy.deepcopy(whole), count
        with pytest.raises(torch.OutOfMemoryError):
            resize(layer)
        room = 99
        check(layer, ended=False)


def test_dropping_is_refused_where_it_cannot_be() -> None:
    layer = made("q4", 512)
    layer.append(*states(100))
    with pytest.raises(ValueError, match="sinks hold the first tokens of a row; sink_len=0"):
        layer.drop_front(64, 512)
    layer = made("q4:sink_len=0", 512)
    layer.append(*states(100), new_lens=[100, 90])
    with pytest.raises(ValueError, match="equal length"):
        layer.drop_front(64, 512)
    layer.reset()
    layer.append(*states(100))
    for count in (3, 128, -64):
        with pytest.raises(ValueError, match="multiple of 32"):
            layer.drop_front(count, 512)
    with pytest.raises(ValueError, match="36 tokens stay"):
        layer.drop_front(64, 20)


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_is_taken_by_another_cache(spec: str) -> None:
    layer, other = made(spec, 100), made(spec, 300)
    layer.append(*states(90), new_lens=[90, 71])
    other.load_state_dict(layer.state_dict())
    assert other.lengths.host == [90, 71]
    twin = copy.deepcopy(layer)
    for x in (layer, other, twin):
        x.append(*states(1, 4))
    for x in (other, twin):
        assert torch.equal(x.attend(queries(1)), layer.attend(queries(1)))
    grown = made(spec, 10)
    grown.load_state_dict(layer.state_dict())
    assert grown.max_seq_len == 91


def _set(path: str, value: Any) -> Any:
    """What puts a value into a state, at keys divided by dots."""

    def change(state: dict[str, Any]) -> None:
        *inner, last = path.split(".")
        for key in inner:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return change


#: The key, a value, or what becomes of the one there, and a word of the error.
LIES = [
    ("lengths", [81, 1], "codes of k"),
    ("lengths", [10**8, 1], "codes of k"),
    ("lengths", [20], "whole numbers"),
    ("lengths", [20, -1], "whole numbers"),
    ("lengths", [20, 2.5], "whole numbers"),
    ("lengths", [20, True], "whole numbers"),
    ("lengths", [20, 2**40], "whole numbers"),
    ("lengths", None, "whole numbers"),
    ("tail_lowest", [0, 10**9], "tail_lowest of row 1"),
    ("tail_lowest", [0, 0], "tail_lowest of row 0"),
    ("streams", None, "streams are None"),
    ("streams.k", {}, "k needs the keys"),
    ("streams.k.codes", lambda x: x[:, :, :1], "codes of k"),
    ("streams.k.codes", lambda x: x.to(torch.float32), "codes of k"),
    ("streams.k.codes", None, "codes of k is a NoneType"),
    ("streams.v.scales", lambda x: x[:1], "scales of v"),
    ("streams.v.scales", None, "scales of v is a NoneType"),
    ("streams.v.tail", lambda x: x[:, :, 1:], "tail of v"),
    ("streams.v.sink", None, "sink of v"),
    ("streams.k.transform", {}, "k needs the keys"),
    ("streams.k.transform", {"rotate": True}, "k needs the keys"),
    ("streams.k.transform", {"rotate": 3}, "k needs the keys"),
    ("streams.k.transform", [], "k needs the keys"),
    ("streams.k.transform", {"mean": "0", "rotate": False}, "'k' was stored with 'mean'"),
    (
        "streams.k.transform",
        {"bias": torch.zeros(1), "pairs": torch.zeros(1), "scale": None, "rotate": False},
        "'k' was stored with 'bias, pairs' of an earlier version",
    ),
]


@pytest.mark.parametrize(("path", "value", "word"), LIES, ids=[f"{p}: {w}" for p, _, w in LIES])
def test_a_state_that_contradicts_itself_changes_nothing(path: str, value: Any, word: str) -> None:
    """Numbers in it are held against its tensors before anything is allocated or forgotten."""
    spec = "q8:plain,residual_len=8,tail_slack=4,sink_len=4/q4:plain,residual_len=8,tail_slack=4,sink_len=4"
    layer, other = made(spec, 200), made(spec, 100)
    layer.append(*states(80), new_lens=[80, 71])
    other.append(*states(5, 3))
    state, before = layer.state_dict(), other.state_dict()
    _set(path, value)(state)
    with pytest.raises(ValueError, match=word):
        other.load_state_dict(state)
    assert other.max_seq_len == 100
    after = other.state_dict()
    assert after["lengths"] == before["lengths"] == [5, 5]
    for name, part in after["streams"].items():
        for key in ("codes", "scales", "tail", "sink"):
            same = part[key], before["streams"][name][key]
            assert torch.equal(*(x.view(torch.uint8) for x in same))


def test_states_and_moves_that_are_refused() -> None:
    layer, paged = made("q8", 100), made("q8", 100, page_size=32)
    layer.append(*states(20))
    for wrong, reason in (
        (made("q4", 100), "stored as"),
        (made("q8", 100, rows=3), "batch_size is 2"),
    ):
        with pytest.raises(ValueError, match=reason):
            wrong.load_state_dict(layer.state_dict())
    for refused in (
        paged.state_dict,
        lambda: paged.load_state_dict(layer.state_dict()),
        lambda: paged.grow(200),
        lambda: paged.to("meta"),
        lambda: paged.drop_front(0, 100),
    ):
        with pytest.raises(ValueError, match=r"paged|contiguous"):
            refused()
    assert layer.to("cpu") is layer
    assert layer.to("meta").device.type == "meta"


@pytest.mark.parametrize("spec", SPECS)
def test_queries_that_are_not_the_newest(spec: str) -> None:
    layer = made(spec, 100)
    layer.append(*states(70), will_attend=False)
    layer.append(*states(9, 1))
    q = queries(9)
    whole = layer.attend(q)
    layer.crop(0)
    parts = [layer.attend(q[:, :, i : i + 3], before=9 - i - 3) for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="T from 1"):
        layer.attend(q, before=-1)


def test_a_copy_made_in_inference_mode_is_used_outside_of_it():
    cache = LayerKVCache(1, 64, 64, 64, n_kv_heads=2, **cache_configs("q4"))
    x = torch.randn(1, 2, 9, 32)
    cache.append(x, x)
    with torch.inference_mode():
        made = copy.deepcopy(cache)
    for held in (made, cache):
        held.append(x[:, :, :1], x[:, :, :1])
    assert torch.equal(made.attend(x[:, :, :1]), cache.attend(x[:, :, :1]))
    made.append(x[:, :, :1], x[:, :, :1])
    assert (made.pos, cache.pos) == (11, 10)
