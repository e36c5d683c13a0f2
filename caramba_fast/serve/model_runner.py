"""Choosing: the next tokens of many answers from one batch of logits, each with its own settings.

An answer gets the token a run of its own would choose: the same edits, filters and random numbers. Answers with
the same filters are drawn together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig, SamplingFields
from caramba_fast.infer.sampling import sample
from caramba_fast.serve.request import Answer

FILTERS = tuple(name for name in SamplingFields.model_fields if name not in ("seed", "do_sample"))


@dataclass(eq=False)
class Choice:
    """One answer whose next tokens are wanted.

    Attributes:
        answer: it.
        draft: tokens that were read behind its last one.
        first: the row of the logits behind its last token; those behind the draft follow.
        tokens: what it chose: as much of the draft as it would have said itself, and one token more.
        error: why nothing can be chosen.
    """

    answer: Answer
    draft: Sequence[int]
    first: int
    tokens: list[int] = field(default_factory=list)
    error: Exception | None = None


def choose(logits: Tensor, choices: Sequence[Choice]) -> None:
    """Fills in the tokens of every choice.

    Args:
        logits: (M, V), the rows of all choices.
    """
    chosen = _unedited(logits, [c for c in choices if not c.answer.request.edits])
    for choice in choices:
        try:
            if choice.answer.request.edits:
                _walk(logits, choice)
            else:
                _take(choice, chosen[choice])
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            choice.error = error


def _take(choice: Choice, drawn: Sequence[int]) -> None:
    """Accepts the draft up to the first token it would not have chosen, and takes its own choice there."""
    for place in range(len(choice.draft) + 1):
        if place == len(drawn):
            raise ValueError("no token can be chosen: the model's logits are NaN")
        choice.tokens.append(drawn[place])
        if place == len(choice.draft) or choice.draft[place] != drawn[place]:
            break
    if choice.answer.points is not None:
        choice.answer.points.used(len(choice.tokens))


def _unedited(logits: Tensor, choices: Sequence[Choice]) -> dict[Choice, list[int]]:
    """The tokens of every choice, row by row, up to the first row that nothing can be drawn from."""
    groups: dict[tuple[object, ...], list[Choice]] = defaultdict(list)
    likeliest = logits.argmax(-1)
    sound = torch.isfinite(logits.gather(-1, likeliest[:, None])[:, 0]).tolist()
    for choice in choices:
        config = choice.answer.request.config
        key = tuple(getattr(config, name) for name in FILTERS) if config.samples else ()
        groups[key].append(choice)
    found: dict[Choice, list[int]] = {}
    for members in groups.values():
        config = members[0].answer.request.config
        if not config.samples:
            ids = likeliest.tolist()
            found.update((c, [ids[row] for row in _rows(c, sound)]) for c in members)
            continue
        counts = [len(_rows(c, sound)) for c in members]
        rows = [row for c in members for row in _rows(c, sound)]
        points = [
            number
            for c, count in zip(members, counts, strict=True)
            if c.answer.points is not None
            for number in c.answer.points.ahead(count)
        ]
        some = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        drawn = iter(_drawn(some, config, points) if rows else ())
        for choice, count in zip(members, counts, strict=True):
            found[choice] = list(itertools.islice(drawn, count))
    return found


def _rows(choice: Choice, sound: Sequence[bool]) -> list[int]:
    """Its rows of the logits, up to the first that is no distribution."""
    rows = range(choice.first, choice.first + len(choice.draft) + 1)
    return list(itertools.takewhile(lambda row: sound[row], rows))


def _drawn(logits: Tensor, config: GenerateConfig, points: Sequence[float]) -> list[int]:
    """Tokens for logits (R, V), with a random number for each row if any are drawn."""
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    numbers = torch.tensor(points, dtype=exact, device=logits.device) if points else None
    ids: list[int] = sample(logits, config, numbers).tolist()
    return ids


def _walk(logits: Tensor, choice: Choice) -> None:
    """Token by token: what is edited depends on the tokens before."""
    answer, taken = choice.answer, 0
    request, points = answer.request, answer.points
    try:
        for place in range(len(choice.draft) + 1):
            row = logits[choice.first + place][None]
            scores = request.edits.scores(row, [answer.history], [answer.new], which=[answer.index])
            if not bool(torch.isfinite(scores.amax())):
                raise ValueError(
                    "no token can be chosen: the logits are NaN, or the settings remove every token"
                )
            numbers = points.ahead(place + 1)[place:] if points is not None else ()
            token = _drawn(scores, request.config, numbers)[0]
            choice.tokens.append(token)
            if place == len(choice.draft) or choice.draft[place] != token:
                break
            answer.history.push(token)
            taken += 1
    finally:
        answer.history.pop(taken)
    if points is not None:
        points.used(len(choice.tokens))
