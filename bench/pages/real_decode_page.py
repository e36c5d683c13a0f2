"""Speed of real models in docs/performance.md: decode steps by cache and program, first tokens, and a picture.

``python -m caramba_fast.bench.pages.real_decode_page`` writes the picture and the README's table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.pages.sections import RESULTS, ROOT, table, write_parts

DECODE, FIRST_TOKEN, WEIGHTS = "-decode.csv", "-first-token.csv", "-weights.json"
GGUF_TYPES = "-gguf-types.csv"
#: What is added to the folder of results, for those of a CPU without AVX-512.
AVX2 = "-avx2"
PICTURE = ROOT.parent / "docs" / "decode-real.png"
README, PART = ROOT.parent / "README.md", "decode of real models"
#: (program, cache) shown in the README beside DynamicCache.
SHOWN = (
    ("transformers", "dynamic eager"),
    ("accelerate", "q4"), ("accelerate packed weights", "q4"), ("Generator compiled packed weights", "q4"),
    ("Generator compiled int8 weights", "q4"), ("Generator compiled int4 weights", "q4"),
    ("llama.cpp", "f16"), ("llama.cpp", "q4_0"), ("OpenVINO GenAI", "f16"),
)  # fmt: skip
MIB = 2**20
#: Plotted: (program, cache), colour.
DRAWN = {
    ("transformers", "dynamic"): "C7", ("accelerate", "q8"): "C0", ("accelerate", "q4"): "C3",
    ("Generator compiled int4 weights", "q4"): "C4", ("llama.cpp", "f16"): "C2", ("llama.cpp", "q8_0"): "C8",
    ("llama.cpp", "q4_0"): "C1", ("OpenVINO GenAI", "f16"): "C5", ("OpenVINO GenAI", "u4"): "C9",
}  # fmt: skip
Row = Mapping[str, str]
TEXT = """`python -m caramba_fast.bench.real.decode` (`make bench-real`): decode steps after a context of so many
tokens, batch 1, all programs interleaved in every round. Tokens/s (medians of steps), and the speedup over
transformers with its DynamicCache ("dynamic", attention by `sdpa`; "eager", by two matrix products; medians over
rounds). accelerate is the same model with our caches, Generator our own loop; "compiled" is `compile=True`, for
which Inductor makes C++ of the step. "Packed" weights are the model's own in oneDNN's layout
([`pack_weights`](inference.md#packed-weights)). At short contexts weights, not the cache, are what a step costs. Those
of llama.cpp are Q4_0 in the layers, 4.5 bits a weight, with which it is fastest ([by how
much](#q4_0-and-q4_1-weights-of-other-programs)), and Q8_0 in the output matrix; int4 ones are torchao's
(`PrototypeInt4WeightOnlyConfig`, groups of 32), 5 bits, and int8 in the output matrix; int8 ones are torchao's
(`Int8WeightOnlyConfig`), which are fast only where they are compiled ([what both
cost](#what-weights-of-few-bits-cost))."""
#: Remarks on programs and files, shown where they were measured.
GENAI = "OpenVINO GenAI"
GENAI_TEXT = f"{GENAI} has the weights of llama.cpp, and does not say what its cache takes."
WEIGHTS_TEXT = """`python -m caramba_fast.bench.real.weights`: against the checkpoint in float32, both with an fp16
cache, on windows of 2,048 tokens of text that settings were not chosen on, with 95% intervals. "int4" is that of the
columns above; "output too" has the output matrix in int4 as well. The checkpoints were GGUF files themselves, so their
weights have been quantized once: SmolLM2's layers to Q4_1, which Q4_1 therefore costs that model nothing."""

GGUF_TYPES_TEXT = """`python -m caramba_fast.bench.real.gguf_types`: llama.cpp lays weights in Q4_0 (4.5 bits) out
anew when it loads them and multiplies them faster than those in Q4_1. Steps after a context: tokens/s of Generator
(`q4`, int4 weights, compiled), then what the others reach as multiples of it, with fp16 caches, interleaved. Prompts:
seconds of Generator (`q4`, bf16 weights) for 1,024 tokens, then how many times as fast the others are."""


def name_of(program: str, cache: str) -> str:
    """Column heading: the program, its cache, and its weights if they are not the model's."""
    program, weights = _parts(program)
    return ", ".join([f"{program} {cache}", *weights])


def _parts(program: str) -> tuple[str, list[str]]:
    """A program's name, and its weights if they are not the model's: ``"Generator int4 weights"``."""
    if not program.endswith(" weights"):
        return program, []
    name, bits, _ = program.rsplit(" ", 2)
    plain = name.removesuffix(" compiled")
    return plain, [f"{bits} weights", *(["compiled"] if plain != name else [])]


def section(folder: Path = RESULTS / "real") -> list[str]:
    """The section of the page; empty if nothing was measured."""
    found = [rows for path in sorted(folder.glob(f"*{DECODE}")) if (rows := list(read(path)))]
    if not found:
        return []
    lines = [
        "## Real models",
        "",
        TEXT,
        *([GENAI_TEXT] if any(row["program"] == GENAI for rows in found for row in rows) else []),
        "",
        f"![tokens per second and cache bytes]({PICTURE.name})",
        "",
    ]
    for rows in found:
        lines += _model(rows)
    for path in sorted(folder.with_name(f"{folder.name}{AVX2}").glob(f"*{DECODE}")):
        lines += _model(list(read(path)), " on a CPU with AVX2")
    first = [row for path in sorted(folder.glob(f"*{FIRST_TOKEN}")) for row in read(path)]
    lines += _first_tokens(first) if first else []
    types = [row for path in sorted(folder.glob(f"*{GGUF_TYPES}")) for row in read(path)]
    lines += _gguf_types(types) if types else []
    return lines + _weights(sorted(folder.glob(f"*{WEIGHTS}")))


def headline(folder: Path = RESULTS / "real") -> list[str]:
    """The README's table, tokens/s and MiB of every model and context; ValueError if nothing was measured."""
    body = []
    shown = list[tuple[str, str]]()
    for rows in _measured(folder):
        names = _names(rows)
        shown = [name for name in SHOWN if name in names or name in shown]
        found = {(row["context"], row["program"], row["cache"]): row for row in rows}
        for context in dict.fromkeys(row["context"] for row in rows):
            base = found[(context, *names[0])]
            cells = []
            for name in shown:
                row = found.get((context, *name))
                cells.append("" if row is None else _speed_and_size(row))
            body.append((base["model"], f"{int(context):,}", _speed_and_size(base), *cells))
    heads = [name_of(program, f"`{cache}`") for program, cache in shown]
    return table(("model", "context", "DynamicCache", *heads), body)


def _speed_and_size(row: Row) -> str:
    speed = format(float(row["tokens_per_s"]), ".1f")
    return f"{speed} · {_mib(row)}" if row["cache_bytes"] else speed


def _measured(folder: Path) -> list[list[dict[str, str]]]:
    """The rows of each model; raises ValueError if there are none."""
    found = [rows for path in sorted(folder.glob(f"*{DECODE}")) if (rows := list(read(path)))]
    if not found:
        raise ValueError(f"{folder} has no *{DECODE}: run caramba_fast.bench.real.decode")
    return found


def _names(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Program and cache, in the order they were measured."""
    return list(dict.fromkeys((row["program"], row["cache"]) for row in rows))


def _model(rows: Sequence[Row], where: str = "") -> list[str]:
    first, names = rows[0], _names(rows)
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    found = {(row["context"], row["program"], row["cache"]): row for row in rows}
    weights = dict.fromkeys(
        f"{row['program']} {row['weights']}" for row in rows if not _parts(row["program"])[1]
    )
    versions = dict.fromkeys(row["version"] for row in rows)
    about = (
        f"{first['device']}, {first['threads']} thread(s), torch {first['torch']}, {', '.join(versions)}; weights: "
        f"{', '.join(weights)}."
    )
    heads = [f"{int(context):,} tokens" for context in contexts]
    speed, size = [], []
    for name in names:
        some = [found.get((context, *name)) for context in contexts]
        speed.append((name_of(*name), *(_speed(row) if row else "" for row in some)))
        if any(row and row["cache_bytes"] for row in some):
            size.append((name_of(*name), *(_mib(row) if row else "" for row in some)))
    return [
        f"### {first['model']}{where}", "", about, "", *table(("tokens/s", *heads), speed), "",
        *table(("MiB of the cache", *heads), size), "",
    ]  # fmt: skip


def _speed(row: Row) -> str:
    return f"{float(row['tokens_per_s']):.1f} · {float(row['vs_dynamic']):.2f}×"


def _mib(row: Row) -> str:
    return f"{int(row['cache_bytes']) / MIB:.1f}"


def _first_tokens(rows: Sequence[Row]) -> list[str]:
    lines = [
        "### First token and memory", "",
        "Seconds until the first token after a prompt, and the speedup over transformers; MiB the "
        "process holds once the model is loaded and warm, weights and libraries included, and the most it holds while "
        "it reads the longest prompt (medians of rounds; each in a process of its own, interleaved). llama.cpp has its "
        f"cache from the start. Weights of llama.cpp and {GENAI}: those of the tables above.",
        "",
    ]  # fmt: skip
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    found = {(row["model"], row["program"], row["cache"], row["prompt"]): row for row in rows}
    body = []
    for name in dict.fromkeys((row["model"], row["program"], row["cache"]) for row in rows):
        some = [found.get((*name, prompt)) for prompt in prompts]
        cells = [
            f"{float(row['first_token_s']):.2f} · {float(row['vs_dynamic']):.2f}×" if row else ""
            for row in some
        ]
        last = [row for row in some if row][-1]
        body.append((name[0], name_of(*name[1:]), *cells, last["held_mib"], last["peak_mib"]))
    heads = [f"{int(prompt):,} tokens" for prompt in prompts]
    head = ("model", "program", *heads, "MiB before", "most MiB")
    return [*lines, *table(head, body, left=2), ""]


def _gguf_types(rows: Sequence[Row]) -> list[str]:
    """Table of other programs by the type of their weights."""
    columns = sorted(
        {(r["program"], r["weights"]) for r in rows if not r["program"].startswith("Generator")},
        reverse=True,
    )
    body = []
    for key in dict.fromkeys((row["model"], row["what"], row["tokens"]) for row in rows):
        base, *others = (row for row in rows if (row["model"], row["what"], row["tokens"]) == key)
        found = {
            (row["program"], row["weights"]): f"{float(row['vs_generator']):.2f}×" for row in others
        }
        model, what, tokens = key
        ours = float(base["median_ms"])
        shown = f"{1e3 / ours:.1f}" if what == "step" else f"{ours / 1e3:.2f} s"
        body.append(
            (model, f"{what}, {int(tokens):,}", shown, *(found.get(name, "") for name in columns))
        )
    heads = [f"{program} {weights.partition(',')[0]}" for program, weights in columns]
    title = "### Q4_0 and Q4_1 weights of other programs"
    return [
        title,
        "",
        GGUF_TYPES_TEXT,
        "",
        *table(("model", "tokens", "Generator", *heads), body, left=2),
        "",
    ]


def _weights(files: Sequence[Path]) -> list[str]:
    """Quality loss of low-bit weights; empty if it was not measured."""
    body = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, row in found["weights"].items():
            ratio, low, high = row["ppl_ratio"]
            body.append(
                (
                    found["about"]["title"], found["about"]["windows"], name, f"{ratio:.4f} ({low:.4f}–{high:.4f})",
                    f"{1000 * row['mean_kl'][0]:.1f}", f"{row['top1_agreement'][0]:.1%}", f"{row['acceptance'][0]:.1%}",
                )
            )  # fmt: skip
    if not body:
        return []
    head = (
        "model",
        "windows",
        "weights",
        "perplexity ratio",
        "KL, mnat",
        "same top token",
        "acceptance",
    )
    title = "### What weights of few bits cost"
    return [title, "", WEIGHTS_TEXT, "", *table(head, body, left=3), ""]


def draw(folder: Path, path: Path) -> None:
    """Plots tokens/s and cache bytes against context, two pictures per model; ValueError if nothing was measured."""
    from caramba_fast.quality.plot import new_figure, write_figure  # noqa: PLC0415 - heavy

    found = _measured(folder)
    figure = new_figure(9.0, 3.4 * len(found))
    grid = figure.subplots(len(found), 2, squeeze=False)
    for axes, rows in zip(grid, found, strict=True):
        for name, colour in DRAWN.items():
            mine = [row for row in rows if (row["program"], row["cache"]) == name]
            contexts = [int(row["context"]) for row in mine]
            style = {"color": colour, "label": name_of(*name), "marker": "o", "markersize": 3}
            if mine:
                axes[0].plot(contexts, [float(row["tokens_per_s"]) for row in mine], **style)
            if mine and mine[0]["cache_bytes"]:
                axes[1].plot(contexts, [int(row["cache_bytes"]) / MIB for row in mine], **style)
        for axis, what in zip(axes, ("tokens/s", "MiB of the cache"), strict=True):
            axis.set(xlabel="context", ylabel=what, ylim=(0, None))
            axis.set_title(f"{rows[0]['model']}, {rows[0]['dtype']}", fontsize=9)
            axis.locator_params(axis="x", nbins=6)
            axis.grid(alpha=0.3)
    grid[0][1].legend(
        *grid[0][0].get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=7
    )
    write_figure(figure, path)


if __name__ == "__main__":
    draw(RESULTS / "real", PICTURE)
    write_parts({PART: headline()}, README)
