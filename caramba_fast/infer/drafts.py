"""Drafts: guesses of the next tokens of each row, and how likely the guesser held them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.conversation import Conversation
from caramba_fast.infer.edits import LogitEdits
from caramba_fast.infer.history import TokenHistory
from caramba_fast.infer.run import blank_ended
from caramba_fast.infer.sampling import (
    NOTHING,
    check_chosen,
    draw_marked,
    filtered_logits,
    likeliest,
    random_state,
    set_random_state,
)  # fmt: skip


class Drafted(NamedTuple):
    """Drafts of all rows.

    Attributes:
        tokens: for each row its draft, which may be empty.
        probability: (B, K, V) float32 what they were drawn from, or None where each token was certain.
    """

    tokens: list[list[int]]
    probability: Tensor | None


class Draft(Protocol):
    """What guesses. Rows are those of the target, which alone say what the tokens are."""

    def feed(self, rows: Sequence[TokenHistory]) -> None:
        """The rows have got prompts."""

    def take(self, rows: Sequence[int]) -> None:
        """Row b is now what row ``rows[b]`` was."""

    def propose(
        self, rows: Sequence[TokenHistory], counts: Sequence[int], new: Sequence[int]
    ) -> Drafted:
        """At most ``counts[b]`` tokens behind row b, of whose tokens ``new[b]`` were generated."""

    def follow(self, rows: Sequence[TokenHistory], agreed: Sequence[int]) -> None:
        """The rows have moved on; their first ``agreed[b]`` tokens are those of row b and its draft."""

    def reset(self) -> None:
        """Forgets every row."""

    def snapshot(self, *, tails: bool = False) -> Any:
        """What `restore` goes back to; ``tails`` as in `Conversation.snapshot`."""

    def restore(self, before: Any) -> None:
        """Goes back to a snapshot."""


class ModelDraft:
    """Drafts of a second, smaller model with a cache of its own.

    Args:
        conversation: the draft model's.
        config: settings; its temperature and filters are the draft's too.
        rng: what tokens are drawn with.
    """

    def __init__(
        self, conversation: Conversation, config: GenerateConfig, rng: torch.Generator | None
    ) -> None:
        self.talk, self.config, self.rng = conversation, config, rng
        self.edits: LogitEdits | None = None
        self.endings: frozenset[int] = frozenset()  # ids behind which nothing is drafted

    def feed(self, rows: Sequence[TokenHistory]) -> None:
        """Reads what it lacks of the rows; all of them anew, where they are not those it knows."""
        if len(self.talk.rows) != len(rows):
            self.talk.reset()
        known = [len(own) for own in self.talk.rows] or [0] * len(rows)
        missing = [list(row.tokens[count:]) for count, row in zip(known, rows, strict=True)]
        if any(missing):
            self.talk.feed(missing)

    def take(self, rows: Sequence[int]) -> None:
        """Moves the cache too."""
        self.talk.take(rows)

    def propose(
        self, rows: Sequence[TokenHistory], counts: Sequence[int], new: Sequence[int]
    ) -> Drafted:
        """Draws token after token; each pass of the draft model gives one for every row."""
        own, drafts = self.talk.rows, [list[int]() for _ in rows]
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
                logits = self.talk.next_logits(wanted)
            else:
                last = [draft[-1] if draft else self.talk.fill for draft in drafts]
                logits = self.talk.step(last, wanted)
            tokens, probability = self._draw(logits, wanted, [n + index for n in new])
            if probability is not None:
                drawn_from.append(probability)
            for row, (goes_on, token) in enumerate(zip(wanted, tokens, strict=True)):
                if goes_on and token != NOTHING:
                    drafts[row].append(token)
                    own[row].push(token)
                stuck[row] |= token == NOTHING
        return Drafted(drafts, torch.stack(drawn_from, dim=1) if drawn_from else None)

    def _draw(
        self, logits: Tensor, wanted: Sequence[bool], new: Sequence[int]
    ) -> tuple[list[int], Tensor | None]:
        """A token of each row, and what it was drawn from; `NOTHING` where the settings remove every token."""
        logits = scores = blank_ended(logits, wanted)
        if self.edits:
            scores = self.edits.scores(scores, self.talk.rows, new, alive=wanted)
            scores = blank_ended(scores, wanted)
        if self.config.samples:
            probability = filtered_logits(scores, self.config).softmax(-1)
            tokens = draw_marked(probability, self.rng).tolist()
        else:
            probability, tokens = None, likeliest(scores).tolist()
        if NOTHING in tokens:
            # A guess may run into a dead end that the text does not: only broken logits are an error.
            broken = likeliest(logits).tolist()
            check_chosen(broken, logits, logits, new, "draft model")
        return tokens, probability

    def _catch_up(self, rows: Sequence[TokenHistory]) -> None:
        """Tokens the target got while nothing was drafted."""
        for own, row in zip(self.talk.rows, rows, strict=True):
            own.extend(row.tokens[len(own) :])

    def follow(self, rows: Sequence[TokenHistory], agreed: Sequence[int]) -> None:
        """Takes back what was rejected; the tokens the target added are fed with the next draft."""
        if self.talk.cache is None:
            return
        self.talk.settle()
        own, lengths = self.talk.rows, self.talk.cached
        self.talk.settle_at([min(n, a) for n, a in zip(lengths, agreed, strict=True)])
        for mine, row, kept in zip(own, rows, agreed, strict=True):
            mine.pop(max(0, len(mine) - kept))
            mine.extend(row.tokens[len(mine) :])

    def reset(self) -> None:
        """Forgets every row."""
        self.talk.reset()

    def snapshot(self, *, tails: bool = False) -> Any:
        """That of the conversation, and what the call under way has set."""
        set_by_call = (self.config, self.edits, self.endings, self.rng)
        return self.talk.snapshot(tails=tails), set_by_call, random_state(self.rng)

    def restore(self, before: Any) -> None:
        """Goes back to a snapshot."""
        self.talk.restore(before[0])
        self.config, self.edits, self.endings, self.rng = before[1]
        set_random_state(self.rng, before[2])
