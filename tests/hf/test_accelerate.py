"""What accelerate promises of a model besides its tokens: gradients, attention weights, shared configs, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.hf_matrix import IS_OLD, longrope, tiny
from tokenizers import Tokenizer as WordLevelTokenizer
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from caramba_fast.hf import (
    CarambaCache,
    CarambaStaticCache,
    accelerate,
    attention,
    restore,
)
from caramba_fast.hf.capabilities import capabilities_of
from caramba_fast.hf.compat import CACHE
from caramba_fast.infer import Generator
from caramba_fast.ops.extend_attention import causal_attention
from caramba_fast.serve import Engine

IDS = torch.tensor([[5, 9, 17, 8, 21, 5], [3, 4, 4, 80, 11, 60]])
KINDS = ("fp32", "q8", "q4")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- gradients ---------------------------------------------------------------------------------


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_training_an_accelerated_model_gives_the_gradients_of_its_own_attention(
    family: str,
) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    expected = gradients(model, model(IDS, labels=IDS, use_cache=False).loss)
    accelerate(model, "q4")
    for options in ({"use_cache": False}, {}, {"past_key_values": CarambaCache(model, "q8")}):
        found = gradients(model, model(IDS, labels=IDS, **options).loss)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-3)


def caches(model: PreTrainedModel) -> Iterator[Any]:
    for kind in KINDS:
        yield CarambaCache(model, kind)
        yield CarambaCache(model, kind, prefill="stored")
        yield CarambaStaticCache(model, kind, max_cache_len=24)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj", ""])
def test_a_backward_pass_through_stored_keys_raises(trained: str) -> None:
    model = accelerate(tiny("llama"), "q8")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name and "layers.1" in name)
    for cache in caches(model):
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        out = model(IDS[:, :1], past_key_values=cache, labels=IDS[:, :1])
        with pytest.raises(RuntimeError, match="no gradient flows"):
            out.logits.sum().backward()


def test_a_pass_that_wants_no_gradient_does_not_raise() -> None:
    model = accelerate(tiny("llama").requires_grad_(False), "q8")
    cache = CarambaCache(model, "q8")
    for _ in range(2):
        assert not model(IDS, past_key_values=cache).logits.requires_grad


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("falcon", {}),
        ("llama", {"output_attentions": True}),
        ("llama", {"attention_mask": torch.zeros(1, 1, 1, IDS.shape[1] + 1)}),
    ],
)
def test_dequantized_keys_have_no_gradient_either(family: str, options: dict[str, Any]) -> None:
    model = accelerate(tiny(family), "q8")
    cache = CarambaCache(model, "q8")
    model(IDS[:1], past_key_values=cache)
    with pytest.raises(RuntimeError, match="no gradient flows"):
        model(IDS[:1, :1], past_key_values=cache, **options).logits.sum().backward()


def test_a_model_that_keeps_no_cache_is_said_to_need_none_of_ours() -> None:
    model = tiny("llama")
    model.generation_config.use_cache = False
    with pytest.warns(UserWarning, match="use_cache is False"):
        accelerate(model, "q8")


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "gemma3_text", "deepseek_v3"]
)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_long_prompts_give_what_eager_attention_gives(
    family: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    ids, seen = torch.randint(3, 90, (2, 70)), torch.ones(2, 70, dtype=torch.long)
    if padded:
        seen[1, :31] = 0
    expected = model(ids, attention_mask=seen).logits
    calls = []
    monkeypatch.setattr(
        attention,
        "causal_attention",
        lambda *args, **options: calls.append(1) or causal_attention(*args, **options),
    )
    accelerate(model, "q8")
    for options in ({}, {"past_key_values": CarambaCache(model, "q8")}, {"use_cache": False}):
        calls.clear()
        found = model(ids, attention_mask=seen, **options).logits
        torch.testing.assert_close(found[seen > 0], expected[seen > 0], atol=1e-3, rtol=1e-3)
        ours = isinstance(options.get("past_key_values"), CarambaCache)  # others' masks are tensors
        assert not ours or len(calls) == model.config.num_hidden_layers


# -- attention weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "mistral", "gemma3_text"]
)
@torch.no_grad()
def test_output_attentions_gives_what_eager_attention_gives(family: str) -> None:
    if IS_OLD and family in ("gpt2", "gpt_neox"):
        pytest.skip("attention is not told in this transformers: None, as with sdpa")
    model = tiny(family)
    model.set_attn_implementation("eager")
    options: dict[str, Any] = dict(
        max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    expected = [model(IDS, output_attentions=True).attentions]
    expected += model.generate(IDS, attention_mask=torch.ones_like(IDS), **options).attentions
    accelerate(model, "fp32")
    found = [model(IDS, output_attentions=True).attentions]
    found += model.generate(IDS, attention_mask=torch.ones_like(IDS), **options).attentions
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) == model.config.num_hidden_layers
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[..., -b.shape[-1] :], b, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_output_attentions_warns_once_and_a_static_cache_refuses() -> None:
    model = accelerate(tiny("llama"), "q8")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(IDS, output_attentions=True)
    assert sum("dequantized keys and values" in str(w.message) for w in told) == 1
    cache = CarambaStaticCache(model, "q8", max_cache_len=24)
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"output_attentions.*restore\(model\)"):
        model(IDS[:, :1], past_key_values=cache, output_attentions=True)


# -- configs that models share -----------------------------------------------------------------


def test_models_that_share_a_config_are_restored_one_by_one() -> None:
    first = tiny("llama")
    second = type(first)(first.config).eval()
    own = first.config._attn_implementation
    accelerate(first, "q8")
    accelerate(second, "q4")
    accelerate(first, "q4")
    restore(first)
    cache = CarambaCache(second, "q4")
    with torch.no_grad():
        for _ in range(3):
            second(IDS, past_key_values=cache)
    assert cache.dequantizations == 0
    restore(second)
    assert first.config._attn_implementation == own
    third = accelerate(copy.deepcopy(first), "q8")
    assert first.config._attn_implementation == own
    restore(third)
    assert third.config._attn_implementation == own


# -- what is refused, and what is told ---------------------------------------------------------


def test_what_packs_nothing_is_refused_and_left_as_it_is() -> None:
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("not in this transformers")
    config = transformers.DeepseekV4Config(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, q_lora_rank=16, o_lora_rank=16, o_groups=2,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, index_n_heads=2,
        index_head_dim=16, qk_rope_head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    own = model.config._attn_implementation
    for kind in ("fp32", "q8:plain", "q8"):
        with pytest.raises(TypeError, match="nothing could be packed"):
            accelerate(model, kind)
    assert model.config._attn_implementation == own and "_caramba_fast" not in vars(model)


def minimax() -> PreTrainedModel:
    """Half of its layers attend to blocks of tokens that an indexer selects."""
    if not hasattr(transformers, "MiniMaxM3VLTextConfig"):
        pytest.skip("not in this transformers")
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=2, num_experts_per_tok=1, dense_intermediate_size=32,
        shared_intermediate_size=32, rotary_dim=16, index_n_heads=2, index_head_dim=16, index_block_size=4,
        index_topk_blocks=2, index_local_blocks=1, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"], bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_layers_that_select_what_they_attend_to_are_refused() -> None:
    model = minimax()
    own = model.config._attn_implementation
    for make in (lambda: accelerate(model, "fp32"), lambda: CarambaCache(model, "q8")):
        with pytest.raises(TypeError, match=r"compress themselves \(MiniMaxM3VLSparseCacheLayer\)"):
            make()
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_attention_to_selected_tokens_alone_is_refused(name: str) -> None:
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="Linear attends to the tokens that an indexer selects"):
        attention.caramba_attention(
            nn.Linear(1, 1), q, k, k, None, **{name: torch.zeros(1, 1, 2, dtype=torch.long)}
        )


def test_an_assistant_with_another_tokenizer_has_a_head_without_weights_for_a_while() -> None:
    words = [f"w{i}" for i in range(93)]
    vocabularies = [["<unk>", *words], ["<unk>", *reversed(words), "x1", "x2", "x3"]]
    tokenizers = [
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=WordLevelTokenizer(models.WordLevel({w: i for i, w in enumerate(v)}, "<unk>")),
            unk_token="<unk>",
        )
        for v in vocabularies
    ]  # fmt: skip
    for tokenizer in tokenizers:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    target, assistant = (tiny("llama", vocab_size=len(v)) for v in vocabularies)
    for model in (target, assistant):
        accelerate(model, "q4")
    ids = tokenizers[0](" ".join(words[:20]), return_tensors="pt").input_ids
    options = {
        "max_new_tokens": 12,
        "tokenizer": tokenizers[0],
        "assistant_tokenizer": tokenizers[1],
    }
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    for do_sample in (False, True):
        found = target.generate(ids, assistant_model=assistant, do_sample=do_sample, **options)
        assert found.shape == plain.shape
        assert do_sample or torch.equal(found, plain)


class Wrapper(nn.Module):
    """As PEFT's models are."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model


@pytest.mark.parametrize(
    "wrap", [Wrapper, torch.compile, lambda model: Wrapper(torch.compile(model))]
)
def test_what_wraps_a_model_is_accelerated_inside(wrap: Any) -> None:
    model = tiny("llama")
    own = model.config._attn_implementation
    outer = wrap(model)
    assert accelerate(outer, "q8") is outer
    assert isinstance(
        model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True).past_key_values,
        CarambaCache,
    )
    settings = restore(outer)
    assert settings is not None and settings.name == "q8"
    assert model.config._attn_implementation == own and restore(model) is None


def test_a_generator_takes_the_model_inside_of_what_peft_makes() -> None:
    outer = Wrapper(model := tiny("llama"))
    given: dict[str, Any] = dict(max_new_tokens=3, eos_token_id=5)
    made = Generator(outer, cache="fp32", temperature=0.0, max_seq_len=64, pad_token_id=0, **given)
    stock = model.generate(IDS, **given, do_sample=False, pad_token_id=0)
    assert made.generate(IDS).tolist() == stock.tolist()
    outer.active_peft_config = SimpleNamespace(is_prompt_learning=True)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="its learned prompt is not in the model inside"):
        Generator(outer)


@pytest.mark.parametrize("build", [Generator, Engine])
def test_adapters_that_need_their_wrapper_are_refused_without_it(build: Any) -> None:
    outer = Wrapper(model := tiny("llama"))
    for kind in ("XLORA", "POLY"):
        config = SimpleNamespace(peft_type=SimpleNamespace(value=kind))
        outer.active_peft_config = config  # type: ignore[assignment]
        with pytest.raises(TypeError, match="needs the PEFT wrapper"):
            build(outer)
    # Activated LoRA is in the layers, which do nothing until the wrapper has looked for its tokens.
    model.peft_config = {"default": SimpleNamespace(alora_invocation_tokens=[5, 9])}
    with pytest.raises(TypeError, match="needs the PEFT wrapper"):
        build(model)


def test_a_shallow_copy_generates_after_its_model_was_restored() -> None:
    model = accelerate(tiny("llama"), "q8")
    copied = copy.copy(model)
    restore(model)
    found = copied.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    stock = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.tolist() == stock.tolist()


@torch.no_grad()
def test_a_model_that_was_compiled_before_reads_packed_afterwards() -> None:
    model = tiny("llama", num_hidden_layers=1)  # each layer breaks into many graphs
    compiled = torch.compile(model, backend="eager")
    before = compiled(IDS).logits
    accelerate(compiled, "q8")
    cache = CarambaCache(model, "q8")
    torch.testing.assert_close(
        compiled(IDS, past_key_values=cache).logits, before, atol=1e-4, rtol=1e-4
    )
    expected = model(IDS[:, :1], past_key_values=copy.deepcopy(cache)).logits
    assert cache.dequantizations == 0
    torch.testing.assert_close(
        compiled(IDS[:, :1], past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4
    )
    restore(compiled)
    torch.testing.assert_close(compiled(IDS).logits, before)


def test_what_is_no_model_is_refused_with_what_to_give() -> None:
    model = tiny("llama")
    with pytest.raises(TypeError, match=r"model\.module"):
        accelerate(nn.DataParallel(model))
    with pytest.raises(TypeError, match=r"give us the model inside, model\.model"):
        accelerate(SimpleNamespace(model=model, task="text-generation"))  # as a pipeline is
    with pytest.raises(
        TypeError,
        match=r"load the model first, AutoModelForCausalLM.from_pretrained\('some/name'\)",
    ):
        accelerate("some/name")
    for kind in KINDS:
        with pytest.raises(TypeError, match="meta device: load them first"):
            accelerate(tiny("llama").to("meta"), kind)
    offloaded = tiny("llama").to("meta")
    offloaded.get_input_embeddings()._hf_hook = object()  # as the package accelerate leaves it
    with pytest.raises(TypeError, match="its embeddings are offloaded: keep them on a device"):
        accelerate(offloaded, "q8")


def messages(model: PreTrainedModel, cache: Any, steps: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(steps):
            cache = model(IDS[:, :1], past_key_values=cache).past_key_values
    return [str(w.message) for w in told if issubclass(w.category, UserWarning)]


def test_slow_reads_are_told_once_with_what_helps() -> None:
    plain, theirs = tiny("llama"), tiny("falcon")
    [message] = messages(plain, CarambaCache(plain, "q8"))
    assert "accelerate(model)" in message and "dequantized" in message
    [message] = messages(theirs, CarambaCache(theirs, "q8"))
    assert (
        "accelerate" not in message
        and "attention interface" in message
        and "a stock cache is faster" in message
    )
    assert messages(theirs, CarambaCache(theirs, "q8")) == []  # once a model, not a cache
    model = accelerate(tiny("llama"), "q8")
    [message] = messages(model, None)
    assert f"{CACHE}=CarambaCache" in message
    assert messages(model, DynamicCache(config=model.config)) == []
    assert messages(accelerate(tiny("qwen2"), "q8"), CarambaCache(tiny("qwen2"), "q8")) == []
    latent = accelerate(tiny("deepseek_v3"), "q8")
    cache = CarambaCache(latent, "q8")
    told = messages(latent, cache)
    assert (cache.dequantizations > 0) == (not IS_OLD)  # before 5.1 it stores whole keys
    # and not that the cache is another one
    assert ["dequantized at every step" in message for message in told] == [True] * (not IS_OLD)
    [message] = messages(latent, None)
    assert f"{CACHE}=CarambaCache" in message


# -- RoPE that turns all keys otherwise beyond a length ------------------------------------------


@pytest.mark.skipif(
    transformers.__version__.startswith("5.0"),
    reason="this transformers goes on from the newest token alone there",
)
@pytest.mark.parametrize("length", [20, 28, 32, 40])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
)
def test_a_text_that_is_read_again_stays_in_our_cache(length: int, options: dict[str, Any]) -> None:
    """Below, across and beyond the 32 tokens at which Phi-3 gives its cache up; transformers takes a stock one then."""
    model, ids = longrope(32), torch.arange(3, 3 + length)[None]
    given = dict(max_new_tokens=8, do_sample=False, **options)
    expected = model.generate(ids, **given)
    accelerate(model, "fp32")
    found = model.generate(ids, return_dict_in_generate=True, **given)
    assert torch.equal(found.sequences, expected)
    assert isinstance(found.past_key_values, (CarambaCache, CarambaStaticCache))
    own = CarambaCache(model, "fp32")
    given.pop("cache_implementation", None)
    assert torch.equal(model.generate(ids, past_key_values=own, **given), expected)
    assert own.length == length + 7
    restore(model)
    assert torch.equal(model.generate(ids, **given), expected)
    assert "prepare_inputs_for_generation" not in vars(model)


# -- families with ways of their own -------------------------------------------------------------

SMALL = dict(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
OWN_WAYS: dict[str, dict[str, Any]] = {
    "GitConfig": dict(intermediate_size=96, vision_config=VISION),
    "Inkling2TextConfig": dict(
        intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, head_dim=16, sliding_window=8, unpadded_vocab_size=97,
    ),
    "MoshiConfig": dict(head_dim=16, sliding_window=8, ffn_dim=96),
}  # fmt: skip


def of_own_ways(name: str) -> PreTrainedModel:
    """A small random model; Moshi's is its decoder of text."""
    if not hasattr(transformers, name):
        pytest.skip("this transformers has no such model")
    if IS_OLD and name == "MoshiConfig":
        pytest.skip("with its own caches, too, this transformers differs from passes without one")
    config = getattr(transformers, name)(**SMALL, **OWN_WAYS[name])
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OWN_WAYS)
@torch.no_grad()
def test_logits_are_the_models_own_whatever_its_attention_asks(name: str, padded: bool) -> None:
    """GIT computes attention itself, Inkling 2 has sinks of each query, the masks of Moshi lack their window."""
    model = of_own_ways(name)
    ids = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : 9 if padded else 0] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    given: dict[str, Any] = {} if name == "GitConfig" else {"position_ids": places}

    def logits(cache: Any) -> Tensor:
        found = []
        for first, last in [(0, 30), (30, 34), *((i, i + 1) for i in range(34, 60))]:
            own = {key: value[:, first:last] for key, value in given.items()}
            seen = mask[:, :last]
            if name == "MoshiConfig" and first == 50:  # one that hides a token, so that it is built
                seen = seen.clone()
                seen[0, 45] = 0
            out = model(
                ids[:, first:last],
                attention_mask=seen,
                past_key_values=cache,
                use_cache=True,
                **own,
            )
            found.append(out.logits * mask[:, first:last, None])
        return torch.cat(found, dim=1)

    expected = logits(DynamicCache(config=model.config))
    accelerate(model, "fp32")
    for prefill in ("exact", "stored"):
        found = logits(CarambaCache(model, "fp32", prefill=prefill))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    tokens = dict(max_new_tokens=9, do_sample=False)
    ours = model.generate(ids[:, :30], attention_mask=mask[:, :30], **tokens)
    restore(model)
    assert (
        ours.tolist() == model.generate(ids[:, :30], attention_mask=mask[:, :30], **tokens).tolist()
    )


@torch.no_grad()
def test_output_attentions_beside_a_position_bias() -> None:
    model = of_own_ways("Inkling2TextConfig")
    expected = model(IDS, output_attentions=True).attentions
    accelerate(model, "fp32")
    for ours, theirs in zip(model(IDS, output_attentions=True).attentions, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_attention_that_always_gets_a_mask_keeps_its_own() -> None:
    """BigBird-Pegasus says that its self-attention is not causal, and leaves that to masks."""
    torch.manual_seed(3)
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96,
        max_position_embeddings=128, init_std=0.3, pad_token_id=0, is_decoder=True,
    )  # fmt: skip
    model = transformers.BigBirdPegasusForCausalLM(config).eval()
    ids = torch.arange(3, 43).view(2, 20)
    expected = model(ids, use_cache=False).logits
    accelerate(model, "fp32")
    for given in ({"use_cache": False}, {"past_key_values": CarambaCache(model, "fp32")}):
        torch.testing.assert_close(model(ids, **given).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["GPTJConfig", "BloomConfig", "LlamaConfig"])
@torch.no_grad()
def test_a_window_of_the_caches_alone_is_kept_by_attention_that_is_not_ours(name: str) -> None:
    """A stray setting: stock caches drop tokens that no mask hides."""
    config = getattr(transformers, name)(
        **SMALL | dict(rotary_dim=8, intermediate_size=96, sliding_window=4)
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))

    def logits(cache: Any) -> Tensor:
        parts = [(0, 3), (3, 4), (4, 9), *((i, i + 1) for i in range(9, 16))]
        found = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in parts]
        return torch.cat(found, dim=1)

    if IS_OLD and name == "BloomConfig":
        with pytest.raises(RuntimeError, match="must match the existing size"):
            logits(DynamicCache(config=model.config))
        return  # the stock cache cannot do it there
    expected = logits(DynamicCache(config=model.config))
    found = logits(CarambaCache(model, "fp32"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# -- keys and values that are too large --------------------------------------------------------


def with_large(part: str, layer: int) -> PreTrainedModel:
    """A model whose keys or values of a layer exceed the range of fp16, and whose tokens stay what they were."""
    model = tiny("llama")
    attention_layer = model.model.layers[layer].self_attn
    other = attention_layer.q_proj if part == "k" else attention_layer.o_proj
    with torch.no_grad():
        getattr(attention_layer, f"{part}_proj").weight.mul_(1e7)
        other.weight.div_(1e7)
    return model


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_too_large_for_a_cache_are_named(
    part: str, implementation: str | None
) -> None:
    options = dict(max_new_tokens=6, do_sample=False)
    for layer in (0, 1):
        model = with_large(part, layer)
        expected = model.generate(IDS, **options)
        options["cache_implementation"] = implementation
        name = "keys" if part == "k" else "values"
        for kind in ("fp16", "q8", "q4", "q8:plain", "q8/bf16"):
            for prefill in ("exact", "stored"):
                accelerate(model, kind, prefill=prefill)
                with pytest.raises(
                    ValueError, match=rf"layer {layer} has {name} of up to .*'bf16'"
                ):
                    model.generate(IDS, **options)
        for kind in ("fp32", "bf16"):
            accelerate(model, kind)
            assert torch.equal(model.generate(IDS, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", [CarambaCache, CarambaStaticCache])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_pass_with_too_large_values_leaves_no_tokens(kind: Any, tokens: int) -> None:
    model = accelerate(tiny("llama"), "q4")
    sizes = {} if kind is CarambaCache else {"max_cache_len": 128}
    cache, twin = kind(model, "q4", **sizes), kind(model, "q4", **sizes)
    for made in (cache, twin):
        model(IDS, past_key_values=made)
    weight, more = model.model.layers[1].self_attn.v_proj.weight, IDS[:, :1].repeat(1, tokens)
    weight.mul_(1e7)
    with pytest.raises(ValueError, match="layer 1 has values"):
        model(more, past_key_values=cache)
    weight.div_(1e7)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [6, 6]
    found, wanted = (model(more, past_key_values=made).logits for made in (cache, twin))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_padding_may_be_too_large() -> None:
    model = tiny("llama")
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, :3], mask[1, :3] = 7, 0
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0
        model.model.layers[0].input_layernorm.register_forward_hook(
            lambda _, given, out: torch.where((given[0] == 0).all(-1, keepdim=True), 1e9, out)
        )
    options = dict(attention_mask=mask, max_new_tokens=1, do_sample=False)
    expected = model.generate(ids, **options)
    assert torch.equal(accelerate(model, "fp16").generate(ids, **options), expected)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.0."),
    reason="early exit raises TypeError there, whatever the cache",
)
def test_drafts_of_the_first_layers_leave_the_whole_model_as_it_is() -> None:
    model = tiny("llama", num_hidden_layers=3)
    accelerate(model, "q4")
    ids = torch.arange(9)[None]
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(ids, **options)
    model = tiny("llama", num_hidden_layers=3)
    accelerate(model, "q4")
    stock = {CACHE: DynamicCache(config=model.config)}
    model.generate(ids, assistant_early_exit=1, **options, **stock)
    restore(model)
    assert list(capabilities_of(model).shapes) == [0, 1, 2]
    accelerate(model, "q4")
    assert torch.equal(model.generate(ids, **options), plain)


def test_a_depth_that_is_left_early_is_not_taken_for_the_whole_model() -> None:
    model = tiny("llama", num_hidden_layers=3)
    model.config.num_hidden_layers = 1
    few = capabilities_of(model)
    assert list(few.shapes) == [0]
    model.config.num_hidden_layers = 3
    whole = capabilities_of(model)
    assert (list(few.shapes), list(whole.shapes)) == ([0], [0, 1, 2])
    assert capabilities_of(model) is whole
