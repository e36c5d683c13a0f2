"""Drafts of a smaller model, which drafted tokens the target accepts, and how many to draft.

Speculative sampling (arXiv:2211.17192, arXiv:2302.01318): with p the target's and q the draft's distribution, both
after all filters, a drafted token is accepted with probability min(1, p/q); the first rejected one is resampled from
max(0, p - q), normalised. The result is distributed as p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.run import blank_ended
from caramba_fast.infer.sampling import (
    NOTHING,
    check_chosen,
    draw_marked,
    filtered_logits,
    likeliest,
    random_state,
    sample_marked,
    set_random_state,
)  # fmt: skip
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.session import Session


class Drafted(NamedTuple):
    """Drafts of all rows.

    Attributes:
        tokens: the draft of each row, which may be empty.
        probability: (B, K, V) float32 distributions they were drawn from, or None if they were not drawn.
    """

    tokens: list[list[int]]
    probability: Tensor | None


class Draft(Protocol):
    """Proposes tokens for the target's rows."""

    def feed(self, rows: Sequence[TokenSequence]) -> None:
        """Processes the prompts of the rows."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row b becomes what row ``rows[b]`` was."""

    def propose(self, rows: Sequence[TokenSequence], counts: Sequence[int]) -> Drafted:
        """Drafts at most ``counts[b]`` tokens for row b."""

    def follow(self, rows: Sequence[TokenSequence], agreed: Sequence[int]) -> None:
        """Follows the rows, whose first ``agreed[b]`` tokens are those of row b and the accepted part of its draft."""

    def reset(self) -> None:
        """Forgets every row."""

    def snapshot(self, *, tails: bool = False) -> Any:
        """State for `restore`; ``tails`` as in `Session.snapshot`."""

    def restore(self, before: Any) -> None:
        """Restores a snapshot."""


class ModelDraft:
    """Drafts of a smaller model, in a session of its own; temperature and filters of ``config`` apply to it too."""

    def __init__(
        self, session: Session, config: GenerateConfig, rng: torch.Generator | None
    ) -> None:
        self.session, self.config, self.rng = session, config, rng
        self.processors: LogitsProcessors | None = None
        self.endings: frozenset[int] = frozenset()  # ids after which nothing is drafted

    def feed(self, rows: Sequence[TokenSequence]) -> None:
        """Feeds the tokens it lacks; starts over if the number of rows differs."""
        if len(self.session.rows) != len(rows):
            self.session.reset()
        known = [len(own) for own in self.session.rows] or [0] * len(rows)
        missing = [list(row.tokens[count:]) for count, row in zip(known, rows, strict=True)]
        if any(missing):
            self.session.feed(missing)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row b becomes what row ``rows[b]`` was, in the cache too."""
        self.session.select_rows(rows)

    def propose(self, rows: Sequence[TokenSequence], counts: Sequence[int]) -> Drafted:
        """Drafts token by token, all rows in one pass of the draft model."""
        own, drafts = self.session.rows, [list[int]() for _ in rows]
        stuck = [False] * len(own)
        self._catch_up(rows)
        drawn_from: list[Tensor] = []
        for index in range(max(counts)):
            wanted = [
                count > index and not end and not (draft and draft[-1] in self.endings)
                for count, draft, end in zip(counts, drafts, stuck, strict=True)
            ]
            if not any(wanted):
                break
            if index == 0:
                logits = self.session.next_logits(wanted)
            else:
                last = [draft[-1] if draft else self.session.fill for draft in drafts]
                logits = self.session.step(last, wanted)
            tokens, probability = self._draw(logits, wanted)
            if probability is not None:
                drawn_from.append(probability)
            for row, (goes_on, token) in enumerate(zip(wanted, tokens, strict=True)):
                if goes_on and token != NOTHING:
                    drafts[row].append(token)
                    own[row].push(token)
                stuck[row] |= token == NOTHING
        return Drafted(drafts, torch.stack(drawn_from, dim=1) if drawn_from else None)

    def _draw(self, logits: Tensor, wanted: Sequence[bool]) -> tuple[list[int], Tensor | None]:
        """A token of each row and the distribution it was drawn from; `NOTHING` if the settings remove every token."""
        logits = scores = blank_ended(logits, wanted)
        if self.processors:
            scores = self.processors.scores(scores, self.session.rows, alive=wanted)
            scores = blank_ended(scores, wanted)
        if self.config.samples:
            probability = filtered_logits(scores, self.config).softmax(-1)
            tokens = draw_marked(probability, self.rng).tolist()
        else:
            probability, tokens = None, likeliest(scores).tolist()
        if NOTHING in tokens:
            # A draft may reach a dead end that the text does not; only logits that are not finite are an error.
            broken = likeliest(logits).tolist()
            new = [row.new for row in self.session.rows]
            check_chosen(broken, logits, logits, new, "draft model")
        return tokens, probability

    def _catch_up(self, rows: Sequence[TokenSequence]) -> None:
        """Adds the tokens the target got while nothing was drafted."""
        for own, row in zip(self.session.rows, rows, strict=True):
            own.extend(row.tokens[len(own) :])
            own.start = row.start

    def follow(self, rows: Sequence[TokenSequence], agreed: Sequence[int]) -> None:
        """Drops rejected tokens; the tokens the target added are fed with the next draft."""
        if self.session.cache is None:
            return
        self.session.drop_padding()
        own, lengths = self.session.rows, self.session.cached
        self.session.keep_cached([min(n, a) for n, a in zip(lengths, agreed, strict=True)])
        for mine, row, kept in zip(own, rows, agreed, strict=True):
            mine.pop(max(0, len(mine) - kept))
            mine.extend(row.tokens[len(mine) :])

    def reset(self) -> None:
        """Forgets every row."""
        self.session.reset()

    def snapshot(self, *, tails: bool = False) -> Any:
        """State of the session, and of what the current call has set."""
        set_by_call = (self.config, self.processors, self.endings, self.rng)
        return self.session.snapshot(tails=tails), set_by_call, random_state(self.rng)

    def restore(self, before: Any) -> None:
        """Restores a snapshot."""
        self.session.restore(before[0])
        self.config, self.processors, self.endings, self.rng = before[1]
        set_random_state(self.rng, before[2])


def accept(
    scores: Tensor,
    drafted: Drafted,
    config: GenerateConfig,
    method: str,
    rng: torch.Generator | None,
) -> tuple[list[int], list[int]]:
    """How many tokens of each draft are accepted, and the token after them.

    Args:
        scores: (B, K + 1, V), the target's processed logits before each drafted token and after the last.
        drafted: the drafts, each of at most K tokens.
        config: temperature and filters.
        method: "reject_sampling" or "sample_match"; the same when greedy.

    Returns:
        (B,) accepted counts and (B,) next tokens, `NOTHING` if none can be chosen.
    """
    lengths = [len(tokens) for tokens in drafted.tokens]
    if not config.samples:
        return _matching(likeliest(scores).tolist(), drafted.tokens)
    if method == "sample_match":
        return _drawn_alike(scores, drafted.tokens, config, rng)
    probability = filtered_logits(scores, config).softmax(-1)
    counts = _accepted(probability, drafted, lengths, rng)
    return counts, _next(probability, drafted.probability, drafted.tokens, counts, rng)


def _matching(chosen: list[list[int]], drafts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Accepts drafted tokens while they are what the target chose."""
    counts = []
    for picked, draft in zip(chosen, drafts, strict=True):
        count = 0
        while count < len(draft) and draft[count] == picked[count]:
            count += 1
        counts.append(count)
    return counts, [picked[count] for picked, count in zip(chosen, counts, strict=True)]


def _drawn_alike(
    scores: Tensor,
    drafts: Sequence[list[int]],
    config: GenerateConfig,
    rng: torch.Generator | None,
) -> tuple[list[int], list[int]]:
    """Samples from the target position by position, as without a draft, while any draft has the same token."""
    counts, tokens = [0] * len(drafts), [0] * len(drafts)
    running = [True] * len(drafts)
    place = 0
    while any(running):
        drawn = sample_marked(scores[:, min(place, scores.shape[1] - 1)], config, rng).tolist()
        for row, draft in enumerate(drafts):
            if running[row]:
                tokens[row] = drawn[row]
                running[row] = place < len(draft) and draft[place] == drawn[row]
                counts[row] += running[row]
        place += 1
    return counts, tokens


def _accepted(
    p: Tensor, drafted: Drafted, lengths: Sequence[int], rng: torch.Generator | None
) -> list[int]:
    """How many tokens of each draft precede the first rejected one."""
    width = max(lengths)
    if width == 0:
        return [0] * len(lengths)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in drafted.tokens]
    ids = torch.tensor(padded, device=p.device)[..., None]
    target = p[:, :width].gather(-1, ids)[..., 0]
    q = drafted.probability
    guess = torch.ones_like(target) if q is None else q[:, :width].gather(-1, ids)[..., 0]
    chance = torch.rand(target.shape, generator=rng, device=p.device)
    stands = chance * guess < target  # u < p / q without dividing; never where p is 0
    place = torch.arange(width, device=p.device)
    stands &= place < torch.tensor(lengths, device=p.device)[:, None]
    return stands.cumprod(-1).sum(-1).tolist()


def _next(
    p: Tensor,
    q: Tensor | None,
    drafts: Sequence[list[int]],
    counts: Sequence[int],
    rng: torch.Generator | None,
) -> list[int]:
    """The next token: from max(0, p - q) after a rejection, else from p."""
    rows = torch.arange(len(counts), device=p.device)
    place = torch.tensor(counts, device=p.device)
    here = p[rows, place]
    rejected = torch.tensor(
        [count < len(draft) for count, draft in zip(counts, drafts, strict=True)], device=p.device
    )[:, None]
    if q is None:
        guess = torch.zeros_like(here)
        ids = [
            draft[count] if count < len(draft) else 0
            for count, draft in zip(counts, drafts, strict=True)
        ]
        guess[rows, torch.tensor(ids, device=p.device)] = 1.0
    else:
        guess = q[rows, place.clamp(max=q.shape[1] - 1)]
    missed = (here - guess).clamp(min=0.0)
    # If p and q differ only by rounding, nothing is left of the difference: then use p.
    missed = torch.where(missed.sum(-1, keepdim=True) > 0, missed, here)
    return draw_marked(torch.where(rejected, missed, here), rng).tolist()


@dataclass
class SpeculationStats:
    """Statistics of speculation in one run.

    Attributes:
        drafted, accepted: tokens over all rows.
        passes: passes of the target after the prompt.
        new_tokens: tokens from these passes, over all rows.
        row_passes: sum of the live rows over all passes.
        spec_k: tokens to draft per step.
        disabled: why speculation was turned off, or None.
    """

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    new_tokens: int = 0
    row_passes: int = 0
    spec_k: int = 0
    disabled: str | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; nan before any was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per row and pass of the target; nan before the first."""
        return self.new_tokens / self.row_passes if self.row_passes else float("nan")

    def as_dict(self) -> dict[str, float | str | None]:
        """The figures by name."""
        return {
            **asdict(self),
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
        }


class DraftLength:
    """The number of tokens to draft, K, adapted to the acceptance rate of each interval."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.stats = SpeculationStats(spec_k=config.spec_k)
        self._rounds, self._drafted, self._accepted = 0, 0, 0

    @property
    def k(self) -> int:
        """Tokens to draft next; 0 once speculation is disabled."""
        return 0 if self.stats.disabled else self.stats.spec_k

    def saw(self, drafted: int, accepted: int, new: int, rows: int) -> None:
        """Records a pass of the target that verified ``drafted`` tokens of ``rows`` rows and gave ``new`` tokens."""
        stats = self.stats
        stats.drafted += drafted
        stats.accepted += accepted
        stats.passes += 1
        stats.new_tokens += new
        stats.row_passes += rows
        self._drafted += drafted
        self._accepted += accepted
        self._rounds += drafted > 0
        if self._rounds == self._config.spec_k_interval:
            self._end_interval()

    def _end_interval(self) -> None:
        config, stats = self._config, self.stats
        if stats.acceptance_rate < config.spec_disable_below_accept:
            stats.disabled = (
                f"acceptance {stats.acceptance_rate:.2f} of {stats.drafted} drafted tokens is below "
                f"spec_disable_below_accept={config.spec_disable_below_accept}"
            )
        if config.spec_k_adaptive:
            grows = self._accepted >= config.spec_target_acceptance * self._drafted
            k = stats.spec_k + (1 if grows else -1)
            stats.spec_k = min(max(k, config.spec_k_min), config.spec_k_max)
        self._rounds, self._drafted, self._accepted = 0, 0, 0
