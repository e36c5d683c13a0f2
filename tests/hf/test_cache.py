"""CarambaCache as a cache: cropped, moved, saved, grown, and refusing what it cannot do."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from support.hf_matrix import IS_OLD, PAD, exists, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Lfm2Config, PreTrainedModel

from caramba_fast import KVCacheKind, KVCacheTensorConfig
from caramba_fast.hf import (
    CarambaCache,
    CarambaStaticCache,
    accelerate,
    compat,
    growing_layer,
    register,
    restore,
)
from caramba_fast.hf.cache_state import load_stock, state_of_stock
from caramba_fast.hf.compat import CACHE

KINDS = ["fp32", "q8", "q4", "nf4:plain,sink_len=4,residual_len=8", "q8/q4:rotate"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    model = tiny("llama")
    model.set_attn_implementation(register())
    return model


@pytest.fixture(scope="module")
def gemma() -> PreTrainedModel:
    """A sliding layer and a full one."""
    model = tiny("gemma3_text")
    model.set_attn_implementation(register())
    return model


@torch.no_grad()
def fed(model: Any, cache: Any, tokens: Tensor, **options: Any) -> Tensor:
    """Logits (B, T, V) of ``tokens`` (B, T) behind what the cache holds."""
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, **options).logits


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


def crop(cache: Any, removed: int) -> None:
    cache.crop(-removed if compat.CROP_REMOVES or removed else cache.get_seq_length())


#: Families with layers that are not attention.
HYBRIDS = ["qwen3_next", "falcon_h1", "lfm2"]


def hybrid(family: str) -> PreTrainedModel:
    if IS_OLD:
        pytest.skip("it brings a cache of its own in this transformers")
    if family != "lfm2":
        model = tiny(family)
    else:
        config = Lfm2Config(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=PAD,
        )  # fmt: skip
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(register())
    return model


# -- shrinking and moving ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cropped_is_as_if_it_had_never_been(llama: Any, kind: str) -> None:
    cache, other = CarambaCache(llama, kind), CarambaCache(llama, kind)
    prompt, more = tokens(2, 20), tokens(2, 3, 1)
    fed(llama, cache, prompt)
    fed(llama, other, prompt)
    fed(llama, cache, tokens(2, 9, 2))
    crop(cache, 9)
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(
        fed(llama, cache, more), fed(llama, other, more), rtol=1e-4, atol=1e-4
    )


def test_crop_follows_transformers(llama: Any) -> None:
    cache, stock = CarambaCache(llama, "fp32"), DynamicCache(config=llama.config)
    for x in (cache, stock):
        fed(llama, x, tokens(1, 20))
    for count in (-3, 0, -20) if compat.CROP_REMOVES else (18, -3, 30, 0):
        for x in (cache, stock):
            x.crop(count)
        assert cache.get_seq_length() == stock.get_seq_length()
    if compat.CROP_REMOVES:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_moved_repeated_and_selected(llama: Any, kind: str, padded: bool) -> None:
    prompt, more = tokens(3, 20), tokens(3, 2, 1)
    mask = torch.ones(3, 22, dtype=torch.int64)
    if padded:
        mask[1, :6] = 0
        prompt[1, :6] = PAD

    def options(rows: Any, length: int) -> dict[str, Any]:
        return {"attention_mask": mask[rows, :length]} if padded else {}

    cache = CarambaCache(llama, kind)
    fed(llama, cache, prompt, **options([0, 1, 2], 20))
    expected = fed(llama, copy.deepcopy(cache), more, **options([0, 1, 2], 22))
    for move, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 1, 1])), [2, 1, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),  # no padded row is left
        (lambda c: c.batch_select_indices(torch.tensor([0, 2])), [0, 2]),
    ):
        moved = copy.deepcopy(cache)
        move(moved)
        found = fed(llama, moved, more[rows], **options(rows, 22))
        torch.testing.assert_close(found, expected[rows], rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 20


def test_reset_forgets_and_allows_another_batch(llama: Any) -> None:
    cache = CarambaCache(llama, "q8")
    first = fed(llama, cache, tokens(2, 70))
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(fed(llama, cache, tokens(2, 70)), first)
    cache.reset()
    assert fed(llama, cache, tokens(3, 7)).shape[0] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_it_is_saved_and_loaded(request: Any, family: str, kind: str) -> None:
    model = request.getfixturevalue(family)
    cache = CarambaCache(model, kind)
    fed(model, cache, tokens(2, 80))
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    loaded = CarambaCache(model, kind).load_state_dict(torch.load(file, weights_only=True))
    for step in range(3):
        a, b = (fed(model, x, tokens(2, 1, step)) for x in (cache, loaded))
        assert torch.equal(a, b)
    assert loaded.get_seq_length() == cache.get_seq_length() == 83


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_saved_with_their_stock_layers(family: str) -> None:
    model = hybrid(family)
    cache = CarambaCache(model, "q8")
    fed(model, cache, tokens(2, 20))
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loaded = CarambaCache(model, "q8").load_state_dict(state, "cpu").to("cpu")
    other = CarambaCache(model, "q8").load_state_dict(state)
    fed(
        model, other, tokens(2, 1, 9)
    )  # shares nothing with the state, nor with what is loaded from it
    for step in range(3):
        a, b = (fed(model, x, tokens(2, 1, step)) for x in (cache, loaded))
        assert torch.equal(a, b)
    empty = CarambaCache(model, "q8")
    assert CarambaCache(model, "q8").load_state_dict(empty.state_dict()).get_seq_length() == 0


def test_what_a_layer_of_another_kind_holds_is_named() -> None:
    cache = CarambaCache(hybrid("lfm2"), "q8")
    cache.layers[0].odd = object()
    for move in (lambda: cache.to("cpu"), cache.state_dict):
        with pytest.raises(ValueError, match=r"\.odd is a object; a layer of .* moved"):
            move()


class Late:
    """A stock layer that knows its size from its first token on, as those of transformers 5.12."""

    def __init__(self) -> None:
        self.is_ready = False

    def start(self, size: int) -> None:
        self.size, self.is_ready = size, True


def test_what_a_stock_layer_sets_late_is_restored_into_a_fresh_one() -> None:
    used, fresh = Late(), Late()
    used.start(4)
    load_stock(fresh, state_of_stock(used), None)
    assert vars(fresh) == vars(used)
    with pytest.raises(
        ValueError, match="a Late of is_ready; this cache has a Late of is_ready, size"
    ):
        load_stock(used, state_of_stock(Late()), None)
    other = state_of_stock(used)
    other["fields"]["odd"] = 1
    with pytest.raises(ValueError, match="a Late of is_ready, odd, size; this cache has"):
        load_stock(Late(), other, None)


def test_states_of_other_hybrids_are_refused() -> None:
    model = hybrid("qwen3_next")
    cache = CarambaCache(model, "q8")
    fed(model, cache, tokens(1, 5))
    state = cache.state_dict()
    packed, stock = state["layers"][1], state["layers"][0]
    with pytest.raises(ValueError, match="layer 1 of the state is a 'LinearAttentionLayer'"):
        CarambaCache(model, "q8").load_state_dict({**state, "layers": [stock, stock]})
    with pytest.raises(
        ValueError, match="packed layer of keys and values; this cache has a Linear"
    ):
        CarambaCache(model, "q8").load_state_dict({**state, "layers": [packed, packed]})
    for wrong in (None, 3):
        with pytest.raises(ValueError, match="the fields of a 'LinearAttentionLayer' are"):
            CarambaCache(model, "q8").load_state_dict(
                {**state, "layers": [{**stock, "fields": wrong}, packed]}
            )
    bad = copy.deepcopy(stock)
    bad["fields"]["conv_states"] = torch.zeros(1, 1).expand(2**20, 2**20)
    with pytest.raises(ValueError, match="conv_states is a tensor that is expanded"):
        CarambaCache(model, "q8").load_state_dict({**state, "layers": [bad, packed]})
    empty = CarambaCache(model, "q8").state_dict()
    used = copy.deepcopy(cache)
    used.load_state_dict(empty)
    assert not used.get_seq_length()
    cache.layers[0].more = lambda: None
    with pytest.raises(ValueError, match=r"LinearAttentionLayer.more is a function"):
        cache.state_dict()


def test_states_that_do_not_fit_are_refused(llama: Any, gemma: Any) -> None:
    cache = CarambaCache(llama, "q8")
    fed(llama, cache, tokens(1, 5))
    state = cache.state_dict()
    with pytest.raises(ValueError, match="stored as"):
        CarambaCache(llama, "q4").load_state_dict(state)
    with pytest.raises(ValueError, match="format"):
        CarambaCache(llama, "q8").load_state_dict({})
    with pytest.raises(ValueError, match="2 layers"):
        CarambaCache(tiny("llama", num_hidden_layers=1), "q8").load_state_dict(state)


CODE = torch.zeros(1, 1, 1, 1, dtype=torch.int8)
LIES: dict[str, Any] = {
    "format": ("format", 3),
    "layers": ("layers", {}),
    "a layer": ("layers", 0, []),
    "leftpad": ("leftpad", torch.tensor([0.5])),
    "rows of leftpad": ("leftpad", torch.zeros(7, dtype=torch.int32)),
    "dtype": ("layers", 1, "dtype", "Tensor"),
    "dropped": ("layers", 1, "dropped", -1),
    "store": ("layers", 1, "store", None),
    "rows": ("layers", 1, "store", "batch_size", 10**9),
    "heads": ("layers", 1, "store", "n_kv_heads", 10**9),
    "head_dim": ("layers", 1, "store", "streams", "v", "head_dim", 10**9),
    "codes": ("layers", 1, "store", "streams", "k", "codes", None),
    "lengths": ("layers", 1, "store", "lengths", [10**8]),
    "more": ("layers", 1, "more", 1),
    "lengths as a tuple": ("layers", 1, "store", "lengths", (7,)),
    "leftpad without values": ("leftpad", torch.zeros(1, dtype=torch.int32, device="meta")),
    "leftpad of two dimensions": ("leftpad", torch.zeros(1, 1, dtype=torch.int32)),
    "tokens of a layer": ("layers", 1, "dropped", 7),
    "codes without memory": (
        "layers", 1, "store", "streams", "k", "codes", CODE.expand(1, 4, 2**22, 9),
    ),
    "codes without values": (
        "layers", 0, "store", "streams", "k", "codes", torch.zeros(1, 2, 20, 16, dtype=torch.int8, device="meta"),
    ),
    "nested codes": (
        "layers", 1, "store", "streams", "v", "codes", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ),
}  # fmt: skip


def test_a_decoder_with_fewer_layers_than_its_config_says_has_a_state() -> None:
    """As that of distilled Bart models, whose config counts the layers of an encoder."""
    settings = dict(
        d_model=32, vocab_size=96, encoder_layers=3, decoder_layers=2, max_position_embeddings=64
    )
    config = transformers.BartConfig(
        **settings, decoder_attention_heads=2, decoder_ffn_dim=32, is_decoder=True, is_encoder_decoder=False
    )  # fmt: skip
    model = transformers.BartForCausalLM(config).eval()
    cache, other = CarambaCache(model, "q8"), CarambaCache(model, "q8")
    fed(model, cache, tokens(1, 20))
    other.load_state_dict(cache.state_dict())
    after = tokens(1, 3, 2)
    assert torch.equal(fed(model, other, after), fed(model, cache, after))


def test_a_state_has_to_say_where_rows_start(llama: Any) -> None:
    cache = CarambaCache(llama, "q8")
    fed(llama, cache, tokens(1, 5))
    state = cache.state_dict()
    del state["leftpad"]
    with pytest.raises(ValueError, match="the state lacks 'leftpad'"):
        CarambaCache(llama, "q8").load_state_dict(state)


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_lies_is_refused_and_changes_nothing(llama: Any, lie: str) -> None:
    cache = CarambaCache(llama, "q8")
    fed(llama, cache, tokens(1, 20))
    state = copy.deepcopy(cache.state_dict())
    *path, last, value = LIES[lie]
    place: Any = state
    for key in path:
        place = place[key]
    place[last] = value
    other = CarambaCache(llama, "q8")
    fed(llama, other, tokens(1, 9, 1))
    kept = copy.deepcopy(other)
    with pytest.raises(ValueError, match=r"(?i)state"):
        other.load_state_dict(state)
    after = tokens(1, 3, 2)
    assert torch.equal(fed(llama, other, after), fed(llama, kept, after))


# -- growing and windows -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q8", "q4", "fp32"])
def test_it_grows_as_if_it_had_been_large_from_the_start(llama: Any, kind: str) -> None:
    small, large = CarambaCache(llama, kind), CarambaCache(llama, kind, max_seq_len=900)
    small.reserve(1)
    for step, count in enumerate([70, 1, 40, 1, 300, 1]):
        a, b = (fed(llama, x, tokens(1, count, step)) for x in (small, large))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert small.layers[0].store.max_seq_len < 900


def test_a_state_longer_than_max_seq_len_is_refused(llama: Any) -> None:
    long, short = CarambaCache(llama, "q8"), CarambaCache(llama, "q8", max_seq_len=20)
    llama(torch.arange(30)[None] + 1, **{CACHE: long})
    with pytest.raises(ValueError, match=r"rows of 30 tokens.*max_seq_len=20"):
        short.load_state_dict(long.state_dict())
    assert short.get_seq_length() == 0


def test_more_than_max_seq_len_is_refused_before_anything_is_written(llama: Any) -> None:
    cache = CarambaCache(llama, "q8", max_seq_len=30)
    fed(llama, cache, tokens(1, 28, 0))
    before = cache.state_dict()
    with pytest.raises(ValueError, match=r"rows of 31 tokens.*max_seq_len=30"):
        fed(llama, cache, tokens(1, 3, 1))
    with pytest.raises(ValueError, match="max_seq_len=30"):
        llama.generate(tokens(1, 40, 2), max_new_tokens=16, past_key_values=cache)
    after = cache.state_dict()
    for a, b in zip(before["layers"], after["layers"], strict=True):
        assert torch.equal(a["store"]["streams"]["k"]["codes"], b["store"]["streams"]["k"]["codes"])
    fed(llama, cache, tokens(1, 2, 1))
    assert cache.get_seq_length() == 30 and cache.max_seq_len == 30
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        CarambaCache(llama, "q8", max_seq_len=0)


@pytest.mark.parametrize("kind", ["fp32", "q8:plain", "q4:plain", "nf4:plain,residual_len=4"])
def test_a_window_keeps_what_it_needs(gemma: Any, kind: str, monkeypatch: Any) -> None:
    def logits() -> tuple[Tensor, CarambaCache]:
        cache, found = CarambaCache(gemma, kind), []
        for step, count in enumerate([90, 1, 20, *[1] * 30]):
            found.append(fed(gemma, cache, tokens(2, count, step))[:, -1])
        return torch.stack(found), cache

    whole, large = logits()
    assert large.layers[0].dropped == 0
    monkeypatch.setattr(growing_layer, "SLACK", 8)
    found, cache = logits()
    sliding = cache.layers[0]
    assert sliding.dropped > 0 and sliding.store.pos < 40
    assert sliding.nbytes < 0.7 * large.layers[0].nbytes
    assert cache.get_seq_length() == 141
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=2e-3)
    with pytest.raises(RuntimeError, match="sliding window"):
        crop(cache, 40)


def test_a_crop_that_a_layer_refuses_crops_none() -> None:
    model = tiny("gemma3_text", layer_types=["full_attention", "sliding_attention"])
    model.set_attn_implementation(register())
    cache, ids = CarambaCache(model, "fp32"), tokens(1, 500)
    for part in ids.split(100, dim=1):
        fed(model, cache, part)
    assert cache.layers[1].dropped
    with pytest.raises(RuntimeError, match=r"400 tokens.*sliding window of layer 1"):
        crop(cache, 400)
    assert [layer.length for layer in cache.layers] == [500, 500]
    crop(cache, 20)
    assert [layer.length for layer in cache.layers] == [480, 480]


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_of_a_model_with_fewer_layers_is_refused_before_anything_is_written(
    static: bool,
) -> None:
    small, large = (tiny("llama", num_hidden_layers=n) for n in (2, 3))
    for model in (small, large):
        model.set_attn_implementation(register())
    cache = (
        CarambaStaticCache(small, "q8", max_cache_len=32) if static else CarambaCache(small, "q8")
    )
    other = copy.deepcopy(small)  # as deep, so its passes are served
    fed(other, cache, tokens(1, 5))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM, of 2 layers, does not serve .* of 3"
        ):
            fed(large, cache, tokens(1, 2, 1))
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [5, 5]


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_that_are_not_attention_are_not_written_by_a_refused_pass(family: str) -> None:
    model = hybrid(family)
    cache, more = CarambaCache(model, "fp32", max_seq_len=12), tokens(2, 2, 1)
    fed(model, cache, tokens(2, 10))
    expected = fed(model, copy.deepcopy(cache), more)
    with pytest.raises(ValueError, match=r"rows of 14 tokens.*max_seq_len=12"):
        fed(model, cache, tokens(2, 4))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"the cache holds 2 rows, and {rows} came"):
            fed(model, cache, tokens(rows, 2))
    assert torch.equal(fed(model, cache, more), expected)


def test_padding_between_tokens_is_right_through_tensors(llama: Any) -> None:
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 5:8] = 0
    caches = [CarambaCache(llama, "fp32", prefill="stored"), DynamicCache(config=llama.config)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = (fed(llama, cache, ids, attention_mask=mask) for cache in caches)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert caches[0].dequantizations > 0


# -- layers that share -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q4", "nf4:plain,residual_len=8,tail_slack=4"])
@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_shared_layers_attend_to_long_chunks_packed(family: str, kind: str) -> None:
    """A chunk longer than a tail's slack, which both the layer and those that share it read row by row."""
    if not exists(family):
        pytest.skip("not in this transformers")
    model = tiny(family, initializer_range=0.05)
    model.set_attn_implementation(register())
    chunk, prompt = tokens(2, 60, 1), tokens(2, 20)
    whole, single = CarambaCache(model, kind), CarambaCache(model, kind)
    for cache in (whole, single):
        fed(model, cache, prompt)
    at_once = fed(model, whole, chunk)
    one_by_one = torch.cat([fed(model, single, x) for x in chunk.split(1, dim=1)], dim=1)
    assert whole.dequantizations == single.dequantizations == 0
    assert float((at_once - one_by_one).norm() / one_by_one.norm()) < 0.02
    after, wanted = (fed(model, cache, tokens(2, 1, 2)) for cache in (whole, single))
    assert float((after - wanted).norm() / wanted.norm()) < 0.02


# -- accuracy ----------------------------------------------------------------------------------

#: Relative L2 of the logits of decode steps, largest seen over the families times about two.
BOUNDS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 0.03, "q8": 0.03}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gpt_neox"])
def test_logits_stay_within_bounds(family: str, kind: str) -> None:
    model = tiny(family, initializer_range=0.05)
    stock = DynamicCache(config=model.config)
    steps = [tokens(2, 24), *(tokens(2, 1, i) for i in range(6))]
    expected = [fed(model, stock, step)[:, -1] for step in steps]
    model.set_attn_implementation(register())
    cache = CarambaCache(model, kind)
    for step, wanted in zip(steps, expected, strict=True):
        found = fed(model, cache, step)[:, -1]
        assert float((found - wanted).norm() / wanted.norm()) < BOUNDS[kind]
    assert cache.dequantizations == 0


@pytest.mark.parametrize("kind", ["bf16", "q8", "q4"])
def test_half_precision_models(kind: str) -> None:
    model = tiny("llama", initializer_range=0.05).to(torch.bfloat16)
    stock, ours = DynamicCache(config=model.config), CarambaCache(model, kind)
    steps = [tokens(2, 24), *(tokens(2, 1, i) for i in range(4))]
    expected = [fed(model, stock, step)[:, -1].float() for step in steps]
    model.set_attn_implementation(register())
    for step, wanted in zip(steps, expected, strict=True):
        found = fed(model, ours, step)[:, -1].float()
        assert float((found - wanted).norm() / wanted.norm()) < (0.25 if kind == "q4" else 0.05)
    assert ours.dequantizations == 0


# -- accelerate and restore --------------------------------------------------------------------


def test_restore_puts_everything_back() -> None:
    model = tiny("gemma3_text")
    before = model.config._attn_implementation
    expected = model.generate(tokens(1, 9), max_new_tokens=6, do_sample=False)
    for kind in ("q8", "q4", "fp32"):
        assert accelerate(model, kind) is model
    found = model.generate(tokens(1, 9), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, expected)
    restore(model)
    restore(model)
    assert model.config._attn_implementation == before
    assert not any(name.startswith("_caramba") for name in vars(model))
    assert "_prepare_cache_for_generation" not in vars(model)
    out = model.generate(
        tokens(1, 9), max_new_tokens=6, do_sample=False, return_dict_in_generate=True
    )
    assert type(out.past_key_values) is DynamicCache


def test_a_failed_accelerate_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    before = dict(vars(model)), model.config._attn_implementation
    for cache, options in (
        ("q5", {}),
        ("q4", {"residual": 3}),
        ({"k": "q8"}, {}),
        ("q4/q4/q8", {}),
    ):
        with pytest.raises(ValueError):
            accelerate(model, cache, **options)
        assert (dict(vars(model)), model.config._attn_implementation) == before
    accelerate(model, "q8")
    with pytest.raises(ValueError, match="q5"):
        accelerate(model, "q5")
    out = model.generate(tokens(1, 5), max_new_tokens=2, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].store.k.config.kind.value == "q8_channel"


def test_a_copy_is_accelerated_too() -> None:
    model = accelerate(tiny("llama"), "fp32")
    twin = copy.deepcopy(model)
    restore(model)
    out = twin.generate(tokens(1, 5), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, CarambaCache)
    restore(twin)
    assert twin.config._attn_implementation == model.config._attn_implementation


@pytest.mark.parametrize(
    "cache",
    [
        "fp16",
        KVCacheKind.Q4_0,
        "q8/q4",
        {"k": "q8", "v": "q4"},
        {"k": KVCacheKind.NF4, "v": "bf16"},
    ],
)
def test_every_way_to_name_a_cache(cache: Any) -> None:
    model = accelerate(tiny("llama"), cache, residual_len=8)
    out = model.generate(tokens(1, 70), max_new_tokens=4, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].store.residual_len == 8
    assert out.past_key_values.dequantizations == 0


def test_whole_configs() -> None:
    k, v = KVCacheTensorConfig(kind="q8"), KVCacheTensorConfig(kind="q4")
    cache = CarambaCache(tiny("llama"), {"k": k, "v": v})
    assert (cache.common.settings.k, cache.common.settings.v) == (k, v)


def test_auto_takes_what_the_policy_takes() -> None:
    model = tiny("llama", initializer_range=0.05)
    accelerate(
        model, "auto", max_seq_len=128, cache_auto_candidates=("q8", "q4"), cache_auto_benchmark=False,
        calibration_ids=tokens(4, 96),
    )  # fmt: skip
    out = model.generate(tokens(1, 9), max_new_tokens=3, return_dict_in_generate=True)
    assert out.past_key_values.common.settings.name in ("q8_0", "q4_0")
    with pytest.raises(ValueError, match="only of use with cache='auto'"):
        accelerate(model, "q4", cache_budget_mb=4)


def test_offloading_keeps_one_layer_at_the_model() -> None:
    model = tiny("llama")
    expected = model.generate(tokens(1, 9), max_new_tokens=6, do_sample=False)
    accelerate(model, "fp32")
    out = model.generate(
        tokens(1, 9), max_new_tokens=6, do_sample=False, cache_implementation="offloaded",
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)
    assert out.past_key_values.offloads
    assert out.past_key_values.to("cpu") is out.past_key_values


def test_a_failure_half_way_leaves_the_settings_before(monkeypatch: Any) -> None:
    from caramba_fast.hf import integration

    model = accelerate(tiny("llama"), "q8", residual_len=8)
    before = vars(model)["_caramba_fast"]

    def fails_once(_: Any) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(integration, "_use_our_attention", fails_once)
    with pytest.raises(ZeroDivisionError):
        accelerate(model, "q4")
    assert vars(model)["_caramba_fast"] == before
    restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_both_models_of_assisted_generation() -> None:
    model, assistant = tiny("llama"), tiny("llama", num_hidden_layers=1)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(tokens(1, 9), **options)
    accelerate(model, "fp32")
    accelerate(assistant, "fp32")
    assert torch.equal(model.generate(tokens(1, 9), assistant_model=assistant, **options), expected)


# -- bad input ---------------------------------------------------------------------------------


def test_a_batch_that_changes_size(llama: Any) -> None:
    cache = CarambaCache(llama, "q8")
    fed(llama, cache, tokens(2, 5))
    with pytest.raises(ValueError, match="holds 2 rows, and 3 came"):
        fed(llama, cache, tokens(3, 1))
    assert cache.get_seq_length() == 5


def test_a_batch_that_changes_size_between_turns() -> None:
    model = accelerate(tiny("llama"), "q8")
    options: dict[str, Any] = dict(max_new_tokens=3, return_dict_in_generate=True)
    first = model.generate(tokens(2, 5), **options)
    cache, length = first.past_key_values, first.past_key_values.get_seq_length()
    more = torch.cat((first.sequences, tokens(2, 4)), dim=1)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM: .*2 rows, and 3 came; start a new cache"
    ):
        model.generate(more[[0, 1, 1]], past_key_values=cache, **options)
    assert cache.get_seq_length() == length
    cache.batch_select_indices(torch.tensor([0, 1, 1]))  # what the message says to do
    out = model.generate(more[[0, 1, 1]], past_key_values=cache, **options)
    assert torch.equal(out.sequences[1], out.sequences[2])


def test_models_that_cannot_be_served() -> None:
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=97)
    )
    models: list[tuple[Any, str]] = [(t5, "encoder-decoder")]
    if not IS_OLD:  # there it looks for CUDA kernels
        config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=97)
        models.append((MambaForCausalLM(config), "past_key_values|recurrent"))
    for model, reason in models:
        before = dict(vars(model)), model.config._attn_implementation
        with pytest.raises(TypeError, match=f"{type(model).__name__} cannot be served.*({reason})"):
            accelerate(model)
        assert (dict(vars(model)), model.config._attn_implementation) == before
    with pytest.raises(TypeError, match="PreTrainedModel"):
        accelerate(torch.nn.Linear(2, 2))  # type: ignore[type-var]


def test_without_transformers_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import caramba_fast; caramba_fast.accelerate"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: caramba_fast.hf needs transformers" in run.stderr
    assert "pip install 'transformers>=4.57'" in run.stderr


def test_old_versions_are_refused() -> None:
    compat.check_version("4.57.0.dev0")
    for old in ("4.56.2", "3.0"):
        with pytest.raises(ImportError, match=rf"needs transformers >= 4.57, found {old}"):
            compat.check_version(old)


# -- the demo model, against the native path ---------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("kind", ["fp16", "q8", "q4", "nf4", "q8/q4", "q4:plain"])
def test_the_demo_model_loses_what_it_loses_natively(kind: str, prefill: Any) -> None:
    """ΔNLL of a cache follows from its logits: those of both paths are the same to rounding."""
    from transformers import AutoModelForCausalLM

    from caramba_fast import ModelKVCache, load_demo
    from caramba_fast.config import cache_configs
    from caramba_fast.models import demo_path

    native = load_demo()
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    accelerate(model, kind, prefill=prefill)
    ids = torch.arange(3, 163).view(1, -1) * 7 % 1000
    store = ModelKVCache(native.cache_layout, 1, 256, prefill=prefill, **cache_configs(kind))
    cache = CarambaCache(model, kind, prefill=prefill)
    losses = []
    for forward in (lambda x: native(x, store), lambda x: fed(model, cache, x)):
        logits = [forward(ids[:, :120])[:, -1]]
        logits += [forward(ids[:, i : i + 1])[:, -1] for i in range(120, 159)]
        nll = torch.nn.functional.cross_entropy(torch.cat(logits), ids[0, 120:])
        losses.append(float(nll))
    assert abs(losses[0] - losses[1]) < 2e-3
    assert cache.dequantizations == 0


def test_a_compiled_generate() -> None:
    """What `generate` does by itself on a GPU, here with a backend that needs no compiler."""
    from transformers import CompileConfig

    torch._dynamo.reset()  # of one function it compiles 8 forms at most, whichever test asked for them
    model = tiny("llama")
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)
    expected = model.generate(tokens(1, 9), **options)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    accelerate(model, "fp32")
    found = model.generate(
        tokens(1, 9), cache_implementation="static", compile_config=config, **options
    )
    assert torch.equal(found, expected)


def test_heads_come_from_the_tensors() -> None:
    """As under tensor parallelism, where a process has some of the heads the config names."""
    cache = CarambaCache(tiny("llama"), "q4")
    k, v = torch.randn(2, 1, 1, 70, 16)
    cache.update(k, v, 0)
    assert cache.layers[0].store.n_kv_heads == 1
