"""``caramba-fast quality``: tables, files, runs into the same folder, and errors in one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from caramba_fast.cli.app import app
from caramba_fast.cli.quality import load_subject
from caramba_fast.models import ModelConfig, Transformer, demo_path
from caramba_fast.quality import QualityReport, read_csv

SMALL = ("--context", 96, "--tokens", 192, "--needles", 8)
WORDS = [f"Ġ{a}{b}{c}" for a in "abcdef" for b in "abcdef" for c in "abcdef"]


def bytes_and_words(words: list[str], bos: bool) -> Tokenizer:
    """A tokenizer of single bytes and whole words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *words, "<s>"])}
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocab, unk_token="a", continuing_subword_prefix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return tokenizer


def make_checkpoint(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(2)
    save_file(Transformer(config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    return make_checkpoint(folder, bytes_and_words(WORDS, bos=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("The quick brown fox\njumps over the lazy dog.\n" * 60)
    return file


def invoke(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["quality", *map(str, arguments)])


def assert_one_line_of_error(result: Any, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("caramba-fast: ")
    for part in parts:
        assert part in lines[0]


def test_the_default_caches_of_a_demo_model(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.split("Written")[0].splitlines())) <= 100
    report = QualityReport.from_json(tmp_path / "quality.json")
    kinds = ["fp16", "q8", "q8/q4", "q4", "q4:plain", "nf4", "nf4:plain"]
    assert [row.kind for row in report.rows] == kinds
    assert read_csv(tmp_path / "quality.csv") == report.rows
    assert all(f" {kind} " in result.stdout for kind in kinds)
    assert (tmp_path / "quality.png").stat().st_size > 5000
    for name in ("quality.csv", "quality.json", "quality.png", "parts"):
        assert str(tmp_path / name) in result.stdout
    assert report.about["name"] == "demo:gqa"


@pytest.mark.parametrize("name", ["demo:dba", "demo:gqa/outliers-8"])
def test_other_models_and_more_contexts(name: str, tmp_path: Path) -> None:
    options = ("--cache", "q8", "--cache", "q4", "--context", 64, *SMALL)
    result = invoke(name, *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    report = QualityReport.from_json(tmp_path / "quality.json")
    assert [(row.context, row.kind) for row in report.rows] == [
        (context, kind) for context in (64, 96) for kind in ("fp16", "q8", "q4")
    ]
    assert f"{name}, context 64" in result.stdout and f"{name}, context 96" in result.stdout


def test_a_second_run_measures_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = invoke(*SMALL, "--cache", "q8", "--out", tmp_path)
    parts = set((tmp_path / "parts").iterdir())
    damaged = next(file for file in parts if file.name.startswith("text96-q8-"))
    damaged.write_bytes(b"nothing")
    again = invoke(*SMALL, "--cache", "q8", "--out", tmp_path)
    assert f"warning: {damaged} is damaged" in again.stdout
    assert again.stdout.endswith(first.stdout)
    monkeypatch.setattr("caramba_fast.quality.lab.compare", None)  # nothing is left to do
    assert invoke(*SMALL, "--cache", "q8", "--out", tmp_path).stdout == first.stdout


def test_a_checkpoint_with_its_text(checkpoint: Path, text: Path) -> None:
    result = invoke(checkpoint, "--text", text, *SMALL, "--cache", "q4", "--baseline", "fp32")
    assert result.exit_code == 0, result.output
    assert "fp32" in result.stdout and "Written" not in result.stdout
    assert "needles" in result.stdout


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float16)],
)
def test_weights_have_the_dtype_asked_for(dtype: str, wanted: torch.dtype) -> None:
    for name in (
        "demo:gqa",
        str(demo_path("gqa")),
    ):  # a folder has float16; the demo model itself is float32
        model: Any = load_subject(name, "cpu", dtype).model
        found = next(model.parameters()).dtype
        assert found == (torch.float32 if (name, dtype) == ("demo:gqa", "auto") else wanted)


def test_an_unknown_dtype_is_an_error_in_one_line() -> None:
    result = invoke("demo:gqa", "--dtype", "int8")
    assert result.exit_code == 1
    assert "dtype is 'int8'; allowed are auto, float32, float16, bfloat16" in result.output


def test_a_gguf_file_has_the_figures_of_its_folder(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from support.gguf_files import write_demo

    write_demo(tmp_path / "demo.gguf")
    figures = []
    for name in (tmp_path / "demo.gguf", demo_path()):
        out = tmp_path / Path(name).stem
        result = invoke(name, "--text", text, *SMALL, "--cache", "q4", "--out", out)
        assert result.exit_code == 0, result.output
        figures.append([row.mean_kl for row in read_csv(out / "quality.csv")])
    assert figures[0] == pytest.approx(figures[1], rel=0.05)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    assert_one_line_of_error(invoke(damaged, "--text", text), "damaged.gguf cannot be read as GGUF")


def test_no_needles(checkpoint: Path) -> None:
    result = invoke(checkpoint, "--text", "demo", *SMALL, "--needles", 0, "--cache", "q4")
    assert result.exit_code == 0, result.output
    assert "needles" not in result.stdout


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke(*SMALL, "--cache", "q8", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "pip install matplotlib" in result.stdout
    assert (tmp_path / "quality.csv").exists() and not (tmp_path / "quality.png").exists()


WRONG: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "unknown cache": (("--cache", "q3"), ("q3", "fp16", "nf4")),
    "unknown baseline": (("--baseline", "f16"), ("f16", "fp16")),
    "cache of another attention": (("--cache", "q4/q8/q4"), ("k_sem_cfg", "decoupled")),
    "long context": (("--context", 4096), ("4096", "2 to 2048", "max_position_embeddings")),
    "no context": (("--context", 1), ("context is 1;",)),
    "few tokens": (("--tokens", 100), ("tokens is 100", "need 192")),
    "negative needles": (("--needles", -1), ("needles is -1", "0 (off)")),
    "no room for needles": (("--context", 20, "--tokens", 40), ("context is 20", "needle")),
    "no file": (("--text", "nowhere.txt"), ("nowhere.txt is not a file", "'demo'")),
    "device": (("--device", "toaster"), ("toaster", "cpu")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name: str, tmp_path: Path) -> None:
    options, parts = WRONG[name]
    result = invoke(*SMALL[:2] if "--context" not in options else (), *SMALL[2:], *options)
    assert_one_line_of_error(result, *parts)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("demo:mla", ("'mla'", "gqa, dba")),
        ("demo:gqa/hard", ("'hard'", "outliers-8", "outliers-64")),
        ("nowhere", ("'nowhere'", "demo:gqa", "demo:dba")),
    ],
)
def test_an_unknown_model_is_one_line(name: str, parts: tuple[str, ...]) -> None:
    assert_one_line_of_error(invoke(name), *parts)


def test_a_checkpoint_says_what_it_lacks(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    assert_one_line_of_error(invoke(checkpoint), "--text FILE", "--text demo")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    run = (checkpoint, *SMALL)
    assert_one_line_of_error(invoke(*run, "--text", short), "the text has 9 tokens")
    short.write_text("")
    assert_one_line_of_error(invoke(*run, "--text", short), "the text has 0 tokens")
    short.write_bytes(b"\xff\xfe\x00")
    assert_one_line_of_error(invoke(*run, "--text", short), "short.txt is not UTF-8")
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    assert_one_line_of_error(invoke(bare, "--text", text), "tokenizer.json does not exist")


def test_tokenizers_that_do_not_fit_are_one_line(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    wordless = make_checkpoint(tmp_path / "wordless", bytes_and_words(WORDS[:9], bos=False))
    assert_one_line_of_error(
        invoke(wordless, "--text", text, *SMALL), "9 one-token words", "--needles 0"
    )
    shutil.copyfile(demo_path() / "tokenizer.json", wordless / "tokenizer.json")
    assert_one_line_of_error(invoke(wordless, "--text", "demo", *SMALL), "do not belong together")


def test_a_folder_of_another_model_is_one_line(tmp_path: Path) -> None:
    assert invoke(*SMALL, "--cache", "q8", "--out", tmp_path).exit_code == 0
    result = invoke("demo:dba", *SMALL, "--cache", "q8", "--out", tmp_path)
    assert_one_line_of_error(result, "holds another measurement", "model")


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "bloom"])
def test_models_of_transformers_are_measured(tmp_path: Path, family: str) -> None:
    """Checkpoints the native model does not know: windows and norms of Gemma 3, partial RoPE of GPT-NeoX, ALiBi."""
    from support.hf_matrix import tiny

    tokenizer = bytes_and_words(WORDS, bos=True)
    folder = tmp_path / family
    tiny(family, vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = ("--text", "demo", *SMALL, "--cache", "q8:plain", "--cache", "q4:plain")
    result = invoke(folder, *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = {row.kind: row for row in read_csv(tmp_path / "quality.csv")}
    assert 0 < rows["q8:plain"].mean_kl < rows["q4:plain"].mean_kl
    assert rows["fp16"].mean_kl == 0
