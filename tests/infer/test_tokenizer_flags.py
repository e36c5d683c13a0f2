"""add_bos_token and add_eos_token of a folder whose tokenizer.json says by itself what goes around a text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from caramba_fast.infer.tokenizer import TextTokenizer  # noqa: E402
from caramba_fast.models import demo_path  # noqa: E402

BOS, EOS = "<|pad|>", "<|endoftext|>"
END = {"__type": "AddedToken", "content": EOS}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": BOS, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
}


@pytest.mark.parametrize("around", [None, BYTES, TEMPLATE], ids=["none", "bytes", "template"])
@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_tokenizer_json_goes_before_the_flags_as_in_transformers(
    tmp_path: Path, kind: str, around: dict[str, Any] | None
) -> None:
    """transformers 5 drops both flags where there is a tokenizer.json, and so must we: ids are compared."""
    base = json.loads((demo_path() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**base, "post_processor": around}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for begin, end in itertools.product((None, True, False), repeat=2):
        flags = {"add_bos_token": begin, "add_eos_token": end}
        said = {name: flag for name, flag in flags.items() if flag is not None}
        config = {"tokenizer_class": kind, "bos_token": BOS, "eos_token": END, **said}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        wanted = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).encode("def f():")
        assert TextTokenizer.of(tmp_path).encode("def f():") == wanted, said
