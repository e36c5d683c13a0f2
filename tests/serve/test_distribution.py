"""What an engine draws is distributed as an uncached pass says, whatever is batched, shared, preempted or drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.engines import VOCABULARY, small_model, text
from torch import Tensor

from caramba_fast.serve import Engine

BASE = text(5, 100)
PROMPTS = [BASE[:3], BASE[:70], [*BASE[:64], *text(9, 20)]]
#: Answers of a request, and tokens of an answer.
ANSWERS, NEW = 4, 3


def top_k(scores: Tensor, _: list[int]) -> Tensor:
    return scores.masked_fill(scores < scores.sort(descending=True).values[7], -torch.inf)


def top_p(scores: Tensor, _: list[int]) -> Tensor:
    ordered, index = (scores / 1.3).softmax(-1).sort(descending=True)
    kept = index[ordered.cumsum(-1) - ordered < 0.8]
    return torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept] / 1.3)


def penalized(scores: Tensor, new: list[int]) -> Tensor:
    counts = torch.bincount(torch.tensor(new, dtype=torch.int64), minlength=VOCABULARY)
    return scores + 0.5 * (counts > 0) + 3.0 * counts


SETTINGS: list[tuple[dict[str, Any], Callable[[Tensor, list[int]], Tensor]]] = [
    ({"top_k": 8}, top_k),
    ({"temperature": 1.3, "top_p": 0.8}, top_p),
    ({"presence_penalty": -0.5, "frequency_penalty": -3.0}, penalized),
]


def places(prompt: list[int], answer: list[int], scored: Any, dice: Any) -> list[float]:
    """Where the tokens of an answer lie in their distributions: even in (0, 1) if they were drawn from them.

    Those that came before are first, then the likeliest, so that what is wrong with either is wrong at one end.
    """
    with torch.no_grad():
        logits = small_model()(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
    found = []
    for place, token in enumerate(answer):
        chances = scored(logits[place].double(), answer[:place]).softmax(-1).numpy()
        assert chances[token] > 0, "what was removed is not drawn"
        counts = np.bincount(np.array(answer[:place], dtype=np.int64), minlength=VOCABULARY)
        before = np.lexsort((-chances, -counts)).tolist()
        before = before[: before.index(token)]
        found.append(chances[before].sum() + dice.random() * chances[token])
    return found


def chi_square(table: Any) -> float:
    """By how many standard deviations counts differ from even ones."""
    even = table.sum() / table.size
    return float(
        (((table - even) ** 2 / even).sum() - table.size + 1) / (2 * table.size - 2) ** 0.5
    )


def test_drawn_tokens_have_the_chances_of_an_uncached_pass() -> None:
    serving = Engine(
        small_model(), cache_kind="fp32", max_seq_len=128, page_size=32, num_pages=7, max_batch_size=8,
        max_batch_tokens=40, cache_salt="everybody", lookup_tokens=2, ignore_eos=True,
    )  # fmt: skip
    asked = {}
    for _ in range(25):
        for kind, (given, _) in enumerate(SETTINGS):
            for prompt in PROMPTS:
                seed = 10 * len(asked)
                name = serving.add_request(
                    prompt, max_new_tokens=NEW, num_return_sequences=ANSWERS, seed=seed, **given
                )
                asked[name] = kind, prompt
    outputs = {e.request_id: e.output for e in serving if e.output}
    figures = serving.metrics
    assert min(figures.preemptions, figures.prefix_hit_tokens, figures.accepted) > 0
    dice = np.random.default_rng(0)
    found = [[] for _ in SETTINGS]
    for name, (kind, prompt) in asked.items():
        answers = outputs[name].answers
        found[kind].append([places(prompt, a, SETTINGS[kind][1], dice) for a in answers])
    for drawn in map(np.array, found):  # (requests, answers, tokens)
        for place in range(NEW):
            assert chi_square(np.histogram(drawn[:, :, place], 20, (0, 1))[0]) < 4
        unit = [[0, 1], [0, 1]]
        for one, other in ((drawn[:, :-1, 0], drawn[:, 1:, 0]), (drawn[..., 0], drawn[..., 1])):
            assert chi_square(np.histogram2d(one.ravel(), other.ravel(), 5, unit)[0]) < 4
