"""GenerateConfig: every setting of a generation, checked when it is made.

The settings of a generation by theme; `GenerateConfig` is their sum.

Names are those of Hugging Face's generation config where it has the setting, and its other spellings
(``stop_strings``, ``return_dict_in_generate``) are taken as well.

SpeculativeConfig: the settings of speculative decoding, on top of a generation's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from caramba_fast.config import KVCacheKind, cache_configs, spec_name
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields

#: Temperatures below this are greedy: the quotient would overflow long before it made a difference.
GREEDY_BELOW = 1e-5


def _tuple_of(value: object) -> object:
    """A single item where several may stand."""
    return (value,) if isinstance(value, (str, int)) and not isinstance(value, bool) else value


TokenId = Annotated[int, Field(ge=0, strict=True)]
Words = tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...]


class Fields(BaseModel):
    """What all settings share: unknown names are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LengthFields(Fields):
    """When a row ends.

    Attributes:
        max_new_tokens: tokens to generate at most, per call.
        max_length: tokens of a row at most, its prompt and the conversation before it included; instead of
            max_new_tokens.
        min_new_tokens: no end-of-sequence id before so many.
        max_time: seconds after which no further step begins.
        eos_token_id: ids that end a row; None takes the model's own.
        ignore_eos: never stop at one.
        stop: strings and ids that end a row as well (alias stop_strings). A string is looked for in the text
            of the new tokens and needs `Generator(tokenizer=...)`.
        pad_token_id: fills rows that ended; None takes the model's own, else an eos id.
    """

    max_new_tokens: int = Field(default=64, ge=1)
    max_length: int | None = Field(default=None, ge=2)
    min_new_tokens: int = Field(default=0, ge=0)
    max_time: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    eos_token_id: int | tuple[int, ...] | None = None
    ignore_eos: bool = False
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, strict=True)] | TokenId, ...],
        BeforeValidator(_tuple_of),
    ] = Field(default=(), validation_alias=AliasChoices("stop", "stop_strings"))
    pad_token_id: int | None = Field(default=None, ge=0)

    @field_validator("eos_token_id")
    @classmethod
    def _eos_not_negative(cls, value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        ids = (value,) if isinstance(value, int) else value or ()
        if any(index < 0 for index in ids):
            raise ValueError(f"eos_token_id is {value}; ids of 0 or more are allowed")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> LengthFields:
        if self.ignore_eos and self.eos_token_id is not None:
            raise ValueError("ignore_eos=True contradicts eos_token_id; give one of them")
        if self.max_length is not None and "max_new_tokens" in self.model_fields_set:
            raise ValueError("max_length and max_new_tokens are both given; give one of them")
        if self.max_length is None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}; 0 to max_new_tokens={self.max_new_tokens} is allowed"
            )
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings among ``stop``."""
        return tuple(item for item in self.stop if isinstance(item, str))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids among ``stop``."""
        return tuple(item for item in self.stop if isinstance(item, int))


class SamplingFields(Fields):
    """How the next token is drawn.

    Attributes:
        do_sample: False is greedy whatever the temperature; None samples unless the temperature is 0 or
            num_beams is more than 1.
        temperature: 0 (or less than 1e-5) is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; None for all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, after
            top_k (arXiv:1904.09751); None for all.
        min_p: keep tokens at least min_p times as likely as the likeliest (arXiv:2407.01082).
        typical_p: keep the tokens whose surprise is nearest the entropy, until their probability reaches
            typical_p (arXiv:2202.00666).
        seed: makes sampling repeatable; None draws from torch's global generator.
    """

    do_sample: bool | None = None
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    typical_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _sampling_agrees(self) -> SamplingFields:
        if self.do_sample and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"temperature is {self.temperature} (greedy) and do_sample is True; give one of them"
            )
        return self


class EditFields(Fields):
    """What is done to the logits before a token is drawn, greedily or not.

    Attributes:
        repetition_penalty: logits of tokens the row holds already (its prompt included) are divided by it
            where positive and multiplied where negative (arXiv:1909.05858); 1 does nothing.
        no_repeat_ngram_size: no run of so many tokens occurs twice in a row; 0 does nothing.
        logit_bias: token id -> what is added to its logit.
        sequence_bias: (tokens, bias) pairs; the bias is added to the last token where the row ends in those
            before it. A mapping from tuples of ids is taken as well.
        bad_words_ids: runs of tokens that are never completed.
        suppress_tokens: ids that are never generated.
    """

    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    logit_bias: dict[TokenId, float] | None = None
    sequence_bias: Annotated[
        tuple[tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], float], ...],
        BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, dict) else value),
    ] = ()
    bad_words_ids: Words = ()
    suppress_tokens: tuple[TokenId, ...] = ()


class BeamFields(Fields):
    """Beams and several answers to one prompt.

    Attributes:
        num_beams: beams of each row; 1 for none.
        num_return_sequences: rows returned for each prompt, which are the rows of the conversation then.
        length_penalty: the sum of log-probabilities of a finished beam is divided by its number of new tokens to
            this power; above 0 favours longer answers.
        early_stopping: True ends a row once num_beams beams have finished; False when no beam is likely to do
            better; "never" when none can.
    """

    num_beams: int = Field(default=1, ge=1)
    num_return_sequences: int = Field(default=1, ge=1)
    length_penalty: float = Field(default=1.0, allow_inf_nan=False)
    early_stopping: bool | Literal["never"] = False

    @model_validator(mode="after")
    def _beams_agree(self) -> BeamFields:
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences is {self.num_return_sequences}; 1 to num_beams={self.num_beams} is allowed"
            )
        if self.num_beams == 1:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}; it is for num_beams of 2 or more"
                    )
        return self


class OutputFields(Fields):
    """What a call returns.

    Attributes:
        return_dict: a `GenerateOutput` instead of the tokens alone (alias return_dict_in_generate).
        output_scores: keep the processed logits of every step in it.
        output_logits: keep the model's own logits of every step in it.
    """

    return_dict: bool = Field(
        default=False, validation_alias=AliasChoices("return_dict", "return_dict_in_generate")
    )
    output_scores: bool = False
    output_logits: bool = False

    @model_validator(mode="after")
    def _outputs_agree(self) -> OutputFields:
        for name in ("output_scores", "output_logits"):
            if getattr(self, name) and not self.return_dict:
                raise ValueError(
                    f"{name} is True and return_dict is not; scores come with return_dict=True"
                )
        return self


class CacheFields(Fields):
    """How the cache is stored and read.

    Attributes:
        max_seq_len: tokens a row of the cache can hold.
        cache_kind: how the cache is stored: fp32, fp16, bf16, q8 (q8_0), q4 (q4_0) or nf4, each with
            the defaults measured to be good for it; "q8/q4" stores K and V differently,
            "q4/q8/q4" K_sem, K_geo and V of decoupled attention; options follow a colon,
            "q4:plain,rotate" (`caramba_fast.config.spec`). "auto" measures and chooses
            (`caramba_fast.policy`).
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

    The fields are explained, by theme, in `caramba_fast.infer.config` and `caramba_fast.infer.policy_fields`.

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
