"""Cache plans for tests: of a tiny model that counts its passes, and invented ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.policy import (
    CachePlan,
    CachePolicyFields,
    CandidateRow,
    PlanKey,
    choose_cache,
)

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, initializer_range=0.3, eos_token_id=1,
)  # fmt: skip


QUICK: dict[str, Any] = dict(cache_auto_bench_steps=1, cache_auto_bench_prompt_len=8)


GATED: dict[str, Any] = dict(
    **QUICK,
    cache_quality_max_mean_kl=10.0,
    cache_quality_prompt_len=8,
    cache_quality_decode_steps=2,
)


class Counting(Transformer):
    forwards = 0

    def forward(self, *args: Any, **options: Any) -> Tensor:
        self.forwards += 1
        return super().forward(*args, **options)


def make(seed: int = 3, **changes: Any) -> Counting:
    torch.manual_seed(seed)
    return Counting(ModelConfig(**{**SIZES, **changes})).requires_grad_(False).eval()


def choose(model: Transformer, path: Path, /, **changes: Any) -> CachePlan:
    cache = {name: changes.pop(name) for name in ("max_seq_len", "batch_size") if name in changes}
    other = {n: changes.pop(n) for n in ("seed", "prefill", "calibration_ids") if n in changes}
    settings = CachePolicyFields(**{**GATED, "cache_plan_path": path, **changes})
    return choose_cache(model, settings, **{"max_seq_len": 64, **cache}, **other)


def any_plan(name: str, **changes: Any) -> CachePlan:
    key = PlanKey(
        model=name, device="cpu", versions={}, batch_size=1, max_seq_len=1, prefill="exact",
        settings={},
    )  # fmt: skip
    spec = changes.get("spec", "q8_0")
    row = CandidateRow(spec=spec, nbytes=1, bytes_per_token=1.0, status="chosen", reason="fast")
    return CachePlan(**{
        "spec": "q8_0", "nbytes": 1, "bytes_per_token": 1.0, "baseline": "fp16", "key": key,
        "rows": (row,), "made_at": time.time(), "probed_at": time.time(), **changes,
    })  # fmt: skip
