"""How long a cache's greedy text agrees with that of an fp16 cache: tokens before the first difference."""

from __future__ import annotations

from collections.abc import Sequence

from caramba_fast.bench.real.text import KINDS, passages
from caramba_fast.infer.tokenizer import TextTokenizer

#: Prompts, half of each text; tokens of text in each, and tokens generated.
PROMPTS, TOKENS, NEW_TOKENS = 10, 512, 256
ASK = "{text}\n\nExplain what this text says, in detail and in your own words."


def prompts(tokenizer: TextTokenizer, count: int = PROMPTS) -> tuple[tuple[int, ...], ...]:
    """Token ids of chats about passages of the held-out text."""
    found = []
    for kind in KINDS:
        for passage in passages(kind, "held out", 2 * count)[1::4]:
            ids = tokenizer.encode(passage[: 16 * TOKENS], special=False)[:TOKENS]
            message = {"role": "user", "content": ASK.format(text=tokenizer.decode(ids))}
            found.append(tuple(tokenizer.chat([message])))
    return tuple(found)


def agreement(baseline: Sequence[int], found: Sequence[int]) -> int:
    """Length of the common prefix of two answers."""
    differ = (i for i, (a, b) in enumerate(zip(baseline, found, strict=False)) if a != b)
    return next(differ, min(len(baseline), len(found)))
