"""The engine over models of transformers: the tokens of stock ``generate``, request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.hf_matrix import DEQUANTIZED, PACKED, exists, tiny

from caramba_fast.models import demo_path, load_demo
from caramba_fast.serve import Engine

NEW = 8
#: Packed under ``generate``, and not served by an engine: why.
NOT_SERVED = {
    "llama4_text": "cannot be served by an Engine: its layers attend within chunks",
    "qwen3_next": "recurrent|linear|state",
    "falcon_h1": "recurrent|linear|state",
}


def prompts(vocabulary: int) -> list[list[int]]:
    """Of several lengths, longer than the windows of the small models, some beginning alike."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(4, vocabulary, (n,), generator=generator).tolist() for n in (1, 7, 30, 70, 90)
    ]
    return [*rows, rows[4][:64] + rows[1]]


def stock(model: Any, prompt: list[int]) -> list[int]:
    """The greedy tokens of the model itself."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", [name for name in PACKED.values() if exists(name)])
def test_families_get_the_tokens_of_stock_generate(family: str) -> None:
    model = tiny(family)
    if family in NOT_SERVED:
        with pytest.raises(TypeError, match=NOT_SERVED[family]):
            Engine(model)
        return
    serving = Engine(
        model, cache_kind="fp32", max_seq_len=128, max_batch_size=4, max_batch_tokens=48, lookup_tokens=3,
        ignore_eos=True,
    )  # fmt: skip
    given = prompts(min(model.config.get_text_config().vocab_size, 90))
    outputs = serving.generate_batch(given, max_new_tokens=NEW, temperature=0.0)
    assert [o.error for o in outputs] == [None] * len(given)
    assert [o.generated_tokens for o in outputs] == [stock(model, prompt) for prompt in given]
    assert serving.problems() == []


@pytest.mark.parametrize("family", [name for name in DEQUANTIZED.values() if exists(name)])
def test_models_whose_attention_is_their_own_are_refused(family: str) -> None:
    with pytest.raises(TypeError, match="cannot be served by an Engine"):
        Engine(tiny(family))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_with_the_longest_request_has_a_limit(kind: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10_000.0}
    if kind == "longrope":
        rope.update(
            short_factor=[1.0] * 8, long_factor=[3.0] * 8, original_max_position_embeddings=64
        )
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
        max_position_embeddings=64, initializer_range=0.3, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="64 or less is allowed"):
        Engine(model, max_seq_len=128)
    serving = Engine(model, cache_kind="fp32", max_seq_len=64, ignore_eos=True)
    given = prompts(97)[:3]
    outputs = serving.generate_batch(given, max_new_tokens=NEW, temperature=0.0)
    assert [o.generated_tokens for o in outputs] == [stock(model, prompt) for prompt in given]


def test_a_model_in_train_mode_is_refused_where_its_dropout_is_on() -> None:
    model = tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.2).train()
    with pytest.raises(ValueError, match=r"drops activations at random: model\.eval"):
        Engine(model, max_seq_len=128)
    Engine(model.eval(), max_seq_len=128, ignore_eos=True)
    Engine(tiny("llama").train(), max_seq_len=128, ignore_eos=True)


def test_the_model_is_as_it_was() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    engine = Engine(model, cache_kind="q4", max_seq_len=128, ignore_eos=True)
    engine.generate_batch([[5, 6, 7]], max_new_tokens=3)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_a_checkpoint_is_served_alike_natively_and_by_transformers(kind: str) -> None:
    """Code by code the caches agree, but for products that round differently: most tokens are the same."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        demo_path("gqa"), dtype=torch.float32
    )
    ours = load_demo("gqa")
    given = prompts(ours.vocab_size)[1:]
    found = [
        Engine(model, cache_kind=kind, max_seq_len=256, ignore_eos=True).generate_batch(
            given, max_new_tokens=NEW, temperature=0.0
        )
        for model in (theirs.eval(), ours)
    ]
    same = sum(a.generated_tokens == b.generated_tokens for a, b in zip(*found, strict=True))
    assert same >= len(given) - 1


def test_a_model_that_makes_a_mask_of_its_own_is_served() -> None:
    """BioGPT's has the tokens of the pass, whatever is cached."""
    from transformers import AutoModelForCausalLM, BioGptConfig

    config = BioGptConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    serving = Engine(model, cache_kind="fp32", max_seq_len=128, ignore_eos=True)
    outputs = serving.generate_batch(prompts(97), max_new_tokens=NEW, temperature=0.0)
    assert [o.generated_tokens for o in outputs] == [stock(model, p) for p in prompts(97)]


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (lambda found: found.flip(0), "a trial of it gave other logits"),
        (lambda found: found[:, 0, 0, 0], "a trial of it failed"),
    ],
)
def test_a_model_that_reads_requests_wrongly_side_by_side_is_refused(
    logits: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caramba_fast.hf import HuggingFaceModel

    own = HuggingFaceModel.forward_ragged
    monkeypatch.setattr(HuggingFaceModel, "forward_ragged", lambda *given: logits(own(*given)))
    half = torch.bfloat16
    for model in (tiny("llama"), tiny("llama").to(half), mixture(0).to(half)):
        with pytest.raises(TypeError, match=f"cannot be served by an Engine: {said}"):
            Engine(model, max_seq_len=128)


def mixture(seed: int) -> Any:
    """A random mixture of experts that are chosen by small differences."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=96,
        num_key_value_heads=2, num_local_experts=8, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(seed)
    return MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_rounding_that_changes_experts_is_not_taken_for_wrong_reads(
    seed: int, autocast: bool
) -> None:
    """Logits of a mixture in half precision differ by a third where another expert is chosen."""
    from caramba_fast.hf import HuggingFaceModel

    model = mixture(seed) if autocast else mixture(seed).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert HuggingFaceModel(model).cache_reads == "packed"
        Engine(model, max_seq_len=64)


@pytest.mark.parametrize("seed", range(3))
def test_wrong_reads_of_a_mixture_are_not_taken_for_rounding(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caramba_fast.hf import HuggingFaceModel, packed_trial

    class OneOff(packed_trial.RightPadded):
        @property
        def position_ids(self) -> torch.Tensor:  # type: ignore[override]
            found = super().position_ids.clone()
            found[:, -1] += 1
            return found

    monkeypatch.setattr(packed_trial, "RightPadded", OneOff)
    found = HuggingFaceModel(mixture(seed).to(torch.bfloat16)).cache_reads
    assert found.startswith("dense") and "other logits" in found
