"""GenerateConfig: every setting of a generation, validated when it is made; SpeculativeConfig adds speculation.

Names are those of Hugging Face's generation config where it has the setting. Its aliases (``stop_strings``,
``return_dict_in_generate``) are accepted too.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    Field,
    field_validator,
    model_validator,
)

from caramba_fast.config import KVCacheKind, cache_configs, short_name, spec_name
from caramba_fast.config.spec import TAIL_SLACK
from caramba_fast.infer.fields import (
    GREEDY_BELOW,
    BeamFields,
    CacheFields,
    EditFields,
    LengthFields,
    OutputFields,
    SamplingFields,
    StructureFields,
)
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields

Self = TypeVar("Self", bound="GenerateConfig")
AUTO = "auto"
#: Alias -> field.
ALIASES = {
    "cache_kind": "cache",
    "stop_strings": "stop",
    "return_dict_in_generate": "return_dict",
    "num_assistant_tokens": "spec_k",
    "prompt_lookup_num_tokens": "spec_k",
}
#: Field given for one call -> fields of the config that it replaces.
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
    StructureFields,
    BeamFields,
    OutputFields,
    CacheFields,
    CachePolicyFields,
    DecodePlanFields,
):
    """Settings of `Generator` and `generate`.

    The fields are documented in `LengthFields`, `SamplingFields`, `EditFields`, `StructureFields`, `BeamFields`,
    `OutputFields`, `CacheFields`, `CachePolicyFields` and `DecodePlanFields`.

    Raises:
        ValidationError: an unknown field, a value out of range, or two that contradict each other; the message names
            the field, the value and what is allowed.
    """

    @field_validator("cache", mode="before")
    @classmethod
    def _kind_by_name(cls, value: object) -> KVCacheKind | str:
        if value == AUTO:
            return AUTO
        try:
            if isinstance(value, str) and ("/" in value or ":" in value):
                return spec_name(value)
            return KVCacheKind(value)
        except ValueError as error:
            raise ValueError(f"{error}; and {AUTO!r}, which measures and chooses") from None

    @model_validator(mode="after")
    def _fits(self: Self) -> Self:
        if self.cache != AUTO:
            self.stream_configs()
            given = self.given_policy_fields()
            if given:
                raise ValueError(
                    f"{given[0]}={getattr(self, given[0])!r} needs cache='auto'; "
                    f"cache is {self.cache_name!r}"
                )
        return self

    def stream_configs(self, kind: KVCacheKind | str | None = None) -> dict[str, Any]:
        """How each stream is stored, as keyword arguments of `ModelKVCache`; ``kind`` replaces ``cache`` if given."""
        return cache_configs(kind or self.cache, **self.stream_fields)

    @property
    def stream_fields(self) -> dict[str, Any]:
        """Fields of `KVCacheTensorConfig` given for all streams."""
        named = {name: getattr(self, f"cache_{name}") for name in STREAM_FIELDS}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def cache_name(self) -> str:
        """``cache`` as text, with the short names of kinds."""
        return AUTO if self.cache == AUTO else short_name(self.cache)

    @property
    def cache_kind(self) -> KVCacheKind | str:
        """Alias of ``cache``."""
        return self.cache

    @cached_property
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

    @model_validator(mode="after")
    def _beams_are_plain(self: Self) -> Self:
        for name in StructureFields.model_fields:
            if self.num_beams > 1 and getattr(self, name) is not None:
                raise ValueError(f"{name} is given and num_beams is {self.num_beams}; 1 is allowed")
        return self

    def updated(self: Self, **changes: Any) -> Self:
        """A validated copy with some fields changed; settings that a change contradicts are dropped."""
        base = self.model_dump(exclude_unset=True)
        for name, value in changes.items():
            says_something = value is not None and value is not False
            for gone in (ALIASES.get(name), *(OPPOSITES.get(name, ()) if says_something else ())):
                base.pop(gone, None)
        if changes.get("num_beams") == 1:
            for name in ("length_penalty", "early_stopping"):
                base.pop(name, None)
        return type(self)(**{**base, **changes})


#: Most drafted tokens: a draft and the token before it are verified in one pass of at most 32 query tokens.
MOST_DRAFTED = 31
#: XORed with the target's seed to get the draft model's.
DRAFT_SEED = 0x5BD1E995


def _with_slack(fields: dict[str, Any], drafted: int) -> dict[str, Any]:
    """Stream fields with the ``tail_slack`` that a draft of ``drafted`` tokens and the token before it need."""
    return {"tail_slack": drafted + 1, **fields} if drafted >= TAIL_SLACK else fields


class DraftConfig(GenerateConfig):
    """Settings of a draft model; ``longest_draft`` is the most tokens drafted at once."""

    longest_draft: int = Field(default=1, ge=1, le=MOST_DRAFTED)

    @property
    def stream_fields(self) -> dict[str, Any]:
        """As in `GenerateConfig`, with enough ``tail_slack`` for the longest draft."""
        return _with_slack(super().stream_fields, self.longest_draft)


class SpeculativeConfig(GenerateConfig):
    """Settings of `SpeculativeGenerator`: those of `GenerateConfig` and these.

    Attributes:
        spec_k: tokens to draft per round (initially, with spec_k_adaptive); aliases num_assistant_tokens and
            prompt_lookup_num_tokens.
        spec_k_adaptive: adapt K to the acceptance rate.
        spec_k_min, spec_k_max: the range of K.
        spec_target_acceptance: after each interval K grows if its acceptance rate reaches this, else it shrinks.
        spec_k_interval: rounds of an interval; rounds without a draft do not count.
        spec_method: "reject_sampling" accepts a drafted token with probability min(1, p/q) and resamples a rejected
            one from max(0, p - q) (arXiv:2211.17192): most tokens per pass. "sample_match" samples from the target
            and accepts while the draft is the same: fewer tokens per pass, but one row with a seed gets the same
            tokens as without a draft. Both keep the target's distribution.
        spec_extra_token: after a fully accepted draft, also take the next token, which that pass computed.
        spec_disable_below_accept: if the acceptance rate of the run is below this at the end of an interval, the
            rest of the run is decoded without speculation; 0 never.
        spec_draft_cache_kind: cache spec of the draft model; None for the target's, or fp16 if that is "auto".
        lookup_max_ngram, lookup_min_ngram: without a draft model, the longest and shortest n-gram at the end of a
            row whose latest earlier occurrence is looked up (prompt lookup).
    """

    spec_k: int = Field(
        default=4,
        ge=1,
        le=MOST_DRAFTED,
        validation_alias=AliasChoices("spec_k", "num_assistant_tokens", "prompt_lookup_num_tokens"),
    )
    spec_k_adaptive: bool = False
    spec_k_min: int = Field(default=1, ge=1, le=MOST_DRAFTED)
    spec_k_max: int = Field(default=16, ge=1, le=MOST_DRAFTED)
    spec_target_acceptance: float = Field(default=0.7, gt=0.0, lt=1.0)
    spec_k_interval: int = Field(default=4, ge=1)
    spec_method: Literal["reject_sampling", "sample_match"] = "reject_sampling"
    spec_extra_token: bool = True
    spec_disable_below_accept: float = Field(default=0.0, ge=0.0, le=1.0)
    spec_draft_cache_kind: str | None = None
    lookup_max_ngram: int = Field(default=3, ge=1)
    lookup_min_ngram: int = Field(default=1, ge=1)

    @field_validator("spec_draft_cache_kind")
    @classmethod
    def _draft_kind_by_name(cls, value: str | None) -> str | None:
        return None if value is None else spec_name(value)

    @model_validator(mode="after")
    def _speculation_agrees(self) -> SpeculativeConfig:
        if self.num_beams > 1:
            raise ValueError(
                f"num_beams is {self.num_beams}; speculation allows 1: beams have no one next token to draft"
            )
        if self.spec_k_adaptive and not self.spec_k_min <= self.spec_k <= self.spec_k_max:
            raise ValueError(
                f"spec_k is {self.spec_k}; spec_k_min={self.spec_k_min} to spec_k_max={self.spec_k_max} is allowed"
            )
        if self.lookup_min_ngram > self.lookup_max_ngram:
            raise ValueError(
                f"lookup_min_ngram is {self.lookup_min_ngram}; 1 to lookup_max_ngram={self.lookup_max_ngram} "
                "is allowed"
            )
        return self

    @property
    def longest_draft(self) -> int:
        """Most tokens drafted at once."""
        return self.spec_k_max if self.spec_k_adaptive else self.spec_k

    @property
    def stream_fields(self) -> dict[str, Any]:
        """As in `GenerateConfig`, with enough ``tail_slack`` for the longest draft."""
        return _with_slack(super().stream_fields, self.longest_draft)

    def plain(self, **changes: Any) -> GenerateConfig:
        """The same settings without speculation."""
        given = self.model_dump(exclude_unset=True, include=set(GenerateConfig.model_fields))
        return GenerateConfig(**{**given, **changes})

    def for_draft(self) -> DraftConfig:
        """Settings of the draft model: its own cache, and no policy, output or structure fields and no ``stop``."""
        kind = self.spec_draft_cache_kind or ("fp16" if self.cache == AUTO else self.cache)
        others = (CachePolicyFields, OutputFields, StructureFields)
        left_out = {name for part in others for name in part.model_fields} | {"stop"}
        kept = set(GenerateConfig.model_fields) - left_out
        given = self.model_dump(exclude_unset=True, include=kept)
        if self.seed is not None:
            # With the target's seed, drafts would be correlated with the text sampled so far.
            given["seed"] = self.seed ^ DRAFT_SEED
        return DraftConfig(**{**given, "cache": kind, "longest_draft": self.longest_draft})
