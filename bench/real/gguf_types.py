"""Speed of other programs by type of the GGUF file: ``python -m caramba_fast.bench.real.gguf_types [MODEL ...]``.

llama.cpp repacks Q4_0 when it loads a file, for faster products, but not Q4_1. Both files, in llama.cpp and in OpenVINO
GenAI with fp16 caches, take steps in turn with `Generator` (``q4``, int4 weights, compiled); then llama.cpp and
Generator (bf16 weights) read a prompt in turn. Writes ``bench/results/real/<model>-gguf-types.csv``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.timing import quantile, ratio
from caramba_fast.bench.out import write_table
from caramba_fast.bench.pages.real_decode_page import GGUF_TYPES
from caramba_fast.bench.real import decode
from caramba_fast.bench.real.llama_cpp import LlamaCpp
from caramba_fast.bench.real.models import (
    MEASURED,
    SOURCES,
    FetchError,
    model_folder,
    title,
)
from caramba_fast.bench.real.study import RESULTS, file_name
from caramba_fast.bench.real.weights import quantize, why_not_quantized
from caramba_fast.infer import Generator
from caramba_fast.models import load_model, merge_projections

TYPES = ("Q4_1", "Q4_0")
CONTEXTS, PROMPT, ROUNDS = (64, 512, 2048, 8192), 1024, 3
BUDGET_S = 20.0
COLUMNS = (
    "model", "what", "tokens", "program", "cache", "weights", "samples", "median_ms", "vs_generator", "threads",
    "version", "device", "torch", "triton", "commit", "source",
)  # fmt: skip


def measure(name: str, contexts: Sequence[int] = CONTEXTS) -> Iterator[dict[str, Any]]:
    """The rows of one model: steps after contexts, then prompts."""
    native = merge_projections(load_model(model_folder(name), dtype=torch.bfloat16))
    few: Any = merge_projections(load_model(model_folder(name), dtype=torch.bfloat16))
    quantize(few, "int4")
    ids = torch.randint(native.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    text, room = ids[0, : decode.TEXT].tolist(), max(contexts)
    kinds = (("f16",), ("f16",))
    peers = [x for layers in TYPES for x in decode.peers_of(name, room, text, kinds, layers)]
    llama = [x for x in peers if isinstance(x, LlamaCpp)]
    for context in contexts:
        begin = ids[:, : min(decode.TEXT, context)]
        ours = decode.in_generator(few, begin, context, "int4", ("q4",), compiled=True)
        entries = [x.make() for x in (*ours, *decode.in_peers(peers, context))]
        decode.measure(entries, decode.ROUNDS, BUDGET_S)
        for entry in entries:
            yield _row(
                name, "step", context, (entry.program, entry.cache, entry.weights, entry.version), entry.steps,
                ratio(entries[0].rounds, entry.rounds),
            )  # fmt: skip
    generator = Generator(
        native, cache_kind="q4", max_seq_len=PROMPT + 8, temperature=0, ignore_eos=True
    )

    def read(model: Any) -> None:
        if model is generator:
            generator.reset()
            generator.generate(ids, max_new_tokens=1)
        else:
            model.model.reset()
            model.model.eval(ids[0].tolist())

    running = [
        (("Generator", "q4", "bfloat16", "caramba_fast"), partial(read, generator)),
        *(((x.program, x.kind, x.weights, x.version), partial(read, x)) for x in llama),
    ]
    times: list[dict[int, float]] = [{} for _ in running]
    for number in range(-1, ROUNDS):
        for (_, run), taken in zip(running, times, strict=True):
            began = time.perf_counter()
            run()
            if number >= 0:
                taken[number] = time.perf_counter() - began
    for (about, _), taken in zip(running, times, strict=True):
        yield _row(name, "prompt", PROMPT, about, list(taken.values()), ratio(times[0], taken))


def _row(
    name: str,
    what: str,
    tokens: int,
    about: tuple[str, ...],
    taken: list[float],
    vs_generator: float,
) -> dict[str, Any]:
    program, cache, weights, version = about
    median = quantile(taken, 0.5) if what == "step" else statistics.median(taken)
    return {
        "model": title(name), "what": what, "tokens": tokens, "program": program, "cache": cache, "weights": weights,
        "samples": len(taken), "median_ms": f"{1e3 * median:.3f}", "vs_generator": f"{vs_generator:.3f}",
        "threads": torch.get_num_threads(), "version": version, **environment(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    """Measures the models named, by default all."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if (reason := why_not_quantized()) is not None:
        parser.exit(1, f"{reason}\n")
    for name in args.models or MEASURED:
        rows = []
        try:
            for row in measure(name, args.contexts):
                rows.append(row)
                print(*(row[column] for column in COLUMNS[1:9]), flush=True)
        except FetchError as error:
            parser.exit(1, f"{name}: {error}\n")
        write_table(args.out / f"{file_name(name)}{GGUF_TYPES}", COLUMNS, rows)


if __name__ == "__main__":
    main()
