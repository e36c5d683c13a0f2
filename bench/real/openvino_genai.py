"""OpenVINO GenAI's own decode: its pipeline over the GGUF file, one for each of its kinds of cache.

The pipeline keeps the blocks of earlier prompts, so that a context is computed only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caramba_fast.bench.real.weights import four_bits

#: Tokens of a pass beyond the longest context.
STEPS = 1024
#: Values of KV_CACHE_PRECISION.
KINDS = ("f16", "u8", "u4")


class OpenVinoGenAI:
    """A pipeline on torch's number of threads.

    It reads a prompt in one pass, as by default: a scheduler's config would limit passes to 256 tokens.

    Args:
        gguf: the model.
        kind: of `KINDS`.
        room: longest context in tokens.
        text: token ids that are repeated as its context.
        prefixes: whether it reuses the blocks of earlier prompts.
        layers: type of the layers' matrices (`four_bits`).
    """

    program = "OpenVINO GenAI"

    def __init__(
        self,
        gguf: Path,
        kind: str,
        room: int,
        text: Sequence[int],
        *,
        prefixes: bool = True,
        layers: str = "Q4_0",
    ) -> None:
        self.package: Any = import_module("openvino_genai")
        self.kind, self.room = kind, room
        self.version = f"openvino-genai {self.package.__version__}"
        self._text, self._context = list(text), list(text)
        file, self.weights = four_bits(gguf, layers)
        scheduler = self.package.SchedulerConfig()
        scheduler.enable_prefix_caching = prefixes
        scheduler.max_num_batched_tokens = room + STEPS
        self.pipeline = self.package.LLMPipeline(
            str(file), "CPU", scheduler_config=scheduler, KV_CACHE_PRECISION=kind,
            INFERENCE_NUM_THREADS=torch.get_num_threads(),
        )  # fmt: skip

    def generate(self, ids: Sequence[int], count: int) -> list[float]:
        """Generates ``count`` tokens after a prompt; seconds of each but the first."""
        options = self.package.GenerationConfig(
            max_new_tokens=count, do_sample=False, ignore_eos=True
        )
        prompt = import_module("openvino").Tensor(np.array([ids], np.int64))
        found = self.pipeline.generate(prompt, options)
        return [micros / 1e6 for micros in found.perf_metrics.raw_metrics.m_durations]

    def lengthen(self, context: int) -> None:
        """Computes a context of so many tokens of the text."""
        self._context = (self._text * (1 + context // len(self._text)))[:context]
        self.generate(self._context, 1)

    def take(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps after the context, after two that are not counted."""
        return self.generate(self._context, count + 2)[1:]

    def nbytes(self) -> None:
        """None: it does not tell the size of its cache."""
