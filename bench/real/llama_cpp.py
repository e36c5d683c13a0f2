"""llama.cpp's own decode, through llama-cpp-python: one context for each of its kinds of cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from caramba_fast.bench.real.weights import four_bits

#: What caches are called here -> their type in llama.cpp (fp16, and blocks of 32 values with 8 or 4 bits), and whether
#: flash attention is on, which quantized ones need.
KINDS = {
    "f16": ("GGML_TYPE_F16", True),
    "f16 -fa off": ("GGML_TYPE_F16", False),
    "q8_0": ("GGML_TYPE_Q8_0", True),
    "q4_0": ("GGML_TYPE_Q4_0", True),
}
#: Bytes of 32 values.
BYTES = {"f16": 64, "f16 -fa off": 64, "q8_0": 34, "q4_0": 18}
_BATCH = 512
#: Capacity for steps after a context, in tokens.
STEPS = 1024


class LlamaCpp:
    """A context of llama.cpp, on torch's number of threads.

    Args:
        gguf: the model.
        kind: of `KINDS`.
        room: longest context in tokens; steps have extra capacity.
        text: token ids that are repeated as its context.
        layers: type of the layers' matrices (`four_bits`).
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
        type_name, flash = KINDS[kind]
        stored = getattr(package, type_name)
        self.model = package.Llama(
            str(file), n_ctx=room + STEPS, n_batch=_BATCH, n_ubatch=_BATCH, n_threads=threads, n_threads_batch=threads,
            type_k=stored, type_v=stored, flash_attn=flash, n_gpu_layers=0, verbose=False,
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return int(self.model.n_tokens)

    def lengthen(self, context: int) -> None:
        """Extends the context to so many tokens of the text."""
        while self.length < context:
            start = self.length
            again = self._text * (2 + (context - start) // len(self._text))
            first = start % len(self._text)
            self.model.eval(again[first : first + context - start])

    def take(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps, after one that is not counted."""
        token, taken = self._text[0], []
        for _ in range(count + 1):
            began = time.perf_counter()
            self.model.eval([token])
            taken.append(time.perf_counter() - began)
        return taken[1:]

    def nbytes(self) -> int:
        """Bytes of keys and values of the context, computed from the format, since the whole capacity is allocated."""
        package: Any = import_module("llama_cpp")
        model = self.model.model
        layers, heads = package.llama_model_n_layer(model), package.llama_model_n_head_kv(model)
        dim = package.llama_model_n_embd(model) // package.llama_model_n_head(model)
        return 2 * layers * heads * dim * self.length * BYTES[self.kind] // 32
