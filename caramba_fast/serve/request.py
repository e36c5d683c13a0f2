"""Requests, their sequences, and the events and outputs a caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from caramba_fast.cache import PageBytes
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.logprobs import TokenLogprobs
from caramba_fast.infer.lookup import NGramIndex
from caramba_fast.infer.sampling import RandomStream
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.stopping import Stopping
from caramba_fast.infer.tokenizer import TextWriter
from caramba_fast.serve.block_pool import Content
from caramba_fast.serve.metrics import RequestMetrics, RequestTimes

#: Reasons of answers that did not end as in a `Generator` (eos, stop, length, time).
ENDED_BADLY = ("cancelled", "deadline", "error")


class RequestStatus(str, Enum):
    """State of a request, named as in transformers' continuous batching."""

    PENDING = "pending"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class RequestOutput:
    """The result of a request.

    Attributes:
        request_id: its id.
        prompt_ids: the tokens of its prompt.
        answers: the new tokens of every answer (``num_return_sequences``).
        texts: the text of every answer, as in its events; it may begin with a space after the prompt. Empty without a
            tokenizer.
        finish_reasons: of every answer: eos, stop, length, time, cancelled, deadline or error.
        error: the error message, or None.
        metrics: of the request.
        logprobs: of the tokens of every answer, with ``logprobs``; else empty.
    """

    request_id: str
    prompt_ids: list[int]
    answers: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    error: str | None
    metrics: RequestMetrics
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)

    @property
    def generated_tokens(self) -> list[int]:
        """The new tokens of the first answer."""
        return self.answers[0]

    @property
    def status(self) -> RequestStatus:
        """FAILED if an answer was cancelled, passed its deadline or had an error; else FINISHED."""
        failed = any(reason in ENDED_BADLY for reason in self.finish_reasons)
        return RequestStatus.FAILED if failed else RequestStatus.FINISHED


@dataclass(frozen=True)
class Event:
    """New tokens and text of one answer, from one step.

    Attributes:
        request_id, answer: the request, and which of its answers.
        tokens: the new tokens, none if it only ended.
        text: their text, in whole characters; empty without a tokenizer.
        finish_reason: why the answer has ended; None if it goes on.
        output: the result of the request, in the event that ends its last answer.
        logprobs: of the new tokens, with ``logprobs``; else empty.
        pieces: the text token by token; the last piece may contain the stop string that ended the answer.
        stop_text: the end of the answer's text, from the stop string that ended it on, special tokens included; empty
            if none did.
    """

    request_id: str
    answer: int
    tokens: list[int]
    text: str = ""
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    pieces: Sequence[str] = ()
    stop_text: str = ""


class SwappedOut(NamedTuple):
    """A sequence's pages and ring in host memory; ``ring`` is empty if the storage has none."""

    pages: PageBytes
    ring: PageBytes


class PagedSequence(TokenSequence):
    """One answer to a request: its tokens, its pages, and its state of sampling and scheduling.

    Attributes:
        request, index: the request, and which of its answers.
        random: the random numbers it draws; None if greedy.
        writer: detokenizes its tokens, or None.
        drafts: for prompt lookup, or None.
        pages, cached: its pages, in order, and the number of tokens cached in them.
        ring: its fp16 ring in the pool while it has pages; -1 for none.
        keys: content of its full pages.
        contents: content that the full pages of its tokens would have.
        epoch: the pool's epoch when its first page was written.
        swapped: its pages and ring in host memory, while it is swapped out.
        ticket: its place in line, taken when it begins to wait.
        furthest: most tokens that were ever cached.
        paid_at: tokens cached once it has got as many as were recomputed for its turn.
        turn_start: tokens generated when its turn began.
        prefix_hit: prompt tokens found in cached pages.
        preemptions: times it was preempted.
        written: pieces of its text.
        emitted, emitted_pieces: number of tokens, and of pieces of text, that were emitted.
        is_over: whether its end was emitted.
        logprobs: of its new tokens, with ``logprobs``; else empty.
    """

    def __init__(self, request: Request, index: int, limit: int) -> None:
        super().__init__(request.prompt, limit)
        self.request, self.index = request, index
        self.random: RandomStream | None = None
        self.writer: TextWriter | None = None
        self.drafts: NGramIndex | None = None
        self.pages: list[int] = []
        self.cached, self.ring = 0, -1
        self.keys: list[Content] = []
        self.contents: list[Content] = []
        self.epoch = self.ticket = -1
        self.swapped: SwappedOut | None = None
        self.furthest = self.paid_at = self.turn_start = 0
        self.prefix_hit = self.preemptions = self.emitted = self.emitted_pieces = 0
        self.written: list[str] = []
        self.is_over = False
        self.logprobs: list[TokenLogprobs] = []

    def cut(self, length: int) -> None:
        """As in `TokenSequence`; the log-probabilities of removed tokens go too."""
        super().cut(length)
        del self.logprobs[max(0, length - self.start) :]

    @property
    def age(self) -> tuple[int, int]:
        """Sort key; smaller is older."""
        return self.ticket, self.index

    @property
    def turn_tokens(self) -> int:
        """Tokens generated in the current turn."""
        return self.new - self.turn_start

    @property
    def pending(self) -> int:
        """Number of tokens not cached yet."""
        return len(self) - self.cached

    @property
    def left(self) -> int:
        """Number of tokens it may still generate."""
        return self.limit - self.new


def private_scope(number: int) -> str:
    """Scope of a request that shares with none."""
    return f"request {number}"


def salted_scope(salt: str) -> str:
    """Scope of requests of one ``cache_salt``."""
    return f"{_SALT}{salt}"


def is_salted(scope: str) -> bool:
    """Whether a scope is valid in every engine; those of single requests and batches are not."""
    return scope.startswith(_SALT)


_SALT = "salt "


@dataclass(eq=False)
class Request:
    """A prompt and how it is to be answered.

    Attributes:
        number: order of arrival.
        scope: requests of the same scope share pages.
        seed: the one in its settings, or a drawn one.
        sequences: the answers that have begun: the first, and the others once the prompt is processed.
        begun: whether no more answers will begin.
        paused: whether it is not scheduled.
    """

    request_id: str
    number: int
    prompt: list[int]
    config: GenerateConfig
    processors: LogitsProcessors
    times: RequestTimes
    scope: str
    seed: int
    stopping: Stopping
    sequences: list[PagedSequence] = field(default_factory=list)
    paused: bool = False
    begun: bool = False
    error: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether no other request has its scope."""
        return self.scope == private_scope(self.number)

    @property
    def wanted(self) -> int:
        """Number of answers requested."""
        return self.config.num_return_sequences

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended and its end was emitted."""
        whole = self.begun or len(self.sequences) == self.wanted
        return whole and all(sequence.is_over for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The result so far, with the texts that were emitted."""
        sequences = self.sequences
        metrics = self.times.report(
            prompt_tokens=len(self.prompt),
            new_tokens=sum(sequence.new for sequence in sequences),
            prefix_hit_tokens=sequences[0].prefix_hit if sequences else 0,
            preemptions=sum(sequence.preemptions for sequence in sequences),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt_ids=list(self.prompt),
            answers=[sequence.new_tokens for sequence in sequences],
            texts=["".join(one.written) for one in sequences if one.writer is not None],
            finish_reasons=[sequence.finish_reason or "" for sequence in sequences],
            error=self.error,
            metrics=metrics,
            logprobs=[]
            if self.config.logprobs is None
            else [list(sequence.logprobs) for sequence in sequences],
        )
