"""The run of transformers' own tests over accelerated models: that it accelerates, compares and lists reasons."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import upstream

TESTS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tests.test_training_mixin import TrainingTesterMixin
import unittest

def tiny():
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)

class LlamaTest(TrainingTesterMixin, unittest.TestCase):
    def test_generate(self):
        model, ids = tiny(), torch.tensor([[3, 4, 5]])
        found = model.generate(ids, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
        assert found.sequences.shape == (1, 6)
        self.cache = type(found.past_key_values).__name__

    def test_only_the_stock_cache(self):
        self.test_generate()
        assert self.cache == "DynamicCache"

    def test_fails_with_stock_models_too(self):
        self.test_generate()
        assert False
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    for place in (folder, *list(folder.parents)[:2]):
        (place / "__init__.py").write_text("")
    (folder / "test_modeling_llama.py").write_text(TESTS)
    return tmp_path


def test_what_fails_with_ours_alone_ends_with_1_and_is_named(source: Path) -> None:
    driver = [sys.executable, upstream.__file__, "--source", str(source), "--family", "llama"]
    done = subprocess.run([*driver, "--cache", "q8"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| llama | 2 of 2 | 1 of 2 |" in done.stdout
    assert "llama, q8: LlamaTest::test_only_the_stock_cache" in done.stdout
    assert "test_fails_with_stock_models_too" not in done.stdout
    assert "CarambaCache" in done.stdout


def test_what_fails_nowhere_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(source: Path, family: str, cache: str, wanted: str | None) -> dict[str, Any]:
        asked.append((family, cache, wanted))
        return {"found": {"T::test_generate": "passed"}, "why": {}}

    monkeypatch.setattr(upstream, "run", run)
    options = ("--source", ".", "--family", "llama", "--cache", "q8", "--tests", "test_generate")
    monkeypatch.setattr(sys, "argv", ["upstream", *options])
    with pytest.raises(SystemExit) as ended:
        upstream.main()
    assert ended.value.code == 0
    assert asked == [("llama", upstream.STOCK, "test_generate"), ("llama", "q8", "test_generate")]


def test_a_family_without_tests_is_no_success(source: Path) -> None:
    (source / "tests/models/llama/test_modeling_llama.py").write_text("")
    with pytest.raises(SystemExit, match="llama, stock: no test was collected"):
        upstream.run(source, "llama", "stock", None)


def test_differences_need_a_reason_for_that_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "DIFFERENT", (("*::test_a*", ("q8",), "quantized"),))
    stock = {"T::test_a": "passed", "T::test_b": "skipped"}
    ours = {"found": {"T::test_a": "failed", "T::test_b": "failed"}, "why": {"T::test_a": "4 != 5"}}
    assert not list(upstream.compare("llama", "q8", stock, ours))
    [line] = upstream.compare("llama", "fp32", stock, ours)
    assert "T::test_a" in line and "4 != 5" in line
