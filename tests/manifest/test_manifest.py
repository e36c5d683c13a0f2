"""Manifests: what they may say, what is said when they are wrong, and what running one gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from caramba_fast.cli.app import app
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig
from caramba_fast.manifest import (
    ManifestError,
    RunReport,
    load_manifest,
    prepare,
    read_manifest,
    run_manifest,
)
from caramba_fast.manifest.load import _parsed
from caramba_fast.manifest.schema import write_json
from caramba_fast.models import Transformer, demo_path, demo_tokenizer, load_demo

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "manifest.yml"
GUIDE = """
targets:
  - type: experiment
    name: generate_test
    runs:
      - id: generate
        mode: generate
        generate:
          max_new_tokens: 128
          temperature: 0.8
          cache_kind: auto
          cache_budget_mb: 1024
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any pass of a model is a failure."""

    def forward(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model computed")

    monkeypatch.setattr(Transformer, "forward", forward)


def manifest_of(*runs: dict[str, Any], **target: Any) -> str:
    """A manifest of one target with these runs."""
    return yaml.safe_dump({"targets": [{"name": "t", "runs": list(runs), **target}]})


def one(**keys: Any) -> str:
    return manifest_of({"id": "a", **keys})


def done(text: str, folder: Path, **options: Any) -> list[RunReport]:
    return list(run_manifest(read_manifest(text), folder, **options))


def run(path: Path, *options: object, columns: int = 200) -> Any:
    words = ["run", str(path), *map(str, options)]
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, words)


# -- what is read ----------------------------------------------------------------------------


def test_the_guides_manifest_is_read_as_written() -> None:
    (target,) = read_manifest(GUIDE).targets
    assert (target.type, target.name, target.model) == ("experiment", "generate_test", "demo")
    config = target.runs[0].config
    assert (config.max_new_tokens, config.temperature) == (128, 0.8)
    assert (config.cache_name, config.cache_budget_mb) == ("auto", 1024)


def test_speculative_settings_are_a_speculative_config() -> None:
    text = one(speculative={"spec_k": 3, "cache_kind": "q4"}, draft_model="demo:dba")
    (spec,) = read_manifest(text).targets[0].runs
    assert isinstance(spec.config, SpeculativeConfig) and spec.config.spec_k == 3
    assert spec.draft_model == "demo:dba" and spec.settings_key == "speculative"


def test_a_run_that_says_nothing_has_the_defaults() -> None:
    assert read_manifest(one()).targets[0].runs[0].config == GenerateConfig()


def test_anchors_share_settings_and_may_be_overridden() -> None:
    text = """
    targets:
      - name: t
        runs:
          - id: a
            generate: &base {max_new_tokens: 3, seed: 1}
          - id: b
            generate: &more
              <<: *base
              seed: 2
          - id: c
            generate: {<<: *more, top_k: 5}
          - id: d
            generate: *base
    """
    a, b, c, d = (spec.config for spec in read_manifest(text).targets[0].runs)
    assert [x.seed for x in (a, b, c, d)] == [1, 2, 2, 1]
    assert {x.max_new_tokens for x in (a, b, c, d)} == {3} and c.top_k == 5


@pytest.mark.parametrize("number", ["0", "10", "1_0", "0x1f", "-0", "0.5", "1e-3", ".5", "007.5"])
def test_numbers_that_all_yaml_reads_alike_are_taken(number: str) -> None:
    found = _parsed(f"x: {number}")["x"]
    assert found == yaml.safe_load(number)


# -- what is refused -------------------------------------------------------------------------

RUN = "targets:\n- name: t\n  runs:\n  - id: a\n    "
AT = r"targets\[0\]\.runs\[0\]"
WRONG: dict[str, tuple[str, str]] = {
    "empty": ("", "empty; a mapping with the key 'targets'"),
    "comment": ("# nothing\n", "empty"),
    "text": ("hello", "it is a str; a mapping"),
    "list": ("[1]", "it is a list; a mapping"),
    "no yaml": ("[1, 2", r"no valid YAML: line 1, column \d+: expected"),
    "tab": ("\ttargets: 1", "no valid YAML: line 1, column 1: found character"),
    "bad date": ("x: 2024-13-45", "no valid YAML: month must be in"),
    "code": ("x: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "no anchor": ("x: *y", "undefined alias"),
    "key of a list": ("? [a]\n: 1", "line 1, column 3: a key must be a word"),
    "deep": ("[" * 5000, "nested too deeply"),
    "twice": (RUN + "id: b", "line 5, column 5: the key 'id' is given twice"),
    "no targets": ("name: x", "targets: is missing"),
    "targets no list": ("targets: x", "targets='x': a list is needed"),
    "no target": ("targets: []", "targets: at least 1 item is needed; it is empty"),
    "no runs": ("targets: [{name: t}]", r"targets\[0\].runs: is missing"),
    "no mapping": ("targets: [3]", r"targets\[0\]=3: a mapping is needed"),
    "unknown key": ("targets: []\nother: 1", "other: unknown key; allowed are version, name"),
    "number as key": ("targets: []\n1: 1", "Keys should be strings"),
    "misspelt": (
        RUN + "generate: {max_new_token: 3}",
        rf"^{AT}\.generate\.max_new_token: unknown key; did you mean 'max_new_tokens'\?$",
    ),
    "misspelt alias": (RUN + "generate: {stop_string: x}", "did you mean 'stop_strings'?"),
    "nothing like it": (RUN + "generate: {zzz: 3}", rf"^{AT}\.generate\.zzz: unknown key; \d+ others"),
    "misspelt draft": (RUN + "speculative: {spec_j: 1}", "speculative.spec_j: unknown key; did you"),
    "misspelt run": (RUN + "mod: generate", rf"^{AT}\.mod: unknown key; did you mean 'mode'\?$"),
    "mode": (RUN + "mode: train", rf"^{AT}\.mode='train': Input should be 'generate' or 'benchmark'$"),
    "number": (
        RUN + "generate: {max_new_tokens: 0}",
        rf"^{AT}\.generate\.max_new_tokens=0: Input should be greater than or equal to 1$",
    ),
    "type": (RUN + "generate: {temperature: hot}", rf"^{AT}\.generate\.temperature='hot': .*number"),
    "cache": (RUN + "generate: {cache_kind: q3}", rf"^{AT}\.generate\.cache_kind='q3': .*q8_0.*q4; and 'auto'"),
    "either": (
        RUN + "generate: {eos_token_id: x}",
        rf"^{AT}\.generate\.eos_token_id='x': an id of 0 or more, or a list of such ids, is allowed$",
    ),
    "contradiction": (
        RUN + "generate: {cache_kind: q8, cache_quality_max_mean_kl: 0.1}",
        rf"^{AT}\.generate: cache_quality_max_mean_kl=0.1 needs cache='auto'",
    ),
    "both": (RUN + "generate: {}\n    speculative: {}", "generate and speculative are both given"),
    "two prompts": (RUN + "prompts: [a]\n    prompt_file: b", "prompts and prompt_file are both"),
    "empty prompt": (RUN + "prompts: ['']", rf"^{AT}\.prompts\[0\]='': .*at least 1 character"),
    "no list": (RUN + "prompts: hello", rf"^{AT}\.prompts='hello': a list is needed$"),
    "draft alone": (RUN + "draft_model: lookup", "draft_model is for speculative"),
    "measure what": (RUN + "benchmark: {}", "benchmark is for mode benchmark"),
    "compared": (
        RUN + "mode: benchmark\n    benchmark: {compare: [q3]}", rf"^{AT}\.benchmark\.compare.*'q3'"
    ),
    "repeats": (RUN + "mode: benchmark\n    benchmark: {repeats: 0}", r"benchmark\.repeats=0: "),
    "yes for a number": (
        RUN + "generate: {max_new_tokens: yes}",
        rf"^{AT}\.generate: max_new_tokens=True: True and False are no numbers$",
    ),
    "octal": (RUN + "generate: {max_new_tokens: 010}", "line 5, column 32: YAML 1.1 and 1.2 read 010 differently"),
    "base 60": (RUN + "generate: {seed: 1:30}", "YAML 1.1 and 1.2 read 1:30 differently"),
    "true repeats": (RUN + "mode: benchmark\n    benchmark: {repeats: true}", "repeats=True: True and"),
    "same run": (RUN + "mode: generate\n  - id: a", "runs have the name 'a' twice"),
    "same target": (RUN + "mode: generate\n- name: t\n  runs: [{id: b}]", "targets have the name 't'"),
    "version": (RUN + "mode: generate\nversion: 2", "version=2: Input should be 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_in_one_line(name: str) -> None:
    text, said = WRONG[name]
    with pytest.raises(ManifestError) as found:
        read_manifest(text)
    message = str(found.value)
    assert re.search(said, message), message
    assert "\n" not in message


def test_every_wrong_key_is_named_once() -> None:
    text = RUN + "mod: generate\n    generate: {top_p: 2, stop: 3.5, seeds: 1}"
    with pytest.raises(ManifestError) as found:
        read_manifest(text)
    problems = str(found.value).split("; targets")
    assert len(problems) == 4
    assert "at least 1 item" not in str(found.value), "it only follows from the others"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; a manifest"):
        load_manifest(tmp_path / "none.yml")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_manifest(tmp_path)
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"bytes.yml is no UTF-8 text"):
        load_manifest(tmp_path / "bytes.yml")
    (tmp_path / "wrong.yml").write_text("targets: x")
    with pytest.raises(ManifestError, match=r"wrong.yml: targets='x'"):
        load_manifest(tmp_path / "wrong.yml")


LATER: dict[str, tuple[str, str]] = {
    "model": (one(), r"^targets\[0\]\.model='nope': .*nope does not exist"),
    "demo": (one(), r"^targets\[0\]\.model='demo:x': unknown demo model 'x'; known are gqa"),
    "tokenizer": (one(), r"^targets\[0\]\.tokenizer: .*nope does not exist"),
    "device": (one(), r"^targets\[0\]\.device: device is 'toaster'; known are cpu"),
    "prompt file": (one(prompt_file="nope.txt"), rf"^{AT}\.prompt_file: .*nope.txt does not exist$"),
    "draft": (one(speculative={}, draft_model="nope"), rf"^{AT}\.draft_model='nope': .*not exist"),
    "eos": (one(generate={"eos_token_id": 99999}), rf"^{AT}\.generate: eos_token_id is 99999"),
    "bias": (one(generate={"logit_bias": {99999: 1.0}}), rf"^{AT}\.generate: .*99999"),
    "room": (one(generate={"max_new_tokens": 4000}), rf"^{AT}\.generate: .*max_seq_len=\d+ or more"),
    "length": (one(generate={"max_length": 2}), rf"^{AT}\.generate: .*max_length=2"),
    "budget": (one(generate={"cache_budget_mb": 0.1}), rf"^{AT}\.generate: cache_budget_mb=0.1"),
    "outputs": (
        manifest_of({"id": "a", "mode": "benchmark", "output": "x.json"}, {"id": "b", "output": "./x.json"}),
        r"^t/a and t/b both write .*x.json",
    ),
    "plan": (
        manifest_of(
            {"id": "a", "generate": {"cache": "auto", "cache_plan_path": "x.json"}}, {"id": "b", "output": "./x.json"}
        ),
        r"^t/b: output .*x.json is a cache_plan_path too",
    ),
    "folder": (one(output="."), r"^t/a: output .* is a folder"),
}  # fmt: skip
TARGETS = {
    "model": {"model": "nope"}, "demo": {"model": "demo:x"}, "tokenizer": {"tokenizer": "nope"},
    "device": {"device": "toaster"},
}  # fmt: skip


@pytest.mark.usefixtures("no_compute")
@pytest.mark.parametrize("name", LATER)
def test_what_does_not_fit_is_found_before_the_first_run(name: str, tmp_path: Path) -> None:
    text, said = LATER[name]
    raw = yaml.safe_load(text)
    raw["targets"][0] |= TARGETS.get(name, {})
    first = {"name": "fine", "runs": [{"id": "first", "generate": {"max_new_tokens": 2}}]}
    raw["targets"].append(first)  # a target that could run
    with pytest.raises(ManifestError, match=said) as found:
        done(yaml.safe_dump(raw), tmp_path)
    assert "\n" not in str(found.value).strip()
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.usefixtures("no_compute")
def test_an_empty_prompt_file_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ManifestError, match=rf"^{AT}: prompt 0 is empty"):
        done(one(prompt_file="empty.txt"), tmp_path)


@pytest.mark.usefixtures("no_compute")
def test_only_what_is_chosen_is_checked(tmp_path: Path) -> None:
    text = manifest_of({"id": "a"}, {"id": "b", "prompt_file": "nope.txt"})
    (ready,) = prepare(read_manifest(text), tmp_path, only="t/a")
    assert [each.spec.id for each in ready.runs] == ["a"]
    with pytest.raises(ManifestError, match="no run is called 'c'; there are t/a, t/b"):
        prepare(read_manifest(text), tmp_path, only="c")


# -- what is done ----------------------------------------------------------------------------


def test_a_run_writes_what_the_generator_writes(tmp_path: Path) -> None:
    settings = {"max_new_tokens": 12, "temperature": 0.0, "cache": "q8"}
    prompts = ["import os\n", "def main():\n    return"]
    (report,) = done(one(prompts=prompts, generate=settings, output="out/a.json"), tmp_path)
    tokenizer = demo_tokenizer()
    ids = [tokenizer.encode(text).ids for text in prompts]
    found = Generator(load_demo(), **settings).generate(ids)  # type: ignore[arg-type]
    assert report.texts == [tokenizer.decode(row) for row in found[:, -12:].tolist()]
    written = json.loads((tmp_path / "out" / "a.json").read_text())
    assert written["texts"] == report.texts and written["prompts"] == prompts
    assert written["metrics"]["new_tokens"] == 24 and written["report"]["cache_kind"] == "q8"
    assert written["settings"]["generate"] == settings | {"cache": "q8_0"}
    assert written["environment"]["torch"] == torch.__version__


def test_a_text_begins_with_the_space_after_its_prompt(tmp_path: Path) -> None:
    """Decoded alone, an answer loses the space its first word begins with, as SentencePiece has them."""
    words = {f"\u2581w{number}": number for number in range(2048)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"max_new_tokens": 3, "seed": 1, "num_return_sequences": 2}
    text = one(prompts=["w1 w2", "w3"], generate=settings) + "  tokenizer: tokenizer.json\n"
    (report,) = done(text, tmp_path)
    assert len(report.texts) == 4
    assert all(re.fullmatch(r"( w\d+){1,3}", said) for said in report.texts)


def test_paths_are_relative_to_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(demo_path(), target_is_directory=True)
    (tmp_path / "prompt.txt").write_text("import os\n")
    settings = {"max_new_tokens": 2, "cache_kind": "auto", "cache_plan_path": "plan.json",
                "cache_auto_benchmark": False, "max_seq_len": 256}  # fmt: skip
    text = manifest_of(
        {"id": "a", "prompt_file": "prompt.txt", "generate": settings}, model="model"
    )
    (report,) = done(text, tmp_path)
    assert report.prompts == ["import os\n"]
    assert (tmp_path / "plan.json").is_file()


@pytest.mark.parametrize("draft", ["lookup", "demo:dba"])
def test_a_draft_changes_no_greedy_token(tmp_path: Path, draft: str) -> None:
    settings = {"max_new_tokens": 24, "temperature": 0.0, "cache_kind": "fp32"}
    text = manifest_of(
        {"id": "plain", "generate": settings},
        {"id": "drafted", "speculative": settings | {"spec_k": 3}, "draft_model": draft},
    )
    plain, drafted = done(text, tmp_path)
    assert drafted.texts == plain.texts
    assert drafted.report["speculation"]["tokens_per_pass"] >= 1


def test_a_benchmark_compares_caches_and_writes_json(tmp_path: Path) -> None:
    text = one(
        mode="benchmark", generate={"max_new_tokens": 8, "ignore_eos": True, "cache_kind": "fp16"},
        benchmark={"compare": ["q8", "q4", "fp16"], "repeats": 3, "warmup": 0},
    )  # fmt: skip
    (report,) = done(text, tmp_path)
    assert report.output == tmp_path / "t-a.json"
    written = json.loads(report.output.read_text())
    assert list(written["metrics"]) == ["fp16", "q8", "q4"]
    sizes = [written["metrics"][kind]["bytes_per_token"]["median"] for kind in written["metrics"]]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    for figures in written["metrics"].values():
        for spread in figures.values():
            assert spread["p20"] <= spread["median"] <= spread["p80"]
        assert figures["new_tokens"]["median"] == 8
    assert written["settings"]["benchmark"]["repeats"] == 3
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*"))


def test_a_benchmarks_kinds_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    generate = Generator.generate

    def noted(self: Generator, *arguments: Any, **options: Any) -> Any:
        order.append(self.config.cache_name)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Generator, "generate", noted)
    how = {"compare": ["q8"], "repeats": 2, "warmup": 1}
    done(one(mode="benchmark", generate={"max_new_tokens": 2}, benchmark=how), tmp_path)
    assert order == ["fp16", "q8"] * 3


def test_a_benchmark_of_auto_compares_with_fixed_kinds(tmp_path: Path) -> None:
    settings = {"max_new_tokens": 2, "cache_kind": "auto", "cache_budget_mb": 1, "max_seq_len": 256,
                "cache_auto_benchmark": False, "cache_auto_candidates": ["q8", "q4"]}  # fmt: skip
    how = {"compare": ["fp32"], "repeats": 1, "warmup": 0}
    (report,) = done(one(mode="benchmark", generate=settings, benchmark=how), tmp_path)
    assert list(report.metrics) == ["auto", "fp32"]
    assert report.report["auto"]["cache_kind"] in ("q8", "q4")


def test_a_benchmark_of_drafts_has_their_figures(tmp_path: Path) -> None:
    text = one(
        mode="benchmark", speculative={"max_new_tokens": 8, "spec_k": 2},
        benchmark={"repeats": 1, "warmup": 0},
    )  # fmt: skip
    (report,) = done(text, tmp_path)
    assert report.metrics["fp16"]["tokens_per_pass"]["median"] >= 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": float("nan"), "b": [float("inf"), 1.5], "é": "żółw"})
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "a": None,
        "b": [None, 1.5],
        "é": "żółw",
    }
    with pytest.raises(TypeError):
        write_json(file, {"a": 1, "b": object()})
    assert json.loads(file.read_text(encoding="utf-8"))["a"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# -- the command -----------------------------------------------------------------------------


def test_the_guides_manifest_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "guide.yml").write_text(GUIDE)
    result = run(tmp_path / "guide.yml")
    assert result.exit_code == 0, result.output
    assert "generate_test/generate: generate" in result.stdout
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, .*cache (q4|nf4|q8|fp16)", result.stdout)


@pytest.mark.usefixtures("no_compute")
def test_the_example_is_right() -> None:
    result = run(EXAMPLE, "--check")
    assert result.exit_code == 0, result.output
    assert "demo/benchmark: benchmark with demo, cache fp16, q8, q4" in result.stdout


def test_the_example_runs(tmp_path: Path) -> None:
    copy = tmp_path / "examples" / "manifest.yml"
    copy.parent.mkdir()
    copy.write_text(EXAMPLE.read_text())
    result = run(copy, columns=80)
    assert result.exit_code == 0, result.output
    figures = json.loads((copy.parent / "runs" / "manifest-benchmark.json").read_text())["metrics"]
    assert list(figures) == ["fp16", "q8", "q4"]
    assert "of drafts accepted" in result.stdout
    table = [line for line in result.stdout.splitlines() if re.match(r" *(fp16|q8|q4) ", line)]
    assert len(table) == 3 and max(map(len, table)) <= 80


def test_one_run_with_another_prompt(tmp_path: Path) -> None:
    file = tmp_path / "m.yml"
    file.write_text(manifest_of({"id": "a"}, {"id": "b", "generate": {"max_new_tokens": 1}}))
    result = run(file, "--only", "b", "--prompt", "[red]x = ")
    assert result.exit_code == 0, result.output
    assert (
        "[red]x = " in result.stdout and "t/a" not in result.stdout and "nan" not in result.stdout
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WRONG["misspelt"][0], "did you mean 'max_new_tokens'?"),
        ("", "empty"),
        (one(prompt_file="x"), "x does not"),
    ],
)
def test_an_error_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "m.yml"
    file.write_text(text)
    result = run(file)
    assert result.exit_code == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr
    assert result.stderr.startswith(f"caramba-fast: {file}: ")
