"""Decode steps of real models, by cache and by program: ``python -m caramba_fast.bench.real.decode [MODEL ...]``.

A model takes single tokens behind contexts of several lengths: in transformers with its DynamicCache and with ours
(`accelerate`), in our `Generator`, and in llama.cpp and OpenVINO GenAI with their own caches (the packages
llama-cpp-python and openvino-genai; they run a GGUF file of the checkpoint whose weights have 4 bits,
`weights.four_bits`). Contexts are the states of random tokens, repeated; those two compute their own. All take their
steps in turn, in rounds; a ratio is the median over rounds.

Weights of 8 and 4 bits come from torchao, where it is installed (`weights.quantize`): the model of transformers once
more with these, with its DynamicCache and with ours, and with 4 bits ours in `Generator`. ``vs_dynamic`` of all is
against the model as it was loaded.

With ``--prompts`` each of them also reads a prompt in a process of its own, which gives time to first token and the
most memory it took.

A name of `SHAPES` is a model of that shape with random weights, for machines that have no checkpoint: what a step takes
does not depend on what weights say. ``--device cuda`` runs everything of transformers and ours there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.environment import environment
from caramba_fast.bench.generation import hf_decode
from caramba_fast.bench.generation.decode_model import lengthen
from caramba_fast.bench.kernels.timing import quantile, ratio
from caramba_fast.bench.pages.real_decode_page import DECODE, FIRST_TOKEN
from caramba_fast.bench.pages.sections import write_csv
from caramba_fast.bench.real.first_token import first_tokens
from caramba_fast.bench.real.llama_cpp import KINDS as LLAMA_KINDS
from caramba_fast.bench.real.llama_cpp import LlamaCpp
from caramba_fast.bench.real.models import (
    MEASURED,
    SOURCES,
    FetchError,
    gguf_file,
    model_folder,
    title,
)
from caramba_fast.bench.real.openvino_genai import KINDS as GENAI_KINDS
from caramba_fast.bench.real.openvino_genai import OpenVinoGenAI
from caramba_fast.bench.real.study import RESULTS, file_name
from caramba_fast.bench.real.weights import quantize, why_not_quantized
from caramba_fast.infer import Generator
from caramba_fast.models import load_model, merge_projections

CONTEXTS = (64, 512, 2048, 8192, 16384)
#: Under `accelerate`, and in `Generator`.
ACCELERATED, GENERATOR = ("bf16", "q8", "q4", "nf4"), ("bf16", "q8", "q4")
#: Longest context that the other programs are to compute; it takes minutes for each of their caches.
PEERS_MOST = 8192
#: Tokens whose states are repeated; steps of a round; rounds, and seconds after which no more are begun.
TEXT, STEPS, ROUNDS, BUDGET_S = 256, 4, 11, 60.0
QUICK = (64, 2048)
#: Under `accelerate`, of a model whose weights torchao has quantized; and those weights, on a CPU.
QUANTIZED, WEIGHTS = ("q4",), ("int8", "int4")
#: Those that `Generator` takes, too, as it is and compiled.
COMPILED = ("int4",)
#: Models as their configurations say, without their weights.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
POSITIONS = 2**18
COLUMNS = (
    "model", "dtype", "context", "program", "cache", "weights", "samples", "median_ms", "p20_ms", "p80_ms",
    "tokens_per_s", "vs_dynamic", "cache_bytes", "threads", "version", "device", "torch", "triton", "commit", "source",
)  # fmt: skip


@dataclass
class Running:
    """One program with one cache, ready to take steps.

    Attributes:
        program, cache, weights: in the table.
        take: seconds of each of so many steps.
        nbytes: what the cache takes now; None where the program does not say.
        rounds: seconds a step, by round; ``steps`` has all of them.
    """

    program: str
    cache: str
    weights: str
    take: Callable[[int], list[float]]
    nbytes: Callable[[], int | None]
    version: str
    rounds: dict[int, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)


def in_transformers(
    model: Any,
    states: list[tuple[Tensor, Tensor]],
    context: int,
    weights: str,
    kinds: Sequence[str] = ACCELERATED,
) -> Iterator[Running]:
    """DynamicCache first, then ours; weights of other bits are named with the program."""
    version = f"transformers {hf_decode.transformers.__version__}"
    more = f" {weights} weights" if weights in WEIGHTS else ""
    for entry in hf_decode.filled(model, states, context, kinds, () if more else None):
        yield Running(
            f"{'accelerate' if entry.ours else 'transformers'}{more}", entry.name, weights,
            lambda count, entry=entry: hf_decode.take_steps(model, entry, count),
            lambda entry=entry: hf_decode.cache_bytes(entry.cache), version,
        )  # fmt: skip


def with_weights(name: str, dtype: torch.dtype) -> dict[str, tuple[Any, Any]]:
    """`_models` with torchao's weights, by their name; none where it is missing."""
    reason = "it has no checkpoint" if name in SHAPES else why_not_quantized()
    if reason is not None:
        print(f"weights of torchao do not run in {name} here: {reason}")
        return {}
    found = {}
    for weights in WEIGHTS:
        found[weights] = _models(name, dtype, torch.device("cpu"))
        for model in found[weights]:
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
) -> Iterator[Running]:
    """Our own loop over our own model."""
    more = f" {weights} weights" if weights in WEIGHTS else ""
    more = f" compiled{more}" if compiled else more
    room = context + ids.shape[1] + (ROUNDS + 2) * (STEPS + 1) + 2
    for kind in kinds:
        generator = Generator(
            model, cache_kind=kind, max_seq_len=room, max_new_tokens=room - ids.shape[1], temperature=0,
            ignore_eos=True, compile=compiled,
        )  # fmt: skip
        tokens = generator.generate_iter(ids)
        next(tokens)
        assert generator.cache is not None
        lengthen(generator.cache, context)
        for _ in range(2 * compiled):  # the second step is compiled
            next(tokens)

        def take(count: int, tokens: Any = tokens) -> list[float]:
            taken = []
            for _ in range(count + 1):
                began = time.perf_counter()
                next(tokens)
                taken.append(time.perf_counter() - began)
            return taken[1:]

        yield Running(
            f"Generator{more}", kind, weights, take, lambda g=generator: g.cache.nbytes,
            "caramba_fast",
        )  # fmt: skip


Peer = LlamaCpp | OpenVinoGenAI


def peers_of(
    name: str,
    room: int,
    ids: Sequence[int],
    kinds: tuple[Sequence[str], Sequence[str]] = (tuple(LLAMA_KINDS), GENAI_KINDS),
    layers: str = "Q4_0",
) -> list[Peer]:
    """The other programs, once for each of their caches; says which do not run and why.

    Args:
        name: of a model.
        room, ids: tokens of the longest context, and those that are repeated as it.
        kinds: caches of llama.cpp and of OpenVINO GenAI.
        layers: what they have the matrices of layers stored as (`weights.four_bits`).
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


def in_peers(running: Sequence[Peer], context: int) -> Iterator[Running]:
    """Other programs; a context is what they had before, and as many tokens more as are missing.

    Contexts they have no room for are left out with a line.
    """
    for peer in running:
        if context > peer.room:
            print(
                f"{peer.program} {peer.kind}: {context} tokens are left out, it was to compute {peer.room}"
            )
            continue
        peer.lengthen(context)
        yield Running(peer.program, peer.kind, peer.weights, peer.take, peer.nbytes, peer.version)


def measure(entries: Sequence[Running], rounds: int, budget_s: float) -> None:
    """Rounds in which all take their steps; the first is a warm-up."""
    began = time.perf_counter()
    for number in range(-1, rounds):
        for entry in entries:
            taken = entry.take(STEPS)
            if number >= 0:
                entry.steps += taken
                entry.rounds[number] = statistics.median(taken)
        if number >= 2 and time.perf_counter() - began > budget_s:
            return


def rows_of(
    name: str, dtype: str, context: int, entries: Sequence[Running], device: torch.device
) -> Iterator[dict[str, Any]]:
    """The lines of one context."""
    base = entries[0]
    for entry in entries:
        median = quantile(entry.steps, 0.5)
        yield {
            "model": title(name), "dtype": dtype, "context": context, "program": entry.program, "cache": entry.cache,
            "weights": entry.weights, "samples": len(entry.steps), "median_ms": f"{1e3 * median:.3f}",
            "p20_ms": f"{1e3 * quantile(entry.steps, 0.2):.3f}", "p80_ms": f"{1e3 * quantile(entry.steps, 0.8):.3f}",
            "tokens_per_s": f"{1 / median:.2f}", "vs_dynamic": f"{ratio(base.rounds, entry.rounds):.3f}",
            "cache_bytes": entry.nbytes(), "threads": torch.get_num_threads(), "version": entry.version,
            **environment(device),
        }  # fmt: skip


def _models(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """The model for transformers, and for our `Generator`."""
    auto = hf_decode.transformers.AutoModelForCausalLM
    if name in SHAPES:
        config = hf_decode.transformers.LlamaConfig(
            **SHAPES[name], max_position_embeddings=POSITIONS
        )
        with device:
            model = auto.from_config(config, dtype=dtype)
        return model, model
    folder = model_folder(name)
    native = merge_projections(load_model(folder, dtype=dtype, device=device))
    return auto.from_pretrained(folder, dtype=dtype).to(device), native


def decode(
    name: str,
    contexts: Sequence[int],
    dtype: torch.dtype,
    rounds: int,
    budget_s: float,
    peers_most: int = PEERS_MOST,
    device: str = "cpu",
) -> Iterator[list[dict[str, Any]]]:
    """The lines of every context of one model."""
    place = torch.device(device)
    hf, native = _models(name, dtype, place)
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
    for context in sorted(contexts):
        if context > most:
            print(f"{name} has {most} positions: {context} tokens are left out")
            continue
        entries = [
            *in_transformers(hf, states, context, short),
            *in_generator(native, ids[:, : min(TEXT, context)], context, short),
            *in_peers(peers, context),
        ]
        for weights, (theirs, own) in quantized.items():
            entries += in_transformers(theirs, states, context, weights, QUANTIZED)
            prompt = ids[:, : min(TEXT, context)]
            if weights in COMPILED:
                entries += in_generator(own, prompt, context, weights, QUANTIZED)
                entries += in_generator(own, prompt, context, weights, QUANTIZED, compiled=True)
        measure(entries, rounds, budget_s)
        yield list(rows_of(name, short, context, entries, place))


def main() -> None:
    """Measures the models named, by default all, and writes lines as soon as they are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    args = parser.parse_args()
    contexts = args.contexts or (QUICK if args.quick else CONTEXTS)
    rounds, budget = (3, 10.0) if args.quick else (ROUNDS, BUDGET_S)
    for name in args.models or MEASURED:
        try:
            rows: list[dict[str, Any]] = []
            dtype = getattr(torch, args.dtype)
            for part in decode(name, contexts, dtype, rounds, budget, args.peers_most, args.device):
                rows += part
                write_csv(args.out / f"{file_name(name)}{DECODE}", COLUMNS, rows)
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
        except FetchError as error:
            parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
