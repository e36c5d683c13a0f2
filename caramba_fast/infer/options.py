"""The settings of a generation as TypedDicts, for editors and type checkers; `config` documents the fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from caramba_fast.config import KVCacheKind
from caramba_fast.infer.fields import StructuredOutputs
from caramba_fast.infer.logits import AllowedTokens, LogitsProcessor
from caramba_fast.infer.run import Streamer
from caramba_fast.infer.stopping import Decoder, StoppingCriterion
from caramba_fast.models.protocol import LanguageModel


class PolicyOptions(TypedDict, total=False):
    """Fields of `CachePolicyFields`."""

    cache_budget_mb: float | None
    cache_quality_max_delta_nll: float | None
    cache_quality_max_ppl_ratio: float | None
    cache_quality_max_mean_kl: float | None
    cache_quality_min_needle: float | None
    cache_quality_prompt_len: int
    cache_quality_decode_steps: int
    cache_auto_benchmark: bool
    cache_auto_bench_steps: int
    cache_auto_bench_prompt_len: int
    cache_auto_candidates: Sequence[str] | None
    cache_plan_path: str | Path | None
    cache_plan_probe: bool
    cache_plan_probe_interval_sec: float
    on_no_candidate: Literal["raise", "best"]


class OtherOptions(TypedDict, total=False):
    """Fields of `GenerateConfig` that one call may change, except those of `CallOptions`; aliases included."""

    max_length: int | None
    min_new_tokens: int
    max_time: float | None
    eos_token_id: int | Sequence[int] | None
    ignore_eos: bool
    stop: str | int | Sequence[str | int]
    stop_strings: str | Sequence[str]
    pad_token_id: int | None
    do_sample: bool | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]
    bad_words_ids: Sequence[Sequence[int]]
    suppress_tokens: Sequence[int]
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    return_dict: bool
    return_dict_in_generate: bool
    output_scores: bool
    output_logits: bool
    logprobs: int | None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None


class CallOptions(OtherOptions, total=False):
    """Fields of `GenerateConfig` that one call may change, aliases included."""

    max_new_tokens: int
    temperature: float
    top_p: float | None


class CacheOptions(PolicyOptions, total=False):
    """Fields of `GenerateConfig` that belong to a generator's cache, aliases included."""

    cache: KVCacheKind | str
    cache_kind: KVCacheKind | str
    max_seq_len: int
    cache_qblock: int | None
    cache_rotate: bool | None
    cache_residual_len: int | None
    cache_sink_len: int | None
    prefill: Literal["exact", "stored"]
    prefill_chunk: int | None
    cuda_graph: bool | None
    compile: bool
    decode_plan: Literal["auto", "fixed", "none"]
    decode_bucket_short: int
    decode_bucket_mid: int
    decode_q_chunk: int | None
    decode_q_chunk_mid: int | None
    decode_q_chunk_long: int | None
    decode_local_window: int | None
    decode_local_window_mid: int | None
    decode_local_window_long: int | None


class GenerateOptions(CallOptions, CacheOptions, total=False):
    """Fields of `GenerateConfig`, aliases included."""


class SpeculationOptions(TypedDict, total=False):
    """Fields that `SpeculativeConfig` adds, aliases included."""

    spec_k: int
    num_assistant_tokens: int
    prompt_lookup_num_tokens: int
    spec_k_adaptive: bool
    spec_k_min: int
    spec_k_max: int
    spec_target_acceptance: float
    spec_k_interval: int
    spec_method: Literal["reject_sampling", "sample_match"]
    spec_extra_token: bool
    spec_disable_below_accept: float
    spec_draft_cache_kind: str | None
    lookup_max_ngram: int
    lookup_min_ngram: int


class SpeculativeOptions(GenerateOptions, SpeculationOptions, total=False):
    """Fields of `SpeculativeConfig`, aliases included."""


class HookOptions(TypedDict, total=False):
    """Fields of `Hooks`."""

    logits_processor: Sequence[LogitsProcessor] | LogitsProcessor
    stopping_criteria: Sequence[StoppingCriterion] | StoppingCriterion
    prefix_allowed_tokens_fn: AllowedTokens | None
    streamer: Streamer | None


class RunOptions(CallOptions, SpeculationOptions, HookOptions, total=False):
    """Options of one call of a generator: settings of the call, and hooks."""


class TextOptions(OtherOptions, CacheOptions, total=False):
    """What `caramba_fast.inference` takes besides ``max_new_tokens``, ``temperature`` and ``top_p``."""


class OnceOptions(TextOptions, HookOptions, total=False):
    """What `generate` takes besides ``max_new_tokens``: all settings, and hooks."""

    temperature: float
    top_p: float | None


class LoadOptions(SpeculativeOptions, total=False):
    """What `Generator.load` takes besides a path, a model and a config: settings, and arguments of the class."""

    device: torch.device | str | None
    tokenizer: Decoder | None
    calibration_ids: Tensor | Sequence[int] | None
    draft_model: LanguageModel | None
