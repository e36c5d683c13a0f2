"""Tokenizers of GGUF files that transformers reads otherwise than llama.cpp."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files need the extra gguf")
transformers = pytest.importorskip("transformers")

from caramba_fast.infer.tokenizer import TextTokenizer  # noqa: E402
from caramba_fast.models import demo_tokenizer  # noqa: E402
from caramba_fast.models.config import CheckpointError  # noqa: E402

BEGIN, USER, THINK = "<\uff5cbegin\uff5c>", "<\uff5cUser\uff5c>", "<a thought>"


def read(path: Path, write: Callable[[Any], None]) -> TextTokenizer:
    """The tokenizer of a file that holds hardly more."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8,
        "attention.head_count": 2,
    }  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    write(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TextTokenizer.of(path)


# -- SentencePiece ------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", "<u>", "\u2581", "a", "b", "\u2581a", "\u2581\u2581", "\u2581b"]


def pieces(writer: Any, prefix: bool | None) -> None:
    writer.add_tokenizer_model("llama")
    every = PIECES + [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_token_list(every)
    writer.add_token_types([2, 3, 3, 4] + [1] * (len(PIECES) - 4) + [6] * 256)
    writer.add_token_scores([0.0] * 4 + [-float(i) for i in range(len(PIECES) - 4)] + [0.0] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_every_stretch_of_text_gets_a_space_in_front_or_none_does(tmp_path, prefix):
    tokenizer = read(tmp_path / "m.gguf", lambda writer: pieces(writer, prefix))
    space = "\u2581" * (prefix is not False)
    for text in ("a", " a", "  a", "a b", "a<u>b", "a<u> b", "a</s>a", ""):
        parts = re.split("(<u>|</s>)", text)
        spelled = [
            part if part in ("<u>", "</s>", "") else space + part.replace(" ", "\u2581")
            for part in parts
        ]
        ids = tokenizer.encode(text)
        found = "".join(tokenizer.tokenizer.convert_ids_to_tokens(ids))
        assert found == "<s>" + "".join(spelled)
        if "<" not in text:
            assert tokenizer.decode(ids) == text


# -- bytes --------------------------------------------------------------------------------

EXTRA = [(BEGIN, 3), (USER, 3), (THINK, 4), ("<plain>", 4)]


def byte_level(writer: Any, *, bos: bool) -> None:
    """The vocabulary of the demo models, and tokens behind it that are not spelled in bytes."""
    import json

    demo = demo_tokenizer()
    size, merges = demo.get_vocab_size(), json.loads(demo.to_str())["model"]["merges"]
    special = set(demo.get_added_tokens_decoder())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([demo.id_to_token(i) for i in range(size)] + [text for text, _ in EXTRA])
    writer.add_token_types([3 if i in special else 1 for i in range(size)] + [k for _, k in EXTRA])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    if bos:
        writer.add_bos_token_id(size)
        writer.add_add_bos_token(True)


@pytest.mark.parametrize("bos", [True, False])
def test_control_tokens_stay_whole_whatever_they_are_written_in(tmp_path, bos):
    tokenizer = read(tmp_path / "m.gguf", lambda writer: byte_level(writer, bos=bos))
    size = demo_tokenizer().get_vocab_size()
    begin, user, think, plain = range(size, size + 4)
    words = demo_tokenizer().encode("def f(x):").ids
    text = f"{USER}def f(x):{THINK}<plain>"
    ids = tokenizer.encode(text)
    assert ids == [begin] * bos + [user, *words, think, plain]
    assert tokenizer.decode(ids) == f"def f(x):{THINK}<plain>"
    assert tokenizer.decode(ids[bos:], skip_special_tokens=False) == text
    assert tokenizer.encode(BEGIN, special=False) == [begin]
    assert len(tokenizer.tokenizer) == size + 4  # and no token is behind those of the model
    if bos:
        assert tokenizer.tokenizer.bos_token_id == begin


@pytest.mark.parametrize("cut", ["midm-2.0", "lfm2", "jina-v5-nano"])
def test_other_vocabularies_that_are_as_llama_3s(tmp_path, cut):
    def write(writer: Any) -> None:
        byte_level(writer, bos=False)
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre(cut)
        writer.add_bos_token_id(0)

    tokenizer = read(tmp_path / "m.gguf", write)
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.tokenizer.backend_tokenizer.model.ignore_merges


def test_a_transformers_without_byte_level_tokenizers_is_named(tmp_path, monkeypatch):
    from support.gguf_files import write_demo

    write_demo(tmp_path / "demo.gguf", pre="llama-bpe")
    find = importlib.util.find_spec
    missing = "transformers.integrations.gguf"
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(
        CheckpointError, match=r"as 'llama-bpe' does, which transformers [\d.]+ does not read"
    ):
        TextTokenizer.of(tmp_path / "demo.gguf")
