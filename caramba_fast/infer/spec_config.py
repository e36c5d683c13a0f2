"""SpeculativeConfig: the settings of speculative decoding, on top of a generation's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

from caramba_fast.config import spec_name
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.fields import OutputFields
from caramba_fast.policy.settings import CachePolicyFields

#: Drafts are verified with the token before them in one pass of at most 32 query tokens.
MOST_DRAFTED = 31


class SpeculativeConfig(GenerateConfig):
    """Settings of `SpeculativeGenerator`; those of `GenerateConfig` and these.

    Attributes:
        spec_k: tokens to draft per step (at first, where K adapts); aliases num_assistant_tokens and
            prompt_lookup_num_tokens.
        spec_k_adaptive: move K by the acceptance.
        spec_k_min, spec_k_max: where K moves.
        spec_target_acceptance: K grows while the acceptance of an interval reaches it and shrinks while not.
        spec_k_interval: rounds of an interval.
        spec_method: "reject_sampling" accepts a drafted token with probability min(1, p/q) and draws a rejected
            one again from max(0, p - q) (arXiv:2211.17192): most tokens per pass. "sample_match" draws
            from the target and accepts while the draft drew the same: fewer tokens per pass, but one row with a
            seed gets the very tokens it would get without a draft. Both keep the target's distribution.
        spec_extra_token: after a draft that was accepted whole, take the token the same pass gives for free.
        spec_disable_below_accept: once an interval is over and the acceptance so far is below this, the rest
            of the run is decoded plainly; 0 never.
        spec_draft_cache_kind: how the draft model's cache is stored; None as the target's, or fp16 where
            that is "auto".
        lookup_max_ngram, lookup_min_ngram: without a draft model, drafts are what followed the newest tokens
            where they occurred last; runs of at most and at least so many tokens are looked up.
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

    def plain(self, **changes: Any) -> GenerateConfig:
        """The same settings without speculation."""
        given = self.model_dump(exclude_unset=True, include=set(GenerateConfig.model_fields))
        return GenerateConfig(**{**given, **changes})

    def for_draft(self) -> GenerateConfig:
        """The draft model's: its own cache, and nothing of where a run ends or what it returns."""
        kind = self.spec_draft_cache_kind or (
            "fp16" if self.cache_kind == AUTO else self.cache_kind
        )
        left_out = {
            *CachePolicyFields.model_fields, *OutputFields.model_fields, "cache_calibration", "stop",
        }  # fmt: skip
        kept = set(GenerateConfig.model_fields) - left_out
        given = self.model_dump(exclude_unset=True, include=kept)
        return GenerateConfig(**{**given, "cache_kind": kind})
