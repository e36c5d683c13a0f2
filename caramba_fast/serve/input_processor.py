"""InputProcessor: validates prompts and settings and makes requests.

Also prepares the parts of an engine: a model for ragged batches, settings for shared pages, and the pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import PagePool
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.fields import CacheFields, OutputFields
from caramba_fast.infer.grammar import Grammar, grammar_of
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields
from caramba_fast.infer.sampling import RandomStream
from caramba_fast.infer.stopping import (
    Stopping,
    check_fits,
    eos_ids,
    row_limits,
    warn_past_positions,
)
from caramba_fast.infer.tokenizer import TextTokenizer, TextWriter
from caramba_fast.models.identity import modules_of
from caramba_fast.models.registry import as_language_model
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.metrics import RequestTimes
from caramba_fast.serve.request import PagedSequence, Request, private_scope, salted_scope

#: Least tokens expected of a request, when memory is divided between rings and pages.
USUAL_TOKENS = 256
#: Longest and shortest n-gram of prompt lookup.
LOOKUP = (3, 1)
#: Settings that belong to the engine, not to one request.
ENGINE_FIELDS = {
    name
    for part in (CacheFields, CachePolicyFields, DecodePlanFields, OutputFields)
    for name in part.model_fields
}


@dataclass(frozen=True)
class Prepared:
    """A validated request that is not in the engine yet."""

    tokens: list[int]
    config: GenerateConfig
    limit: int
    request_id: str | None
    deadline: float | None
    times: RequestTimes
    scope: str | None
    grammar: Grammar | None = None
    is_cancelled: bool = False

    @property
    def due(self) -> float:
        """Time (``time.monotonic``) of its deadline or max_time; in the past if it was cancelled."""
        limit = min(self.deadline or torch.inf, self.config.max_time or torch.inf)
        return -torch.inf if self.is_cancelled else self.times.arrived + limit

    @property
    def is_late(self) -> bool:
        """Whether its deadline or max_time is over."""
        return self.due <= time.monotonic()


class InputProcessor:
    """Makes requests from callers' input; ``config`` has the default settings of requests."""

    def __init__(
        self,
        model: Any,
        config: GenerateConfig,
        settings: EngineConfig,
        tokenizer: TextTokenizer | None,
        pool: PagePool,
    ) -> None:
        self.model, self.config, self.settings = model, config, settings
        self.tokenizer, self.pool = tokenizer, pool

    def request(self, prepared: Prepared, name: str, number: int) -> Request:
        """The request with its first sequence."""
        config = prepared.config
        eos = eos_ids(config, self.model)
        processors = LogitsProcessors(
            config, self.model.vocab_size, eos, self.model.device, grammar=prepared.grammar
        )
        stopping = Stopping(config, eos, self.tokenizer, (), 0, prepared.times.arrived)
        scope = prepared.scope or private_scope(number)
        seed = int(torch.randint(2**62, (1,), device="cpu")) if config.seed is None else config.seed
        made = Request(
            name, number, prepared.tokens, config, processors, prepared.times, scope, seed, stopping
        )
        made.sequences.append(self.sequence(made, 0, prepared.limit))
        return made

    def branches(self, sequence: PagedSequence) -> list[PagedSequence]:
        """New sequences for the other answers to its prompt; none unless it is the first and has no new token."""
        request = sequence.request
        if sequence.index or sequence.new:
            return []
        return [self.sequence(request, index, sequence.limit) for index in range(1, request.wanted)]

    def prepared(
        self,
        prompt: str | Sequence[int] | Tensor,
        config: GenerateConfig | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        **overrides: Any,
    ) -> Prepared:
        """A validated request, for `take_on`; arguments and errors as in `add_request`."""
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise TypeError(f"request_id is {request_id!r}; a name is needed")
        times, settings = RequestTimes(), self.config_of(config, overrides)
        tokens = self.tokens(prompt)
        limit = self.limit(tokens, settings)
        if deadline is not None and (
            isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0
        ):
            raise ValueError(f"deadline is {deadline!r}; seconds above 0 are allowed")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise TypeError(f"cache_salt is {cache_salt!r}; text is needed")
        salt = self.settings.cache_salt if cache_salt is None else cache_salt
        scope = None if salt is None else salted_scope(salt)
        eos = eos_ids(settings, self.model)
        grammar = grammar_of(settings, self.tokenizer, self.model.vocab_size, eos)
        return Prepared(tokens, settings, limit, request_id, deadline, times, scope, grammar)

    def sequence(self, request: Request, index: int, limit: int) -> PagedSequence:
        """A new sequence of a request, with at most ``limit`` new tokens."""
        sequence = PagedSequence(request, index, limit)
        if request.config.samples:
            seed = (request.seed + index) % 2**63
            sequence.random = RandomStream(seed, self.model.device)
        if self.settings.lookup_tokens:
            sequence.drafts = NGramIndex(*LOOKUP)
        if self.tokenizer is not None:
            sequence.writer = TextWriter(
                self.tokenizer.decode, sequence.written.append, request.prompt[-32:]
            )
        return sequence

    def tokens(self, prompt: Any) -> list[int]:
        """Token ids of a prompt; raises TypeError or ValueError if it is invalid."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("the prompt is text; that needs Engine(tokenizer=...)")
            self.check_text(prompt)
            prompt = self.tokenizer.encode(prompt)
        tokens: list[int] = _as_ids(prompt, self.config.max_seq_len).tolist()
        most = self.model.vocab_size - 1  # read once: a model of transformers looks it up
        wrong = [token for token in tokens if not 0 <= token <= most]
        if wrong:
            raise ValueError(f"the prompt holds token id {wrong[0]}; 0 to {most} is allowed")
        return tokens

    def check_text(self, text: str) -> None:
        """Raises ValueError for text that is too long to be tokenized."""
        most = self.settings.max_prompt_chars
        if most is None and self.longest_token is not None:
            most = self.config.max_seq_len * self.longest_token
        if most is not None and len(text) > most:
            raise ValueError(
                f"the prompt has {len(text)} characters; max_prompt_chars allows {most}"
            )

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of the longest token of the vocabulary; None if there is no vocabulary."""
        vocabulary = getattr(getattr(self.tokenizer, "tokenizer", None), "get_vocab", None)
        return max(map(len, vocabulary()), default=None) if callable(vocabulary) else None

    def config_of(self, config: GenerateConfig | None, overrides: dict[str, Any]) -> GenerateConfig:
        """Settings of one request; raises TypeError or ValueError if they are invalid or belong to the engine."""
        if config is not None and not isinstance(config, GenerateConfig):
            raise TypeError(f"config is a {type(config).__name__}; a GenerateConfig is needed")
        found = self.config if config is None else config
        found = found.updated(**overrides) if overrides else found
        if found is self.config:
            return found
        for name in sorted(ENGINE_FIELDS & found.model_fields_set):
            if getattr(found, name) != getattr(self.config, name):
                raise ValueError(
                    f"{name} belongs to the engine; give it to Engine(...), not with a request"
                )
        self.check(found)
        return found

    def check(self, config: GenerateConfig) -> None:
        """Raises ValueError for settings an engine cannot serve."""
        if config.num_beams > 1:
            raise ValueError(f"num_beams is {config.num_beams}; an engine allows 1")
        most = self.settings.max_batch_size
        places = self.pool.places(most)
        if config.num_return_sequences > places:
            allowed = f"max_batch_size={places}"
            if places < most:
                allowed = f"{places} (so many requests have room for their newest tokens)"
            raise ValueError(
                f"num_return_sequences is {config.num_return_sequences}; 1 to {allowed} is allowed"
            )
        if config.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop holds the string {config.stop_strings[0]!r}, which needs Engine(tokenizer=...)"
            )
        self._check_cost(config)
        LogitsProcessors(
            config, self.model.vocab_size, eos_ids(config, self.model), torch.device("cpu")
        )

    def _check_cost(self, config: GenerateConfig) -> None:
        """Raises ValueError for settings whose size, or cost per token, exceeds the engine's limits."""
        words = [*config.bad_words_ids, *(words for words, _ in config.sequence_bias)]
        settings, vocabulary = self.settings, self.model.vocab_size
        asked = config.structured_outputs
        for what, count, limit, allowed in (
            ("the stop strings hold {} characters", sum(map(len, config.stop_strings)),
             "max_stop_chars", settings.max_stop_chars),
            ("bad_words_ids and sequence_bias hold {} ids", sum(map(len, words)),
             "max_edit_ids", settings.max_edit_ids),
            ("structured_outputs holds {} characters", asked.size if asked else 0,
             "max_structure_chars", settings.max_structure_chars),
            ("logprobs is {}", config.logprobs or 0, "max_logprobs", settings.max_logprobs),
            ("no_repeat_ngram_size is {}", config.no_repeat_ngram_size, "max_ngram", settings.max_ngram),
            ("suppress_tokens holds {} ids", len(config.suppress_tokens), "the vocabulary", vocabulary),
            ("stop holds {} ids", len(config.stop_ids), "the vocabulary", vocabulary),
        ):  # fmt: skip
            if count > allowed:
                raise ValueError(f"{what.format(count)}; {limit} allows {allowed}")

    def limit(self, tokens: list[int], config: GenerateConfig) -> int:
        """Most new tokens; raises ValueError if they do not fit."""
        limit = row_limits(config, [len(tokens)])[0]
        check_fits(self._rooms, len(tokens), limit)
        warn_past_positions(self.model, len(tokens) + limit - 1)
        return limit

    @property
    def room(self) -> int:
        """Most tokens of one request, prompt included."""
        return min(most for most in self._rooms.values() if most is not None)

    @property
    def _rooms(self) -> dict[str, int | None]:
        """Limits in tokens of a request, by name."""
        positions = getattr(self.model, "max_positions", None)
        return {
            "max_seq_len": self.config.max_seq_len,
            "the pool": self.settings.page_size * self.pool.num_pages,
            f"the model with {positions} positions": positions,
        }


def _as_ids(prompt: Any, most: int) -> Tensor:
    """A prompt as (T,) int64, T >= 1; raises ValueError for anything else, or more than ``most`` ids."""
    count = prompt.numel() if isinstance(prompt, Tensor) else getattr(prompt, "__len__", int)()
    if count > most:
        raise ValueError(f"the prompt holds {count} token ids; max_seq_len allows {most}")
    if isinstance(prompt, Tensor):
        ids = prompt
    else:
        wrong = f"the prompt is {type(prompt).__name__}; one row of one or more token ids is needed"
        if isinstance(prompt, (dict, set, frozenset, bytes)) or not hasattr(prompt, "__len__"):
            raise ValueError(wrong)
        if any(isinstance(token, (bool, str, bytes)) for token in prompt):
            raise ValueError(wrong)
        try:
            ids = torch.as_tensor(prompt, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{wrong}: {error}") from error
    if not ids.numel():
        raise ValueError("the prompt is empty; it needs at least one token")
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 1 or not len(ids) or not whole:
        raise ValueError(
            f"the prompt has shape {tuple(ids.shape)}, {ids.dtype}; one row of one or more token ids is needed"
        )
    return ids.to(torch.int64)


def servable(model: Any, max_seq_len: int) -> Any:
    """The model, if it takes ragged batches.

    Raises:
        TypeError: it does not; the message says why.
        ValueError: max_seq_len is too long for it, or its dropout is on (train mode).
    """
    found = as_language_model(model)
    reason = getattr(found, "why_not_ragged", None)
    if not callable(getattr(found, "forward_ragged", None)) or reason:
        raise TypeError(
            f"{type(model).__name__} cannot be served by an Engine: "
            f"{reason or 'it has no forward_ragged(ids, batch, rows)'}; the native Transformer and transformers "
            "models with the attention interface can, others go through Generator"
        )
    parts = (part for module in modules_of(found) for part in module.modules())
    if any(part.training and part.p for part in parts if isinstance(part, nn.Dropout)):
        raise ValueError(f"{type(model).__name__} drops activations at random: model.eval()")
    limit = getattr(found, "ragged_limit", None)
    if limit is not None and max_seq_len > limit:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; this model's RoPE changes with the length beyond {limit}, and would change "
            f"for every request in a batch: {limit} or less is allowed"
        )
    return found


def shareable(config: GenerateConfig) -> GenerateConfig:
    """The settings, adapted to shared pages; raises ValueError for one that an engine cannot serve."""
    if config.cache_residual_len:
        raise ValueError(
            f"cache_residual_len is {config.cache_residual_len}; an engine allows 0: pages are shared between "
            "requests, and an fp16 tail belongs to one"
        )
    if config.cache == AUTO:
        raise ValueError(
            "cache is 'auto'; an engine needs a kind: caramba_fast.choose_cache measures, and names one"
        )
    if "prefill" in config.model_fields_set and config.prefill != "stored":
        raise ValueError(
            f"prefill is {config.prefill!r}; an engine allows 'stored': prompts are cut into chunks"
        )
    if config.cache_budget_mb is not None:
        raise ValueError(
            f"cache_budget_mb={config.cache_budget_mb:g} is for a Generator; an engine's bytes are cache_bytes"
        )
    if config.compile:
        raise ValueError("compile=True is for a Generator")
    if config.prefill_chunk:
        raise ValueError(f"prefill_chunk={config.prefill_chunk!r} is for a Generator")
    given = [n for n in DecodePlanFields.model_fields if n in config.model_fields_set]
    if given:
        raise ValueError(f"{given[0]} is for a Generator; an engine reads whole caches")
    outputs = [name for name in OutputFields.model_fields if getattr(config, name)]
    if outputs:
        raise ValueError(f"{outputs[0]} is for a Generator; an engine gives a RequestOutput")
    return config.updated(cache_residual_len=0, prefill="stored")


def pool_for(model: Any, config: GenerateConfig, settings: EngineConfig) -> PagePool:
    """The page pool; raises ValueError for fewer bytes than a page takes, or a storage that pages cannot have."""
    storage, layout = config.stream_configs(), model.cache_layout
    length = config.max_seq_len
    size, wanted, rings = settings.page_size, settings.num_pages, settings.max_batch_size
    if settings.cache_bytes is not None:
        page, ring, sinks = PagePool.sizes(layout, size, **storage)
        ring += sinks  # more sinks follow, for every 16 pages, as in `PagePool.sink_rows`
        # No more rings than requests of `USUAL_TOKENS` fit, since rings take memory from pages.
        usual = max(2, USUAL_TOKENS // size) * page
        rings = max(1, min(rings, settings.cache_bytes // (ring + usual)))
        left = settings.cache_bytes - rings * ring
        wanted = left // page
        while wanted * page + wanted // 16 * sinks > left:
            wanted -= 1
        if wanted < 1:
            beside = f" and the ring of a request {ring}" if ring else ""
            raise ValueError(
                f"cache_bytes is {settings.cache_bytes}; a page of {size} tokens takes {page}{beside}, so much or "
                "more is allowed"
            )
    if wanted is None:
        wanted = settings.max_batch_size * -(-length // size)
    rings = min(rings, wanted)
    return PagePool(
        layout, size, wanted, length, model.device, rings=rings, num_splits=settings.num_splits, **storage
    )  # fmt: skip
