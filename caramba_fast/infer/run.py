"""Run: the state of one call of `Generator.generate`, the caller's hooks, and that one call runs at a time."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.logits import AllowedTokens, LogitsProcessor, LogitsProcessors
from caramba_fast.infer.logprobs import TokenLogprobs, token_logprobs
from caramba_fast.infer.output import GenerationMetrics, percentiles
from caramba_fast.infer.sampling import NOTHING, check_chosen, filtered_logits, sample_marked
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.session import Session
from caramba_fast.infer.stopping import Stopping, StoppingCriterion


class Streamer(Protocol):
    """As Hugging Face's ``BaseStreamer``: gets the prompt, then the tokens of each step."""

    def put(self, value: Tensor) -> None:
        """Takes (B, T) prompt ids, then (B,) tokens, on the CPU."""

    def end(self) -> None:
        """Called after the last step."""


@dataclass(frozen=True)
class Hooks:
    """The caller's callbacks for one run.

    Attributes:
        logits_processor: callables (input_ids (B, L), scores (B, V)) -> scores, as Hugging Face's; one or several.
        stopping_criteria: callables (input_ids (B, L), scores) -> bool or (B,) bools; one or several.
        prefix_allowed_tokens_fn: (row, ids (L,)) -> ids that may follow.
        streamer: gets the prompt and every step's tokens.
    """

    logits_processor: Sequence[LogitsProcessor] | LogitsProcessor = ()
    stopping_criteria: Sequence[StoppingCriterion] | StoppingCriterion = ()
    prefix_allowed_tokens_fn: AllowedTokens | None = None
    streamer: Streamer | None = None

    def __post_init__(self) -> None:
        for name in () if self.streamer is None else ("put", "end"):
            if not callable(getattr(self.streamer, name, None)):
                raise TypeError(
                    f"streamer is of type {type(self.streamer).__name__}, without {name}(); put() and end() are needed"
                )

    @property
    def processors(self) -> Sequence[LogitsProcessor]:
        """The processors as a sequence."""
        return _several("logits_processor", self.logits_processor)

    @property
    def criteria(self) -> Sequence[StoppingCriterion]:
        """The criteria as a sequence."""
        return _several("stopping_criteria", self.stopping_criteria)


def _several(name: str, given: Any) -> Sequence[Any]:
    items = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for item in items:
        if not callable(item):
            raise TypeError(f"{name} holds a {type(item).__name__}; callables are needed")
    return items


#: Held while a call looks whether another runs; the handler of a signal may call, too.
BEGINNING = threading.RLock()
Method = TypeVar("Method", bound=Callable[..., Any])
Step = TypeVar("Step")


@dataclass(eq=False)
class Turn:
    """A call of a generator.

    Attributes:
        thread: the thread that runs it.
        is_held: whether it is an iteration whose consumer has a token, and the generator does nothing.
    """

    thread: int = field(default_factory=threading.get_ident)
    is_held: bool = False


class Turns:
    """Lets a generator run one call at a time; a held iteration may be overtaken by its own thread."""

    def __init__(self) -> None:
        self._now: Turn | None = None  # stays when a call has ended

    def begin(self, turn: Turn) -> None:
        """Begins a call, or goes on with it; raises RuntimeError, having changed nothing, while another runs."""
        with BEGINNING:
            if self._now is not None and self._now is not turn:
                self._check_over(self._now)
            self._now = turn
        turn.is_held, turn.thread = False, threading.get_ident()

    def _check_over(self, other: Turn) -> None:
        if is_running(other, __file__, "call", "one_by_one"):
            raise RuntimeError(
                "a call of this generator is under way; it takes one at a time: give each thread a generator of "
                "its own, over one model"
            )
        mine = other.thread == threading.get_ident()
        if other.is_held and not mine and other.thread in sys._current_frames():
            raise RuntimeError(
                "a generate_iter of another thread is under way; end or close its iterator, or give each thread "
                "a generator of its own, over one model"
            )

    def one_by_one(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of an iteration, each in its turn."""
        turn, close = Turn(), cast(Any, steps).close
        try:
            while True:
                self.begin(turn)
                step = next(steps, None)
                if step is None:
                    return
                turn.is_held = True
                yield step
        finally:
            try:
                close()
            finally:
                turn.is_held = False


def alone(method: Method) -> Method:
    """Makes a method of a generator one call of its `Turns`."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        turn = Turn()
        self._turns.begin(turn)
        # Nothing ends the turn, where an interrupt could hit: the frame of a call that has ended is gone.
        return method(self, *args, **options)

    return cast(Method, call)


def is_running(wanted: object, file: str, *names: str) -> bool:
    """Whether a function of these names in a file runs, in any thread, with ``wanted`` as its local ``turn``."""
    for newest in sys._current_frames().values():
        frame: FrameType | None = newest
        while frame is not None:
            code = frame.f_code
            named = code.co_filename == file and code.co_name in names
            if named and frame.f_locals.get("turn") is wanted:
                return True
            frame = frame.f_back
    return False


class Stopwatch:
    """Times the steps of a run, without the consumer's time between them."""

    def __init__(self) -> None:
        self.steps = array("d")  # 8 bytes a step, however long the text
        self.new_tokens = 0
        self.began = time.monotonic()
        self.resume()

    def resume(self) -> None:
        """Starts the time of the next step."""
        self._began = time.perf_counter()

    def step(self, new_tokens: int) -> None:
        """Ends a step that gave ``new_tokens`` tokens over all rows."""
        self.steps.append(time.perf_counter() - self._began)
        self.new_tokens += new_tokens

    def report(
        self, rows: int, prompt_tokens: int, cache_bytes: int, bytes_per_token: float
    ) -> GenerationMetrics:
        """The metrics so far; there must be at least one step."""
        total = sum(self.steps)
        gaps = np.asarray(self.steps[1:])
        p50, p99 = percentiles(gaps)
        decode = float(gaps.sum())
        return GenerationMetrics(
            prompt_tokens=prompt_tokens,
            new_tokens=self.new_tokens,
            ttft_s=self.steps[0],
            inter_token_p50_s=p50,
            inter_token_p99_s=p99,
            total_s=total,
            tokens_per_s=self.new_tokens / total,
            decode_tokens_per_s=(self.new_tokens - rows) / decode if decode else float("nan"),
            cache_bytes=cache_bytes,
            bytes_per_token=bytes_per_token,
        )


@dataclass
class Run:
    """The state of one generation: its rows, their limits, and the outputs that are kept.

    Attributes:
        limits: most new tokens of each row.
        may_be_left: whether the consumer iterates, and may stop between two steps.
        given: how many steps such a consumer has got.
    """

    session: Session
    config: GenerateConfig
    processors: LogitsProcessors
    stopping: Stopping
    rng: torch.Generator | None
    limits: list[int]
    watch: Stopwatch
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    row_scores: list[list[Tensor]] = field(default_factory=list)
    row_logits: list[list[Tensor]] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    may_be_left: bool = False
    given: int = 0

    def __post_init__(self) -> None:
        for row, limit in zip(self.rows, self.limits, strict=True):
            row.begin(limit)
        self.row_scores = [[] for _ in self.limits]
        self.row_logits = [[] for _ in self.limits]
        self.logprobs = [[] for _ in self.limits]
        self._edits = bool(self.processors)

    @property
    def rows(self) -> list[TokenSequence]:
        """The sequences of the session."""
        return self.session.rows

    @property
    def alive(self) -> list[bool]:
        """Which rows go on."""
        return [row.finish_reason is None for row in self.rows]

    @property
    def is_over(self) -> bool:
        """Whether every row has ended."""
        return not any(self.alive)

    @property
    def new(self) -> list[int]:
        """Number of new tokens of each row."""
        return [row.new for row in self.rows]

    def choose(self, logits: Tensor) -> list[int]:
        """Chooses and appends the next token of each row; returns the padding id where a row has ended.

        Raises ValueError if no token can be chosen for a row.
        """
        alive = self.alive
        logits = blank_ended(logits, alive)
        scores = logits
        if self._edits:
            scores = blank_ended(self.processors.scores(logits, self.rows, alive=alive), alive)
        sampled = sample_marked(scores, self.config, self.rng).tolist()
        if NOTHING in sampled:
            check_chosen(sampled, logits, scores, self.new)
        if self.config.output_scores:
            self.scores.append(self.processed(scores))
        if self.config.output_logits:
            self.logits.append(logits.clone())
        if self.config.logprobs is not None:
            found = token_logprobs(logits, sampled, self.config.logprobs)
            for place, each in enumerate(found):
                self.logprobs[place] += [each] if alive[place] else []
        fill = self.session.fill
        chosen = [token if a else fill for token, a in zip(sampled, alive, strict=True)]
        self.session.note(chosen, alive)
        self.watch.step(sum(alive))
        self.stopping.end(self.rows, alive, self.scores if self.config.output_scores else None)
        return chosen

    def processed(self, scores: Tensor) -> Tensor:
        """Scores as returned: float32, filtered if sampling."""
        if self.config.samples:
            return filtered_logits(scores, self.config)
        return scores.to(torch.float32, copy=True)

    def give(self, index: int, tokens: Sequence[int], scores: Tensor, logits: Tensor) -> int:
        """Appends tokens to one row until it ends; returns how many.

        ``scores`` and ``logits``, (T, V), are what each of them was chosen from.
        """
        row, stopping = self.session.rows[index], self.stopping
        count, logprobs = self.config.logprobs, self.logprobs[index]
        for place, token in enumerate(tokens):
            row.push(token)
            if self.config.output_scores:
                self.row_scores[index].append(self.processed(scores[place]))
            if self.config.output_logits:
                self.row_logits[index].append(logits[place].clone())
            if count is not None:
                logprobs += token_logprobs(logits[place][None], [token], count)
            reason = stopping.after(row)
            if reason is None and stopping.has_criteria:
                kept = self.kept_scores
                kept = None if kept is None else kept[: row.new]
                ends = stopping.by_criteria(self.rows, kept, row.new)
                reason = "criteria" if ends[index] else None
            row.finish_reason = reason
            if reason is not None:
                return place + 1
        return len(tokens)

    @property
    def complete_columns(self) -> int:
        """Number of new tokens that every row has, unless it ended before."""
        counts = [n for n, alive in zip(self.new, self.alive, strict=True) if alive]
        return min(counts) if counts else max(self.new)

    def column(self, place: int) -> list[int]:
        """The new token of every row at index ``place``; the padding id after a row's end."""
        return [
            row.tokens[row.start + place] if place < row.new else self.session.fill
            for row in self.rows
        ]

    @property
    def kept_scores(self) -> tuple[Tensor, ...] | None:
        """Scores (B, V) of each step; None unless requested."""
        return _columns(self.scores, self.row_scores) if self.config.output_scores else None

    @property
    def kept_logits(self) -> tuple[Tensor, ...] | None:
        """Logits (B, V) of each step; None unless requested."""
        return _columns(self.logits, self.row_logits) if self.config.output_logits else None

    def continuations(self) -> Tensor:
        """(B, longest) int64 on the CPU: the new tokens, right-padded."""
        longest, fill = max(self.new), self.session.fill
        return torch.tensor(
            [row.new_tokens + [fill] * (longest - row.new) for row in self.rows], device="cpu"
        )


def blank_ended(logits: Tensor, alive: Sequence[bool]) -> Tensor:
    """(B, ..., V) with zeros for rows that have ended, whose logits may be anything, even NaN."""
    if all(alive):
        return logits
    ended = torch.tensor([not goes_on for goes_on in alive], device=logits.device)
    return logits.masked_fill(ended.view(-1, *[1] * (logits.ndim - 1)), 0.0)


def _columns(steps: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Steps of all rows, then those kept row by row; zeros after a row's end."""
    longest = max((len(row) for row in rows), default=0)
    blank = torch.zeros_like(steps[0][0]) if steps else None
    return (
        *steps,
        *(
            torch.stack([row[place] if place < len(row) else blank for row in rows])  # type: ignore[misc]
            for place in range(longest)
        ),
    )
