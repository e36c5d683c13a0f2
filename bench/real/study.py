"""Quality loss of each cache with real models: ``python -m caramba_fast.bench.real.study``, `make real`.

The quality lab on half English, half Python documentation (`text`), against an fp16 cache: perplexity ratio, KL, top
token and acceptance with 95% intervals over windows, and the bytes of a whole cache. Writes one JSON report per model
into ``bench/results/real``, from which `real_page` makes the first part of docs/quality.md. Finished parts are kept in
``--parts``, so that a run can be resumed, and a new cache costs its own time and the baseline's. Parts are named by
settings, not by code: a run warns if other code made some of them, and the folder then has to be removed. ``--add``
needs no parts: it adds the caches of ``--specs`` to the existing report. ``--long`` measures a few caches on longer
windows of the same text, each ``--context`` in a file of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.environment import details
from caramba_fast.bench.real import specs as chosen
from caramba_fast.bench.real.code import note_code
from caramba_fast.bench.real.models import MEASURED, SOURCES, FetchError, model_folder, title
from caramba_fast.bench.real.text import KINDS, PARTS, TextError, windows
from caramba_fast.cli.quality import Subject, begin_token, load_subject
from caramba_fast.quality import QualityReport, cache_size, cached_forward, measure
from caramba_fast.quality.compare import ModelForward
from caramba_fast.quality.needles import token_ids
from caramba_fast.quality.report import on_pareto_front

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real"
#: Suffixes of a model's name: report of the part of the text for choosing settings; report of long windows.
CHOSEN_ON, LONG = "-chosen-on", "-long"
RUNS = Path(__file__).resolve().parents[2] / "runs" / "real"
#: 8 windows of 2048 tokens are 16,376 predictions.
CONTEXT, WINDOWS = 2048, 8
QUICK_WINDOWS = 2
#: With ``--long``: 32,764 predictions.
LONG_CONTEXT, LONG_WINDOWS = 8192, 4
#: Rows computed together.
BATCH = 2
#: Tokens of the cache whose total bytes are reported.
SIZE_CONTEXT = 4096


def file_name(model: str) -> str:
    """A model's name as that of a file: a folder's last part, a Hub id without its slash."""
    return Path(model).name if Path(model).is_dir() else model.replace("/", "--")


def study(
    model: str,
    specs: Sequence[str] = chosen.STUDY,
    *,
    context: int = CONTEXT,
    count: int = WINDOWS,
    part: str = "held out",
    parts: Path = RUNS,
    subject: Subject | None = None,
) -> QualityReport:
    """Figures of one model, the baseline first.

    Args:
        model: a name, folder or Hub id that `model_folder` takes.
        specs: caches to measure.
        context: tokens of a window, and of the whole cache whose bytes are given if that is more.
        count: windows, half of each text.
        part: of the texts (`text.PARTS`).
        parts: where finished parts are kept.
        subject: the model, if it is loaded already.

    Returns the lab's report; its ``about`` also has ``title``, ``text_part``, ``code`` (what made the parts,
    `note_code`), ``sizes`` (bits a value and bytes of a whole cache of `SIZE_CONTEXT` tokens, by spec), ``seconds`` (of
    this run) and ``environment``. Raises FetchError or TextError if model or text cannot be had, ValueError for a spec
    that is unknown or does not fit the model.
    """
    subject = subject or load_subject(str(model_folder(model)), "cpu")
    bos = begin_token(subject)
    size = context - (bos is not None)
    ids = windows(lambda text: token_ids(subject.tokenizer, text).tolist(), size, count, part)
    forward = cached_forward(subject.model)
    began = time.perf_counter()

    def show(done: int, total: int) -> None:
        print(f"\r{model}: {done / total:4.0%}", end="", file=sys.stderr, flush=True)

    folder = parts / f"{file_name(model)}-{part.replace(' ', '-')}-{count}x{context}"
    code = note_code(folder)
    report = measure(
        forward, specs, text_ids=ids.reshape(-1), contexts=(context,), tokens=count * context,
        baseline=chosen.BASELINE, batch=BATCH, bos_token_id=bos, folder=folder, progress=show,
    )  # fmt: skip
    print(file=sys.stderr)
    report.about.update(
        name=file_name(model), title=title(model), text_part=part, texts=list(KINDS), context=context, windows=count,
        code=code, size_context=max(SIZE_CONTEXT, context),
        sizes=sizes(forward, [row.kind for row in report.rows], max(SIZE_CONTEXT, context)),
        seconds=round(time.perf_counter() - began, 1), environment=details(torch.device("cpu")),
    )  # fmt: skip
    return report


def sizes(forward: ModelForward, specs: Sequence[str], context: int) -> dict[str, dict[str, Any]]:
    """By spec: bits of a cached number, scales included, and bytes of a whole cache of ``context`` tokens."""
    found = {}
    for spec in specs:
        size = cache_size(forward.layout, spec, context)
        whole = round(size.cache_bytes_per_token * context)
        found[spec] = {"bits_per_value": size.bits_per_value, "cache_bytes": whole}
    return found


#: Settings in which two reports must agree to be merged.
SAME = ("model", "text", "baseline", "text_part", "context", "windows", "size_context")


def added(earlier: QualityReport, report: QualityReport) -> QualityReport:
    """``earlier`` with the caches of ``report`` added or replaced, in the order of the study.

    Raises ValueError if models, texts, windows or baselines differ.
    """
    differ = [name for name in SAME if earlier.about.get(name) != report.about.get(name)]
    if differ:
        raise ValueError(f"the report that is there has another {', '.join(differ)}")
    nlls = [found.rows[0].nll for found in (earlier, report)]
    if not math.isclose(*nlls, rel_tol=1e-5):
        raise ValueError(f"the baseline's loss is {nlls[1]}, in the report that is there {nlls[0]}")
    rows = {row.kind: row for row in (*earlier.rows, *report.rows[1:])}
    order = {spec: at for at, spec in enumerate((chosen.BASELINE, *chosen.STUDY))}
    ordered = sorted(rows.values(), key=lambda row: order.get(row.kind, len(order)))
    front = on_pareto_front([(row.cache_bytes_per_token, row.mean_kl) for row in ordered])
    about = dict(earlier.about)
    about["sizes"] = {**about["sizes"], **report.about["sizes"]}
    about["code"] = list(dict.fromkeys([*about["code"], *report.about["code"]]))
    about["seconds"] = round(about["seconds"] + report.about["seconds"], 1)
    ordered = [replace(row, pareto=best) for row, best in zip(ordered, front, strict=True)]
    return QualityReport(ordered, earlier.needles, about)


def lines(report: QualityReport) -> list[str]:
    """The table of a report, for a terminal."""
    head = f"{'cache':28} {'bits':>5} {'ratio':>8} {'KL mnat':>9} {'top-1':>7} {'accept':>7}"
    rows = (
        f"{row.kind:28} {row.bits_per_value:5.2f} {row.ppl_ratio:8.4f} {1000 * row.mean_kl:9.2f} "
        f"{row.top1_agreement:7.2%} {row.acceptance:7.2%}"
        for row in report.rows
    )
    return [head, *rows]


def add_options(parser: argparse.ArgumentParser, specs: Sequence[str]) -> None:
    """Adds the options that the study and the tasks share."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help=f"of {', '.join(SOURCES)}; a checkpoint folder; or a Hub id (organisation/model)",
    )  # fmt: skip
    parser.add_argument("--specs", nargs="+", default=list(specs), metavar="SPEC")
    parser.add_argument("--parts", type=Path, default=RUNS, help="where finished parts are kept")
    parser.add_argument("--out", type=Path, help="where results go, by default bench/results/real")
    parser.add_argument("--quick", action="store_true", help="a small part, into runs/real/quick")


def out_folder(args: argparse.Namespace) -> Path:
    """Folder of the results; a quick run never replaces published ones."""
    folder: Path = args.out or (RUNS / "quick" if args.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    """Parses the command line and runs the study."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add_options(parser, chosen.STUDY)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--windows", type=int, help=f"{WINDOWS}, or {QUICK_WINDOWS} with --quick")
    parser.add_argument("--on", choices=PARTS, default="held out", help="which part of the texts")
    parser.add_argument(
        "--add", action="store_true", help="keep the other caches of the report that is there"
    )
    parser.add_argument(
        "--long", action="store_true",
        help=f"by default {LONG_WINDOWS} windows of {LONG_CONTEXT} tokens, and fewer caches",
    )  # fmt: skip
    args = parser.parse_args()
    if args.long:
        parser.set_defaults(context=LONG_CONTEXT, specs=list(chosen.LONG))
        args = parser.parse_args()
    out = out_folder(args)
    count = args.windows or (
        QUICK_WINDOWS if args.quick else LONG_WINDOWS if args.long else WINDOWS
    )
    for model in args.models or MEASURED:
        suffix = "" if args.on == "held out" else CHOSEN_ON
        if args.long:
            suffix = LONG if args.context == LONG_CONTEXT else f"-{args.context}{LONG}"
        file = out / f"{file_name(model)}{suffix}.json"
        try:
            report = study(
                model, args.specs, context=args.context, count=count, part=args.on, parts=args.parts
            )
            if args.add and file.is_file():
                report = added(QualityReport.from_json(file), report)
        except (FetchError, TextError, ValueError) as error:
            parser.exit(1, f"{model}: {error}\n")
        report.to_json(file)
        print(
            f"{report.about['title']}, {args.on}, {report.about['seconds']} s",
            *lines(report),
            sep="\n",
        )


if __name__ == "__main__":
    main()
