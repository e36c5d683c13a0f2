"""Beam search with a length penalty; the answers are those of Hugging Face's ``generate``.

Each prompt has ``num_beams`` running beams. A step takes the best continuations of all of them: those that end among
the best ``num_beams`` are kept as answers, and the best of the others run on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from caramba_fast.infer.run import Run, blank_ended
from caramba_fast.infer.sampling import filtered_logits, why_nothing
from caramba_fast.infer.sequence import FinishReason

#: Score of placeholder beams, which rank below any real one.
UNLIKELY = -1e9


class Hypothesis(NamedTuple):
    """A finished beam."""

    score: float
    tokens: list[int]
    beams: list[int]
    reason: FinishReason


class Candidate(NamedTuple):
    """A continuation: a running beam, its next token, and why it would end."""

    score: float
    beam: int
    token: int
    reason: FinishReason | None


@dataclass(frozen=True)
class BeamResult:
    """The answers, best first for each prompt.

    Attributes:
        tokens: (B * num_return_sequences, new) int64, right-padded.
        scores: (B * num_return_sequences,) float32.
        beam_indices: like tokens, the beam each token was added to, -1 after the end.
    """

    tokens: Tensor
    scores: Tensor
    beam_indices: Tensor


@dataclass
class BeamRow:
    """The beams of one prompt."""

    width: int
    length_penalty: float
    early_stopping: bool | str
    limit: int
    scores: list[float] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    answers: list[Hypothesis] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.scores = [0.0] + [UNLIKELY] * (self.width - 1)
        self.paths = [[] for _ in range(self.width)]

    def normalised(self, score: float, length: int) -> float:
        """Score of an answer: a sum of log-probabilities over ``length`` new tokens, with length penalty."""
        return score / length**self.length_penalty

    def finish(self, answers: list[Hypothesis]) -> None:
        """Keeps the best ``width`` of the answers so far."""
        self.answers = sorted([*self.answers, *answers], key=lambda a: -a.score)[: self.width]

    def close_if_done(self, length: int, all_ended: bool) -> None:
        """Closes the row if no running beam can become one of its answers, or need not be waited for."""
        full = len(self.answers) == self.width
        best = self.limit if self.early_stopping == "never" and self.length_penalty > 0 else length
        hopeless = full and self.normalised(self.scores[0], best) <= self.answers[-1].score
        self.closed = all_ended or hopeless or (full and self.early_stopping is True)


class BeamSearch:
    """The beams of all prompts of a run, whose session holds the prompts alone."""

    def __init__(self, run: Run) -> None:
        config = run.config
        self.run, self.session, self.width = run, run.session, config.num_beams
        self.prompts = len(run.limits)
        self.start = self.session.cache, self.session.rows
        self.rows = [
            BeamRow(self.width, config.length_penalty, config.early_stopping, limit)
            for limit in run.limits
        ]
        self.length = 0

    def search(self, logits: Tensor, wanted: int) -> BeamResult:
        """Searches from the logits (B, V) after the prompts; returns ``wanted`` answers each."""
        self.session.select_rows([row for row in range(self.prompts) for _ in range(self.width)])
        logits = logits.repeat_interleave(self.width, 0)
        while True:
            tokens, alive = self.advance(logits)
            if not any(alive):
                break
            self.run.watch.resume()
            logits = self.session.step(tokens, alive)
        return self.result(wanted)

    def advance(self, logits: Tensor) -> tuple[list[int], list[bool]]:
        """Chooses the next token of every beam and reorders the beams; returns tokens and which beams go on."""
        self.length += 1
        picked = self._candidates(logits)
        order = list(range(len(self.session.rows)))
        tokens = [self.session.fill] * len(order)
        open_rows = [index for index, row in enumerate(self.rows) if not row.closed]
        for index in open_rows:
            candidates = self._judged(index, picked[index])
            running = self._select(index, candidates)
            for place, candidate in enumerate(running, index * self.width):
                order[place] = index * self.width + candidate.beam
                tokens[place] = candidate.token
        alive = [not row.closed for row in self.rows for _ in range(self.width)]
        self.session.reorder(order)
        self.session.note(tokens, alive)
        self.run.watch.step(len(open_rows))
        return tokens, alive

    def _candidates(self, logits: Tensor) -> list[list[tuple[float, int, int]]]:
        """The best (score, beam, token) of every prompt, best first."""
        run, config = self.run, self.run.config
        log_p = logits.to(torch.float32).log_softmax(-1)
        log_p = self._without_closed(log_p)
        owners = [row // self.width for row in range(len(self.session.rows))]
        alive = [not row.closed for row in self.rows for _ in range(self.width)]
        scores = edited = self._without_closed(
            run.processors.scores(log_p, self.session.rows, which=owners, alive=alive)
        )
        if config.samples:
            scores = self._filtered(scores)
        if config.output_scores:
            run.scores.append(scores.clone())
        if config.output_logits:
            run.logits.append(logits.clone())
        running = torch.tensor([row.scores for row in self.rows], device=logits.device)
        total = scores.view(self.prompts, self.width, -1) + running[:, :, None]
        count = max(2, 1 + len(run.stopping.endings)) * self.width
        flat = total.flatten(1)
        sound = flat.amax(1).isfinite()
        flat = flat.where(sound[:, None], 0.0)
        if config.samples:
            drawn = torch.multinomial(flat.softmax(-1), count, generator=run.rng)
            best, place = flat.gather(1, drawn).sort(-1, descending=True)
            index = drawn.gather(1, place)
        else:
            best, index = flat.topk(min(count, flat.shape[1]))
        best = best.masked_fill(~sound[:, None], torch.nan)  # read back below, with the scores
        vocab = scores.shape[-1]
        picked = best.tolist()
        for prompt, few in enumerate(picked):
            if math.isnan(few[0]):
                beams = slice(prompt * self.width, (prompt + 1) * self.width)
                why = why_nothing(logits[beams], edited[beams])
                raise ValueError(
                    f"row {prompt}, new token {self.length}: no token can be chosen for any beam: {why}"
                )
        return [
            [(score, i // vocab, i % vocab) for score, i in zip(*pair, strict=True)]
            for pair in zip(picked, index.tolist(), strict=True)
        ]

    def _without_closed(self, scores: Tensor) -> Tensor:
        """Scores (B * beams, V) with zeros for closed prompts, whose scores may be anything."""
        return blank_ended(scores, [not row.closed for row in self.rows for _ in range(self.width)])

    def _filtered(self, scores: Tensor) -> Tensor:
        """Filtered scores; some tokens of every beam stay, so that beams can go on where others end."""
        config, fewest = self.run.config, 1 + max(1, len(self.run.stopping.endings))
        likeliest = scores.topk(min(fewest, scores.shape[-1])).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, likeliest, True)
        filtered = filtered_logits(scores, config)
        return torch.where(kept, scores / config.temperature, filtered)

    def _judged(self, index: int, picked: list[tuple[float, int, int]]) -> list[Candidate]:
        """The candidates of a prompt, each with why it ends, if it does."""
        stopping, first = self.run.stopping, index * self.width
        late = stopping.out_of_time
        found = []
        for score, beam, token in picked:
            row = self.session.rows[first + beam]
            row.push(token)
            reason = stopping.after(row)
            row.pop(1)
            found.append(Candidate(score, beam, token, reason or ("time" if late else None)))
        if not stopping.has_criteria:
            return found
        rows = [self.session.rows[first + c.beam].with_token(c.token) for c in found]
        kept = tuple(self.run.scores) if self.run.config.output_scores else None
        ends = stopping.by_criteria(rows, kept)
        return [
            c._replace(reason=c.reason or ("criteria" if end else None))
            for c, end in zip(found, ends, strict=True)
        ]

    def _select(self, index: int, candidates: list[Candidate]) -> list[Candidate]:
        """Keeps answers among the candidates; returns those that run on."""
        row = self.rows[index]
        all_ended = all(c.reason is not None for c in candidates)
        row.finish(
            [
                Hypothesis(
                    row.normalised(c.score, self.length),
                    [*self._new_tokens(index, c.beam), c.token],
                    [*row.paths[c.beam], index * self.width + c.beam],
                    c.reason,
                )
                for c in (candidates if all_ended else candidates[: self.width])
                if c.reason is not None
            ]
        )
        running = [c for c in candidates if c.reason is None][: self.width]
        while len(running) < self.width:  # fewer than wanted: the vocabulary is small, or all ended
            running.append(Candidate(UNLIKELY, 0, candidates[0].token, None))
        row.scores = [c.score for c in running]
        row.paths = [[*row.paths[c.beam], index * self.width + c.beam] for c in running]
        row.close_if_done(self.length, all_ended)
        return running

    def _new_tokens(self, index: int, beam: int) -> list[int]:
        return self.session.rows[index * self.width + beam].new_tokens

    def result(self, wanted: int) -> BeamResult:
        """The best ``wanted`` answers to each prompt; they become the rows of the session."""
        run = self.run
        answers = [answer for row in self.rows for answer in row.answers[:wanted]]
        origin = [index for index in range(self.prompts) for _ in range(wanted)]
        self.session.go_back(*self.start)
        if wanted > 1:
            self.session.select_rows(origin)
        for row, answer in zip(self.session.rows, answers, strict=True):
            row.extend(answer.tokens)
            row.finish_reason = answer.reason
        longest = max(len(answer.tokens) for answer in answers)
        beams = [answer.beams + [-1] * (longest - len(answer.beams)) for answer in answers]
        scores = torch.tensor([answer.score for answer in answers], device="cpu")
        return BeamResult(run.continuations(), scores, torch.tensor(beams, device="cpu"))
