"""Decode steps of real models, by cache and by program: ``python -m caramba_fast.bench.real.decode [MODEL ...]``.

A model takes single tokens after contexts of several lengths: in transformers with its DynamicCache and with ours
(`accelerate`), in our `Generator`, and in llama.cpp and OpenVINO GenAI with their own caches (the packages
llama-cpp-python and openvino-genai; they run a GGUF file of the checkpoint with 4-bit weights, `weights.four_bits`).
Contexts are the states of random tokens, repeated; those two compute theirs. All take their steps in turn, in rounds;
a ratio is the median over rounds.

Packed weights (`caramba_fast.models.pack_weights`) and, where torchao is installed, its weights of 8 and 4 bits
(`weights.quantize`) are measured as well: in transformers with DynamicCache and with our caches, packed ones and 4
bits in `Generator`, and all three in its compiled step. ``vs_dynamic`` is always against DynamicCache with the model's
own weights as they are.

With ``--prompts`` each program also reads a prompt in its own process, for time to first token and peak memory.

A name of `shapes.SHAPES` is a model of that shape with random weights, for machines without checkpoints: weights do
not affect the time of a step. ``--device cuda`` runs transformers and ours there, with as many caches at once as fit
into memory, and ends with status 1 if a `Generator` did not replay a CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import environment
from caramba_fast.bench.generation import hf_decode
from caramba_fast.bench.generation.decode_model import lengthen
from caramba_fast.bench.kernels.parity import described
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.bench.kernels.timing import quantile, ratio
from caramba_fast.bench.out import write_table
from caramba_fast.bench.pages.real_decode_page import DECODE, FIRST_TOKEN
from caramba_fast.bench.real.first_token import first_tokens
from caramba_fast.bench.real.fitting import Attempt, Running, in_groups
from caramba_fast.bench.real.llama_cpp import KINDS as LLAMA_KINDS
from caramba_fast.bench.real.llama_cpp import LlamaCpp
from caramba_fast.bench.real.models import MEASURED, SOURCES, FetchError, gguf_file, title
from caramba_fast.bench.real.openvino_genai import KINDS as GENAI_KINDS
from caramba_fast.bench.real.openvino_genai import OpenVinoGenAI
from caramba_fast.bench.real.shapes import SHAPES, models_of
from caramba_fast.bench.real.study import RESULTS, file_name
from caramba_fast.bench.real.weights import quantize, why_not_quantized
from caramba_fast.infer import Generator
from caramba_fast.models import pack_weights
from caramba_fast.models.packed import why_not_packed

CONTEXTS = (64, 512, 2048, 8192, 16384)
#: Caches under `accelerate`, and in `Generator`.
ACCELERATED, GENERATOR = ("bf16", "q8", "q4", "nf4"), ("bf16", "q8", "q4")
#: Longest context for the other programs, which take minutes to compute it for each of their caches.
PEERS_MOST = 8192
#: Tokens whose states are repeated; steps of a round; rounds, and seconds after which no more are begun.
TEXT, STEPS, ROUNDS, BUDGET_S = 256, 4, 11, 120.0
QUICK = (64, 2048)
#: Caches under `accelerate` with other weights than the model's as they are, on a CPU: packed ones (`pack_weights`),
#: and torchao's.
QUANTIZED, PACKED, TORCHAO = ("q4",), "packed", ("int8", "int4")
WEIGHTS = (PACKED, *TORCHAO)
#: Of these, those that are also measured in `Generator`, and those with which its compiled step is measured.
OWN, COMPILED = (PACKED, "int4"), (PACKED, "int8", "int4")
COLUMNS = (
    "model", "dtype", "context", "program", "cache", "weights", "samples", "median_ms", "p20_ms", "p80_ms",
    "tokens_per_s", "vs_dynamic", "cache_bytes", "threads", "version", "device", "torch", "triton", "commit", "source",
)  # fmt: skip


def in_transformers(
    model: Any,
    states: list[tuple[Tensor, Tensor]],
    context: int,
    weights: str,
    kinds: Sequence[str] = ACCELERATED,
) -> Iterator[Attempt]:
    """DynamicCache first, then ours; packed and torchao's weights are part of the program's name.

    With the model's own weights DynamicCache is also measured under transformers' eager attention.
    """
    version = f"transformers {hf_decode.transformers.__version__}"
    more = f" {weights} weights" if weights in WEIGHTS else ""

    def made(
        program: str, name: str, ours: bool, make: Callable[[], Any], attention: str | None = None
    ) -> Running:
        cache = hf_decode.holding(make(), states, context)
        entry = hf_decode.Entry(name, cache, ours, attention)
        found = Running(
            program, name, weights, lambda count: hf_decode.take_steps(model, entry, count),
            lambda: hf_decode.cache_bytes(entry.cache), version,
        )  # fmt: skip
        if model.device.type == "cuda":
            found.take(1)  # compiles, and frees the memory used to store so many tokens at once
        return found

    caches = hf_decode.caches(model, context, kinds, () if more else None)
    for name, ours, make in caches:
        program = f"{'accelerate' if ours else 'transformers'}{more}"
        yield Attempt(f"{program} {name}", partial(made, program, name, ours, make))
        if name == "dynamic" and not more:
            eager = "dynamic eager"
            yield Attempt(f"{program} {eager}", partial(made, program, eager, ours, make, "eager"))


def with_weights(name: str, dtype: torch.dtype) -> dict[str, tuple[Any, Any]]:
    """`models_of` with other weights, by name of the weights; prints why any are left out."""
    reasons = {PACKED: why_not_packed(dtype)}
    for weights in TORCHAO:
        reasons[weights] = "it has no checkpoint" if name in SHAPES else why_not_quantized()
    found = {}
    for weights, reason in reasons.items():
        if reason is not None:
            print(f"{weights} weights do not run in {name} here: {reason}")
            continue
        found[weights] = models_of(name, dtype, torch.device("cpu"))
        for model in found[weights]:
            if weights == PACKED:
                pack_weights(model.eval())
            else:
                quantize(model, weights)
    return found


def in_generator(
    model: Any,
    ids: Tensor,
    context: int,
    weights: str,
    kinds: Sequence[str] = GENERATOR,
    *,
    compiled: bool = False,
) -> Iterator[Attempt]:
    """Our own loop over our own model."""
    more = f" {weights} weights" if weights in WEIGHTS else ""
    program = f"Generator{' compiled' * compiled}{more}"
    room = context + ids.shape[1] + (ROUNDS + 2) * (STEPS + 1) + 2

    def made(kind: str) -> Running:
        generator = Generator(
            model, cache_kind=kind, max_seq_len=room, max_new_tokens=room - ids.shape[1], temperature=0,
            ignore_eos=True, compile=compiled,
        )  # fmt: skip
        tokens = generator.generate_iter(ids)
        next(tokens)
        cache = generator.cache
        assert cache is not None
        lengthen(cache, context)
        if compiled or model.device.type == "cuda":  # the second step compiles, or records a graph
            next(tokens)
            next(tokens)

        def take(count: int) -> list[float]:
            taken = []
            for _ in range(count + 1):
                began = time.perf_counter()
                next(tokens)
                taken.append(time.perf_counter() - began)
            return taken[1:]

        return Running(
            program, kind, weights, take, lambda: cache.nbytes, "caramba_fast",
            graph=lambda: generator.report["decode_graph"],
        )  # fmt: skip

    for kind in kinds:
        yield Attempt(f"{program} {kind}", partial(made, kind))


class NotReplayedError(RuntimeError):
    """Steps of a `Generator` on a GPU were not replayed."""


Peer = LlamaCpp | OpenVinoGenAI


def peers_of(
    name: str,
    room: int,
    ids: Sequence[int],
    kinds: tuple[Sequence[str], Sequence[str]] = (tuple(LLAMA_KINDS), GENAI_KINDS),
    layers: str = "Q4_0",
) -> list[Peer]:
    """The other programs, once per cache; prints which do not run and why.

    ``room`` is the longest context in tokens, made of ``ids``, repeated. ``kinds`` are caches of llama.cpp and of
    OpenVINO GenAI, ``layers`` is the type of the layers' matrices (`weights.four_bits`).
    """
    if name not in SOURCES:
        print(f"neither llama.cpp nor OpenVINO GenAI runs {name} here: it has no GGUF file")
        return []
    found = list[Peer]()
    file = gguf_file(name)
    if find_spec("llama_cpp"):
        found += [LlamaCpp(file, kind, room, ids, layers) for kind in kinds[0]]
    else:
        print("llama.cpp does not run here: the package llama-cpp-python is missing")
    if find_spec("openvino_genai"):
        found += [OpenVinoGenAI(file, kind, room, ids, layers=layers) for kind in kinds[1]]
    else:
        print("OpenVINO GenAI does not run here: the package openvino-genai is missing")
    return found


def in_peers(running: Sequence[Peer], context: int) -> Iterator[Attempt]:
    """The other programs; each context extends the previous one. Prints which have too little room for a context."""
    for peer in running:
        if context > peer.room:
            print(
                f"{peer.program} {peer.kind}: {context} tokens are left out, it was to compute {peer.room}"
            )
            continue
        yield Attempt(f"{peer.program} {peer.kind}", partial(_in_peer, peer, context))


def _in_peer(peer: Peer, context: int) -> Running:
    peer.lengthen(context)
    return Running(peer.program, peer.kind, peer.weights, peer.take, peer.nbytes, peer.version)


def measure(entries: list[Running], rounds: int, budget_s: float) -> None:
    """Rounds in which all take their steps, the first as a warm-up; removes those that run out of memory."""
    began = time.perf_counter()
    for number in range(-1, rounds):
        for entry in [*entries]:
            try:
                taken = entry.take(STEPS)
            except torch.OutOfMemoryError:
                print(f"{entry.program} {entry.cache}: left out: no memory for its steps")
                entries[:] = [other for other in entries if other is not entry]
                continue
            if number >= 0:
                entry.steps += taken
                entry.rounds[number] = statistics.median(taken)
        if number >= 2 and time.perf_counter() - began > budget_s:
            return


def rows_of(
    name: str, dtype: str, context: int, entries: Sequence[Running], device: torch.device
) -> Iterator[dict[str, Any]]:
    """The rows of one context, relative to the first of ``entries`` if that is DynamicCache."""
    base = next((x.rounds for x in entries[:1] if x.cache == "dynamic"), None)
    for entry in entries:
        median = quantile(entry.steps, 0.5)
        yield {
            "model": title(name), "dtype": dtype, "context": context, "program": entry.program, "cache": entry.cache,
            "weights": entry.weights, "samples": len(entry.steps), "median_ms": f"{1e3 * median:.3f}",
            "p20_ms": f"{1e3 * quantile(entry.steps, 0.2):.3f}", "p80_ms": f"{1e3 * quantile(entry.steps, 0.8):.3f}",
            "tokens_per_s": f"{1 / median:.2f}", "vs_dynamic": f"{ratio(base, entry.rounds):.3f}" if base else "",
            "cache_bytes": entry.nbytes(), "threads": torch.get_num_threads(), "version": entry.version,
            **environment(device),
        }  # fmt: skip


def not_replayed(entries: Sequence[Running], device: torch.device) -> list[str]:
    """Prints whether each `Generator` on a GPU replays its steps; returns those that do not."""
    if device.type != "cuda":
        return []
    found = {f"{x.program} {x.cache}": x.graph() for x in entries if x.graph is not None}
    for name, state in found.items():
        print(f"{name}: decode_graph {state}", flush=True)
    return [name for name, state in found.items() if state != "replayed"]


def decode(
    name: str,
    contexts: Sequence[int],
    dtype: torch.dtype,
    rounds: int,
    budget_s: float,
    peers_most: int = PEERS_MOST,
    device: str = "cpu",
) -> Iterator[list[dict[str, Any]]]:
    """The rows of every context of one model.

    Raises NotReplayedError at the end if steps on a GPU were not replayed as a CUDA graph.
    """
    place = torch.device(device)
    hf, native = models_of(name, dtype, place)
    most = getattr(hf.config, "max_position_embeddings", max(contexts))
    ids = torch.randint(hf.config.vocab_size, (1, TEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = hf_decode.prompt_states(hf.eval(), ids)
    short = str(dtype).removeprefix("torch.")
    reach = max((c for c in contexts if c <= min(most, peers_most)), default=0)
    peers = list[Peer]()
    if reach and place.type == "cpu":
        peers = peers_of(name, reach, ids[0].tolist())
    quantized = with_weights(name, dtype) if place.type == "cpu" else {}
    eager = list[str]()
    for context in sorted(contexts):
        if context > most:
            print(f"{name} has {most} positions: {context} tokens are left out")
            continue
        attempts = [
            *in_transformers(hf, states, context, short),
            *in_generator(native, ids[:, : min(TEXT, context)], context, short),
            *in_peers(peers, context),
        ]
        for weights, (theirs, own) in quantized.items():
            attempts += in_transformers(theirs, states, context, weights, QUANTIZED)
            prompt = ids[:, : min(TEXT, context)]
            if weights in OWN:
                attempts += in_generator(own, prompt, context, weights, QUANTIZED)
            if weights in COMPILED:
                attempts += in_generator(own, prompt, context, weights, QUANTIZED, compiled=True)
        rows: list[dict[str, Any]] = []
        for entries in in_groups(attempts, place):
            measure(entries, rounds, budget_s)
            eager += not_replayed(entries, place)
            # Each group begins with the first entry of all, whose row is there already unless it ran out of memory.
            had = {(row["program"], row["cache"]) for row in rows}
            found = rows_of(name, short, context, entries, place)
            rows += [row for row in found if (row["program"], row["cache"]) not in had]
        yield rows
    if eager:
        raise NotReplayedError(f"{name}: steps were not replayed: {', '.join(eager)}")


def compile_kernels(
    name: str, contexts: Sequence[int], dtype: torch.dtype, shard: Shard, device: str = "cuda"
) -> None:
    """Takes steps with every N-th cache in a single layer of a shape, to fill Triton's cache with their kernels."""
    place = torch.device(device)
    hf, native = models_of(name, dtype, place, layers=1)
    ids = torch.randint(hf.config.vocab_size, (1, TEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = hf_decode.prompt_states(hf.eval(), ids)
    short = str(dtype).removeprefix("torch.")
    attempts = [
        attempt
        for context in contexts
        for attempt in (
            *in_transformers(hf, states, context, short),
            *in_generator(native, ids[:, : min(TEXT, context)], context, short),
        )
    ]
    for attempt in shard.of(attempts):
        try:
            attempt.make().take(1)
        except Exception as error:  # appears again when it is measured
            print(f"compile {attempt.name}: {described(error)}", flush=True)


def main() -> None:
    """Measures the models named, by default all, and writes rows at once."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"of {', '.join((*SOURCES, *SHAPES))}, or a folder",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contexts", type=int, nargs="*")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--prompts", type=int, nargs="*", help="also first tokens behind so many tokens"
    )
    parser.add_argument(
        "--peers-most", type=int, default=PEERS_MOST, help="longest context of other programs"
    )
    parser.add_argument("--quick", action="store_true", help=f"contexts of {QUICK}, few rounds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--compile-only", type=Shard.parse, metavar="I/N",
                        help="of shapes: compile the kernels of every N-th cache, and end")  # fmt: skip
    args = parser.parse_args()
    contexts = args.contexts or (QUICK if args.quick else CONTEXTS)
    rounds, budget = (3, 10.0) if args.quick else (ROUNDS, BUDGET_S)
    for name in args.models or MEASURED:
        try:
            rows: list[dict[str, Any]] = []
            dtype = getattr(torch, args.dtype)
            if args.compile_only:
                compile_kernels(name, contexts, dtype, args.compile_only, args.device)
                continue
            for part in decode(name, contexts, dtype, rounds, budget, args.peers_most, args.device):
                rows += part
                write_table(args.out / f"{file_name(name)}{DECODE}", COLUMNS, rows)
                for row in part:
                    print(
                        *(
                            row[c]
                            for c in ("context", "program", "cache", "tokens_per_s", "vs_dynamic")
                        ),
                        flush=True,
                    )
            if args.prompts:
                first_tokens(
                    name, args.prompts, args.dtype, args.out / f"{file_name(name)}{FIRST_TOKEN}"
                )
        except (FetchError, NotReplayedError) as error:
            parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
