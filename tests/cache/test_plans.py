"""Calls that a layer cache plans once: whatever they depend on may change, and no stale one is run."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caramba_fast.cache import AttentionLimits, DecoupledLayerKVCache, LayerKVCache
from caramba_fast.config import cache_configs
from caramba_fast.ops import use_backend
from caramba_fast.ops.decode_attention import decode_op

HEADS, DIM, ROOM = 2, 32, 512


def layer(spec: str = "q8:plain", decoupled: bool = False, **options: Any) -> Any:
    if decoupled:
        configs = cache_configs("/".join([spec] * 3))
        return DecoupledLayerKVCache(2, ROOM, 64, 64, 64, **configs, n_kv_heads=HEADS, **options)
    tail = {"residual_len": 8, "tail_slack": 16} if spec == "tail" else {}
    spec = "q4" if spec == "tail" else spec
    configs = cache_configs(f"{spec}/{spec}", **tail)
    return LayerKVCache(2, ROOM, 64, 64, **configs, n_kv_heads=HEADS, **options)


def new(tokens: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, tokens, DIM, generator=source).to(dtype) for _ in range(2)]


def query(tokens: int = 1, seed: int = 9, heads: int = 4) -> torch.Tensor:
    return torch.randn(2, heads, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def fill(cache: LayerKVCache) -> LayerKVCache:
    """A prompt and steps, so that plans for both calls are there."""
    cache.append(*new(20, 1))
    for seed in range(3):
        with torch.set_grad_enabled(seed < 2):
            cache.append(*new(1, seed + 2))
            cache.attend(query())
    return cache


@pytest.fixture(params=["q8:plain", "q4", "tail", "fp16"])
def cache(request: pytest.FixtureRequest) -> LayerKVCache:
    return fill(layer(request.param))


def assert_goes_on(cache: LayerKVCache) -> None:
    """A step gives what one gives without any plan."""
    for gradients in (True, False):  # the quickest way is taken without them
        twin = cache.select_rows([0, 1])
        with torch.set_grad_enabled(gradients):
            for one in (cache, twin):
                one.append(*new(1, 50))
        assert torch.equal(cache.attend(query()), twin.attend(query()))
    for found, wanted in zip(cache.get(), twin.get(), strict=True):
        assert torch.equal(found, wanted)
    assert cache.seq_lens.tolist() == cache.lengths.host


CHANGES: dict[str, Callable[[LayerKVCache], object]] = {
    "more room": lambda cache: cache.grow(4 * ROOM),
    "less tokens": lambda cache: cache.crop([3, 0]),
    "other rows": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "another state": lambda cache: cache.load_state_dict(fill(layer_like(cache)).state_dict()),
    "a wide tail": lambda cache: (cache.append(*new(60, 8)), cache.attend(query(60))),
    "a window": lambda cache: setattr(cache, "reach", AttentionLimits(local_window=4)),
    "many tokens": lambda cache: cache.append(*new(200, 8), will_attend=False),
    "lengths in other memory": lambda cache: cache.seq_lens.share_memory_(),
}  # fmt: skip


def layer_like(cache: LayerKVCache) -> LayerKVCache:
    configs = {f"{name}_cfg": stream.config for name, stream in cache.streams.items()}
    return LayerKVCache(2, ROOM, 64, 64, **configs, n_kv_heads=HEADS)


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_follows_what_has_changed(cache: LayerKVCache, change: str) -> None:
    CHANGES[change](cache)
    assert_goes_on(cache)
    assert_goes_on(cache)


def test_dropping_the_front_is_followed() -> None:
    cache = fill(layer("q4:plain"))
    cache.drop_front(5, 64)
    assert_goes_on(cache)


def test_a_copy_has_its_own_plans() -> None:
    cache = fill(layer())
    other = cache.select_rows([1])
    before = cache.get()
    other.append(*(x[:1] for x in new(1, 3)))
    for now, then in zip(cache.get(), before, strict=True):
        assert torch.equal(now, then)
    assert_goes_on(cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_and_queries_of_another_dtype_are_planned_anew(dtype: torch.dtype) -> None:
    cache = fill(layer())
    cache.append(*new(1, 50, dtype))
    assert cache.attend(query().to(dtype)).dtype == dtype
    assert cache.attend(query()).dtype == torch.float32


def test_options_are_those_of_the_call() -> None:
    cache = fill(layer())
    plain = cache.attend(query())
    for options in (
        {"softmax_scale": 0.5}, {"window_size": (3, 0)}, {"softcap": 2.0}, {"s_aux": torch.ones(4)},
    ):  # fmt: skip
        assert not torch.equal(cache.attend(query(), **options), plain)
        assert torch.equal(cache.attend(query()), plain)
    twice = cache.attend(query(), s_aux=torch.zeros(4)), cache.attend(query(), s_aux=torch.ones(4))
    assert not torch.equal(*twice)
    out, lse = cache.attend(query(), return_softmax_lse=True)
    assert torch.equal(out, plain) and lse.shape == (2, 4, 1)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cache: cache.attend(query()[:1]), "B=2|int32 is needed"),
        (lambda cache: cache.attend(query(heads=3)), "multiple of n_kv_heads"),
        (lambda cache: cache.attend(query()[..., :16]), "hold something else"),
        (lambda cache: cache.attend(query()[0]), "has shape"),
        (lambda cache: cache.attend(query(24)), "tokens cached is needed"),
        (lambda cache: cache.attend(query().double()), "float64"),
        (lambda cache: cache.attend(query().to("meta")), "share one device"),
        (lambda cache: cache.attend(query(), s_aux=torch.ones(3)), "s_aux is"),
        (lambda cache: cache.attend(query(), window_size=(-2, 0)), "window_size is"),
        (lambda cache: cache.attend(query(), nonsense=1), "no option nonsense"),
        (lambda cache: cache.append(*(x[:1] for x in new())), "has shape"),
        (lambda cache: cache.append(*(x[..., :16] for x in new())), "has shape"),
        (lambda cache: cache.append(*(x.double() for x in new())), "float64"),
        (lambda cache: cache.append(*(x.to("meta") for x in new())), "is on meta"),
        (lambda cache: cache.append(*new(600)), "max_seq_len is 512"),
        (lambda cache: cache.append(*new(), cache_leftpad=torch.zeros(3, dtype=torch.int32)), "left"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_between_steps(
    call: Callable[[LayerKVCache], object], error: str
) -> None:
    cache = fill(layer())
    state = cache.state_dict()
    with pytest.raises((TypeError, ValueError), match=error):
        call(cache)
    assert cache.state_dict()["lengths"] == state["lengths"]
    assert_goes_on(cache)


def test_a_full_row_is_refused_by_a_planned_step() -> None:
    cache = fill(layer())
    cache.append(*new(ROOM - cache.pos - 1, 4))
    cache.append(*new())
    with pytest.raises(ValueError, match="cannot take 1 more"):
        cache.append(*new())


def test_the_backend_in_force_serves_a_planned_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = fill(layer()), list[str]()
    wanted, reference = cache.attend(query()), decode_op.reference

    def noting(*args: Any, **options: Any) -> Any:
        seen.append("reference")
        return reference(*args, **options)

    monkeypatch.setattr(decode_op, "reference", noting)
    with use_backend("reference"):
        found = cache.attend(query())
    assert seen == ["reference"]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_buffers_that_were_replaced_are_let_go() -> None:
    cache = fill(layer())
    old = weakref.ref(cache.k.codes)
    cache.grow(8 * ROOM)
    cache.append(*new())
    cache.attend(query())
    gc.collect()
    assert old() is None


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_has_lengths_of_its_own(copied: Callable[[LayerKVCache], LayerKVCache]) -> None:
    cache = fill(layer())
    cache.append(*new(2))
    other = copied(cache)
    other.append(*new(2))
    other.append(*new(2))
    assert (cache.seq_lens.tolist(), other.seq_lens.tolist()) == ([25, 25], [29, 29])
    assert_goes_on(other)
    assert_goes_on(cache)


class Names(TorchDispatchMode):
    """The ops that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_lengths_are_written_by_an_op_only_where_ops_are_observed() -> None:
    cache = fill(layer())
    with Names() as names:
        cache.append(*new(1, 6))
    assert "aten.add_.Tensor" in names.found
    assert cache.seq_lens.tolist() == cache.lengths.host == [24, 24]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cache.append(*new(1, 7))
    assert not [event.name for event in profile.events() if "add_" in event.name]
    assert cache.seq_lens.tolist() == cache.lengths.host == [25, 25]


@torch.no_grad()
def test_many_rows_have_their_lengths_too() -> None:
    cache = LayerKVCache(40, 64, 32, 32, **cache_configs("q8:plain"), n_kv_heads=1)
    for _ in range(4):
        cache.append(torch.randn(40, 1, 2, 32), torch.randn(40, 1, 2, 32))
    assert cache.seq_lens.tolist() == cache.lengths.host == [8] * 40


def test_queries_are_not_kept() -> None:
    cache = fill(layer())
    q = query()
    kept = weakref.ref(q)
    cache.attend(q)
    del q
    gc.collect()
    assert kept() is None


def test_decoupled_steps_follow_too() -> None:
    cache = layer("q4", decoupled=True)
    three = [*new(20, 1), new(20, 2)[0]]
    cache.append(*three)
    for seed in range(3):
        cache.append(*new(1, seed), new(1, seed + 9)[0])
        cache.attend(query(seed=1), query(seed=2))
    cache.grow(4 * ROOM)
    twin = cache.select_rows([0, 1])
    for one in (cache, twin):
        one.append(*new(1, 40), new(1, 41)[0])
    found = [one.attend(query(seed=1), query(seed=2)) for one in (cache, twin)]
    assert torch.equal(*found)
