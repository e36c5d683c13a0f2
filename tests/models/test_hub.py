"""Ids of the Hub: downloaded where a path does not exist and reads like one, and not otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from huggingface_hub import constants  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from caramba_fast.cli.app import app  # noqa: E402
from caramba_fast.infer import Generator  # noqa: E402
from caramba_fast.models import CheckpointError, demo_path, load_demo, load_model  # noqa: E402
from caramba_fast.models.hub import local_path  # noqa: E402
from caramba_fast.models.registry import model_folder  # noqa: E402

NAME, COMMIT = "somebody/Demo-0.1B", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A cache folder of its own, and no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture
def cached(offline):
    """The demo model in the cache, as a download leaves it, with code and a pickle beside it."""
    there = offline / "models--somebody--Demo-0.1B"
    snapshot = there / "snapshots" / COMMIT
    shutil.copytree(demo_path(), snapshot)
    for ref in ("main", "v1"):
        (there / "refs").mkdir(exist_ok=True)
        (there / "refs" / ref).write_text(COMMIT)
    return snapshot


def test_what_is_in_the_cache_is_used_without_a_network(cached):
    assert local_path(NAME).resolve() == cached.resolve()
    assert local_path(NAME, "v1").resolve() == cached.resolve()
    generator = Generator.from_checkpoint(NAME, cache_kind="q8", temperature=0.0)
    wanted = Generator(load_demo(), cache_kind="q8", temperature=0.0)
    prompt = generator.tokenizer.encode("def main():")
    assert generator.generate([prompt], max_new_tokens=8).tolist() == (
        wanted.generate([prompt], max_new_tokens=8).tolist()
    )
    assert load_model(NAME, revision=COMMIT).config == load_demo().config
    for revision in (None, COMMIT):
        assert Generator.from_checkpoint(NAME, revision=revision).tokenizer is not None


def test_commands_take_an_id_and_a_revision(cached):
    asked = [
        "generate",
        "def main():",
        "--model",
        NAME,
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    ]
    found = CliRunner().invoke(app, [*asked, "--revision", "v1"])
    assert found.exit_code == 0, found.output
    assert found.output.startswith("def main():")
    wrong = CliRunner().invoke(app, [*asked, "--revision", "v9"])
    assert wrong.exit_code == 1 and "at revision v9" in wrong.output
    local = ["generate", "a", "--model", str(demo_path()), "--revision", "v1"]
    assert "is a path; revisions are of Hub ids" in CliRunner().invoke(app, local).output
    demo = CliRunner().invoke(app, ["generate", "a", "--model", "demo", "--revision", "v1"])
    assert "demo models have none" in demo.output


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("command", ["plan", "quality"])
def test_commands_that_measure_take_a_revision_too(command: str) -> None:
    def said(model: str, revision: str) -> str:
        asked = [command, model, "--text", "nowhere.txt", "--revision", revision]
        return CliRunner().invoke(app, asked).output

    assert "nowhere.txt is not a file" in said(NAME, "v1")
    assert "at revision v9" in said(NAME, "v9")
    assert "is a path; revisions are of Hub ids" in said(str(demo_path()), "v1")
    assert "demo models have none" in said("demo", "v1")


def test_only_weights_settings_and_tokenizers_are_downloaded(monkeypatch, tmp_path):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_path(NAME, "v2") == tmp_path
    [(name, options)] = asked
    assert (name, options["revision"]) == (NAME, "v2")
    kept = huggingface_hub.utils.filter_repo_objects(
        [
            "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
            "tokenizer.model", "chat_template.jinja", "merges.txt", "modeling_own.py", "pytorch_model.bin",
            "model.gguf", "consolidated.safetensors", "onnx/config.json", "README.md",
        ],
        allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"],
    )  # fmt: skip
    assert list(kept) == [
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
        "tokenizer.model", "chat_template.jinja", "merges.txt",
    ]  # fmt: skip


@pytest.mark.usefixtures("offline")
def test_offline_it_says_what_was_tried(monkeypatch):
    with pytest.raises(
        CheckpointError, match=rf"{NAME} does not exist here, and could not be downloaded"
    ):
        Generator.from_checkpoint(NAME)
    said = CliRunner().invoke(app, ["serve", NAME])
    assert (
        said.exit_code == 1
        and "could not be downloaded from the Hub at revision main" in said.output
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install huggingface-hub"):
        local_path(NAME)


def test_nothing_else_reads_like_an_id(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    for path in ("smollm", "/no/such", "./a/b", "a/b/c", "../a", "a/..", "~/a", "C:/a b"):
        assert local_path(path) == Path(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody" / "Demo-0.1B").mkdir(parents=True)
    assert local_path(NAME) == Path(NAME)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_folder(NAME)
