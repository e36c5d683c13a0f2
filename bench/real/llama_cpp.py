"""llama.cpp's own decode, through llama-cpp-python: one context for each kind of cache it has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.real.weights import four_bits

#: Our word for a cache, and llama.cpp's: fp16, and blocks of 32 values with 8 or 4 bits for keys and values.
KINDS = {"f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0", "q4_0": "GGML_TYPE_Q4_0"}
#: Bytes of 32 values.
BYTES = {"f16": 64, "q8_0": 34, "q4_0": 18}
_BATCH = 512
#: Tokens of steps behind a context.
STEPS = 1024


class LlamaCpp:
    """A context of llama.cpp with flash attention, on torch's number of threads.

    Args:
        gguf: the model.
        kind: of `KINDS`.
        room: tokens of its longest context; it has room for steps behind them.
        text: token ids that are repeated as its context.
        layers: what the matrices of its layers are stored as (`four_bits`).
    """

    program = "llama.cpp"

    def __init__(
        self, gguf: Path, kind: str, room: int, text: Sequence[int], layers: str = "Q4_0"
    ) -> None:
        package: Any = import_module("llama_cpp")
        self.kind, self.room, self._text = kind, room, list(text)
        self.version = f"llama-cpp-python {package.__version__}"
        file, self.weights = four_bits(gguf, layers)
        threads = torch.get_num_threads()
        stored = getattr(package, KINDS[kind])
        self.model = package.Llama(
            str(file), n_ctx=room + STEPS, n_batch=_BATCH, n_ubatch=_BATCH, n_threads=threads, n_threads_batch=threads,
            type_k=stored, type_v=stored, flash_attn=True, n_gpu_layers=0, verbose=False,
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Tokens in its context."""
        return int(self.model.n_tokens)

    def lengthen(self, context: int) -> None:
        """Computes tokens of the text until the context has so many."""
        while self.length < context:
            start = self.length
            again = self._text * (2 + (context - start) // len(self._text))
            first = start % len(self._text)
            self.model.eval(again[first : first + context - start])

    def take(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps, and one before them that is not counted."""
        token, taken = self._text[0], []
        for _ in range(count + 1):
            began = time.perf_counter()
            self.model.eval([token])
            taken.append(time.perf_counter() - began)
        return taken[1:]

    def nbytes(self) -> int:
        """Bytes of keys and values of the tokens in the context, from the format: it allocates its room at once."""
        package: Any = import_module("llama_cpp")
        model = self.model.model
        layers, heads = package.llama_model_n_layer(model), package.llama_model_n_head_kv(model)
        dim = package.llama_model_n_embd(model) // package.llama_model_n_head(model)
        return 2 * layers * heads * dim * self.length * BYTES[self.kind] // 32
