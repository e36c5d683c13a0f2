"""The study behind the caches' defaults: ``python -m caramba_fast.bench.generation.quality [SUBJECT ...]``.

Measures every setting alone and together, on both demo models and on hard variants of them, against an fp16 cache;
then the chosen defaults with needles at two contexts. Writes ``bench/results/quality/<subject>.csv`` (the matrix) and
``<subject>-claims.csv`` (and .json), from which `quality_page` makes docs/quality.md. Finished parts are kept in
``--parts``, so that a run can be resumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from caramba_fast.models import Transformer, demo_tokenizer, held_out_text, load_demo
from caramba_fast.quality import QualityReport, RecallFormat, cached_forward, measure
from caramba_fast.quality.hard import hard_variants

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quality"
CONTEXT, TOKENS, HARD_TOKENS, CLAIM_TOKENS, NEEDLES = 1024, 16384, 8192, 32768, 2048
CLAIM_CONTEXTS = (1024, 2048)
PARTS = ("matrix", "claims")

#: The defaults of keys and values with 4 bits, except the tail.
KEYS, VALUES = "sink_len=4", "fit=mse,rotate,sink_len=4"
TAIL = "residual_len=16"


def _more(options: str) -> str:
    return f",{options}" if options else ""


def matrix(streams: int) -> list[str]:
    """The settings compared: each alone, all together, and all but one.

    ``streams`` is 2 for K and V, 3 for K_sem, K_geo and V.
    """

    def q4(keys: str, values: str = "", *, by: str = "q4_channel") -> str:
        return "/".join([f"{by}:plain{_more(keys)}"] * (streams - 1) + [f"q4:plain{_more(values)}"])

    def q8(keys: str, values: str = "") -> str:
        return "/".join(
            [f"q8_channel:plain{_more(keys)}"] * (streams - 1) + [f"q8:plain{_more(values)}"]
        )

    alone = ["fit=mse", "rotate", "sink_len=4", *(f"residual_len={n}" for n in (16, 32, 64))]
    found = [
        "q8:plain",
        q8(""),
        q8("qblock=64"),
        q8("qblock=128"),
        "q4:plain",
        *(f"q4:plain,{option}" for option in alone),
        q4("fit=mse,rotate", "fit=mse", by="q4"),
        q4("fit=mse,rotate," + TAIL, "fit=mse," + TAIL, by="q4"),
        q4(""),
        q4("", "fit=mse"),
        q4("", "fit=mse,rotate"),
        q4("sink_len=4", VALUES),
        *(q4(f"{KEYS},residual_len={n}", f"{VALUES},residual_len={n}") for n in (16, 32, 64)),
        q4(f"{KEYS},{TAIL},qblock=64", f"{VALUES},{TAIL}"),
        "q4",
        "nf4:plain",
        "nf4",
    ]
    if streams == 2:
        found += ["q8/q4", "q8:plain/q4:plain", "q4:plain/q8:plain"]
    else:  # a lane of semantic keys has 32 values
        found += ["q4/q8/q4", "q4:plain/q8:plain/q4:plain", "q8:plain/q4:plain/q4:plain"]
        found += ["q4:plain/q4:plain,qblock=64/q4:plain,qblock=64"]
    return list(dict.fromkeys(found))


def claims(streams: int, hard: bool) -> list[str]:
    """The defaults that the page makes promises of, next to the same kinds without them."""
    if hard:
        return ["q8", "q4", "nf4", "q4:plain"]
    mixed = ["q8/q4"] if streams == 2 else ["q4/q8/q4"]
    return ["q8", "q8:plain", "q4", "q4:plain", "nf4", "nf4:plain", *mixed]


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


def main() -> None:
    """Parses the command line and runs the study."""
    known = subjects()
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
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
