"""The settings of a generation by theme; `GenerateConfig` combines them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from caramba_fast.config import KVCacheKind
from caramba_fast.config.files import shown
from caramba_fast.config.kvcache import removed
from caramba_fast.config.names import NamedFields

TokenId = Annotated[int, Field(ge=0, strict=True)]
#: Bias added to a float32 logit: -inf bans the token; NaN and values that overflow are rejected.
Bias = Annotated[float, Field(le=3e38)]
Words = tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...]

#: Temperatures below this are greedy: dividing by them would overflow long before it made a difference.
GREEDY_BELOW = 1e-5


def _tuple_of(value: object) -> object:
    """Wraps a single item in a tuple."""
    return (value,) if isinstance(value, (str, int)) and not isinstance(value, bool) else value


def _stops(value: object) -> object:
    """`_tuple_of` texts and ids; raises ValueError for anything else, which a union would explain twice."""
    items = _tuple_of(value)
    for item in items if isinstance(items, (list, tuple, set, frozenset)) else ():
        index = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not index and not (isinstance(item, str) and item):
            raise ValueError(
                f"it holds {shown(item)}; texts of at least 1 character, and ids of 0 or more, are allowed"
            )
    return items


class Fields(NamedFields):
    """Base of all settings: unknown names are rejected, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LengthFields(Fields):
    """When a row ends.

    Attributes:
        max_new_tokens: most tokens to generate per call.
        max_length: most tokens of a row, with its prompt and the earlier conversation; replaces max_new_tokens.
        min_new_tokens: before this many, neither an end-of-sequence id nor ``stop`` ends a row, as in vLLM, unless
            ``structured_outputs`` allows nothing else.
        max_time: seconds after which no further step begins.
        eos_token_id: ids that end a row; None for the model's.
        ignore_eos: do not stop at end-of-sequence ids.
        stop: strings and ids that also end a row (alias stop_strings). Strings are looked for in the text of the new
            tokens and need `Generator(tokenizer=...)`.
        pad_token_id: fills rows that ended; None for the model's, else an eos id.
    """

    max_new_tokens: int = Field(default=64, ge=1)
    max_length: int | None = Field(default=None, ge=2)
    min_new_tokens: int = Field(default=0, ge=0)
    max_time: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    eos_token_id: int | tuple[int, ...] | None = None
    ignore_eos: bool = False
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, strict=True)] | TokenId, ...],
        BeforeValidator(_stops),
    ] = Field(default=(), validation_alias=AliasChoices("stop", "stop_strings"))
    pad_token_id: int | None = Field(default=None, ge=0)

    @field_validator("eos_token_id", mode="before")
    @classmethod
    def _ids_that_end(cls, value: object) -> object:
        """An id or some; raises ValueError for anything else, which a union would explain twice."""
        if value is None:
            return None
        items = value if isinstance(value, list | tuple) else (value,)
        ids = [str(item).removesuffix(".0") for item in items]
        if not all(text.isdecimal() for text in ids):
            raise ValueError("an id of 0 or more, or a list of such ids, is allowed")
        return tuple(map(int, ids)) if items is value else int(ids[0])

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
    """How the next token is sampled.

    Attributes:
        do_sample: False is greedy at any temperature; None samples unless the temperature is 0 or num_beams is more
            than 1.
        temperature: 0 (or less than 1e-5) is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens, and ties with the last of them; None for all.
        top_p: after top_k, keep the smallest set of most likely tokens whose probability reaches top_p
            (arXiv:1904.09751); None for all.
        min_p: keep tokens at least min_p times as likely as the most likely one (arXiv:2407.01082).
        typical_p: keep the tokens whose surprisal is nearest to the entropy until their probability reaches typical_p,
            and ties with the last of them (arXiv:2202.00666).
        seed: makes sampling reproducible; None samples from torch's global generator.
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
    """Logits processors, applied before a token is chosen, greedily or not.

    Attributes:
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens already in the row,
            prompt included (arXiv:1909.05858); 1 for none.
        presence_penalty: subtracted from the logit of every token generated in the row (OpenAI's API).
        frequency_penalty: subtracted from the logit of a token once for each time it was generated in the row.
        no_repeat_ngram_size: no n-gram of this many tokens occurs twice in a row of the batch; 0 for no limit.
        logit_bias: token id -> bias added to its logit; -inf bans it.
        sequence_bias: (tokens, bias) pairs; the bias is added to the last token if the row ends with the tokens before
            it. A mapping from tuples of ids is accepted too.
        bad_words_ids: token sequences that are never completed; one that is only an end-of-sequence id is ignored, as
            in transformers.
        suppress_tokens: ids that are never generated.
    """

    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, allow_inf_nan=False)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    logit_bias: dict[TokenId, Bias] | None = None
    sequence_bias: Annotated[
        tuple[tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], Bias], ...],
        BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, dict) else value),
    ] = ()
    bad_words_ids: Words = ()
    suppress_tokens: tuple[TokenId, ...] = ()


class StructuredOutputs(Fields):
    """A constraint on the output: exactly one of these, as in vLLM's ``StructuredOutputsParams``.

    Attributes:
        json_schema: a JSON schema, as a mapping or as text (alias json).
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches.
        grammar: a context-free grammar in the Lark syntax of llguidance.
    """

    json_schema: dict[str, Any] | str | None = Field(
        default=None, validation_alias=AliasChoices("json_schema", "json")
    )
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    @property
    def size(self) -> int:
        """Its length in characters."""
        return len(str(self.json_schema or self.regex or self.grammar or ""))

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        given = [
            name for name in type(self).model_fields if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; one of json_schema, json_object, "
                "regex and grammar is needed"
            )
        return self


class StructureFields(Fields):
    """Further fields of vLLM's ``SamplingParams``.

    Attributes:
        logprobs: return the log-probability of every new token and of this many most likely ones in its place, from
            the model's distribution before penalties, temperature and filters. None for none. In a `Generator` it needs
            ``return_dict=True``.
        structured_outputs: a constraint on the answer; needs a tokenizer, and llguidance (extra ``serve``).
    """

    logprobs: int | None = Field(default=None, ge=0)
    structured_outputs: StructuredOutputs | None = None


class BeamFields(Fields):
    """Beam search, and several answers to one prompt.

    Attributes:
        num_beams: beams of each row; 1 for none.
        num_return_sequences: rows returned for each prompt; the conversation then has all of these rows.
        length_penalty: the sum of log-probabilities of a finished beam is divided by its number of new tokens to this
            power; above 0 favours longer answers.
        early_stopping: True ends a row once num_beams beams have finished; False when no beam is likely to do better;
            "never" when none can.
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
        return_dict: return a `GenerateOutput` instead of the tokens alone (alias return_dict_in_generate).
        output_scores: include the processed logits of every step.
        output_logits: include the model's own logits of every step.
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
        cache: cache spec (alias cache_kind): fp32, fp16, bf16, q8 (q8_0), q4 (q4_0) or nf4, each with the defaults
            that measured best; "q8/q4" stores K and V differently, "q4/q8/q4" K_sem, K_geo and V of decoupled
            attention; options follow a colon, as in "q4:plain,rotate" (`caramba_fast.config.spec`). "auto" measures
            and chooses (`caramba_fast.policy`).
        cache_qblock: values per scale: 32, 64 or 128. None leaves this and the next three to the kind's defaults.
        cache_rotate: store K and V in a rotated basis (`KVCacheTensorConfig.rotate`).
        cache_residual_len: keys less than this many tokens back are read in fp16.
        cache_sink_len: the first tokens of a row are read in fp16 as well.
        prefill: "exact": a first prompt attends to its exact K and V; "stored": to K and V as the cache returns them,
            which makes results independent of chunking.
        prefill_chunk: most prompt tokens per forward pass, which bounds memory; None for no limit. With
            prefill="exact" only the first chunk attends to exact K and V, so chunking adds quantization noise.
        cuda_graph: record the decode step as one CUDA graph and replay it. None does so if the model is on CUDA, the
            Triton kernels serve it and recording succeeds (`Generator.decode_graph` tells); True raises if that is not
            so; False never does.
        compile: compile the decode step of a model on a CPU with torch's Inductor, which takes a C++ compiler and up
            to a minute per batch size of a generator. Logits then differ from eager ones by rounding. Raises if it
            cannot be compiled.
    """

    max_seq_len: int = Field(default=2048, ge=1)
    cache: KVCacheKind | str = Field(
        default=KVCacheKind.FP16, validation_alias=AliasChoices("cache", "cache_kind")
    )
    cache_qblock: int | None = None
    cache_rotate: bool | None = None
    cache_residual_len: int | None = Field(default=None, ge=0)
    cache_sink_len: int | None = Field(default=None, ge=0)
    prefill: Literal["exact", "stored"] = "exact"
    prefill_chunk: int | None = Field(default=None, ge=1)
    cuda_graph: bool | None = None
    compile: bool = False

    @model_validator(mode="before")
    @classmethod
    def _no_calibration(cls, given: Any) -> Any:
        if isinstance(given, dict) and "cache_calibration" in given:
            raise ValueError(removed("cache_calibration"))
        return given
