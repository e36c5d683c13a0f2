"""The command line: text out, one line of error where something is wrong, never a traceback."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

import caramba_fast
from caramba_fast.cli import main
from caramba_fast.cli.app import app
from caramba_fast.cli.models import TextWriter
from caramba_fast.infer import Generator
from caramba_fast.models import ModelConfig, Transformer, load_model, load_tokenizer
from caramba_fast.ops import BackendStatus, backends

TEXT = ["def read(path):\n    return open(path).read()\n", "naïve café: żółw 🦜🦜\n"] * 4
PROMPT = "def read(path):"
COMMANDS = [
    "demo", "doctor", "generate", "chat", "run", "quality", "plan", "bench",
]  # fmt: skip
BENCHMARKS = ["ops", "model", "generation", "speculation"]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,
    )
    torch.manual_seed(2)
    save_file(Transformer(config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def invoke(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def generate(prompt: str, folder: Path, *options: object, stdin: str | None = None) -> Any:
    return invoke(
        "generate", prompt, "--model", folder, "--max-new-tokens", 8, *options, stdin=stdin
    )


def assert_one_line_of_error(result: Any, *parts: str) -> None:
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("caramba-fast: ")
    for part in parts:
        assert part in lines[0]


# -- generate --------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, "naïve 🦜", "two\nlines\n", " leading space", "[red]x"])
def test_generate_writes_the_prompt_and_its_continuation(folder: Path, prompt: str) -> None:
    result = generate(prompt, folder, "--cache", "fp32", "--temperature", 0, "--max-new-tokens", 40)
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(folder)
    generator = Generator(load_model(folder), cache_kind="fp32", temperature=0.0, max_new_tokens=40)
    ids = generator.generate([tokenizer.encode(prompt).ids])[0].tolist()
    assert result.stdout == tokenizer.decode(ids) + "\n"


@pytest.mark.parametrize("cache", ["fp32", "fp16", "bf16", "q8", "q8_0", "q4", "q4_0", "nf4"])
def test_generate_runs_with_every_cache(folder: Path, cache: str) -> None:
    result = generate(PROMPT, folder, "--cache", cache)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(PROMPT)
    assert "8 tokens" in result.stderr
    assert f"({cache.removesuffix('_0')})" in result.stderr


def test_the_default_cache_and_no_stats(folder: Path) -> None:
    result = generate(PROMPT, folder, "--no-stats")
    assert result.exit_code == 0
    assert result.stderr == ""


def test_a_single_token_has_figures_without_nan(folder: Path) -> None:
    result = generate(PROMPT, folder, "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert "nan" not in result.stderr


def test_a_seed_repeats_the_text(folder: Path) -> None:
    first, second, other = (
        generate(PROMPT, folder, "--seed", seed, "--temperature", 1.5).stdout for seed in (3, 3, 4)
    )
    assert first == second != other


def test_a_dash_reads_standard_input(folder: Path) -> None:
    options = ("--temperature", 0)
    piped = generate("-", folder, *options, stdin=PROMPT)
    assert piped.exit_code == 0, piped.output
    assert piped.stdout == generate(PROMPT, folder, *options).stdout


WRONG: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "unknown cache": (
        ("--cache", "q3"),
        ("cache", "q3", "fp32", "fp16", "bf16", "q8", "q4", "nf4"),
    ),
    "gates without auto": (
        ("--cache", "q8", "--budget-mb", 0.001),
        ("cache_budget_mb=0.001", "a q8 cache"),
    ),
    "auto and no room": (("--cache", "auto", "--budget-mb", 0.001), ("no candidate fits",)),
    "no such stop": (("--stop", ""), ("stop",)),
    "beams": (("--num-beams", 0), ("num_beams=0",)),
    "answers of a greedy run": (
        ("--temperature", 0, "--num-return-sequences", 2),
        ("num_return_sequences",),
    ),
    "more answers than beams": (
        ("--num-beams", 2, "--num-return-sequences", 3),
        ("num_return_sequences", "num_beams=2"),
    ),
    "beams and a draft": (("--num-beams", 2, "--draft", "lookup"), ("num_beams is 2",)),
    "a draft's length without a draft": (("--spec-k", 3), ("--spec-k is 3", "--draft lookup")),
    "draft too long": (("--draft", "lookup", "--spec-k", 99), ("spec_k=99", "31")),
    "no such draft": (("--draft", "nowhere"), ("nowhere", "does not exist")),
    "draft of another vocabulary": (("--draft", "demo"), ("vocabulary of 2048",)),
    "unknown demo": (("--model", "demo:zzz"), ("zzz", "gqa, dba")),
    "unknown dtype": (("--dtype", "int8"), ("int8", "float32, float16, bfloat16")),
    "top_p": (("--top-p", 1.5), ("top_p=1.5", "less than or equal to 1")),
    "top_k": (("--top-k", 0), ("top_k=0", "greater than or equal to 1")),
    "temperature": (("--temperature", -1), ("temperature=-1", "greater than or equal to 0")),
    "no tokens": (("--max-new-tokens", 0), ("max_new_tokens=0", "greater than or equal to 1")),
    "seed": (("--seed", -1), ("seed=-1",)),
    "large seed": (("--seed", 2**64), ("seed",)),
    "no room": (("--max-seq-len", 4), ("max_seq_len=4",)),
    "unknown device": (("--device", "toaster"), ("toaster",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_one_line(folder: Path, name: str) -> None:
    options, parts = WRONG[name]
    assert_one_line_of_error(generate(PROMPT, folder, *options), *parts)


def test_two_wrong_options_are_named_in_one_line(folder: Path) -> None:
    result = generate(PROMPT, folder, "--cache", "q3", "--top-p", 0)
    assert_one_line_of_error(result, "cache='q3'", "top_p")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_one_line(folder: Path) -> None:
    assert_one_line_of_error(generate(PROMPT, folder, "--device", "cuda"), "CUDA")


@pytest.mark.parametrize("stdin", [None, ""])
def test_an_empty_prompt_is_refused(folder: Path, stdin: str | None) -> None:
    result = generate("" if stdin is None else "-", folder, stdin=stdin)
    assert_one_line_of_error(result, "prompt is empty")
    assert result.stdout == ""


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert_one_line_of_error(generate(PROMPT, tmp_path / "nowhere"), "nowhere", "does not exist")


def test_a_folder_without_a_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert_one_line_of_error(generate(PROMPT, copy), "tokenizer.json")


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[]"])
def test_a_damaged_tokenizer_is_named(copy: Path, content: str) -> None:
    (copy / "tokenizer.json").write_text(content)
    assert_one_line_of_error(generate(PROMPT, copy), "tokenizer.json")


def test_a_tokenizer_larger_than_the_model_is_one_line(copy: Path) -> None:
    tokenizer = load_tokenizer(copy)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save(str(copy / "tokenizer.json"))
    assert_one_line_of_error(generate("zzz", copy), "token id")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_key_value_heads", 3), ("hidden_size", "wide")],
)
def test_a_config_that_is_wrong_is_one_line(copy: Path, field: str, value: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, field: value}))
    assert_one_line_of_error(generate(PROMPT, copy), field)


def test_damaged_weights_are_one_line(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\0" * 40)
    assert_one_line_of_error(generate(PROMPT, copy), "model.safetensors")


def test_a_stop_string_ends_the_text(folder: Path) -> None:
    whole = generate(PROMPT, folder, "--temperature", 0, "--max-new-tokens", 30).stdout
    stop = next(x for x in whole.removeprefix(PROMPT)[5:] if x.isascii() and x.isprintable())
    options = ("--temperature", 0, "--max-new-tokens", 30, "--stop", "never said", "--stop", stop)
    result = generate(PROMPT, folder, *options)
    assert result.exit_code == 0, result.output
    cut = result.stdout.removesuffix("\n")
    assert whole.startswith(cut) and stop in cut.removeprefix(PROMPT) and len(cut) < len(whole) - 1


def test_beams_search_at_the_default_temperature(folder: Path) -> None:
    result = generate(PROMPT, folder, "--num-beams", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout == generate(PROMPT, folder, "--num-beams", 3, "--temperature", 0).stdout


def test_several_answers_are_numbered_with_their_scores(folder: Path) -> None:
    result = generate(PROMPT, folder, "--num-beams", 3, "--num-return-sequences", 2)
    assert result.exit_code == 0, result.output
    scores = [
        float(x) for x in re.findall(r"^\[[12]\] \((-[\d.]+)\)$", result.stdout, re.MULTILINE)
    ]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True)
    assert result.stdout.count(PROMPT) == 2


@pytest.mark.parametrize("draft", ["lookup", "the model itself"])
def test_a_draft_changes_no_greedy_token(folder: Path, draft: str) -> None:
    options = ("--temperature", 0, "--cache", "fp32", "--max-new-tokens", 30)
    plain = generate(PROMPT, folder, *options)
    name = folder if draft != "lookup" else draft
    drafted = generate(PROMPT, folder, *options, "--draft", name, "--spec-k", 3)
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert "of drafts accepted" in drafted.stderr and "tokens a pass" in drafted.stderr


def test_auto_says_which_cache_it_took(folder: Path) -> None:
    options = ("--cache", "auto", "--max-seq-len", 256)
    result = generate(PROMPT, folder, *options, "--budget-mb", 1)
    assert result.exit_code == 0, result.output
    assert re.search(r"\((fp16|q8|q4|nf4)[^)]*\)", result.stderr)


def test_a_prompt_is_not_shown_when_nothing_follows(folder: Path) -> None:
    result = generate(PROMPT, folder, "--cache", "auto", "--budget-mb", 0.001)
    assert result.exit_code == 1 and result.stdout == ""


# -- help ------------------------------------------------------------------------------------


def test_help_lists_the_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"bench {name}" for name in BENCHMARKS[:2])])
def test_help_is_complete_on_a_narrow_terminal(command: str) -> None:
    words = [*command.split(), "--help"]
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert found.help and (found.help.splitlines()[0][:30] in result.stdout)
    for option in found.params:
        assert option.opts[0].lstrip("-") in result.stdout
        assert option.help, f"{option.name} is not explained"
    assert "…│" not in result.stdout


# -- bench -----------------------------------------------------------------------------------


@pytest.fixture
def benchmark_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What benchmarks are called with, in place of the measuring."""
    calls: list[tuple[str, list[str]]] = []
    groups = {"kernels": ["run"], "generation": ["decode_model", "generation", "speculation"]}
    for name in (f"{group}.{name}" for group, names in groups.items() for name in names):
        module = types.ModuleType(name)
        module.main = lambda argv, name=name: calls.append((name, argv)) or 0  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"caramba_fast.bench.{name}", module)
    return calls


def test_benchmarks_get_their_options(benchmark_calls: list[tuple[str, list[str]]]) -> None:
    assert invoke("bench", "ops", "--quick", "--device", "cuda", "--out", "x.csv").exit_code == 0
    assert invoke("bench", "model", "--context", 8, "--context", 9, "--cache", "q4").exit_code == 0
    assert invoke("bench", "speculation", "--help", "--out", "y", "--deep").exit_code == 0
    assert invoke("bench", "generation").exit_code == 0
    assert benchmark_calls == [
        ("kernels.run", ["--device", "cuda", "--backend", "auto", "--threads", "0", "--quick", "--out", "x.csv"]),
        ("generation.decode_model", ["--threads", "0", "--contexts", "8", "9", "--kinds", "q4"]),
        ("generation.speculation", ["--help", "--out", "y", "--deep"]),
        ("generation.generation", []),
    ]  # fmt: skip


def test_defaults_that_help_names_are_those_of_the_settings() -> None:
    """Commands import what they need when they run, so that their help says these numbers by itself."""
    from caramba_fast.cli.quality import DEFAULT_CONTEXT
    from caramba_fast.infer import SpeculativeConfig

    fields = SpeculativeConfig.model_fields
    numbers = {
        ("plan", "prompt_len"): fields["cache_quality_prompt_len"].default,
        ("plan", "decode_steps"): fields["cache_quality_decode_steps"].default,
        ("plan", "bench_prompt_len"): fields["cache_auto_bench_prompt_len"].default,
        ("plan", "bench_steps"): fields["cache_auto_bench_steps"].default,
        ("generate", "spec_k"): fields["spec_k"].default,
        ("chat", "spec_k"): fields["spec_k"].default,
        ("quality", "context"): DEFAULT_CONTEXT,
    }
    said = {}
    for command, group in typer.main.get_command(app).commands.items():
        for option in getattr(group, "params", ()):
            found = re.search(r"Default: (\d+)", getattr(option, "help", None) or "")
            if found:
                said[command, option.name] = int(found[1])
    assert said == numbers


def test_the_options_are_those_of_the_modules() -> None:
    """Their parsers take what the commands pass on."""
    from caramba_fast.bench.generation import decode_model
    from caramba_fast.bench.kernels import run as ops

    words = "--device cpu --backend auto --threads 1 --quick --grid tiny --time-limit 5 --out x.csv"
    assert ops._arguments(words.split()).grid == "tiny"
    words = "--threads 1 --head-dims 64 --rounds 3 --contexts 8 --batches 1 --kinds q4 --out x.csv"
    assert decode_model._arguments(words.split()).contexts == [8]


def test_a_benchmark_ends_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("run")
    module.main = lambda argv: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "caramba_fast.bench.kernels.run", module)
    assert invoke("bench", "ops").exit_code == 3


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("matplotlib", "pip install matplotlib"),
        ("caramba_fast.bench.x", "bench/"),
    ],
)
def test_a_benchmark_that_lacks_something_is_one_line(
    monkeypatch: pytest.MonkeyPatch, missing: str, said: str
) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("caramba_fast.cli.bench.importlib.import_module", broken)
    assert_one_line_of_error(invoke("bench", "ops"), missing, said)


# -- writing text as it comes --------------------------------------------------------------------


def written(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    parts: list[str] = []
    writer = TextWriter(tokenizer.decode, parts.append)
    for token in ids:
        writer.put(token)
    writer.close()
    return parts


@pytest.mark.parametrize("text", [*TEXT[:2], "\n\n", "🦜", "a\ufffdb", "x\n🦜\ny"])
def test_the_writer_writes_the_whole_text(text: str) -> None:
    tokenizer = make_tokenizer()
    assert "".join(written(tokenizer, tokenizer.encode(text).ids)) == text


def test_the_writer_never_shows_half_a_character() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("🐢é").ids
    assert len(ids) > 2
    parts = written(tokenizer, ids)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == "🐢é"
    assert parts[0] == "🐢"


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("a🐢").ids[:-1]
    assert "".join(written(tokenizer, ids)) == tokenizer.decode(ids)


def test_spaces_survive_with_a_sentencepiece_tokenizer() -> None:
    """Its decoder drops the space before the first word of what it is given."""
    words = ["▁def", "▁f", "▁return", "\n", "▁x"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [0, 1, 3, 2, 4, 3, 3, 4]
    assert "".join(written(tokenizer, ids)) == tokenizer.decode(ids)


# -- doctor ----------------------------------------------------------------------------------


def test_doctor_lists_every_op_and_why_a_backend_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for status in backends():
        assert all(part in result.stdout for part in status.op.split("."))
        for backend, reason in status.reasons.items():
            assert f"{backend}: {reason}" in result.stdout
    for name in ("torch", "triton", "transformers", "CARAMBA_FAST_BACKEND"):
        assert name in result.stdout
    assert caramba_fast.__version__ in result.stdout


def test_doctor_says_what_would_run_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = invoke("doctor").stdout
    planned = shown[shown.index("With a CUDA device") :]
    for op, runs in (
        ("decode_attention", "triton"),
        ("append_", "triton"),
        ("merge_state", "triton"),
        ("extend_attention", "triton"),
    ):
        line = next(x for x in planned.splitlines() if x.strip("│┃ ").split(" ")[0] == op)
        assert "cuda" in line and runs in line
    assert "no Triton kernel" not in planned and "no CUDA device" not in planned
    assert "sm_80 or newer and head_dim up to 256" in planned


def test_doctor_without_triton_says_what_cuda_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caramba_fast.cli.doctor.triton_missing", lambda: "triton is not installed")
    assert "plain torch: triton is not installed" in " ".join(invoke("doctor").stdout.split())


def test_doctor_stays_readable_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke("doctor")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for status in backends():
        assert all(part in result.stdout for part in status.op.split("."))
        assert all(f"{backend}:" in result.stdout for backend in status.reasons)


def test_a_report_has_what_a_bug_needs_and_nothing_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plain text whatever the terminal; ~ for the home folder, no secrets, nothing of other programs."""
    home = tmp_path / "home" / "jane"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CARAMBA_FAST_STRESS_SECONDS", f"{home}/private")
    monkeypatch.setenv("CARAMBA_FAST_API_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "not ours")
    result = invoke("doctor", "--report")
    assert result.exit_code == 0, result.output
    text = result.stdout
    for word in (
        caramba_fast.__version__, torch.__version__, platform.python_version(), "transformers ",
        "triton ", "processor ", "instruction set of the kernels: ", "threads: ", "cpu: ", "cuda: ",
        "file: ", "loaded: ", "OMP_NUM_THREADS=1", "CARAMBA_FAST_STRESS_SECONDS=~/private", "hf: ", "cli: ",
    ):  # fmt: skip
        assert word in text, word
    for status in caramba_fast.backends():
        assert f"{status.op} {status.device} {status.runs}" in text
    for private in (str(home), "jane", "hf_secret", "not ours", "\x1b", "│"):
        assert private not in text, private


def test_doctor_prints_a_reason_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are markup to rich, and part of what to install to pip."""
    reason = "triton is not installed (pip install triton)"
    status = BackendStatus("quantize", "cpu", "cpp", {"triton": reason})
    monkeypatch.setattr("caramba_fast.cli.doctor.backends", lambda: [status])
    monkeypatch.setenv("COLUMNS", "300")
    assert reason in invoke("doctor").stdout


# -- whole processes -------------------------------------------------------------------------


def run(
    *arguments: object, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    root = str(Path(caramba_fast.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(
        [sys.executable, "-m", "caramba_fast", *map(str, arguments)],
        input=stdin, env=env, capture_output=True, text=True, encoding="utf-8", timeout=120,
        check=False,
    )  # fmt: skip


def test_the_command_line_runs_as_a_process(folder: Path) -> None:
    options = ("--model", folder, "--cache", "q4", "--max-new-tokens", 8, "--seed", 1)
    done = run("generate", "-", *options, stdin=PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert re.search(r"8 tokens, [\d.]+ tokens/s.*\(q4\)", done.stderr)


def test_an_error_of_a_process_is_one_line(folder: Path) -> None:
    done = run("generate", PROMPT, "--model", folder, "--cache", "q3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "q4_0" in done.stderr


def test_transformers_says_nothing_beside_the_error(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    done = run("generate", PROMPT, "--model", copy)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "do not fit config.json" in done.stderr


@pytest.mark.parametrize("command", [("doctor",), ("generate", PROMPT)], ids=lambda c: c[0])
def test_an_unknown_backend_in_the_environment_is_one_line(command: tuple[str, ...]) -> None:
    done = run(*command, CARAMBA_FAST_BACKEND="abacus")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "abacus" in done.stderr
    assert "reference" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich", "tokenizers", "yaml"])
def test_main_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        main()
    message = str(stopped.value)
    package = "pyyaml" if package == "yaml" else package
    assert f"needs {package}: pip install {package}" in message
    assert "\n" not in message


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.stdout == f"caramba-fast {caramba_fast.__version__}\n"
