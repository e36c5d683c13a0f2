"""A checkpoint folder that cannot be used says which file or field is wrong, and runs nothing."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from caramba_fast.models import CheckpointError, ModelConfig, Transformer, load, load_model

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(1)
    save_file(Transformer(CONFIG).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def set_fields(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def drop_field(folder: Path, name: str) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config[name]
    file.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


def shard(folder: Path, names: Any = ("a.safetensors", "b.safetensors")) -> None:
    """Two shards; the index calls them what ``names`` says."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for number, (name, value) in enumerate(state.items()):
        halves[number % 2][name] = value
    for file, half in zip(("a.safetensors", "b.safetensors"), halves, strict=True):
        save_file(half, folder / file)
    table = {name: names[number % 2] for number, name in enumerate(state)}
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))


def truncate(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def write(folder: Path, name: str, text: str | bytes) -> None:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def replace_weights(folder: Path, name: str, content: str | bytes = b"") -> None:
    (folder / "model.safetensors").unlink()
    write(folder, name, content)


NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "model is not a folder"),
    "a file for a folder": (
        lambda f: (shutil.rmtree(f), f.write_text("x")),
        "model is not a folder",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "config cut short": (lambda f: truncate(f / "config.json", 0.5), "config.json .* JSON"),
    "empty config": (lambda f: write(f, "config.json", ""), "config.json .* JSON"),
    "config not utf-8": (lambda f: write(f, "config.json", b'{"a": "\xff"}'), "config.json"),
    "config is a list": (lambda f: write(f, "config.json", "[1]"), "config.json holds a list"),
    "config is null": (lambda f: write(f, "config.json", "null"), "config.json holds"),
    "config nested too deep": (lambda f: write(f, "config.json", "[" * 100_000), "config.json"),
    "config is a folder": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        "config.json",
    ),
    "no model_type": (lambda f: drop_field(f, "model_type"), "model_type"),
    "unsupported model_type": (
        lambda f: set_fields(f, model_type="gpt2"),
        "model_type.*gpt2.*llama",
    ),
    "unsupported activation": (lambda f: set_fields(f, hidden_act="gelu"), "hidden_act.*gelu"),
    "quantized weights": (
        lambda f: set_fields(f, quantization_config={"quant_method": "bitnet"}),
        "quantization_config.*bitnet",
    ),
    "unsupported rope": (
        lambda f: set_fields(f, rope_parameters={"rope_type": "longrope"}),
        "rope_type.*longrope.*llama3",
    ),
    "unsupported older rope": (
        lambda f: set_fields(f, rope_parameters=None, rope_scaling={"type": "dynamic"}),
        "rope_type.*dynamic.*llama3",
    ),
    "partial rotation": (
        lambda f: set_fields(f, partial_rotary_factor=0.5),
        "partial_rotary_factor",
    ),
    "no vocab_size": (lambda f: drop_field(f, "vocab_size"), "vocab_size"),
    "no heads": (lambda f: drop_field(f, "num_attention_heads"), "num_attention_heads"),
    "heads do not divide": (
        lambda f: set_fields(f, num_key_value_heads=3),
        "num_attention_heads.*num_key_value_heads",
    ),
    "heads 0": (lambda f: set_fields(f, num_attention_heads=0), "num_attention_heads"),
    "odd head_dim": (lambda f: set_fields(f, head_dim=7), "head_dim"),
    "negative layers": (lambda f: set_fields(f, num_hidden_layers=-1), "num_hidden_layers"),
    "rope factor below 1": (
        lambda f: set_fields(f, rope_parameters={"rope_type": "linear", "factor": 0.5}),
        "factor",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "weights cut short": (
        lambda f: truncate(f / "model.safetensors", 0.9),
        "model.safetensors cannot be read",
    ),
    "weights cut in the header": (
        lambda f: truncate(f / "model.safetensors", 0.001),
        "model.safetensors cannot be read",
    ),
    "weights empty": (
        lambda f: write(f, "model.safetensors", b""),
        "model.safetensors cannot be read",
    ),
    "no tensor in the weights": (lambda f: edit_weights(f, dict.clear), "holds no weights"),
    "a missing tensor": (
        lambda f: edit_weights(f, lambda s: s.pop(NORM)),
        f"missing {re.escape(NORM)}",
    ),
    "an unexpected tensor": (
        lambda f: edit_weights(f, lambda s: s.update(extra=torch.ones(1))),
        "unexpected extra",
    ),
    "a tensor of another shape": (
        lambda f: edit_weights(f, lambda s: s.update({Q: torch.ones(3, 5)})),
        rf"{re.escape(Q)} has shape \(3, 5\), not \(32, 32\)",
    ),
    "more layers than weights": (
        lambda f: set_fields(f, num_hidden_layers=2),
        r"missing model\.layers\.1",
    ),
    "a transposed tensor": (
        lambda f: set_fields(f, intermediate_size=32, hidden_size=48),
        "has shape",
    ),
    "index names a parent": (
        lambda f: shard(f, ("../a.safetensors", "b.safetensors")),
        r"outside the folder: '\.\./a\.safetensors'",
    ),
    "index names an absolute path": (
        lambda f: shard(f, (str(f / "a.safetensors"), "b.safetensors")),
        "outside the folder",
    ),
    "index names the parent folder": (lambda f: shard(f, ("..", "b.safetensors")), r"\.\."),
    "index names nothing": (lambda f: shard(f, ("", "b.safetensors")), "index.json|lacks"),
    "index names a number": (lambda f: shard(f, (1, 2)), "index.json"),
    "index names a list": (lambda f: shard(f, ([], [])), "index.json"),
    "a shard is missing": (
        lambda f: (shard(f), (f / "b.safetensors").unlink()),
        r"lacks shards.*b\.safetensors",
    ),
    "a shard is cut short": (
        lambda f: (shard(f), truncate(f / "b.safetensors", 0.5)),
        "b.safetensors cannot be read",
    ),
    "index is damaged": (lambda f: replace_weights(f, INDEX, '{"weight'), "index.json is not"),
    "index is a list": (lambda f: replace_weights(f, INDEX, "[]"), "index.json is not"),
    "index has no map": (lambda f: replace_weights(f, INDEX, "{}"), "index.json is not"),
    "index map is a list": (
        lambda f: replace_weights(f, INDEX, '{"weight_map": ["a.safetensors"]}'),
        "index.json is not",
    ),
    "index is empty": (
        lambda f: replace_weights(f, INDEX, '{"weight_map": {}}'),
        "no weights|index.json",
    ),
}


def test_the_undamaged_folder_loads(folder: Path) -> None:
    assert load_model(folder).config == load_model(str(folder)).config


def test_the_undamaged_shards_load(folder: Path, whole: Path) -> None:
    shard(folder)
    ids = torch.arange(5)[None]
    torch.testing.assert_close(load_model(folder)(ids), load_model(whole)(ids))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_by_name(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_model(folder)


MISTYPED: dict[str, Any] = {
    "num_attention_heads": "four",
    "hidden_size": "wide",
    "num_key_value_heads": [2],
    "head_dim": {"a": 1},
    "vocab_size": 64.5,
    "rms_norm_eps": "small",
    "eos_token_id": "</s>",
    "rope_theta": "large",
    "rope_scaling": "linear",
    "rope_parameters": [1, 2],
    "partial_rotary_factor": "half",
    "max_position_embeddings": "many",
    "tie_word_embeddings": "perhaps",
}


@pytest.mark.parametrize("field", MISTYPED)
def test_a_field_of_the_wrong_type_is_named(folder: Path, field: str) -> None:
    if field.startswith("rope"):
        drop_field(folder, "rope_parameters")
    set_fields(folder, **{field: MISTYPED[field]})
    with pytest.raises(CheckpointError, match=field):
        load_model(folder)


@pytest.mark.parametrize(("field", "value"), [("sliding_window", "wide"), ("layer_types", 3)])
def test_a_window_of_the_wrong_type_is_named(folder: Path, field: str, value: Any) -> None:
    set_fields(folder, **{"model_type": "mistral", "sliding_window": 8, field: value})
    with pytest.raises(CheckpointError, match=field):
        load_model(folder)


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads"])
def test_a_size_that_head_dim_follows_from_must_be_a_number(folder: Path, field: str) -> None:
    drop_field(folder, "head_dim")
    set_fields(folder, **{field: "many"})
    with pytest.raises(CheckpointError, match=field):
        load_model(folder)


def test_a_null_field_counts_as_absent(folder: Path) -> None:
    set_fields(folder, partial_rotary_factor=None, head_dim=None, rope_scaling=None)
    assert load_model(folder).config.head_dim == 8


def test_inverse_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda state: state.update({name: torch.ones(4)}))
    load_model(folder)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="float16"):
        load_model(folder, dtype=torch.int8)
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed are auto, float32"):
        load_model(folder, dtype="int8")


def test_a_dtype_may_be_given_by_its_name(folder: Path) -> None:
    for load_from in (load_model, load):
        for name, wanted in {"bfloat16": torch.bfloat16, "auto": torch.float32}.items():
            assert {x.dtype for x in load_from(folder, dtype=name).parameters()} == {wanted}


class Touches:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.safetensors"])
def test_a_pickle_is_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "unpickled"
    evil = pickle.dumps(Touches(marker))
    replace_weights(folder, name, evil)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_model(folder)
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()


def test_an_index_that_names_a_pickle_does_not_open_it(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    table = {"weight_map": {NORM: "pytorch_model.bin"}}
    replace_weights(folder, INDEX, json.dumps(table))
    write(folder, "pytorch_model.bin", pickle.dumps(Touches(marker)))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_model(folder)
    assert not marker.exists()


def test_an_adapter_in_the_folder_is_not_left_out_silently(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for read in (load_model, load):
        with pytest.raises(CheckpointError, match=r"a PEFT adapter.*merge_and_unload"):
            read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"a PEFT adapter.*merge_and_unload"):
        load(folder)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn],
)
def test_weights_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """A cast would make other numbers of quantized weights, and drop what is imaginary."""
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda state: state.update({name: state[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} in .*floating-point weights"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_every_width_are_taken(folder: Path, dtype: torch.dtype) -> None:
    edit_weights(folder, lambda state: state.update({k: x.to(dtype) for k, x in state.items()}))
    assert load_model(folder).lm_head.weight.dtype == torch.float32
    assert load_model(folder, dtype=None).lm_head.weight.dtype == dtype


def sharded(folder: Path, parts: list[dict[str, Tensor]], weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    for index, part in enumerate(parts):
        save_file(part, folder / f"part-{index}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    """The index names one of them; which is right nobody can tell."""
    state = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    others = {key: x for key, x in state.items() if key != name}
    weight_map = {**dict.fromkeys(others, "part-1.safetensors"), name: "part-0.safetensors"}
    sharded(folder, [{name: state[name]}, {**others, name: 2 * state[name]}], weight_map)
    with pytest.raises(CheckpointError, match=rf"{name} is in part-1.*names part-0.*one shard"):
        load_model(folder)
    weight_map[name] = "part-1.safetensors"
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {**weight_map, "x": "part-0.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=rf"{name} is in part-0.*names part-1"):
        load_model(folder)


def test_a_tensor_that_the_index_misplaces_is_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    weight_map = dict.fromkeys(state, "part-0.safetensors") | {
        "lm_head.weight": "part-1.safetensors"
    }
    sharded(folder, [state, {"unused": torch.ones(1)}], weight_map)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is in part-0.*names part-1"):
        load_model(folder)
    del state["lm_head.weight"]
    save_file(state, folder / "part-0.safetensors")
    with pytest.raises(CheckpointError, match=r"names lm_head\.weight, which no shard holds"):
        load_model(folder)


def test_an_output_matrix_of_its_own_is_used_although_the_config_ties_it(folder: Path) -> None:
    """As transformers has it; merged adapters look so. Equal matrices are tied without a word."""
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(3, 20)[None]
    set_fields(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="which differ: both are used"):
        found = load_model(folder)
    if int(transformers.__version__.split(".")[0]) >= 5:
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(found(ids), stock(ids).logits, rtol=1e-4, atol=1e-4)
    edit_weights(
        folder, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()})
    )
    tied = load_model(folder)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    edit_weights(folder, lambda s: s.pop("model.embed_tokens.weight"))
    other = load_model(folder)
    assert torch.equal(other(ids), tied(ids))


def test_rope_is_what_transformers_takes_or_refused() -> None:
    base = CONFIG.to_hf()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(
        CheckpointError, match=r"rope_scaling has rope_type='yarn' and rope_parameters 'default'"
    ):
        ModelConfig.from_hf({**base, "rope_parameters": plain, "rope_scaling": yarn})
    both = ModelConfig.from_hf(
        {**base, "rope_parameters": {**yarn, "rope_theta": 5e4}, "rope_scaling": {**yarn}}
    )
    assert both.rope.rope_type == "yarn" and both.rope.rope_theta == 5e4
    nested = {**yarn, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    found = ModelConfig.from_hf(
        {**base, "rope_parameters": nested, "original_max_position_embeddings": 128}
    )
    assert found.rope.original_max_position_embeddings == 128
    for rope_type in ("linear", "llama3"):
        unscaled = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4}}
        with pytest.raises(CheckpointError, match=f"rope_type '{rope_type}' needs a factor"):
            ModelConfig.from_hf({**base, **unscaled})


@pytest.mark.parametrize(
    ("given", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 8}, 8),
     ({"sliding_window": 8, "layer_types": ["full_attention"]}, 8)],
)  # fmt: skip
def test_mistral_has_the_window_that_transformers_gives_it(
    given: dict[str, Any], window: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    raw = {k: v for k, v in CONFIG.to_hf().items() if k not in ("sliding_window", "layer_types")}
    raw |= {"model_type": "mistral", **given}
    assert ModelConfig.from_hf(raw).sliding_window == window
    assert transformers.MistralConfig(num_hidden_layers=1, **given).sliding_window == window


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [None, 0, 1, 2])
def test_qwen_has_the_window_that_transformers_gives_it(family: str, first: int | None) -> None:
    """One that is used and not stated is of 4096 tokens, in the layers from max_window_layers on."""
    transformers = pytest.importorskip("transformers")
    given = {"use_sliding_window": True, "num_hidden_layers": 2}
    given |= {} if first is None else {"max_window_layers": first}
    stated = ("sliding_window", "layer_types", "max_window_layers")
    raw = {k: v for k, v in CONFIG.to_hf().items() if k not in stated}
    raw |= {"model_type": family, **given}
    theirs = transformers.AutoConfig.for_model(family, **given)
    assert theirs.sliding_window == 4096
    if len(set(theirs.layer_types)) > 1:
        with pytest.raises(CheckpointError, match="mixes full and sliding"):
            ModelConfig.from_hf(raw)
        return
    window = 4096 if theirs.layer_types[0] == "sliding_attention" else None
    assert ModelConfig.from_hf(raw).sliding_window == window
    assert ModelConfig.from_hf({**raw, "sliding_window": None}).sliding_window is None
    assert ModelConfig.from_hf({**raw, "use_sliding_window": False}).sliding_window is None
