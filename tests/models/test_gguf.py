"""GGUF files: tiny models of transformers, written as llama.cpp writes them, say what they said before."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
transformers = pytest.importorskip("transformers")

from support.gguf_files import logits_of, write_demo, write_gguf  # noqa: E402

from caramba_fast.hf.loading import _rope_before_5  # noqa: E402
from caramba_fast.infer import Generator  # noqa: E402
from caramba_fast.infer.tokenizer import find_tokenizer  # noqa: E402
from caramba_fast.models import Transformer, demo_path, demo_tokenizer, load_demo  # noqa: E402
from caramba_fast.models.config import CheckpointError  # noqa: E402
from caramba_fast.models.gguf import GgufFile  # noqa: E402
from caramba_fast.models.registry import load  # noqa: E402

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=3,
    initializer_range=0.2,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def tiny(kind: str, **changes: Any) -> Any:
    """A random model; norms and biases are random too, so that losing them is seen."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rope_freqs(head: int) -> np.ndarray:
    """Factors as llama.cpp's converter works them out for `LLAMA3`, one by one."""
    found = []
    for place in range(0, head, 2):
        wave = 2 * np.pi * LLAMA3["rope_theta"] ** (place / head)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(8.0)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(found, dtype=np.float32)


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
GEMMA = dict(
    num_hidden_layers=7, head_dim=32, query_pre_attn_scalar=32, sliding_window=16, tie_word_embeddings=True,
)  # fmt: skip
CASES = {
    "llama": (tiny, ("llama",), {}, "llama", {}),
    "llama, tied, a head of its own": (tiny, ("llama",), dict(tie_word_embeddings=True, head_dim=32), "llama", {}),
    "llama, biases": (tiny, ("llama",), dict(attention_bias=True, mlp_bias=True), "llama", {}),
    "llama, linear": (
        tiny, ("llama",), dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama, a factor alone": (
        tiny, ("llama",), dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        "llama", {"rope.scaling.factor": 4.0},
    ),
    "llama, a factor that is none": (tiny, ("llama",), {}, "llama", {"rope.scaling.factor": 0.0}),
    "llama, scaling is off": (
        tiny, ("llama",), {}, "llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    ),
    "llama 3": (tiny, ("llama",), dict(rope_parameters=LLAMA3, head_dim=32), "llama", {"rope.freq_base": 500000.0}),
    "mistral, a window": (
        tiny, ("mistral",), dict(sliding_window=24), "llama", {"attention.sliding_window": 24}
    ),
    "qwen2": (tiny, ("qwen2",), {}, "qwen2", {"rope.freq_base": 10000.0}),
    "qwen2, yarn": (
        tiny, ("qwen2",), dict(rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
        }), "qwen2", {
            "rope.freq_base": 1e6, **YARN,
        },
    ),
    "qwen3, a head of its own": (tiny, ("qwen3",), dict(head_dim=32), "qwen3", {"rope.freq_base": 10000.0}),
    "gemma3": (
        tiny, ("gemma3_text",), GEMMA, "gemma3", {"rope.freq_base": 1e6, "attention.sliding_window": 16},
    ),
    "gemma3, linear": (
        tiny, ("gemma3_text",), dict(
            **GEMMA, rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ), "gemma3", {
            "rope.freq_base": 1e6, "attention.sliding_window": 16, "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}  # fmt: skip


def written(path: Path, case: str, **options: Any) -> Any:
    make, args, changes, architecture, said = CASES[case]
    model = make(*args, **changes)
    extra = {"rope_freqs.weight": rope_freqs(32)} if case == "llama 3" else None
    write_gguf(path, model, architecture, said=said, extra=extra, **options)
    return model


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_says_what_it_said_before(tmp_path, case):
    wanted = written(tmp_path / "m.gguf", case)
    found = load(tmp_path / "m.gguf")
    ids = torch.randint(0, 96, (1, 80), generator=torch.Generator().manual_seed(1))
    if isinstance(found, Transformer):
        said = logits_of(found, ids)
    else:
        assert case.startswith("gemma")  # the one that is not native
        said = logits_of(found.model, ids)
    torch.testing.assert_close(said, logits_of(wanted, ids), rtol=1e-4, atol=1e-4)
    assert 3 in (
        found.eos_token_id if isinstance(found.eos_token_id, tuple) else (found.eos_token_id,)
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_kinds_of_weights_are_what_they_round_to(tmp_path, kind):
    wanted = written(tmp_path / "m.gguf", "llama", kind=kind)
    ids = torch.arange(3, 60)[None]
    found, number = load(tmp_path / "m.gguf"), gguf.GGMLQuantizationType[kind]
    before = logits_of(wanted, ids)
    with torch.no_grad():
        for parameter in wanted.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.numpy(), number)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, number)))
    torch.testing.assert_close(logits_of(found, ids), logits_of(wanted, ids), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits_of(found, ids), before, rtol=1e-4, atol=1e-4)
    stored = torch.bfloat16 if kind == "BF16" else torch.float16
    assert next(load(tmp_path / "m.gguf", dtype=None).parameters()).dtype == stored


@pytest.mark.parametrize(
    ("kind", "stored"), [("F32", "float32"), ("F16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_gemma_is_not_loaded_in_float16(tmp_path: Path, kind: str, stored: str) -> None:
    """What it adds up from layer to layer passes 65504."""
    written(tmp_path / "m.gguf", "gemma3", kind=kind)
    assert next(load(tmp_path / "m.gguf", dtype=None).parameters()).dtype == getattr(torch, stored)


@pytest.mark.parametrize(
    ("texts", "ids", "ends"),
    [
        ({}, {"eos": 3}, 3),
        ({106: "<end_of_turn>"}, {"eos": 1}, [1, 106]),
        ({5: "<|eot_id|>", 6: "<|end_of_text|>"}, {"eos": 6}, [6, 5]),
        ({5: "<|endoftext|>", 6: "<|im_end|>"}, {"eos": 6, "eot": 6}, [6, 5]),
        ({5: "<|im_end|>", 7: "<|file_sep|>", 8: "<|repo_name|>"}, {"eos": 5}, [5, 8, 7]),
        ({}, {"eos": 3, "eot": 7, "eom": 2}, [3, 7, 2]),
        ({9: "<|eom_id|>", 8: "<EOT>", 4: "<|end|>"}, {"eos": 3, "eom": 9}, [3, 9, 4, 8]),
        ({9: "<\uff5cend\u2581of\u2581sentence\uff5c>"}, {"eos": 9}, 9),
        ({9: "<\uff5cend\u2581of\u2581sentence\uff5c>"}, {}, 9),
    ],
)  # fmt: skip
def test_answers_end_where_llama_cpp_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[int, str], ids: dict[str, int], ends: Any
) -> None:  # fmt: skip
    """By the ids a file names, EOS first, and by the text of a token."""
    import support.gguf_files as files

    def tokens(writer: Any, *_: Any) -> None:
        writer.add_token_list([texts.get(i, f"t{i}") for i in range(120)])
        for name, number in ids.items():
            getattr(writer, f"add_{name}_token_id")(number)

    monkeypatch.setattr(files, "_add_tokenizer", tokens)
    write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=120), "llama")
    assert GgufFile(tmp_path / "m.gguf").config["eos_token_id"] == ends
    assert load(tmp_path / "m.gguf").eos_token_ids == (
        tuple(ends) if isinstance(ends, list) else (ends,)
    )


def test_the_tokenizer_comes_with_it(tmp_path):
    """The demo model as GGUF writes what it writes from its folder."""
    write_demo(tmp_path / "demo.gguf", pre=None)
    reader = gguf.GGUFReader(tmp_path / "demo.gguf")
    assert "tokenizer.ggml.pre" not in reader.fields
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.pre is None.*qwen2"):
        find_tokenizer(tmp_path / "demo.gguf")
    write_demo(tmp_path / "demo.gguf")
    generator = Generator.from_checkpoint(tmp_path / "demo.gguf", cache_kind="q8", temperature=0.0)
    tokenizer = find_tokenizer(tmp_path / "demo.gguf")
    text = "def read(path):\n    return 12345 + x['a']  # ünï\n"
    ids = tokenizer.encode(text)
    assert ids == demo_tokenizer().encode(text).ids and tokenizer.decode(ids) == text
    found = generator.generate([ids], max_new_tokens=16)
    wanted = Generator(load_demo(), cache_kind="q8", temperature=0.0)
    assert found.tolist() == wanted.generate([ids], max_new_tokens=16).tolist()


def test_rope_has_the_names_that_transformers_4_reads():
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert _rope_before_5(plain) == {"rope_theta": 1e4, "rope_scaling": None}
    assert _rope_before_5(linear) == {"rope_theta": 1e6, "rope_scaling": scaling}
    assert _rope_before_5({"full_attention": linear, "sliding_attention": plain}) == {
        "rope_theta": 1e6, "rope_scaling": scaling, "rope_local_base_freq": 1e4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "said", "extra", "message"),
    [
        ("falcon", {}, {}, "'falcon'; allowed are llama, qwen2, qwen3, gemma3"),
        ("llama", {"expert_count": 8}, {}, "mixtures of experts"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}, "'longrope'; allowed"),
        ("llama", {"rope.scaling.type": "linear"}, {}, "llama.rope.scaling.factor is missing"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, {}, "attn_factor is given without yarn"),
        ("llama", {"rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.factor is missing"),
        ("llama", {"rope.dimension_count": 8}, {}, "rope.dimension_count is 8"),
        ("llama", {"embedding_length": None}, {}, "llama.embedding_length is missing"),
        ("qwen2", {"attention.sliding_window": 8}, {}, "attention.sliding_window is 8"),
        ("llama", {}, {"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "not the scaling of Llama 3"),
        ("llama", {}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "'blk.0.attn_sinks.weight'"),
        ("llama", {"block_count": 3}, {}, "missing model.layers.2"),
        ("gemma3", {"block_count": 2**30, "attention.sliding_window": 16}, {}, "the weights have 2; missing"),
        ("llama", {"attention.head_count": 0}, {}, "llama.attention.head_count is 0; a positive integer"),
        ("llama", {"attention.head_count": 1000}, {}, "64 rows, which 1000 heads do not share evenly"),
        ("llama", {"embedding_length": "x"}, {}, "llama.embedding_length is 'x'; a positive integer"),
        ("llama", {"rope.freq_base": "x"}, {}, "llama.rope.freq_base is 'x'; a finite number above 0"),
        ("llama", {"rope.scale_linear": float("nan")}, {}, "llama.rope.scale_linear is nan; a finite number"),
        ("qwen2", {**YARN, "rope.scaling.yarn_attn_factor": 1.0}, {}, "'yarn' with yarn_attn_factor; allowed"),
        ("qwen2", {**YARN, "rope.scaling.yarn_ext_factor": 0.0}, {}, "'yarn' with yarn_ext_factor; allowed"),
        ("llama", {"attention.causal": False}, {}, "llama.attention.causal is False"),
        ("llama", {}, {"rope_freqs.weight": np.ones(0, np.float32)}, "not the scaling of Llama 3"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(tmp_path, architecture, said, extra, message):
    write_gguf(tmp_path / "m.gguf", tiny("llama"), architecture, said=said, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon is nan; a finite number"),
        ("rope.freq_base", 0.0, "gemma3.rope.freq_base is 0.0; a finite number"),
        ("rope.scaling.factor", -1.0, "gemma3.rope.scaling.factor is -1.0; a finite number"),
        ("attention.sliding_window_pattern", 0, "sliding_window_pattern is 0; a positive integer"),
        ("block_count", "x", "gemma3.block_count is 'x'; a positive integer"),
        ("feed_forward_length", 95, "mismatched .*mlp.down_proj.weight"),
        ("attention.head_count", 3, "cannot be loaded by transformers"),
        ("final_logit_softcapping", float("nan"), "softcapping is nan; a finite number"),
        ("attn_logit_softcapping", -1.0, "attn_logit_softcapping is -1.0; a finite number"),
    ],
)
def test_settings_of_gemma_that_it_cannot_have_are_refused(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    said = {"rope.freq_base": 1e6, "attention.sliding_window": 16, name: value}
    write_gguf(tmp_path / "m.gguf", tiny("gemma3_text", **GEMMA), "gemma3", said=said)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


def test_a_bound_of_zero_is_none(tmp_path: Path) -> None:
    """transformers would divide by it."""
    said = {"rope.freq_base": 1e6, "attention.sliding_window": 16, "final_logit_softcapping": 0.0}
    write_gguf(tmp_path / "m.gguf", tiny("gemma3_text", **GEMMA), "gemma3", said=said)
    found = load(tmp_path / "m.gguf")
    assert torch.isfinite(logits_of(found.model, torch.arange(3, 9)[None])).all()


@pytest.mark.parametrize("name", ["eos", "eot", "eom", "bos", "padding"])
@pytest.mark.parametrize("value", ["2", [1, 2], 2.5, True])
def test_ids_of_tokens_that_are_no_integers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    import support.gguf_files as files

    def ids(writer: Any, *_: Any) -> None:
        add = {str: writer.add_string, list: writer.add_array, float: writer.add_float32}
        add.get(type(value), writer.add_bool)(f"tokenizer.ggml.{name}_token_id", value)

    monkeypatch.setattr(files, "_add_tokenizer", ids)
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama")
    with pytest.raises(CheckpointError, match=rf"{name}_token_id is .*; an integer is needed"):
        load(tmp_path / "m.gguf")


def test_embeddings_that_are_no_matrix_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"token_embd.weight is no matrix"):
        load(tmp_path / "m.gguf")


def test_a_part_of_a_model_is_no_model_with_tied_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output matrix may be in another part."""
    import support.gguf_files as files

    monkeypatch.setattr(
        files, "_add_tokenizer", lambda writer, *_: writer.add_uint16("split.count", 2)
    )
    write_gguf(tmp_path / "m-00001-of-00002.gguf", tiny("llama", tie_word_embeddings=True), "llama")
    with pytest.raises(
        CheckpointError, match=r"one of 2 parts of a model \(split.count\); merge them"
    ):
        load(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_other_byte_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The gguf package dequantizes it as if it were this machine's."""
    import sys
    from functools import partial

    other = "BIG" if sys.byteorder == "little" else "LITTLE"
    writer = partial(gguf.GGUFWriter, endianess=gguf.GGUFEndian[other])
    monkeypatch.setattr(gguf, "GGUFWriter", writer)
    write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", kind=kind)
    with pytest.raises(CheckpointError, match="byte order is not this machine's"):
        load(tmp_path / "m.gguf")


def test_a_tensor_that_begins_within_another_is_refused(tmp_path: Path) -> None:
    """As llama.cpp does: one changed bit of an offset gives a tensor the values of others."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny("llama"), "llama")
    content, name = bytearray(path.read_bytes()), b"blk.1.ffn_up.weight"
    offset = content.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, their sizes, the type
    content[offset + 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight' begins at byte .* is damaged"):
        load(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00rest")
    with pytest.raises(CheckpointError, match=r"cut.gguf cannot be read as GGUF"):
        load(tmp_path / "cut.gguf")
    with pytest.raises(CheckpointError, match=r"none.gguf does not exist; .*\.gguf file"):
        load(tmp_path / "none.gguf")


@pytest.mark.parametrize("items", ["bytes", "texts", "lists"])
def test_a_list_longer_than_its_file_is_refused_at_once(tmp_path: Path, items: str) -> None:
    kind = {"bytes": 0, "texts": 8, "lists": 9}[items]
    start = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q4s", 4, b"list")
    content = start + struct.pack("<IIQ", 9, kind, 1 << 40) + bytes(64)
    (tmp_path / "long.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"ends before the end .* at byte {len(content)}"):
        load(tmp_path / "long.gguf")


def test_a_quantization_that_cannot_be_undone_is_named(tmp_path, monkeypatch):
    written(tmp_path / "m.gguf", "llama", kind="Q8_0")
    monkeypatch.delattr(gguf.quants, "Q8_0")
    with pytest.raises(CheckpointError, match=r"token_embd.weight is Q8_0; allowed are BF16"):
        load(tmp_path / "m.gguf")


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    written(tmp_path / "m.gguf", "llama")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("said", [None, True, False])
def test_files_of_llama_3_begin_texts_with_bos_unless_they_say_otherwise(
    said: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import support.gguf_files as files

    add = files._add_tokenizer

    def as_llama_3(writer: Any, *args: Any) -> None:
        add(writer, *args)
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_bos_token_id(0)
        if said is not None:
            writer.add_add_bos_token(said)

    monkeypatch.setattr(files, "_add_tokenizer", as_llama_3)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer=demo_tokenizer())
    tokenizer = find_tokenizer(tmp_path / "m.gguf")
    assert (tokenizer.encode("hi")[0] == 0) == (said is not False)
    assert tokenizer.encode("hi", special=False)[0] != 0
    assert tokenizer.tokenizer.backend_tokenizer.model.ignore_merges
