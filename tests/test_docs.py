"""Every snippet of the README and of the pages runs, in order; measured parts are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.hf_matrix import tiny
from typer.testing import CliRunner

from caramba_fast.cli.app import app
from caramba_fast.hf import CarambaCache, accelerate

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Commands that take seconds; of others only the options are checked.
QUICK = ("generate", "chat", "run", "doctor")


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(text) if name == language]


SETUP, *CHAPTERS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
TITLES = [chapter.partition("\n")[0] for chapter in CHAPTERS]


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    """What the first chapter defines."""
    space: dict[str, Any] = {}
    for block in blocks(SETUP, "python"):
        exec(compile(block, "Setup", "exec"), space)
    overview = CHAPTERS[TITLES.index("Overview")]
    exec(re.search(r"^from caramba_fast.infer import .*$", overview, re.MULTILINE)[0], space)
    return space


@pytest.mark.parametrize("title", TITLES)
def test_python(title, prepared, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if title == "Compiled steps":
        request.getfixturevalue("python_wrapper")
    space = dict(prepared)
    for index, block in enumerate(blocks(CHAPTERS[TITLES.index(title)], "python")):
        exec(compile(block, f"{title}, block {index}", "exec"), space)


def check_options(arguments: list[str]) -> None:
    """Raises for options that the command does not have."""
    command = typer.main.get_command(app).commands[arguments[0]]
    command.make_context(arguments[0], arguments[1:])


@pytest.mark.parametrize(
    "title", [t for t, c in zip(TITLES, CHAPTERS, strict=True) if "```bash" in c]
)
def test_commands(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chapter = CHAPTERS[TITLES.index(title)]
    for index, text in enumerate(blocks(chapter, "yaml")):
        assert index == 0, "one manifest a chapter"
        Path("manifest.yml").write_text(text, encoding="utf-8")
    for line in "".join(blocks(chapter, "bash")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "caramba-fast"
        if arguments[0] in QUICK:
            done = CliRunner().invoke(app, arguments, input="def main():\n/stats\n/undo\n/quit\n")
            assert done.exit_code == 0, (line, done.output)
        else:
            check_options(arguments)
    if "```yaml" in chapter:
        assert Path("timing.json").is_file()


def test_measured_parts_are_filled():
    parts = re.findall(
        r"<!-- measured: (?!end of)(.*?) -->\n(.*?)<!-- measured: end of \1 -->", PAGE, re.DOTALL
    )
    assert {name for name, _ in parts} == {
        "steps",
        "kinds",
        "bytes",
        "decoupled",
        "speculation",
        "overhead",
    }
    for name, text in parts:
        assert "|" in text, f"{name} was not measured"


def test_no_figures_by_hand():
    """Times, factors and rates stand in measured parts alone."""
    outside = re.sub(
        r"<!-- measured: (?!end)(.*?) -->.*?<!-- measured: end of \1 -->", "", PAGE, flags=re.DOTALL
    )
    assert not re.search(r"\d+(\.\d+)?\s?(×|ms|µs|tokens/s)", outside)


def test_links():
    for target in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", PAGE):
        if target[0]:
            assert (ROOT / "docs" / target[0]).exists(), target
        else:
            headings = {"#" + title.lower().replace(" ", "-") for title in TITLES}
            assert target[1] in headings, target


# -- docs/serving.md --------------------------------------------------------------------------

SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SERVING_SETUP, *SERVING_CHAPTERS = re.split(r"^## ", SERVING, flags=re.MULTILINE)[1:]


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """What the first chapter of the page on serving defines."""
    space: dict[str, Any] = {}
    for block in blocks(SERVING_SETUP, "python"):
        exec(compile(block, "Setup", "exec"), space)
    return space


@pytest.mark.parametrize("chapter", SERVING_CHAPTERS, ids=lambda c: c.partition("\n")[0])
def test_serving(chapter, served):
    space = dict(served)
    for index, block in enumerate(blocks(chapter, "python")):
        exec(compile(block, f"{chapter.partition(chr(10))[0]}, block {index}", "exec"), space)


# -- short pages ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index", "choosing", "formats"])
def test_short_pages(name, tmp_path, monkeypatch):
    """One snippet goes on where the one before it ended; commands have the options they are given."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for index, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{name}, block {index}", "exec"), space)
    lines = "".join(blocks(page, "bash")).splitlines()
    for program, *arguments in (shlex.split(line, comments=True) for line in lines):
        if program == "caramba-fast":
            check_options(arguments)


# -- README.md --------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_python(tmp_path, monkeypatch):
    """One snippet goes on where the one before it ended."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for index, block in enumerate(blocks(README, "python")):
        exec(compile(block, f"README, block {index}", "exec"), space)


def test_readme_commands():
    lines = "".join(blocks(README, "bash")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    ours = [arguments for program, *arguments in words if program == "caramba-fast"]
    assert len(ours) > 5
    for arguments in ours:
        check_options(arguments)
    targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^make (\S+)", "\n".join(lines), re.MULTILINE) == ["demo", "test"]
    assert {"demo", "test"} <= set(targets)


def test_readme_links():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("kind", ["q4", "q4:plain"])
def test_a_pass_measures_what_decode_steps_see(kind):
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (chapter,) = re.findall(r"^## Measuring quality\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {}
    exec(blocks(chapter, "python")[0], space)
    model = accelerate(tiny("llama", initializer_range=0.2), kind)
    plain = model(ids := torch.randint(3, 97, (2, 90))).logits
    found = space["logits_through"](model, ids, kind)
    cache = CarambaCache(model, kind, prefill="stored")
    with torch.no_grad():
        steps = [model(part, cache=cache).logits for part in ids.split(1, dim=1)]
    wanted = torch.cat(steps, dim=1)
    assert (found - wanted).norm() < 0.1 * (plain - wanted).norm()
