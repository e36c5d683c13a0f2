"""Quality loss of caches on tasks: ``python -m caramba_fast.bench.real.tasks``, part of `make real`.

Three tasks, greedy, through `Generator`: facts asked for in a long chat (`retrieval`), functions completed
(`completion`), and how long a text agrees with that of an fp16 cache (`agreement`). Writes one JSON file per model into
``bench/results/real``, with the caches and tasks of this run. Answers are kept group by group in ``--parts``, so that a
run can be resumed, and answers scored again without generating them again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.environment import details
from caramba_fast.bench.real import agreement, completion, retrieval
from caramba_fast.bench.real import specs as chosen
from caramba_fast.bench.real.answers import ROWS, AnswerStore, Group
from caramba_fast.bench.real.code import note_code
from caramba_fast.bench.real.functions import PROBLEMS
from caramba_fast.bench.real.models import MEASURED, FetchError, model_folder, title
from caramba_fast.bench.real.study import RUNS, add_options, file_name, out_folder
from caramba_fast.bench.real.text import TextError
from caramba_fast.cli.quality import load_subject
from caramba_fast.config import cache_configs
from caramba_fast.writing import replacing

Figures = dict[str, Any]
Task = Callable[[AnswerStore, str, bool], Figures]
#: Tasks of models that are too small for some; others do all.
ONLY = {"smollm2": ("agreement",)}
#: Functions and agreement prompts of a quick run.
QUICK_FUNCTIONS, QUICK_PROMPTS = 10, 4


def ask_facts(store: AnswerStore, spec: str, quick: bool = False) -> Figures:
    """Facts answered exactly: right, asked, seconds, and under ``contexts`` tokens, right and asked of each.

    A quick run has the shortest context only.
    """
    found: Figures = {"right": 0, "asked": 0, "seconds": 0.0, "contexts": []}
    for context in retrieval.contexts(store.tokenizer)[: 1 if quick else None]:
        group = Group(retrieval.prompts(store.tokenizer, context), retrieval.NEW_TOKENS)
        answered, seconds = store.answers("retrieval", spec, group)
        texts = (store.tokenizer.decode(tokens) for tokens in answered)
        right = sum(
            retrieval.is_right(text, code)
            for text, (_, code) in zip(texts, context.facts, strict=True)
        )
        one = {"tokens": len(group.prompts[0]), "right": right, "asked": len(context.facts)}
        found["contexts"].append(one)
        found["right"] += right
        found["asked"] += len(context.facts)
        found["seconds"] = round(found["seconds"] + seconds, 1)
    return found


def complete_functions(store: AnswerStore, spec: str, quick: bool = False) -> Figures:
    """Functions completed correctly: passed, asked, seconds, names that ``failed``; a quick run has the first ten."""
    problems = PROBLEMS[: QUICK_FUNCTIONS if quick else None]
    prompts = completion.prompts(store.tokenizer, problems)
    found: Figures = {"passed": 0, "asked": len(problems), "seconds": 0.0, "failed": []}
    for start in range(0, len(problems), ROWS):
        group = Group(prompts[start : start + ROWS], completion.NEW_TOKENS, completion.STOP)
        answered, seconds = store.answers("functions", spec, group)
        found["seconds"] = round(found["seconds"] + seconds, 1)
        for problem, tokens in zip(problems[start:], answered, strict=False):
            if completion.passes(problem, store.tokenizer.decode(tokens)):
                found["passed"] += 1
            else:
                found["failed"].append(problem.head)
    return found


def agree(store: AnswerStore, spec: str, quick: bool = False) -> Figures:
    """Tokens until the first that differs from the baseline's.

    Returns mean and median over the prompts, ``whole`` (prompts whose answers agree to the end), asked, most (tokens of
    an answer), seconds (of this cache only), and ``tokens``, one number per prompt.
    """
    count = QUICK_PROMPTS if quick else agreement.PROMPTS
    group = Group(agreement.prompts(store.tokenizer, count), agreement.NEW_TOKENS)
    base, _ = store.answers("agreement", chosen.BASELINE, group)
    answered, seconds = store.answers("agreement", spec, group)
    tokens = [agreement.agreement(a, b) for a, b in zip(base, answered, strict=True)]
    return {
        "mean": round(statistics.mean(tokens), 1),
        "median": statistics.median(tokens),
        "whole": sum(a == b for a, b in zip(base, answered, strict=True)),
        "asked": len(tokens),
        "most": group.new_tokens,
        "seconds": seconds,
        "tokens": tokens,
    }


TASKS: dict[str, Task] = {
    "retrieval": ask_facts,
    "functions": complete_functions,
    "agreement": agree,
}


def run(
    model: str,
    specs: Sequence[str] = chosen.TASKS,
    tasks: Sequence[str] | None = None,
    *,
    quick: bool = False,
    parts: Path = RUNS,
) -> dict[str, Any]:
    """All tasks of one model, the baseline first: ``about``, and under ``tasks`` the figures by task and spec.

    ``model`` is as in `study.study`; ``tasks`` are by default all that the model is for; ``quick`` takes a small part
    of each; ``parts`` is where answers are kept. Raises FetchError or TextError if model or text cannot be had,
    ValueError for a spec that is unknown or does not fit the model.
    """
    names = list(dict.fromkeys((chosen.BASELINE, *specs)))
    for name in names:
        if name not in chosen.KIVI:
            cache_configs(name)  # raises at once for an invalid spec
    subject = load_subject(str(model_folder(model)), "cpu")
    store = AnswerStore(parts / f"{file_name(model)}-answers", subject)
    code = note_code(store.folder)
    found: dict[str, dict[str, Figures]] = {}
    for task in tasks or ONLY.get(model, tuple(TASKS)):
        found[task] = {}
        for spec in names:
            found[task][spec] = TASKS[task](store, spec, quick)
            print(line(model, task, spec, found[task][spec]), file=sys.stderr, flush=True)
    about = {
        "name": file_name(model), "title": title(model), "quick": quick, "rows": ROWS, "code": code,
        "environment": details(torch.device("cpu")),
    }  # fmt: skip
    return {"about": about, "tasks": found}


def line(model: str, task: str, spec: str, figures: Figures) -> str:
    """One result, for a terminal."""
    plain = {name: value for name, value in figures.items() if not isinstance(value, list)}
    return f"{model} {task} {spec}: " + ", ".join(f"{k} {v}" for k, v in plain.items())


def main() -> None:
    """Parses the command line and runs the tasks."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add_options(parser, chosen.TASKS)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS))
    args = parser.parse_args()
    out = out_folder(args)
    for model in args.models or MEASURED:
        try:
            found = run(model, args.specs, args.tasks, quick=args.quick, parts=args.parts)
        except (FetchError, TextError, ValueError) as error:
            parser.exit(1, f"{model}: {error}\n")
        with replacing(out / f"{file_name(model)}-tasks.json") as stream:
            stream.write(f"{json.dumps(found, indent=1)}\n".encode())


if __name__ == "__main__":
    main()
