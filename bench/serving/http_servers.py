"""The servers of `over_http`: ours, and the alternatives.

Each is its own process with the same capacity: `CONCURRENCY` requests of `FULL` tokens at once, passes of
`BATCH_TOKENS`, and as many threads as this process computes with.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from caramba_fast.bench.serving.serve_load import CONCURRENCY, FULL, Item
from caramba_fast.bench.serving.serve_systems import BATCH_TOKENS, PAGE_SIZE
from caramba_fast.infer.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
#: llama.cpp's server as built by `make bench-http`.
LLAMA_SERVER = ROOT / "build" / "peers" / "llama-server" / "bin" / "llama-server"
#: llama.cpp's names of similar caches.
LLAMA_KINDS = {"fp16": "f16", "q8": "q8_0", "q4": "q4_0"}
STARTS_S = 300


@dataclass(frozen=True)
class Server:
    """How to start a server, and the requests to send.

    Attributes:
        command: its command line, without the port.
        model: its name in requests.
        why_not: why it cannot run here; None if it can.
    """

    name: str
    command: tuple[str, ...]
    model: str = "model"
    why_not: str | None = None

    def body(self, item: Item, salt: str, tokenizer: TextTokenizer) -> dict[str, Any]:  # noqa: ARG002
        """A request of /v1/completions: greedy, a fixed number of tokens, no prefix shared with earlier requests."""
        return {
            "model": self.model, "prompt": item.prompt, "max_tokens": item.new_tokens, "temperature": 0,
            "ignore_eos": True, "cache_salt": salt,
        }  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[tuple[str, int]]:
        """Starts it and gives its address and process id once it answers; RuntimeError if it does not."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with subprocess.Popen([*self.command, "--port", str(port)]) as process:
            try:
                address, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_S
                while not _is_up(address):
                    if process.poll() is not None or time.monotonic() > end:
                        raise RuntimeError(f"{self.name} did not start")
                    time.sleep(0.1)
                yield address, process.pid
            finally:
                process.terminate()


class LlamaServer(Server):
    """Looks for common prefixes in its slots whatever the salt, unless told not to."""

    def body(self, item: Item, salt: str, tokenizer: TextTokenizer) -> dict[str, Any]:
        """As `Server.body`."""
        return {**super().body(item, salt, tokenizer), "cache_prompt": False}


class TransformersServer(Server):
    """Takes prompts as text only, and the end of text from a generation config."""

    def body(self, item: Item, salt: str, tokenizer: TextTokenizer) -> dict[str, Any]:  # noqa: ARG002
        """As `Server.body`."""
        settings = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return {
            "model": self.model, "prompt": tokenizer.decode(item.prompt), "max_tokens": item.new_tokens,
            "generation_config": json.dumps({**settings, "max_new_tokens": item.new_tokens}),
        }  # fmt: skip


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def ours(folder: Path, cache: str, dtype: str) -> Server:
    """``caramba-fast serve``, which packs the weights where it can."""
    command = (
        sys.executable, "-m", "caramba_fast", "serve", str(folder), "--cache", cache, "--dtype", dtype,
        "--name", "model", "--max-seq-len", str(FULL), "--max-batch-size", str(CONCURRENCY),
    )  # fmt: skip
    return Server("http", command)


def transformers_serve(folder: Path, dtype: str) -> Server:
    """``transformers serve`` with its continuous batching; its pages have the dtype of the weights."""
    why = None
    if importlib.util.find_spec("transformers.cli.serving") is None:
        why = "this transformers has no `transformers serve` with /v1/completions"
    command = (
        sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu", "--dtype",
        dtype, "--continuous-batching", "--cb-block-size", str(PAGE_SIZE), "--cb-num-blocks",
        str(CONCURRENCY * -(-FULL // PAGE_SIZE)), "--cb-max-batch-tokens", str(BATCH_TOKENS), "--host", "127.0.0.1",
    )  # fmt: skip
    return TransformersServer("transformers serve", command, str(folder), why)


def llama_server(gguf: Path, cache: str) -> Server:
    """llama.cpp's server with a model of 4-bit weights, flash attention and the cache most similar to ours."""
    why, threads = None, str(torch.get_num_threads())
    if not LLAMA_SERVER.exists():
        why = f"{LLAMA_SERVER.relative_to(ROOT)} is not built (make bench-http builds it)"
    elif not gguf.exists():
        why = f"{gguf.name} is not there (python -m caramba_fast.bench.real.models --gguf)"
    elif cache not in LLAMA_KINDS:
        why = f"it has no cache like {cache}"
    kind = LLAMA_KINDS.get(cache, "f16")
    command = (
        str(LLAMA_SERVER), "-m", str(gguf), "-np", str(CONCURRENCY), "-c", str(CONCURRENCY * FULL), "-b",
        str(BATCH_TOKENS), "-ub", str(BATCH_TOKENS), "-t", threads, "-tb", threads, "-fa", "on", "-ctk", kind, "-ctv",
        kind, "--log-disable",
    )  # fmt: skip
    return LlamaServer("llama.cpp's server", command, why_not=why)
