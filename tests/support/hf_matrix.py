"""The support matrix of ``accelerate``: families × features of ``generate``, each run with the stock cache and ours.

Used by the tests; ``python tests/support/hf_matrix.py`` writes the results into docs/huggingface.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from caramba_fast.hf import CarambaCache, accelerate, restore
from caramba_fast.infer import Generator

VOCABULARY, PAD, STEPS = 97, 0, 10


SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    initializer_range=0.3,
)


GROUPED = {**SMALL, "num_key_value_heads": 2}


NARROW = {**GROUPED, "head_dim": 16}


WINDOW = {**NARROW, "sliding_window": 8}


MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


GPT = dict(n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)


LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16)


#: Family -> config class and the settings that make it small.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", NARROW),
    "mistral": ("MistralConfig", WINDOW),
    "gpt2": ("GPT2Config", GPT),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "opt": (
        "OPTConfig",
        dict(
            hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=64, init_std=0.3,
        ),
    ),
    "phi3": ("Phi3Config", GROUPED),
    "gemma2": ("Gemma2Config", {**WINDOW, "tie_word_embeddings": False}),
    "gemma3_text": ("Gemma3TextConfig", {**MIXED, "tie_word_embeddings": False}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "bloom": ("BloomConfig", dict(hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3)),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "cohere": ("CohereConfig", GROUPED),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**SMALL, **LATENT, "num_key_value_heads": 4, "v_head_dim": 16, "first_k_dense_replace": 2},
    ),
}  # fmt: skip


ROWS = [list(range(3, 16)), [40, 41, 9, 9], [77, 5, 3, 22, 61, 30, 8]]


FOLLOWING = [[50, 51], [7], [20, 21, 22]]


def new_model(family: str, **changes: Any) -> PreTrainedModel:
    name, settings = FAMILIES[family]
    ids = dict(bos_token_id=1, eos_token_id=None, pad_token_id=PAD)
    config = getattr(transformers, name)(vocab_size=VOCABULARY, **{**settings, **ids, **changes})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id = PAD
    return model


def stock(model: PreTrainedModel, rows: Sequence[Sequence[int]], steps: int = STEPS) -> list[Any]:
    """Greedy tokens of `model.generate`, row by row."""
    found = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(
            ids, max_new_tokens=steps, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        found.append(out[0, len(row) :].tolist())
    return found


def greedy(model: Any, **settings: Any) -> Generator:
    defaults = dict(temperature=0.0, cache_kind="fp32", max_new_tokens=STEPS, max_seq_len=128)
    return Generator(model, **{**defaults, **settings})


def new_tokens(out: Any, count: int = STEPS) -> list[list[int]]:
    return out[:, -count:].tolist()


#: Families whose packed cache is read directly: name in the documentation, key of `FAMILIES`.
PACKED = {
    "Llama": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Mistral (window)": "mistral",
    "GPT-NeoX": "gpt_neox",
    "GPT-2": "gpt2",
    "GPT-J": "gptj",
    "OPT": "opt",
    "Phi-3": "phi3",
    "Gemma 2": "gemma2",
    "Gemma 3 (hybrid)": "gemma3_text",
    "Gemma 3n (shared layers)": "gemma3n_text",
    "Gemma 4 (two head_dims)": "gemma4_text",
    "MiMo-V2-Flash (V narrower than K)": "mimo_v2_flash",
    "gpt-oss (sinks)": "gpt_oss",
    "Cohere2": "cohere2",
    "OLMo 2": "olmo2",
    "SmolLM3": "smollm3",
    "StableLM": "stablelm",
    "Llama 4 (chunks)": "llama4_text",
    "Qwen3-Next (linear)": "qwen3_next",
    "Falcon-H1 (both in a layer)": "falcon_h1",
}
#: Families with correct results whose cache is dequantized at every step, with a warning.
DEQUANTIZED = {
    "DeepSeek-V3 (MLA)": "deepseek_v3",
    "Bloom": "bloom",
    "Falcon": "falcon",
}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**NARROW, **EXPERTS}),
    "cohere2": ("Cohere2Config", {**MIXED, **UNTIED}),
    "olmo2": ("Olmo2Config", GROUPED),
    "smollm3": ("SmolLM3Config", {**GROUPED, "no_rope_layers": [1, 0], **UNTIED}),
    "stablelm": ("StableLmConfig", {**GROUPED, "partial_rotary_factor": 0.5}),
    "falcon": (
        "FalconConfig",
        dict(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3,
            max_position_embeddings=256, new_decoder_architecture=False, multi_query=True,
        ),
    ),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            **NARROW, "num_hidden_layers": 4, "sliding_window": 8, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "altup_num_inputs": 2,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
            "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **NARROW, **UNTIED, "num_hidden_layers": 4, "sliding_window": 8, "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **MIXED, "head_dim": 32, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **NARROW, **UNTIED, "intermediate_size_mlp": 96, "num_local_experts": 2,
            "attention_chunk_size": 8, "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **NARROW, **UNTIED, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
            "mamba_d_state": 16, "mamba_n_groups": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **NARROW, **EXPERTS, **UNTIED, "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip
#: In transformers 4.57 and 5.0: models not yet on the attention interface (or with masks of their own), one with its
#: own cache, and one that expanded its latents before it stored them.
IS_OLD = parse(transformers.__version__) < parse("5.1")
OLD_DEQUANTIZED, OLD_PACKED = ("gptj", "opt", "stablelm"), ("deepseek_v3",)
OLD_REFUSED = ("qwen3_next", "falcon_h1")
#: Features that a family's stock code cannot run.
STOCK_CANNOT: dict[str, tuple[str, ...]] = {
    "qwen3_next": ("prompt lookup", "assistant model"),
    "falcon_h1": ("prompt lookup", "assistant model", "inputs_embeds"),
}
#: Feature with the expected tokens of one that the stock code cannot run.
SAME_AS = {
    "prompt lookup": "greedy",
    "assistant model": "greedy",
    "prefill chunks": "left padding",
}
#: ``sdpa`` has no softcap: the stock model computes it eagerly.
STOCK_ATTENTION = {"gemma2": "eager"}
#: A token id that never occurs; transformers 4.57 and 5.0 need an end of sequence for prompt lookup.
NEVER = 10_000
NEW = 9
ROW = [5, 9, 17, 8, 21, 5, 9, 17, 8, 33, 40, 5, 9]
SHORT = [77, 5, 3, 22, 61, 30]


def served(family: str) -> str:
    """How this transformers serves a family: "packed", "dequantized" or "refused"."""
    if IS_OLD and family in OLD_REFUSED:
        return "refused"
    if family in PACKED.values():
        return "dequantized" if IS_OLD and family in OLD_DEQUANTIZED else "packed"
    return "packed" if IS_OLD and family in OLD_PACKED else "dequantized"


def exists(family: str) -> bool:
    return hasattr(transformers, {**FAMILIES, **MORE}[family][0])


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A random model with logits far apart."""
    name, settings = {**FAMILIES, **MORE}[family]
    ids = dict(bos_token_id=1, eos_token_id=None, pad_token_id=PAD)
    given = {"vocab_size": VOCABULARY, **settings, **ids, **changes}
    config = getattr(transformers, name)(**given)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=STOCK_ATTENTION.get(family)
    ).eval()
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = NEVER
    return model


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def _ids() -> Tensor:
    return torch.tensor([ROW])


def _padded() -> dict[str, Tensor]:
    lead = len(ROW) - len(SHORT)
    ids = torch.tensor([ROW, [PAD] * lead + SHORT])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(len(ROW)) >= torch.tensor([[0], [lead]])).long(),
    }


def _run(model: PreTrainedModel, ids: Tensor | None = None, **options: Any) -> list[Any]:
    settings = dict(max_new_tokens=NEW, do_sample=False)
    given = {} if ids is None else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model.generate(**{**given, **settings, **options}).tolist()


def _sampled(model: PreTrainedModel) -> Any:
    torch.manual_seed(11)
    return _run(model, _ids(), do_sample=True, top_k=5, temperature=0.7, num_return_sequences=3)


def _assisted(model: PreTrainedModel) -> Any:
    assistant = tiny("llama", num_hidden_layers=1)
    return _run(model, _ids(), assistant_model=assistant)


def _two_turns(model: PreTrainedModel, **batch: Tensor) -> Any:
    batch = batch or {
        "input_ids": _ids(),
        "attention_mask": torch.ones(1, len(ROW), dtype=torch.int64),
    }
    first = model.generate(
        **batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    rows = len(first.sequences)
    ids = torch.cat((first.sequences, torch.tensor([[50, 51, 52]] * rows)), dim=1)
    mask = torch.cat((batch["attention_mask"], torch.ones(rows, NEW + 3, dtype=torch.int64)), dim=1)
    return _run(model, input_ids=ids, attention_mask=mask, past_key_values=first.past_key_values)


def _streamed(model: PreTrainedModel) -> Any:
    streamer = Kept()
    return [_run(model, _ids(), streamer=streamer), streamer.tokens]


def _embedded(model: PreTrainedModel) -> Any:
    embeddings: Any = model.get_input_embeddings()
    return _run(model, inputs_embeds=embeddings(_ids()).detach())


#: The features by their name in the documentation.
FEATURES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "greedy": lambda m: _run(m, _ids()),
    "sampling, 3 sequences": _sampled,
    "left padding": lambda m: _run(m, **_padded()),
    "beams": lambda m: _run(m, _ids(), num_beams=3, num_return_sequences=2),
    "beams, left padding": lambda m: _run(m, **_padded(), num_beams=2),
    "prompt lookup": lambda m: _run(m, _ids(), prompt_lookup_num_tokens=4),
    "assistant model": _assisted,
    "prefill chunks": lambda m: _run(m, **_padded(), prefill_chunk_size=5),
    "two turns": _two_turns,
    "two turns, left padding": lambda m: _two_turns(m, **_padded()),
    "streamer": _streamed,
    "inputs_embeds": _embedded,
    "CompileConfig": lambda m: _run(m, _ids(), compile_config=CompileConfig()),
}


@dataclass(frozen=True)
class Outcome:
    """Result of one feature of one family: whether the tokens match, and how often the cache was dequantized."""

    same: bool
    dequantizations: int
    warned: list[str]


class Counted(CarambaCache):
    made: list[CarambaCache] = []  # noqa: RUF012 - one list is meant

    def _make(self, *args: Any, **kwargs: Any) -> None:
        super()._make(*args, **kwargs)
        Counted.made.append(self)


def outcome(
    model: PreTrainedModel, feature: str, expected: Any, monkeypatch: Any, cache: Any = "fp32"
) -> Outcome:
    from caramba_fast.hf import integration, scope

    monkeypatch.setattr(integration, "CarambaCache", Counted)
    scope._said.pop(id(model.config), None)  # so that warnings for this model are given again
    Counted.made = []
    accelerate(model, cache)
    try:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            found = FEATURES[feature](model)
    finally:
        restore(model)
    assert Counted.made, "no cache of ours was used"
    told = [str(w.message) for w in caught if "dequantized" in str(w.message)]
    return Outcome(found == expected, sum(c.dequantizations for c in Counted.made), told)


PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BEGIN, END = "<!-- matrix: python tests/support/hf_matrix.py -->", "<!-- end of matrix -->"
PACKED_MARK, DENSE_MARK, STOCK_MARK, WRONG_MARK = "✓", "○", "–", "✗"


def mark(family: str, feature: str, models: dict[str, PreTrainedModel], monkeypatch: Any) -> str:
    """The result of a feature of a family, in words."""
    if feature in STOCK_CANNOT.get(family, ()):
        return STOCK_MARK
    model = models.setdefault(family, tiny(family))
    with torch.no_grad():
        expected = FEATURES[feature](model)
    found = outcome(model, feature, expected, monkeypatch)
    if not found.same:
        return WRONG_MARK
    return DENSE_MARK if found.dequantizations else PACKED_MARK


def matrix() -> str:
    """The page's table; runs everything."""

    names, models = list(FEATURES), {}
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 models and caches.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{':-:|' * len(names)}",
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for title, family in {**PACKED, **DEQUANTIZED}.items():
            marks = [mark(family, feature, models, monkeypatch) for feature in names]
            lines.append(f"| {title} | {' | '.join(marks)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{before}{BEGIN}\n{matrix()}\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()


def longrope(switch: int) -> Any:
    """A tiny Phi-3 whose RoPE changes when a text exceeds ``switch`` tokens."""
    factors = dict(short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    rope = (
        {"rope_scaling": {"type": "longrope", **factors}}
        if parse(transformers.__version__) < parse("5")
        else {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}}
    )
    config = transformers.Phi3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=switch,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None, **rope,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config).eval()
