"""The study behind the caches' defaults: ``python -m caramba_fast.bench.generation.quality [SUBJECT ...]``.

Every setting alone and together, on both demo models and on hard variants of them, against an fp16 cache;
then the chosen defaults with needles at two contexts. Writes ``bench/results/quality/<subject>.csv`` (the
matrix), ``<subject>-claims.csv`` (and .json) and ``<subject>-prompts.csv``, from which `quality_page` makes
docs/quality.md. Resumable: finished parts are kept in ``--parts``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from caramba_fast.models import Transformer, demo_tokenizer, held_out_text, load_demo
from caramba_fast.quality import QualityReport, RecallFormat, cached_forward, compare, measure
from caramba_fast.quality.hard import hard_variants

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quality"
CONTEXT, TOKENS, HARD_TOKENS, CLAIM_TOKENS, NEEDLES = 1024, 16384, 8192, 32768, 2048
CLAIM_CONTEXTS = (1024, 2048)
#: Prompts of each kind, tokens of text between them, and tokens measured behind each.
PROMPTS, SPACING, FOLLOWING = 6, 3000, 512
PARTS = ("matrix", "claims", "prompts")

#: What a full set of transforms is, for keys and for values.
KEYS, VALUES = "fit=mse,rotate,center,scale", "fit=mse,scale"
TAIL = "residual_len=32"


def _both(kind: str, keys: str, values: str, streams: int) -> str:
    """A spec with options for keys and for values; for decoupled attention for both keys."""
    key, value = (f"{kind}:{','.join(('plain', *filter(None, (x,))))}" for x in (keys, values))
    return "/".join([key] * (streams - 1) + [value])


def matrix(streams: int) -> list[str]:
    """The settings compared: each alone, all together, and all but one.

    Args:
        streams: 2 for K and V, 3 for K_sem, K_geo and V.
    """

    def q4(keys: str, values: str = "") -> str:
        return _both("q4", keys, values, streams)

    alone = ["fit=mse", "rotate", "center", "scale", "sink_len=4"]
    tails = [f"residual_len={n}" for n in (16, 32, 64)]
    whole = q4(f"{KEYS},{TAIL}", VALUES)
    found = [
        "q8:plain",
        *(_both("q8", x, y, streams) for x, y in (("rotate", ""), ("center,scale", "scale"))),
        _both("q8", "rotate,center,scale", "scale", streams),
        "q4:plain",
        *(f"q4:plain,{option}" for option in (*alone, *tails)),
        q4("", "fit=mse,rotate"),
        q4("center,scale", "scale"),
        q4("rotate,center,scale", "scale"),
        q4(KEYS, VALUES),
        q4(f"{KEYS},residual_len=16", VALUES),
        whole,
        q4(f"{KEYS},residual_len=64", VALUES),
        q4(f"{KEYS},{TAIL},sink_len=4", VALUES),
        q4(f"{KEYS},{TAIL}", "fit=mse,scale,rotate"),
        *(
            q4(",".join((*(x for x in KEYS.split(",") if x != left), TAIL)), VALUES)
            for left in KEYS.split(",")[1:]
        ),
        q4("rotate,center,scale," + TAIL, "scale"),
        "nf4:plain",
        _both("nf4", KEYS, VALUES, streams),
        _both("nf4", f"{KEYS},{TAIL}", VALUES, streams),
    ]
    if streams == 2:
        found += [
            "q4:plain,qblock=64",
            f"q4:plain,{KEYS},{TAIL},qblock=64/q4:plain,{VALUES},qblock=64",
        ]
        found += [
            "q8:plain/q4:plain",
            f"q8:plain,center,scale/q4:plain,{VALUES}",
            "q4:plain/q8:plain",
        ]
    else:  # a lane of semantic keys has 32 values
        found += ["q4:plain/q4:plain,qblock=64/q4:plain,qblock=64"]
        found += [
            "q4:plain/q8:plain/q4:plain",
            f"q4:plain,{KEYS}/q8:plain,center,scale/q4:plain,{VALUES}",
        ]
        found += ["q8:plain/q4:plain/q4:plain"]
    return list(dict.fromkeys(found))


def claims(streams: int, hard: bool) -> list[str]:
    """What is promised of the defaults, next to the same kinds without them."""
    if hard:
        return ["q8", "q4", "nf4", "q4:plain"]
    mixed = ["q8/q4"] if streams == 2 else ["q4/q8/q4"]
    return ["q8", "q8:plain", "q4", "q4:plain", "nf4", "nf4:plain", *mixed]


def prompts(ids: np.ndarray, tokenizer: Tokenizer) -> dict[str, Callable[[int], np.ndarray]]:
    """Short and repetitive prompts, from which constants are hard to take; the i-th of each kind."""

    def words(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text).ids)

    def at(i: int, count: int) -> np.ndarray:
        return ids[SPACING * i :][:count]

    return {
        "64 tokens of text": lambda i: at(i, 64),
        "256 tokens of text": lambda i: at(i, 256),
        "one token, 64 times": lambda i: np.resize(at(i, 1), 64),
        "two tokens in turn, 64": lambda i: np.resize(at(i, 2), 64),
        "a line of 12, repeated to 96": lambda i: np.resize(at(i, 12), 96),
        "a line of 12, repeated to 300": lambda i: np.resize(at(i, 12), 300),
        "20 tokens, repeated to 128": lambda i: np.resize(at(i, 20), 128),
        "32 tokens, repeated to 128": lambda i: np.resize(at(i, 32), 128),
        "a list of digits, 96": lambda i: np.resize(words(f"{i}, 1, 2, 3, 4, 5, 6, 7, 8, 9, "), 96),
        "random tokens, 96": lambda i: np.random.default_rng(i).integers(2, 2048, 96),
    }


def study_prompts(name: str, model: Transformer) -> None:
    """Mean KL on text that follows each kind of prompt, with and without constants taken from it."""
    tokenizer = demo_tokenizer("gqa")
    ids = np.asarray(tokenizer.encode(held_out_text()).ids)
    streams = 2 if model.config.decoupled is None else 3
    without = _both("q4", "fit=mse,rotate", "fit=mse", streams)
    given = _both("q4", KEYS, VALUES, streams)
    rows = []
    for kind, prompt in prompts(ids, tokenizer).items():
        found: list[list[float]] = []
        for i in range(PROMPTS):
            start = prompt(i)
            text = np.concatenate((start, ids[SPACING * i + SPACING // 2 :][:FOLLOWING]))
            scores = compare(
                cached_forward(model, chunk=len(start)),
                torch.from_numpy(text)[None],
                [without, given],
            )
            found.append([float(scores[s].kl[0, len(start) :].mean()) for s in (without, given)])
        means = np.mean(found, axis=0)
        worst = max(b / a for a, b in found)
        rows.append([kind, *(f"{1000 * mean:.3f}" for mean in means), f"{worst:.2f}"])
    with (RESULTS / f"{name}-prompts.csv").open("w", newline="", encoding="utf-8") as file:
        head = ["prompt", "kl_without", "kl_with", "worst_ratio"]
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def subjects() -> dict[str, Callable[[], Transformer]]:
    """Both demo models and their hard variants."""
    found: dict[str, Callable[[], Transformer]] = {}
    for demo in ("gqa", "dba"):
        found[demo] = lambda demo=demo: load_demo(demo)
        found.update({f"{demo}-{name}": build for name, build in hard_variants(demo).items()})
    return found


def study(name: str, model: Transformer, parts: Path, what: Sequence[str]) -> None:
    """Measures one subject and writes its tables."""
    hard = "-" in name
    streams = 2 if model.config.decoupled is None else 3
    tokenizer = demo_tokenizer("gqa")
    text = np.asarray(tokenizer.encode(held_out_text()).ids)
    forward = cached_forward(model)

    def show(done: int, total: int) -> None:
        print(f"\r{name}: {done / total:4.0%}", end="", file=sys.stderr, flush=True)

    def run(specs: list[str], file: str, recall: RecallFormat | None, **sizes: object) -> None:
        report: QualityReport = measure(
            forward, specs, text_ids=text, recall=recall, batch=2, folder=parts / name, progress=show,
            **sizes,  # type: ignore[arg-type]
        )  # fmt: skip
        report.to_csv(RESULTS / f"{file}.csv")
        if recall is not None:
            report.to_json(RESULTS / f"{file}.json")
        print(file=sys.stderr)

    RESULTS.mkdir(parents=True, exist_ok=True)
    if "matrix" in what:
        tokens = HARD_TOKENS if hard else TOKENS
        run(matrix(streams), name, None, contexts=(CONTEXT,), tokens=tokens)
    if "claims" in what:
        run(
            claims(streams, hard), f"{name}-claims", RecallFormat.of(tokenizer),
            contexts=(CONTEXT,) if hard else CLAIM_CONTEXTS, needles=NEEDLES,
            tokens=TOKENS if hard else CLAIM_TOKENS,
        )  # fmt: skip
    if "prompts" in what:
        study_prompts(name, model)


def main() -> None:
    """Parses the command line and runs the study."""
    known = subjects()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", help=f"of {', '.join(known)}; by default all")
    parser.add_argument("--parts", type=Path, default=Path("runs/quality"))
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    unknown = [name for name in args.subjects if name not in known]
    if unknown:
        parser.error(f"unknown subject {unknown[0]!r}; known are {', '.join(known)}")
    for name in args.subjects or known:
        study(name, known[name](), args.parts, (args.only,) if args.only else PARTS)


if __name__ == "__main__":
    main()
