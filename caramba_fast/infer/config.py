"""GenerateConfig: every setting of a generation, checked when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from caramba_fast.config import KVCacheKind, cache_configs, spec_name


class GenerateConfig(BaseModel):
    """Settings of `Generator` and `generate`.

    Attributes:
        max_new_tokens: tokens to generate at most, per call.
        temperature: 0 (or less than 1e-5) is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; None for all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, after
            top_k (arXiv:1904.09751); None for all.
        seed: makes sampling repeatable; None draws from torch's global generator.
        eos_token_id: ids that end a row; None takes the model's own.
        ignore_eos: never stop early.
        pad_token_id: fills rows that ended; None takes the model's own, else an eos id.
        max_seq_len: tokens a row of the cache can hold.
        cache_kind: how the cache is stored: fp32, fp16, bf16, q8 (q8_0), q4 (q4_0) or nf4, each with
            the defaults measured to be good for it; "q8/q4" stores K and V differently,
            "q4/q8/q4" K_sem, K_geo and V of decoupled attention; options follow a colon,
            "q4:plain,rotate" (`caramba_fast.config.spec`).
        cache_qblock: values that share a scale: 32, 64 or 128. None leaves this and the next three to the
            kind's defaults.
        cache_rotate: store K and V in a rotated basis (`KVCacheTensorConfig.rotate`).
        cache_residual_len: keys less than this many tokens back are read in fp16.
        cache_sink_len: the first tokens of a row are read in fp16 as well.
        cache_calibration: a file `caramba_fast.calibrate` made for this model, from which a cache takes
            the constants of its transforms; without one, from the first prompt.
        prefill: "exact": a first prompt attends to its exact K and V; "stored": to what the cache
            returns, which makes results independent of how a prompt is cut into chunks; the constants of
            the cache's transforms then come from the model or a calibration, never from the prompt.
        prefill_chunk: most prompt tokens of one forward pass, which bounds memory; None for no limit.
            With prefill="exact" only the first chunk attends to exact K and V, so that a chunked
            prompt differs from a whole one by quantization noise.
        cuda_graph: record the decode step as one CUDA graph and replay it. None does so where the model is
            on CUDA, the Triton kernels serve it and recording succeeds, and `Generator.decode_graph` says
            what came of it; True raises where that is not so; False never does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    eos_token_id: int | tuple[int, ...] | None = None
    ignore_eos: bool = False
    pad_token_id: int | None = Field(default=None, ge=0)
    max_seq_len: int = Field(default=2048, ge=1)
    cache_kind: KVCacheKind | str = KVCacheKind.FP16
    cache_qblock: int | None = None
    cache_rotate: bool | None = None
    cache_residual_len: int | None = Field(default=None, ge=0)
    cache_sink_len: int | None = Field(default=None, ge=0)
    cache_calibration: Path | None = None
    prefill: Literal["exact", "stored"] = "exact"
    prefill_chunk: int | None = Field(default=None, ge=1)
    cuda_graph: bool | None = None

    @field_validator("cache_kind", mode="before")
    @classmethod
    def _kind_by_name(cls, value: object) -> KVCacheKind | str:
        if value == "auto":
            raise ValueError(
                "cache_kind='auto' is not available in this version; choose a kind: "
                + ", ".join(kind.value for kind in KVCacheKind)
            )
        if isinstance(value, str) and ("/" in value or ":" in value):
            return spec_name(value)
        return KVCacheKind(value)

    @field_validator("eos_token_id")
    @classmethod
    def _eos_not_negative(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        ids = (value,) if isinstance(value, int) else value or ()
        if any(index < 0 for index in ids):
            raise ValueError(f"eos_token_id is {value}; ids of 0 or more are allowed")
        return value

    @model_validator(mode="after")
    def _fits(self) -> GenerateConfig:
        self.stream_configs()
        if self.ignore_eos and self.eos_token_id is not None:
            raise ValueError("ignore_eos=True contradicts eos_token_id; give one of them")
        return self

    def stream_configs(self) -> dict[str, Any]:
        """How each stream is stored, as keyword arguments of `ModelKVCache`."""
        return cache_configs(
            self.cache_kind,
            qblock=self.cache_qblock,
            rotate=self.cache_rotate,
            residual_len=self.cache_residual_len,
            sink_len=self.cache_sink_len,
        )

    @property
    def cache_name(self) -> str:
        """The cache kind as text."""
        return spec_name(self.cache_kind)

    def updated(self, **changes: Any) -> GenerateConfig:
        """A copy with some fields changed, checked like a new one."""
        return GenerateConfig(**{**self.model_dump(exclude_unset=True), **changes})


__all__ = ["GenerateConfig", "ValidationError"]
