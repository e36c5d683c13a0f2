"""transformers' own tests with accelerated models: ``make test-upstream``.

    python tests/support/upstream.py --source FOLDER [--cache fp32 q8] [--family llama …] [--quick]

FOLDER is a checkout of transformers (its ``tests/`` are read, nothing is copied). Each family's model tests, with the
inherited generation and cache tests, run three times: with stock models, and with every model accelerated, cache fp32
and q8. What passes with stock models has to pass with ours, except for the reasons in `DIFFERENT`.

As a pytest plugin (``-p upstream``) it accelerates every model as it enters eval mode or `generate`, with the cache
in CARAMBA_FAST_UPSTREAM.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3", "olmo2", "gpt_oss", "falcon",
    "lfm2",
)  # fmt: skip
#: Families and tests of a quick run: one of each kind of attention, nothing that compiles.
QUICK_FAMILIES = ("llama", "gemma2", "gpt_oss", "lfm2")
QUICK_TESTS = (
    "(generate or cache or padding or decoding or past_key or attention_mask) and not compil"
)
STOCK = "stock"
#: Allowed differences from stock: a pattern of tests, the caches, and the reason.
DIFFERENT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "*::test_sdpa_can_dispatch*", ("fp32", "q8"), "asserts that the model has the attention 'sdpa'",
    ),
    (
        "*::test_attn_implementation_composite*", ("fp32", "q8"),
        "asserts which attention the model and its parts have",
    ),
    (
        "*::test_attention_outputs", ("fp32", "q8"),
        "sets config.output_attentions, which transformers takes with the attention 'eager' alone; as an argument of "
        "a call it gives the weights (test_hf_accelerate)",
    ),
    (
        "*::test_generate_*with_static_cache", ("fp32", "q8"),
        "pads rows at their end, and LFM2 has convolutions: a static cache refuses both and names CarambaCache",
    ),
    *(
        (
            pattern, ("fp32", "q8"),
            "pads rows at their end too, before it compiles (compiled static caches: test_hf_compile)",
        )
        for pattern in ("*::test_generate_compilation_all*", "*::test_static_cache_no_recompile*")
    ),
    (
        "*::test_generate_compile_model_forward*", ("fp32", "q8"),
        "asserts that the cache is a DynamicCache (compiled models: test_hf_compile)",
    ),
)  # fmt: skip
#: Modules their tests import that are unrelated to caches and attention and need further packages.
BESIDE = {
    "tests.test_fsdp_mixin": ("FSDPTesterMixin",),
    "tests.test_tensor_parallel_mixin": ("TensorParallelTesterMixin",),
    "tests.test_training_mixin": ("TrainingTesterMixin",),
    "tests.test_pipeline_mixin": ("PipelineTesterMixin",),
    "tests.exporters": (),
    "tests.exporters.test_export": ("ExportTesterMixin", "ExportGenerateTesterMixin"),
}
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BEGIN, END = "<!-- upstream: make test-upstream -->", "<!-- end of upstream -->"
CACHE, RESULTS = "CARAMBA_FAST_UPSTREAM", "CARAMBA_FAST_UPSTREAM_RESULTS"


class Outcomes:
    """The outcome of every test; written when all are done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, str] = {}
        self.why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2]
        if type(report).__name__ == "SubtestReport" and not report.failed:
            return
        if report.failed or name not in self.found or self.found[name] == "passed":
            self.found[name] = report.outcome
        if report.failed:
            self.why[name] = str(report.longreprtext)[-400:]

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"found": self.found, "why": self.why}), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """Stubs unrelated packages, and accelerates models."""
    for name, classes in BESIDE.items():
        module = types.ModuleType(name)
        for made in classes:
            setattr(module, made, type(made, (), {}))
        sys.modules[name] = module
    if RESULTS in os.environ:
        config.pluginmanager.register(Outcomes(Path(os.environ[RESULTS])))
    if os.environ.get(CACHE, STOCK) != STOCK:
        accelerate_all(os.environ[CACHE])


def accelerate_all(cache: str) -> None:
    """Accelerates every model that can be, as it enters eval mode or `generate`."""
    from transformers import GenerationMixin, PreTrainedModel

    from caramba_fast.hf import accelerate

    trying: set[int] = set()  # models that accelerate is trying, in eval mode

    def accelerated(model: Any) -> Any:
        fresh = isinstance(model, PreTrainedModel) and "_caramba_fast" not in vars(model)
        if fresh and id(model) not in trying:
            trying.add(id(model))
            with contextlib.suppress(TypeError):  # an encoder-decoder, a model without a head, …
                accelerate(model, cache)
            trying.discard(id(model))
        return model

    plain_eval, plain_generate = PreTrainedModel.eval, GenerationMixin.generate

    def evaluated(self: Any) -> Any:
        return accelerated(plain_eval(self))

    def generated(self: Any, *args: Any, **kwargs: Any) -> Any:
        accelerated(kwargs.get("assistant_model"))
        return plain_generate(accelerated(self), *args, **kwargs)

    PreTrainedModel.eval, GenerationMixin.generate = evaluated, generated


def run(source: Path, family: str, cache: str, tests: str | None) -> dict[str, dict[str, str]]:
    """Outcomes of one family's tests, and why those that failed did."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        environment = {
            **os.environ, CACHE: cache, RESULTS: str(results), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "support.upstream", "-p", "no:cacheprovider", "--no-header",
            f"tests/models/{family}/test_modeling_{family}.py", *(["-k", tests] if tests else []),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        if not results.exists():
            raise SystemExit(f"{family}, {cache}: pytest ended early\n{done.stdout}{done.stderr}")
        loaded: dict[str, dict[str, str]] = json.loads(results.read_text(encoding="utf-8"))
    if not loaded["found"]:
        raise SystemExit(f"{family}, {cache}: no test was collected\n{done.stdout}")
    return loaded


def reason(test: str, cache: str) -> str | None:
    for pattern, caches, why in DIFFERENT:
        if cache in caches and fnmatch.fnmatch(test, pattern):
            return why
    return None


def compare(
    family: str, cache: str, stock: dict[str, str], ours: dict[str, dict[str, str]]
) -> Iterator[str]:
    """Tests that pass with stock models, but not with ours and without a reason."""
    for test, outcome in stock.items():
        if outcome != "passed" or ours["found"].get(test) == "passed":
            continue
        if reason(f"{family}::{test}", cache) is None:
            yield f"{family}, {cache}: {test}\n{ours['why'].get(test, ours['found'].get(test, 'did not run'))}\n"


def table(rows: list[tuple[str, dict[str, Counter[str]]]], caches: list[str]) -> str:
    """Passes by family and cache, of the tests that stock models pass."""
    lines = [f"| | {' | '.join(caches)} |", f"|---|{'---|' * len(caches)}"]
    for family, counts in rows:
        shown = (f"{counts[c]['passed']} of {sum(counts[c].values())}" for c in caches)
        lines.append(f"| {family} | {' | '.join(shown)} |")
    return "\n".join(lines)


def publish(rows: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    reasons = "\n".join(
        f"- `{pattern.removeprefix('*::')}`: {why}." for pattern, _, why in DIFFERENT
    )
    made = f"{before}{BEGIN}\n{rows}\n\nWhat differs, and why:\n\n{reasons}\n{END}{after}"
    PAGE.write_text(made, encoding="utf-8")


def main() -> None:
    """Runs everything and prints the table; exit status 1 if a test fails with ours only."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="a checkout of transformers")
    parser.add_argument("--cache", nargs="+", default=["fp32", "q8"])
    parser.add_argument("--family", nargs="+", default=None)
    parser.add_argument("--quick", action="store_true", help="four families, nothing compiled")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only tests that pytest's -k selects")
    parser.add_argument("--out", type=Path, help="where the outcomes are written, as JSON")
    parser.add_argument("--publish", action="store_true", help="write the table into the docs")
    given = parser.parse_args()
    families = given.family or (QUICK_FAMILIES if given.quick else FAMILIES)
    wanted = given.tests or (QUICK_TESTS if given.quick else None)
    rows, wrong, all_found = [], [], {}
    for family in families:
        found = {c: run(given.source, family, c, wanted) for c in (STOCK, *given.cache)}
        all_found[family] = found
        passed = [t for t, outcome in found[STOCK]["found"].items() if outcome == "passed"]
        counts = {c: Counter(found[c]["found"].get(t, "missing") for t in passed) for c in found}
        rows.append((family, counts))
        fresh = [
            w for c in given.cache for w in compare(family, c, found[STOCK]["found"], found[c])
        ]
        wrong += fresh
        print(table(rows[-1:], list(counts)).splitlines()[-1], *fresh, sep="\n", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(all_found), encoding="utf-8")
    whole = table(rows, [STOCK, *given.cache])
    print(whole)
    if given.publish:
        publish(whole)
    print(f"{len(wrong)} tests fail with accelerated models alone, without a reason that is listed")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
