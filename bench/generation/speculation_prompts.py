"""Three kinds of prompt for the demo model: code to continue, text to repeat, lines to recall."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from caramba_fast.models import held_out_text
from caramba_fast.quality import RecallFormat

KINDS = ("code", "repeat", "recall")
CODE_TOKENS, LINES = 256, 24
#: Characters of the repeated beginning; shortest and longest function to repeat.
BEGUN, SHORTEST, LONGEST = 60, 300, 900


def prompts(kind: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` different prompts.

    ``kind`` is "code", a stretch of held-out source; "repeat", a function of it twice and its beginning once more, as
    when text is quoted or edited; or "recall", key-value lines and the first question.
    """
    if kind == "recall":
        form = RecallFormat.of(tokenizer)
        return [_lines(form, seed) for seed in range(count)]
    text = held_out_text()
    if kind == "code":
        ids = tokenizer.encode(text).ids
        starts = np.linspace(0, len(ids) - CODE_TOKENS - 1, count).astype(int)
        return [ids[start : start + CODE_TOKENS] for start in starts]
    functions = [part for part in re.split(r"\n(?=(?:    )?def )", text)
                 if SHORTEST < len(part) < LONGEST]  # fmt: skip
    chosen = [functions[index] for index in np.linspace(0, len(functions) - 1, count).astype(int)]
    return [tokenizer.encode(f"{one}\n\n{one}\n\n{one[:BEGUN]}").ids for one in chosen]


def _lines(form: RecallFormat, seed: int) -> list[int]:
    words = np.random.default_rng(seed).choice(form.words, 2 * LINES, replace=False)
    lines = [form.line(key, value) for key, value in words.reshape(-1, 2)]
    return np.concatenate([*lines, form.question(words[0])]).tolist()
