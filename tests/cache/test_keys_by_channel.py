"""Keys by channel in the caches: which token is read from where, whatever was appended, cropped, moved or saved."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.tolerances import relative_l2

from caramba_fast import LayerKVCache
from caramba_fast.cache import DecoupledLayerKVCache, LayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs

HEADS, DIM = 2, 64
SPECS = (
    "q4_channel:residual_len=32,sink_len=4/q4:plain,rotate",
    "q4_channel:residual_len=5,tail_slack=9,qblock=64/q8:plain",
    "q8_channel/fp16",
    "fp16/q4:plain",
)


def made(spec: str, room: int = 512, rows: int = 2, **more: object) -> LayerKVCache:
    width = HEADS * DIM
    return LayerKVCache(rows, room, width, width, n_kv_heads=HEADS, **cache_configs(spec), **more)


def states(count: int, rows: int = 2) -> list[torch.Tensor]:
    """Keys whose channels have means far from 0, and values."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(rows, HEADS, count, DIM, generator=generator) for _ in range(2))
    return [k + 30 * torch.randn(1, HEADS, 1, DIM, generator=generator), v]


def queries(count: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 4, count, DIM, generator=torch.Generator().manual_seed(9)) / 4


def test_four_bits_hold_keys_that_blocks_of_a_token_do_not():
    k, v = states(256)
    found = {}
    for spec in ("fp32", "q4:plain", "q4_channel/q4:plain"):
        cache = made(spec)
        cache.append(k, v)
        found[spec] = cache.attend(queries(1))
    exact = found.pop("fp32")
    errors = [relative_l2(out, exact) for out in found.values()]
    assert errors[1] < 0.2 < errors[0]


@pytest.mark.parametrize("paged", [{}, {"page_size": 64}], ids=["contiguous", "paged"])
@pytest.mark.parametrize("spec", SPECS[:3])
@pytest.mark.parametrize("left", [0, 1, 31, 32, 40, 63, 64, 65, 100, 127, 128, 150, 199])
@torch.no_grad()
def test_a_crop_at_every_depth_goes_on_as_if_the_tokens_had_never_come(spec, left, paged):
    """Within the ring exactly; below it the cut group comes back from its codes, at their precision."""
    k, v = states(260)
    cache, fresh = made(spec, **paged), made(spec, **paged)
    for start in range(0, 200, 40):
        cache.append(k[:, :, start : start + 40], v[:, :, start : start + 40])
    cache.crop([200 - left, 0])
    lens = [left, 200]
    fresh.append(k[:, :, :200], v[:, :, :200], lens)
    for one in (cache, fresh):
        more = [torch.stack((x[0, :, left : left + 60], x[1, :, 200:260])) for x in (k, v)]
        for start, stop in ((0, 1), (1, 5), (5, 60)):
            one.append(*(x[:, :, start:stop] for x in more))
    a, b = cache.attend(queries(1)), fresh.attend(queries(1))
    assert torch.equal(a[1], b[1])
    if 200 - left <= cache.tail_slack:
        assert torch.equal(a[0], b[0])
    else:
        assert relative_l2(a[0], b[0]) <= 0.25


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_a_saved_state_goes_on_as_the_cache_does(spec):
    k, v = states(140)
    cache = made(spec)
    cache.append(k[:, :, :77], v[:, :, :77], [77, 50])
    other = made(spec, room=256)
    other.load_state_dict(pickle.loads(pickle.dumps(cache.state_dict())))
    for one in (cache, other):
        for start in (77, 90, 130):
            one.append(k[:, :, start : start + 10], v[:, :, start : start + 10])
    assert torch.equal(cache.attend(queries(3)), other.attend(queries(3)))
    assert all(map(torch.equal, cache.get(), other.get()))


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_rows_that_grow_or_lose_their_front_keep_what_they_hold(spec):
    k, v = states(600)
    cache = made(spec, room=130)
    cache.append(k[:, :, :129], v[:, :, :129])
    before = cache.attend(queries(2))
    cache.grow(700)
    assert relative_l2(cache.attend(queries(2)), before) <= 1e-6
    cache.append(k[:, :, 129:600], v[:, :, 129:600])
    count = 389 // cache.group * cache.group
    whole = cache.attend(queries(2), window_size=(90, 0))
    kept = cache.get()
    if cache.streams["k"].sink is not None:  # which are of the tokens that came first
        with pytest.raises(ValueError, match="sinks hold the first tokens"):
            cache.drop_front(count, 256)
        assert all(map(torch.equal, cache.get(), kept))
        return
    cache.drop_front(count, 256)
    assert relative_l2(cache.attend(queries(2), window_size=(90, 0)), whole) <= 1e-4
    assert all(torch.equal(new, old[:, :, count:]) for new, old in zip(cache.get(), kept, strict=True))  # fmt: skip


@torch.no_grad()
def test_padding_and_sinks_do_not_widen_the_range_of_a_channel():
    spec = "q4_channel:sink_len=2/fp16:sink_len=2"
    k, v = states(64, rows=1)
    loud = k.clone()
    loud[:, :, :5] = 1e4  # three of padding, and the sinks behind them
    pad = torch.tensor([3], dtype=torch.int32)
    out = []
    for keys in (k, loud):
        cache = made(spec, rows=1)
        cache.append(keys, v, cache_leftpad=pad)
        cache.append(*(x[:, :, :1] for x in states(1, rows=1)), cache_leftpad=pad)
        out.append(cache.streams["k"].scales.clone()[:, :, :2])
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 7e4])
@torch.no_grad()
def test_a_damaged_key_shows_in_its_group_and_channel_alone(bad):
    k, v = states(96)
    k[0, 1, 40, 7] = bad
    cache = made("q4_channel/fp16")
    cache.append(k, v)
    keys = cache.get()[0]
    wrong = ~keys.isfinite()
    assert wrong[0, 1, 32:64, 7].all() and wrong.sum() == 32
    sound = torch.zeros(2, 4, 1, DIM)
    sound[1] = 1
    out = cache.attend(sound)
    assert (
        out[1].isfinite().all() and out[0, :2].isfinite().all() and not out[0, 2:].isfinite().all()
    )


def test_bytes_are_those_of_the_format_with_groups_and_rings():
    for group in (32, 64):
        cache = made(f"q4_channel:qblock={group}/q4:plain", room=1024, rows=1)
        codes = 1024 * HEADS * DIM // 2
        scales = 1024 // group * HEADS * 2 * DIM * 2
        ring = 2 * (32 + group) * HEADS * DIM * 2
        assert cache.nbytes == codes + scales + 1024 * HEADS * DIM * 18 // 32 + ring
        assert cache.bytes_per_token * 8 / (HEADS * DIM) == 4 + 32 / group + 4.5


@pytest.mark.parametrize(("call", "message"), [
    (lambda: made("q4_channel:qblock=64/q4:plain", page_size=32), "qblock is 64 and pages have 32 tokens"),
    (lambda: KVCacheTensorConfig(kind="q4_channel", qblock=48), "qblock is 48; allowed are 32, 64, 128"),
    (
        lambda: LayerKVCache(1, 64, 128, 128, KVCacheTensorConfig(kind="q4_channel", tail_slack=4)),
        "tail_slack must be the same for all tensors of a layer",
    ),
])  # fmt: skip
def test_what_a_layer_cannot_hold_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@torch.no_grad()
def test_both_key_streams_of_decoupled_attention_may_be_by_channel():
    shapes = {"k_sem": 16, "k_geo": 32, "v": 32}
    spec = cache_configs("q4_channel:residual_len=8/q8_channel:qblock=64/q4:rotate")
    widths = [4 * dim for dim in shapes.values()]
    cache, exact = (
        DecoupledLayerKVCache(1, 256, *widths, n_kv_heads=4, **configs)
        for configs in (spec, cache_configs("fp32/fp32/fp32"))
    )
    assert cache.group == 64
    new = [torch.randn(1, 4, 200, dim) for dim in shapes.values()]
    steps = []
    q = [torch.randn(1, 4, 200, dim) for dim in (16, 32)]
    for start in range(0, 200, 20):
        for one in (cache, exact):
            one.append(*(x[:, :, start : start + 20] for x in new))
        part = [x[:, :, start : start + 20] for x in q]
        steps.append((cache.attend(*part), exact.attend(*part)))
    found, expected = (torch.cat(parts, 2) for parts in zip(*steps, strict=True))
    assert relative_l2(found, expected) <= 0.15


def test_a_model_of_mixed_layers_counts_in_whole_groups():
    cache = ModelKVCache(
        [LayerShape(128, 128, 2)] * 2, 1, 200, **cache_configs("q4_channel/q4:plain")
    )
    assert all(layer.group == 32 and layer.ring_len == 64 for layer in cache)
