"""Time to first token and memory: each program reads a prompt in its own process, in turn.

Memory is that of the process once the model is loaded and warm, and its peak from then on, without that of loading.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.out import write_table
from caramba_fast.bench.real.llama_cpp import KINDS as LLAMA_KINDS
from caramba_fast.bench.real.llama_cpp import LlamaCpp
from caramba_fast.bench.real.models import SOURCES, gguf_file, model_folder, title
from caramba_fast.bench.real.openvino_genai import KINDS as GENAI_KINDS
from caramba_fast.bench.real.openvino_genai import OpenVinoGenAI
from caramba_fast.bench.real.weights import four_bits
from caramba_fast.models import pack_weights
from caramba_fast.models.packed import why_not_packed

#: Reads a prompt and generates so many tokens.
Run = Callable[[list[int], int], object]
ROUNDS, STEPS, WARM_UP = 3, 8, 64
COLUMNS = (
    "model", "dtype", "prompt", "program", "cache", "samples", "first_token_s", "vs_dynamic", "held_mib", "peak_mib",
    "threads", "weights",
)  # fmt: skip
#: Ends the name of a program whose weights are packed.
PACKED = " packed weights"
#: Program and cache of every process.
PROGRAMS = (
    ("transformers", "dynamic"),
    ("transformers", "dynamic eager"),
    ("accelerate", "q8"),
    ("accelerate", "q4"),
    (f"accelerate{PACKED}", "q4"),
    ("Generator", "q4"),
    (f"Generator{PACKED}", "q4"),
)


def first_tokens(name: str, prompts: Sequence[int], dtype: str, path: Path) -> None:
    """Writes medians over `ROUNDS` rounds, in which the programs run in turn."""
    programs = list(PROGRAMS)
    if reason := why_not_packed(getattr(torch, dtype)):
        print(f"packed weights do not run here: {reason}")
        programs = [one for one in programs if not one[0].endswith(PACKED)]
    if name in SOURCES and find_spec("llama_cpp"):
        programs += [(LlamaCpp.program, kind) for kind in LLAMA_KINDS if kind.startswith("f16")]
    if name in SOURCES and find_spec("openvino_genai"):
        programs += [(OpenVinoGenAI.program, kind) for kind in GENAI_KINDS]
    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        found: dict[tuple[str, str], list[dict[str, float]]] = {one: [] for one in programs}
        for _ in range(ROUNDS):
            for one in programs:
                found[one].append(_process(name, prompt, dtype, *one))
        base = _median(found[programs[0]], "seconds")
        for one, samples in found.items():
            program, cache = one
            seconds = _median(samples, "seconds")
            rows.append(
                {
                    "model": title(name), "dtype": dtype, "prompt": prompt, "program": program, "cache": cache,
                    "samples": len(samples), "first_token_s": f"{seconds:.3f}", "vs_dynamic": f"{base / seconds:.3f}",
                    "held_mib": f"{_median(samples, 'held') / 2**20:.0f}",
                    "peak_mib": f"{_median(samples, 'peak') / 2**20:.0f}", "threads": torch.get_num_threads(),
                    "weights": dtype if one in PROGRAMS else four_bits(gguf_file(name))[1],
                }
            )  # fmt: skip
            print(*(rows[-1][column] for column in COLUMNS[2:10]), flush=True)
        write_table(path, COLUMNS, rows)


def _median(samples: Sequence[dict[str, float]], name: str) -> float:
    return sorted(sample[name] for sample in samples)[len(samples) // 2]


def _process(name: str, prompt: int, dtype: str, program: str, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, name, str(prompt), dtype, program, cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[3:])} failed: {done.stderr.strip()[-800:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _transformers(name: str, dtype: torch.dtype, cache: str, packed: bool) -> Run:
    library: Any = import_module("transformers")
    attention = "eager" if cache == "dynamic eager" else "sdpa"
    model = library.AutoModelForCausalLM.from_pretrained(
        model_folder(name), dtype=dtype, attn_implementation=attention
    ).eval()
    if not cache.startswith("dynamic"):
        import_module("caramba_fast").accelerate(model, cache)
    if packed:
        pack_weights(model)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return lambda ids, count: model.generate(torch.tensor([ids]), max_new_tokens=count, **options)


def _generator(name: str, dtype: torch.dtype, cache: str, room: int, packed: bool) -> Run:
    infer: Any = import_module("caramba_fast.infer")
    generator = infer.Generator.from_checkpoint(
        model_folder(name), dtype=dtype, cache_kind=cache, max_seq_len=room, temperature=0,
        ignore_eos=True,
    )  # fmt: skip
    if packed:
        pack_weights(generator.model)

    def run(ids: list[int], count: int) -> None:
        generator.reset()
        generator.generate([ids], max_new_tokens=count)

    return run


def _llama_cpp(name: str, cache: str, room: int) -> Run:
    llama = LlamaCpp(gguf_file(name), cache, room, [0])

    def run(ids: list[int], count: int) -> None:
        llama.model.reset()
        llama.model.eval(ids)
        for _ in range(count - 1):
            llama.model.eval(ids[:1])

    return run


def _openvino_genai(name: str, cache: str, room: int) -> Run:
    return OpenVinoGenAI(gguf_file(name), cache, room, [0], prefixes=False).generate


def _made(name: str, dtype: torch.dtype, program: str, cache: str, room: int) -> Run:
    if program == LlamaCpp.program:
        return _llama_cpp(name, cache, room)
    if program == OpenVinoGenAI.program:
        return _openvino_genai(name, cache, room)
    packed = program.endswith(PACKED)
    if program.startswith("Generator"):
        return _generator(name, dtype, cache, room, packed)
    return _transformers(name, dtype, cache, packed)


def peak_bytes() -> int:
    """Peak memory of this process; on Linux ``getrusage`` would include the parent's, which has models loaded."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, where getrusage gives the process's own peak, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text("ascii"), re.MULTILINE)
    return 1024 * int(kib)


def begin_peak() -> None:
    """Returns free memory to the system and resets the peak; only on Linux."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        ctypes.CDLL(None).malloc_trim(0)
        reset.write_text("5")


def main() -> None:
    """Prints time and memory of one program with one prompt, as JSON."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for argument in ("name", "prompt", "dtype", "program", "cache"):
        parser.add_argument(argument, type=int if argument == "prompt" else str)
    args = parser.parse_args()
    config: Any = json.loads((model_folder(args.name) / "config.json").read_text(encoding="utf-8"))
    chosen = torch.Generator().manual_seed(0)
    ids = torch.randint(config["vocab_size"], (args.prompt,), generator=chosen).tolist()
    run = _made(
        args.name, getattr(torch, args.dtype), args.program, args.cache, args.prompt + 4 * STEPS
    )
    run(ids[:WARM_UP], STEPS)  # warm-up: kernels chosen, memory allocated
    begin_peak()
    held = peak_bytes()
    began = time.perf_counter()
    run(ids, 1)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "held": held, "peak": peak_bytes()}))


if __name__ == "__main__":
    main()
