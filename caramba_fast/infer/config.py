"""GenerateConfig: every setting of a generation, checked when it is made."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError, field_validator, model_validator

from caramba_fast.config import KVCacheKind, cache_configs, spec_name
from caramba_fast.infer.fields import (
    GREEDY_BELOW,
    BeamFields,
    CacheFields,
    EditFields,
    LengthFields,
    OutputFields,
    SamplingFields,
)
from caramba_fast.policy.settings import CachePolicyFields, DecodePlanFields

Self = TypeVar("Self", bound="GenerateConfig")
AUTO = "auto"
#: Other spellings of a field.
ALIASES = {
    "stop_strings": "stop",
    "return_dict_in_generate": "return_dict",
    "num_assistant_tokens": "spec_k",
    "prompt_lookup_num_tokens": "spec_k",
}
#: Fields of which one call gives one, whatever the config has.
OPPOSITES = {
    "max_length": ("max_new_tokens",),
    "max_new_tokens": ("max_length",),
    "eos_token_id": ("ignore_eos",),
    "ignore_eos": ("eos_token_id",),
}
STREAM_FIELDS = ("qblock", "rotate", "residual_len", "sink_len")


class GenerateConfig(
    LengthFields,
    SamplingFields,
    EditFields,
    BeamFields,
    OutputFields,
    CacheFields,
    CachePolicyFields,
    DecodePlanFields,
):
    """Settings of `Generator` and `generate`.

    The fields are explained, by theme, in `caramba_fast.infer.fields` and `caramba_fast.policy.settings`.

    Raises:
        ValidationError: an unknown field, a value out of its range, or two that contradict each other;
            the message names the field, the value and what is allowed.
    """

    @field_validator("cache_kind", mode="before")
    @classmethod
    def _kind_by_name(cls, value: object) -> KVCacheKind | str:
        if value == AUTO:
            return AUTO
        if isinstance(value, str) and ("/" in value or ":" in value):
            return spec_name(value)
        return KVCacheKind(value)

    @model_validator(mode="after")
    def _fits(self: Self) -> Self:
        if self.cache_kind != AUTO:
            self.stream_configs()
            given = self.given_policy_fields()
            if given:
                raise ValueError(
                    f"{given[0]}={getattr(self, given[0])!r} needs cache_kind='auto'; "
                    f"cache_kind is {self.cache_name!r}"
                )
        return self

    def stream_configs(self, kind: KVCacheKind | str | None = None) -> dict[str, Any]:
        """How each stream is stored, as keyword arguments of `ModelKVCache`.

        Args:
            kind: what to store it as instead of ``cache_kind``: what the policy chose for "auto".
        """
        return cache_configs(kind or self.cache_kind, **self.stream_fields)

    @property
    def stream_fields(self) -> dict[str, Any]:
        """Fields of `KVCacheTensorConfig` given for all streams."""
        named = {name: getattr(self, f"cache_{name}") for name in STREAM_FIELDS}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def cache_name(self) -> str:
        """The cache kind as text."""
        return AUTO if self.cache_kind == AUTO else spec_name(self.cache_kind)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        if self.do_sample is not None:
            return self.do_sample and self.temperature >= GREEDY_BELOW
        return self.temperature >= GREEDY_BELOW and self.num_beams == 1

    @model_validator(mode="after")
    def _answers_differ(self: Self) -> Self:
        if self.num_return_sequences > 1 and self.num_beams == 1 and not self.samples:
            raise ValueError(
                f"num_return_sequences is {self.num_return_sequences}; a greedy run has 1 answer "
                "(sample, or use num_beams)"
            )
        return self

    def updated(self: Self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one; what a change contradicts goes."""
        base = self.model_dump(exclude_unset=True)
        for name in changes:
            for gone in (ALIASES.get(name), *OPPOSITES.get(name, ())):
                base.pop(gone, None)
        if changes.get("num_beams") == 1:
            for name in ("length_penalty", "early_stopping"):
                base.pop(name, None)
        return type(self)(**{**base, **changes})


__all__ = ["AUTO", "GenerateConfig", "ValidationError"]
