"""The native Transformer computes what transformers computes from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.models import (
    CheckpointError,
    LanguageModel,
    ModelConfig,
    RopeParameters,
    Transformer,
    load_model,
)

TOLERANCE = 1e-4
TOKENS = 21
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 777.0},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
}
WINDOWED: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 0,
}
VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-wide-heads": (LlamaConfig, {"head_dim": 32}),
    "llama-attention-bias": (LlamaConfig, {"attention_bias": True}),
    "llama-mlp-bias": (LlamaConfig, {"mlp_bias": True}),
    "llama-eps": (LlamaConfig, {"rms_norm_eps": 1e-2}),
    "mistral-window": (MistralConfig, {"sliding_window": WINDOW}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, WINDOWED),
    "qwen2-window-in-no-layer": (Qwen2Config, {**WINDOWED, "max_window_layers": 2}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3-attention-bias": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": (Qwen3Config, dict(head_dim=32, **WINDOWED)),
    **{f"rope-{name}": (LlamaConfig, {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


class Case(NamedTuple):
    """A folder, what transformers computes from it, and the native model loaded from it."""

    folder: Path
    ids: Tensor
    expected: Tensor
    native: Transformer


def randomise(model: torch.nn.Module) -> None:
    """Biases and norms too, which are otherwise 0 and 1 and would hide a missing term."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        noise = torch.randn(parameter.shape, generator=generator) * 0.15
        parameter.data.copy_(centre + noise)


def random_ids(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(97, (rows, tokens), generator=torch.Generator().manual_seed(5))


def written_by_transformers(
    folder: Path, kind: type[PreTrainedConfig], changes: dict[str, Any], **saving: Any
) -> PreTrainedModel:
    changes = json.loads(json.dumps(changes))  # transformers fills rope_parameters in place
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes})).eval()
    randomise(model)
    model.save_pretrained(folder, **saving)
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def make_case(folder: Path, name: str, device: torch.device) -> Case:
    ids = random_ids()
    expected = logits_of(written_by_transformers(folder, *VARIANTS[name]), ids)
    return Case(folder, ids, expected, load_model(folder, device=device))


@pytest.fixture(scope="module", params=VARIANTS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Case:
    return make_case(tmp_path_factory.mktemp("checkpoint"), request.param, device)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Case:
    return make_case(tmp_path_factory.mktemp("llama"), "llama", device)


def new_cache(model: Transformer, rows: int, length: int = 64, **options: Any) -> ModelKVCache:
    kind = KVCacheTensorConfig(kind=options.pop("kind", "fp32"))
    return ModelKVCache(model.cache_layout, rows, length, kind, kind, model.device, **options)


@torch.no_grad()
def native_logits(model: Transformer, ids: Tensor, chunks: list[int] | None = None) -> Tensor:
    """Without a cache, or through an fp32 cache in chunks of the given sizes."""
    ids = ids.to(model.device)
    if chunks is None:
        return model(ids).cpu()
    assert sum(chunks) == ids.shape[1]
    cache = new_cache(model, len(ids))
    parts = [model(part, cache) for part in ids.split(chunks, dim=1)]
    assert cache.row_lengths == [ids.shape[1]] * len(ids)
    return torch.cat(parts, dim=1).cpu()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


FEEDS = {
    "uncached": None,
    "prompt at once": [21],
    "prompt then single tokens": [13, *[1] * 8],
    "chunks": [3, 5, 1, 8, 4],
    "single tokens": [1] * 21,
}


@pytest.mark.parametrize("chunks", FEEDS.values(), ids=FEEDS)
def test_logits_equal_transformers(case: Case, chunks: list[int] | None) -> None:
    assert_close(native_logits(case.native, case.ids, chunks), case.expected)


def test_stored_prefill_of_an_fp32_cache_equals_transformers(case: Case) -> None:
    cache = new_cache(case.native, 2, prefill="stored")
    with torch.no_grad():
        actual = case.native(case.ids.to(case.native.device), cache).cpu()
    assert_close(actual, case.expected)


def test_the_variants_tell_rope_types_and_windows_apart(
    tmp_path: Path, llama: Case, device: torch.device
) -> None:
    for name in [*(f"rope-{rope}" for rope in ROPES), "mistral-window", "llama-eps"]:
        other = make_case(tmp_path / name, name, device)
        assert (other.expected - llama.expected).abs().max() > 100 * TOLERANCE, name


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ROPES)
def test_the_older_spelling_of_rope_gives_the_same_logits(
    tmp_path: Path, rope: str, key: str
) -> None:
    parameters = ROPES[rope]
    model = written_by_transformers(tmp_path, LlamaConfig, {"rope_parameters": parameters})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters")
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    config["rope_theta"] = parameters["rope_theta"]
    config["rope_scaling"] = {key: parameters["rope_type"], **scaling} if scaling else None
    file.write_text(json.dumps(config))
    ids = random_ids()
    assert_close(native_logits(load_model(tmp_path), ids), logits_of(model, ids))


@pytest.mark.parametrize("first_windowed", [0, 2, 28])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_a_window_is_understood_without_a_list_of_layer_types(
    tmp_path: Path, kind: type[PreTrainedConfig], first_windowed: int
) -> None:
    """transformers before 4.53 wrote max_window_layers only."""
    changes = {**WINDOWED, "max_window_layers": first_windowed}
    model = written_by_transformers(tmp_path, kind, changes)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["layer_types"]
    file.write_text(json.dumps(config))
    ids = random_ids()
    assert_close(native_logits(load_model(tmp_path), ids), logits_of(model, ids))


def test_layers_that_mix_full_and_sliding_attention_are_refused(tmp_path: Path) -> None:
    written_by_transformers(tmp_path, Qwen2Config, {**WINDOWED, "max_window_layers": 1})
    with pytest.raises(CheckpointError, match="mixes full and sliding"):
        load_model(tmp_path)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths(tmp_path: Path) -> None:
    model = written_by_transformers(
        tmp_path, LlamaConfig, {"rope_parameters": {**YARN, "factor": None}}
    )
    ids = random_ids()
    assert_close(native_logits(load_model(tmp_path), ids), logits_of(model, ids))


@pytest.mark.parametrize("tied", [False, True])
def test_shards_with_an_index_load_like_one_file(tmp_path: Path, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied}
    model = written_by_transformers(tmp_path, LlamaConfig, changes, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = random_ids()
    assert_close(native_logits(load_model(tmp_path), ids), logits_of(model, ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_none_keeps_what_is_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(dtype)
    model.save_pretrained(tmp_path)
    kept, wide = load_model(tmp_path, dtype=None), load_model(tmp_path)
    assert {p.dtype for p in kept.parameters()} == {dtype}
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    with torch.no_grad():
        actual, expected = kept(random_ids()).float(), wide(random_ids())
    assert (actual - expected).norm() <= 0.05 * expected.norm()


def test_a_loaded_model_is_frozen_and_in_eval_mode(llama: Case) -> None:
    assert not llama.native.training
    assert not any(p.requires_grad for p in llama.native.parameters())
    assert isinstance(llama.native, LanguageModel)


def test_tied_embeddings_stay_one_tensor_when_the_model_is_cast(tmp_path: Path) -> None:
    written_by_transformers(tmp_path, LlamaConfig, {"tie_word_embeddings": True})
    native = load_model(tmp_path).to(torch.bfloat16)
    assert native.lm_head.weight.data_ptr() == native.model.embed_tokens.weight.data_ptr()


# -- rows of different lengths ---------------------------------------------------------------


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=11)


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def ragged_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Transformer:
    return make_case(tmp_path_factory.mktemp("ragged"), request.param, device).native


@pytest.mark.parametrize("prefill", ["exact", "stored"])
@torch.no_grad()
def test_ragged_rows_equal_each_row_alone(ragged_model: Transformer, prefill: str) -> None:
    turns = [[7, 2, 19], [1, 5, 3], [1, 1, 1], [4, 9, 1], [1, 1, 1]]
    whole = random_ids(3, 40)
    cache = new_cache(ragged_model, 3, prefill=prefill)
    alone = [native_logits(ragged_model, row[None])[0] for row in whole]
    seen = [0, 0, 0]
    for lens in turns:
        rows = [whole[b, seen[b] : seen[b] + n] for b, n in enumerate(lens)]
        ids = padded(rows).to(ragged_model.device)
        out = ragged_model(ids, cache, query_lens=lens).cpu()
        for b, n in enumerate(lens):
            assert_close(out[b, :n], alone[b][seen[b] : seen[b] + n])
            seen[b] += n
        assert cache.row_lengths == seen
        assert cache.seq_lens.tolist() == seen


@torch.no_grad()
def test_ragged_rows_without_a_cache_equal_each_row_alone(ragged_model: Transformer) -> None:
    whole, lens = random_ids(3, 17), [17, 4, 9]
    ids = padded([row[:n] for row, n in zip(whole, lens, strict=True)]).to(ragged_model.device)
    out = ragged_model(ids, query_lens=lens).cpu()
    for b, n in enumerate(lens):
        assert_close(out[b, :n], native_logits(ragged_model, whole[b : b + 1, :n])[0])


@torch.no_grad()
def test_padding_that_would_pass_the_end_of_the_cache_is_dropped(llama: Case) -> None:
    """A nearly full row beside one that takes a long chunk."""
    model, whole = llama.native, random_ids(2, 128)
    cache = new_cache(model, 2, length=128)
    first = padded([whole[0, :126], whole[1, :3]]).to(model.device)
    model(first, cache, query_lens=[126, 3])
    second = padded([whole[0, 126:128], whole[1, 3:100]]).to(model.device)
    out = model(second, cache, query_lens=[2, 97]).cpu()
    assert_close(out[0, :2], native_logits(model, whole[:1])[0, 126:])
    assert_close(out[1], native_logits(model, whole[1:, :100])[0, 3:])
    assert cache.row_lengths == [128, 100]


@torch.no_grad()
def test_a_row_may_take_no_token_at_all(llama: Case) -> None:
    model, whole = llama.native, random_ids(2, 12)
    cache = new_cache(model, 2)
    model(whole[:, :8].to(model.device), cache)
    model(whole[:, 8:10].to(model.device), cache, query_lens=[0, 2])
    out = model(torch.stack([whole[0, 8:10], whole[1, 10:]]).to(model.device), cache).cpu()
    assert_close(out[0], native_logits(model, whole[:1, :10])[0, 8:])
    assert_close(out[1], native_logits(model, whole[1:])[0, 10:])


@torch.no_grad()
def test_logits_index_picks_one_position_of_each_row(llama: Case) -> None:
    index = torch.tensor([3, 20])
    model = llama.native
    out = model(llama.ids.to(model.device), logits_index=index.to(model.device)).cpu()
    assert out.shape == (2, 1, 97)
    assert_close(out[:, 0], llama.expected[torch.arange(2), index])


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
@torch.no_grad()
def test_exact_prefill_does_not_see_the_storage_kind(llama: Case, kind: str, tokens: int) -> None:
    ids = llama.ids[:, :tokens].to(llama.native.device)
    out = llama.native(ids, new_cache(llama.native, 2, kind=kind, prefill="exact")).cpu()
    assert_close(out, llama.expected[:, :tokens])


# -- folders written here load in transformers -------------------------------------------------

NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral"},
    "mistral-window": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen2-window": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": WINDOW},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
    "qwen3-window": {"model_type": "qwen3", "qk_norm": True, "sliding_window": WINDOW},
    "special-ids": {"bos_token_id": 4, "eos_token_id": (5, 6), "pad_token_id": 7},
    **{f"rope-{name}": {"rope": RopeParameters(**rope)} for name, rope in ROPES.items()},
}


def written_here(folder: Path, changes: dict[str, Any]) -> Transformer:
    model = Transformer(ModelConfig(**{**SIZES, "head_dim": 32, **changes})).eval()
    randomise(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    return model


@pytest.fixture(params=NATIVE)
def own_folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Transformer]:
    return tmp_path, written_here(tmp_path, NATIVE[request.param])


def test_a_folder_written_here_loads_in_transformers(own_folder: tuple[Path, Transformer]) -> None:
    folder, model = own_folder
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids()
    assert_close(native_logits(model, ids), logits_of(theirs, ids))


@pytest.mark.parametrize(
    "name", ["llama", "special-ids", "mistral", "mistral-window", "qwen2-window"]
)
def test_transformers_reads_the_config_as_it_was_meant(tmp_path: Path, name: str) -> None:
    """What is None here must not come back as a default of the family."""
    ours = written_here(tmp_path, NATIVE[name]).config
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert getattr(theirs, "sliding_window", None) == ours.sliding_window
    eos = theirs.eos_token_id
    assert (tuple(eos) if isinstance(eos, list) else eos) == ours.eos_token_id
    assert (theirs.bos_token_id, theirs.pad_token_id) == (ours.bos_token_id, ours.pad_token_id)


def test_a_folder_written_here_loads_here(own_folder: tuple[Path, Transformer]) -> None:
    folder, model = own_folder
    again = load_model(folder)
    ids = random_ids()
    assert_close(native_logits(again, ids), native_logits(model, ids))
    rope = {"rope"}
    assert again.config.model_dump(exclude=rope) == model.config.model_dump(exclude=rope)
