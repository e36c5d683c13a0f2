"""ModelRunner: one forward pass over all scheduled tokens, and sampling of the next ones.

A sequence gets the token it would get alone: the same logits processors, filters and random numbers. Sequences with
the same filters are sampled together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import PagePool, RaggedBatch, Stretch
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.cuda_graph import BatchGraphs
from caramba_fast.infer.fields import SamplingFields
from caramba_fast.infer.logprobs import TokenLogprobs, token_logprobs
from caramba_fast.infer.sampling import NOTHING, likeliest, sample_marked, why_nothing
from caramba_fast.serve.input_processor import InputProcessor
from caramba_fast.serve.metrics import Counters
from caramba_fast.serve.request import PagedSequence
from caramba_fast.serve.scheduler import Work

FILTERS = tuple(name for name in SamplingFields.model_fields if name not in ("seed", "do_sample"))


@dataclass(eq=False)
class Choice:
    """One sequence that gets next tokens.

    Attributes:
        draft: drafted tokens that were processed after its last one.
        first: row of the logits after its last token; those after the draft follow.
        tokens: the accepted part of the draft, and one token more.
        logprobs: of those tokens, if its request asks for them.
        error: why no first token can be chosen.
    """

    sequence: PagedSequence
    draft: Sequence[int]
    first: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None


class ModelRunner:
    """Runs the model over ragged batches; ``inputs`` makes the further sequences of a prompt.

    Raises ValueError for ``cuda_graph=True`` if there can be no graph.
    """

    def __init__(
        self, model: Any, pool: PagePool, inputs: InputProcessor, counters: Counters
    ) -> None:
        self.model, self.pool, self.inputs, self.counters = model, pool, inputs, counters
        most, wanted = inputs.settings.max_batch_size, inputs.config.cuda_graph
        self.graphs = BatchGraphs(model, pool, wanted, most)

    def run(self, works: Sequence[Work]) -> dict[PagedSequence, list[Choice]]:
        """Runs the model over all work; returns the choices of each sequence and of those that branch off from it."""
        tokens = [work.tokens for work in works]
        stretches = [
            Stretch(work.sequence.cached, len(fed), work.sequence.pages, work.sequence.ring)
            for work, fed in zip(works, tokens, strict=True)
        ]
        rows: list[int] = []
        choices: dict[PagedSequence, list[Choice]] = {}
        end = 0
        for work, fed in zip(works, tokens, strict=True):
            end += len(fed)
            if work.is_whole:
                choices[work.sequence] = [
                    Choice(sequence, work.draft, len(rows))
                    for sequence in (work.sequence, *self.inputs.branches(work.sequence))
                ]
                rows += range(end - len(work.draft) - 1, end)
        logits = self._logits(list(itertools.chain(*tokens)), stretches, rows)
        if rows:
            choose(logits, list(itertools.chain(*choices.values())))
        self.counters.steps += 1
        self.counters.step_tokens += end
        return choices

    def _logits(
        self, tokens: Sequence[int], stretches: Sequence[Stretch], rows: Sequence[int]
    ) -> Tensor:
        """Logits (M, V) after the tokens of ``rows``."""
        found = self.graphs.logits(tokens, stretches)
        if found is not None:
            self.counters.graph_steps += 1
            return found if len(rows) == len(stretches) else found[list(rows)]
        device = self.model.device
        ids = torch.tensor(tokens, device=device)
        wanted = torch.tensor(rows, dtype=torch.int64, device=device)
        logits: Tensor = self.model.forward_ragged(ids, RaggedBatch(stretches, self.pool), wanted)
        return logits


def choose(logits: Tensor, choices: Sequence[Choice]) -> None:
    """Fills in the tokens of every choice from logits (M, V), the rows of all choices."""
    chosen = _unedited(logits, [c for c in choices if not c.sequence.request.processors])
    for choice in choices:
        try:
            if choice.sequence.request.processors:
                _walk(logits, choice)
            else:
                _take(logits, choice, chosen[choice])
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            # Behind an accepted draft it may not be needed; if it is, the next step fails as it would alone.
            choice.error = None if choice.tokens else error
        if choice.sequence.random is not None:
            choice.sequence.random.used(len(choice.tokens))
    _tell(logits, choices)


def _tell(logits: Tensor, choices: Sequence[Choice]) -> None:
    """Adds log-probabilities for the choices that ask for them, all at once."""
    asked = [
        (choice, count)
        for choice in choices
        if choice.error is None and (count := choice.sequence.request.config.logprobs) is not None
    ]
    if not asked:
        return
    rows = [c.first + place for c, _ in asked for place in range(len(c.tokens))]
    some = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
    tokens = [token for choice, _ in asked for token in choice.tokens]
    found = iter(token_logprobs(some, tokens, max(count for _, count in asked)))
    for choice, count in asked:
        mine = itertools.islice(found, len(choice.tokens))
        choice.logprobs = [each._replace(top=each.top[:count]) for each in mine]


def _take(logits: Tensor, choice: Choice, drawn: Sequence[int]) -> None:
    """Accepts the draft up to the first token that was not drawn, and takes the drawn one there."""
    for place in range(len(choice.draft) + 1):
        if place == len(drawn) or drawn[place] == NOTHING:
            row = logits[choice.first + place]
            raise ValueError(f"no token can be chosen: {why_nothing(row, row)}")
        choice.tokens.append(drawn[place])
        if place == len(choice.draft) or choice.draft[place] != drawn[place]:
            break


def _unedited(logits: Tensor, choices: Sequence[Choice]) -> dict[Choice, list[int]]:
    """Tokens of every choice without processors, row by row, up to the first row that gives none."""
    groups: dict[tuple[object, ...], list[Choice]] = defaultdict(list)
    ids = likeliest(logits).tolist()
    sound = [token != NOTHING for token in ids]
    for choice in choices:
        config = choice.sequence.request.config
        key = tuple(getattr(config, name) for name in FILTERS) if config.samples else ()
        groups[key].append(choice)
    found: dict[Choice, list[int]] = {}
    for members in groups.values():
        config = members[0].sequence.request.config
        if not config.samples:
            found.update((c, [ids[row] for row in _rows(c, sound)]) for c in members)
            continue
        counts = [len(_rows(c, sound)) for c in members]
        rows = [row for c in members for row in _rows(c, sound)]
        numbers = [
            number
            for c, count in zip(members, counts, strict=True)
            if c.sequence.random is not None
            for number in c.sequence.random.ahead(count)
        ]
        some = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        drawn = iter(_drawn(some, config, numbers) if rows else ())
        for choice, count in zip(members, counts, strict=True):
            found[choice] = list(itertools.islice(drawn, count))
    return found


def _rows(choice: Choice, sound: Sequence[bool]) -> list[int]:
    """Its rows of the logits, up to the first that gives no token."""
    rows = range(choice.first, choice.first + len(choice.draft) + 1)
    return list(itertools.takewhile(lambda row: sound[row], rows))


def _drawn(logits: Tensor, config: GenerateConfig, numbers: Sequence[float]) -> list[int]:
    """Tokens for logits (R, V), with a random number for each row if they are sampled."""
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    points = torch.tensor(numbers, dtype=exact, device=logits.device) if numbers else None
    ids: list[int] = sample_marked(logits, config, points).tolist()
    return ids


def _walk(logits: Tensor, choice: Choice) -> None:
    """Chooses token by token, since the processors depend on the tokens before."""
    sequence, taken = choice.sequence, 0
    request, random = sequence.request, sequence.random
    try:
        for place in range(len(choice.draft) + 1):
            row = logits[choice.first + place][None]
            scores = request.processors.scores(row, [sequence], which=[sequence.index])
            numbers = random.ahead(place + 1)[place:] if random is not None else ()
            token = _drawn(scores, request.config, numbers)[0]
            if token == NOTHING:
                raise ValueError(f"no token can be chosen: {why_nothing(row[0], scores[0])}")
            choice.tokens.append(token)
            if place == len(choice.draft) or choice.draft[place] != token:
                break
            sequence.push(token)
            taken += 1
    finally:
        sequence.pop(taken)
