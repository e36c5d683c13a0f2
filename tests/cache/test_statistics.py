"""What a sample says of a stream, and the transforms that follow from it."""

import math

import pytest
import torch
from support.tolerances import relative_l2

from caramba_fast.cache import LayerKVCache, LayerShape, ModelKVCache, StreamStatistics
from caramba_fast.cache import statistics as st
from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.models.config import ModelConfig, RopeParameters
from caramba_fast.models.rope import frequencies
from caramba_fast.models.transformer import Transformer
from caramba_fast.quality.lab import calibrate

DIM, HEADS, SLOTS = 32, 2, 512


def turned(x, t, rotary):
    """RoPE in float64, written out: x (B, H, N, D) at t (B, N)."""
    x, out = x.double(), x.double().clone()
    for (i, j), theta in zip(rotary.pairs, rotary.inv_freq, strict=True):
        angle = (t.double() * theta)[:, None]
        out[..., i] = x[..., i] * angle.cos() - x[..., j] * angle.sin()
        out[..., j] = x[..., j] * angle.cos() + x[..., i] * angle.sin()
    return out


def freqs(count):
    return [10000.0 ** (-i / count) for i in range(count)]


ROTARIES = {
    "half": Rotary.half_split(freqs(16)),
    "interleaved": Rotary.interleaved(freqs(16)),
    "partial": Rotary.half_split(freqs(8)),
    "partial at the end": Rotary.interleaved(freqs(4), first=24),
    "llama3": Rotary.half_split(
        frequencies(
            RopeParameters(rope_type="llama3", factor=8.0, original_max_position_embeddings=64), DIM
        )[0].tolist()
    ),
    "yarn": Rotary.half_split(
        frequencies(
            RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), DIM
        )[0].tolist()
    ),
    "none": None,
}


@pytest.fixture(params=ROTARIES)
def rotary(request):
    return ROTARIES[request.param]


def biased_keys(rotary, count=200, size=40.0, leftpad=(0, 0), spread=1.0):
    """Keys after RoPE with a bias on two pairs (or dims), and that bias (H, D)."""
    bias = torch.zeros(HEADS, DIM)
    dims = [(3, 19), (10, 26)] if rotary is None else [rotary.pairs[1], rotary.pairs[-1]]
    for head in range(HEADS):
        for pair in dims:
            bias[head, list(pair)] = size * torch.nn.functional.normalize(torch.randn(2), dim=0)
    keys = spread * torch.randn(2, HEADS, count, DIM) + bias[:, None]
    t = torch.arange(count) - torch.tensor(leftpad)[:, None]
    return (keys if rotary is None else turned(keys, t, rotary).float()), t, bias


def test_statistics_are_those_of_keys_before_rope(rotary):
    keys, t, bias = biased_keys(rotary, spread=0.5)
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    torch.testing.assert_close(seen.mean, bias, atol=0.15, rtol=0)
    torch.testing.assert_close(seen.std, torch.full((HEADS, DIM), 0.5), atol=0.1, rtol=0)
    assert seen.diversity > st.FULL_DIVERSITY


def test_padding_does_not_count(rotary):
    keys, t, bias = biased_keys(rotary, leftpad=(0, 90), spread=0.5)
    keys[1, :, :90] = 1e4
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    torch.testing.assert_close(seen.mean, bias, atol=0.2, rtol=0)


@pytest.mark.parametrize("count", [64, 5000])
def test_long_samples_are_thinned_out(count):
    keys = torch.randn(1, 1, count, 8) + 3
    t = torch.arange(count)[None]
    seen = st.observe(keys, t, t >= 0, None, count)
    torch.testing.assert_close(seen.mean, torch.full((1, 8), 3.0), atol=0.5, rtol=0)


@pytest.mark.parametrize(
    ("distinct", "low", "high"), [(1, 0, 0), (2, 0.99, 1.01), (6, 3, 5.01), (128, 20, 128)]
)
def test_diversity_counts_the_directions_tokens_vary_in(distinct, low, high):
    keys = torch.randn(1, 2, distinct, 64).repeat(1, 1, -(-128 // distinct), 1)[:, :, :128]
    t = torch.arange(128)[None]
    keys = keys * torch.tensor([1.0] * 60 + [50.0] * 4)  # outlier channels do not hide the rest
    assert low <= float(st.observe(keys, t, t >= 0, None, 128).diversity) <= high


def key_config(**changes):
    return KVCacheTensorConfig(kind="q4", **changes)


def test_centering_takes_the_bias_and_no_more(rotary):
    keys, t, bias = biased_keys(rotary)
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    found = st.derive(key_config(center=True), rotary, SLOTS, seen, seen)
    if rotary is None:
        torch.testing.assert_close(found.mean, bias, atol=0.5, rtol=0)
        assert found.bias is None
        return
    assert found.bias.shape == (HEADS, 2, 2), "two pairs stand out: only two are kept"
    back = torch.zeros(HEADS, DIM).scatter(-1, found.pairs.flatten(1).long(), found.bias.flatten(1))
    torch.testing.assert_close(back, bias, atol=0.5, rtol=0)
    partial = len(rotary.pairs) * 2 < DIM
    assert (found.mean is not None) == partial
    if partial:
        turning = [dim for pair in rotary.pairs for dim in pair]
        assert not found.mean[:, turning].any()


def test_nothing_stands_out_of_plain_keys(rotary):
    keys, t, _ = biased_keys(rotary, size=0.0)
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    found = st.derive(key_config(center=True, scale=True), rotary, SLOTS, seen, seen)
    assert found.bias is None
    assert bool((found.scale == 1).all())


def test_scale_is_shared_by_a_pair_and_bounded(rotary):
    keys, t, _ = biased_keys(rotary, size=0.0)
    grown = torch.ones(DIM)
    first, second = (4, 20) if rotary is None else rotary.pairs[0]
    huge = rotary.pairs[1] if rotary is not None else (5, 5)
    grown[first] = grown[second] = 10.0
    grown[list(huge)] = 1000.0
    plain = torch.randn(2, HEADS, 200, DIM) * grown
    keys = plain if rotary is None else turned(plain, t, rotary).float()
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    scale = st.derive(key_config(scale=True), rotary, SLOTS, seen, seen).scale
    torch.testing.assert_close(
        scale[:, [first, second]], torch.full((HEADS, 2), 10.0), rtol=0.25, atol=0
    )
    assert bool((scale[:, list(huge)] == st.SCALE_LIMIT).all())
    rest = [d for d in range(DIM) if d not in (first, second, *huge)]
    assert bool((scale[:, rest] == 1).all())


def test_scaling_without_centering_counts_the_constant_part():
    keys, t, _ = biased_keys(None, size=40.0)
    seen = st.observe(keys, t, t >= 0, None, SLOTS)
    assert st.derive(key_config(scale=True), None, SLOTS, seen, seen).scale.max() > 10
    both = st.derive(key_config(scale=True, center=True), None, SLOTS, seen, seen)
    assert bool((both.scale == 1).all()), "what centering takes out is not there to be scaled"


def test_a_sample_that_tells_little_changes_nothing():
    keys = torch.randn(1, HEADS, 2, DIM).repeat(1, 1, 50, 1) * 10
    keys[..., 3] += 500
    t = torch.arange(100)[None]
    seen = st.observe(keys, t, t >= 0, None, SLOTS)
    found = st.derive(key_config(center=True, scale=True, rotate=True), None, SLOTS, seen, seen)
    assert found.mean is None and bool((found.scale == 1).all()) and found.rotate


# -- caches take their constants -------------------------------------------------------------


def make(rotary, leftpad=False, **sources):
    config = key_config(center=True, scale=True, rotate=True)
    value = KVCacheTensorConfig(kind="q4", scale=True)
    width = HEADS * DIM
    return LayerKVCache(
        2, SLOTS, width, width, config, value, n_kv_heads=HEADS, rope=rotary, **sources
    )


def error(cache, keys, t=None):
    pad = None if t is None else (-t[:, 0]).to(torch.int32)
    real = torch.ones_like(keys[:, :1, :, :1]) if t is None else (t >= 0)[:, None, :, None]
    return relative_l2(cache.get(cache_leftpad=pad)[0] * real, keys * real)


def test_the_first_prompt_sets_the_constants(rotary):
    keys, _, _ = biased_keys(rotary, size=200.0)
    values = torch.randn(2, HEADS, 200, DIM)
    values[..., 7] *= 30
    cache, plain = (
        make(rotary),
        LayerKVCache(
            2, SLOTS, HEADS * DIM, HEADS * DIM, key_config(), key_config(), n_kv_heads=HEADS
        ),
    )
    for held in (cache, plain):
        held.append(keys, values)
    assert error(cache, keys) < 0.1 * error(plain, keys)
    assert relative_l2(cache.get()[1], values) < 0.7 * relative_l2(plain.get()[1], values)


def test_constants_stay_until_the_cache_is_empty_again():
    rotary = ROTARIES["half"]
    cache = make(rotary)
    cache.append(*[biased_keys(rotary, 100)[0]] * 2)
    first = cache.k.transform
    assert first.bias is not None
    cache.append(*[biased_keys(rotary, 100)[0]] * 2)
    assert cache.k.transform is first
    cache.crop(150)
    cache.append(*[torch.randn(2, HEADS, 70, DIM)] * 2)
    assert cache.k.transform is first
    cache.reset()
    assert cache.k.transform.bias is None and cache.k.transform.rotate
    cache.append(*[biased_keys(rotary, 100)[0]] * 2)
    assert cache.k.transform.bias is not None


def test_short_prompts_set_nothing():
    rotary = ROTARIES["half"]
    cache = make(rotary)
    keys = biased_keys(rotary, 31)[0]
    cache.append(keys, keys)  # 62 tokens
    assert cache.k.transform.bias is None and cache.k.transform.scale is None
    cache.append(*[biased_keys(rotary, 100)[0]] * 2)
    assert cache.k.transform.bias is None, "tokens are stored: nothing may change"


def test_left_padding_and_ragged_prompts_are_left_out():
    rotary = ROTARIES["half"]
    keys, _, bias = biased_keys(rotary, leftpad=(0, 40), size=100.0)
    keys[1, :, :40] = 3e4
    keys[0, :, 150:] = -3e4
    cache = make(rotary)
    cache.append(keys, keys, [150, 200], cache_leftpad=torch.tensor([0, 40], dtype=torch.int32))
    found = cache.k.transform
    back = torch.zeros(HEADS, DIM).scatter(-1, found.pairs.flatten(1).long(), found.bias.flatten(1))
    torch.testing.assert_close(back, bias, atol=1.0, rtol=0)


def test_transforms_set_by_hand_are_kept():
    cache = make(ROTARIES["half"])
    from caramba_fast.ops import Transform

    cache.set_transforms(k=Transform(scale=torch.full((HEADS, DIM), 2.0)))
    cache.append(*[biased_keys(ROTARIES["half"])[0]] * 2)
    assert cache.k.transform.bias is None and bool((cache.k.transform.scale == 2).all())
    assert cache.v.transform.scale is None


def test_key_biases_of_the_model_come_first_and_need_no_prompt():
    rotary = ROTARIES["half"]
    keys, _, bias = biased_keys(rotary, 8, size=100.0)
    known = StreamStatistics.exact(bias, torch.ones(HEADS, DIM))
    cache, plain = make(rotary, key_bias=known), make(rotary)
    for held in (cache, plain):
        held.append(keys, keys)
    assert error(cache, keys) < 0.1 * error(plain, keys)


def test_calibration_stands_in_for_the_prompt():
    rotary = ROTARIES["half"]
    keys, t, _ = biased_keys(rotary, size=100.0)
    seen = st.observe(keys, t, t >= 0, rotary, SLOTS)
    cache = make(rotary, calibration={"k": seen})
    cache.append(keys[:, :, :4], keys[:, :, :4])
    assert cache.k.transform.bias is not None and cache.v.transform.scale is None
    assert error(cache, keys[:, :, :4]) < 0.02


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="rope turns dim 63 of k, whose head_dim is 32"):
        make(Rotary.half_split(freqs(32)))
    wrong = StreamStatistics.exact(torch.zeros(3, DIM), torch.ones(3, DIM))
    with pytest.raises(
        ValueError, match=r"statistics of k: mean is \(3, 32\); \(2, 32\) is needed"
    ):
        make(None, key_bias=wrong)
    with pytest.raises(ValueError, match="unknown stream 'q'; streams are k, v"):
        make(None, calibration={"q": wrong})
    with pytest.raises(ValueError, match="v is to be centered; center is for keys"):
        LayerKVCache(1, 8, 32, 32, None, key_config(center=True))
    with pytest.raises(ValueError, match="names a dim twice"):
        Rotary(((0, 1), (1, 2)), (1.0, 1.0))
    with pytest.raises(ValueError, match="one frequency a pair"):
        Rotary(((0, 1),), (1.0, 1.0))


def test_attention_is_exact_under_constants_from_a_prompt(rotary):
    """An fp32 cache with every transform attends as one without: all of it is undone."""
    keys, _, _ = biased_keys(rotary, size=20.0)
    values, q = torch.randn(2, HEADS, 200, DIM), torch.randn(2, 2 * HEADS, 3, DIM)
    found = []
    for flags in ({}, dict(center=True, scale=True, rotate=True)):
        config = KVCacheTensorConfig(kind="fp32", **flags)
        value = config.model_copy(update={"center": False})
        width = HEADS * DIM
        cache = LayerKVCache(2, SLOTS, width, width, config, value, n_kv_heads=HEADS, rope=rotary)
        cache.append(keys, values)
        found.append(cache.attend(q))
    assert relative_l2(found[1], found[0]) < 1e-4


# -- models ----------------------------------------------------------------------------------


def test_a_qwen2_model_tells_its_key_biases():
    config = ModelConfig(
        model_type="qwen2", qkv_bias=True, vocab_size=50, hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = Transformer(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=50)
    shape = model.cache_layout[1]
    torch.testing.assert_close(
        shape.key_bias.mean.flatten(), model.model.layers[1].self_attn.k_proj.bias.detach()
    )
    ids = torch.randint(50, (1, 256))
    measured = calibrate(model, ids).layers[1]["k"]
    torch.testing.assert_close(measured.mean, shape.key_bias.mean, rtol=0.02, atol=1.0)
    assert 0.3 < float((measured.std / shape.key_bias.std).mean()) < 3
    assert (
        Transformer(config.model_copy(update={"qkv_bias": False})).cache_layout[0].key_bias is None
    )


def test_every_layer_of_a_model_cache_gets_its_own_statistics():
    seen = [
        {"k": StreamStatistics.exact(torch.full((1, DIM), float(i)), torch.ones(1, DIM))}
        for i in range(2)
    ]
    from caramba_fast.cache import Calibration

    shapes = [LayerShape(DIM, DIM, 1)] * 2
    center = KVCacheTensorConfig(kind="q4", center=True)
    cache = ModelKVCache(shapes, 1, 64, center, None, calibration=Calibration(seen))
    for layer in cache:
        layer.append(*[torch.randn(1, 1, 2, DIM)] * 2)
    assert cache[0].k.transform.mean is None
    assert bool((cache[1].k.transform.mean == 1).all())
    with pytest.raises(ValueError, match="calibration has 2 layers; the model has 3"):
        ModelKVCache([*shapes, shapes[0]], 1, 64, center, None, calibration=Calibration(seen))


def test_frequencies_are_the_models_own():
    rope = RopeParameters(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
    config = ModelConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, rope=rope,
    )  # fmt: skip
    rotary = Transformer(config).cache_layout[0].rope
    wanted = frequencies(rope, 32)[0]
    assert len(rotary.inv_freq) == 16 and rotary.pairs[3] == (3, 19)
    assert all(
        math.isclose(a, b, rel_tol=1e-6) for a, b in zip(rotary.inv_freq, wanted, strict=True)
    )
