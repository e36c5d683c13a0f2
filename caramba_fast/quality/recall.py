"""Key-value recall: needles hidden in text, one line each, asked for again further on.

A line reads ``#: key = value``; key and value are words that are one token each. A model
that reads its cache well completes ``#: key =`` with the value given earlier. The demo model is
trained on such lines, the needle test asks for them: the format is defined here, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_WORD = re.compile(r"^Ġ[a-z]{3,}$")


class Tokenizer(Protocol):
    """What is asked of a ``tokenizers.Tokenizer``."""

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""

    def encode(self, sequence: str) -> object:
        """An encoding with ``ids``."""


@dataclass(frozen=True)
class RecallFormat:
    """Token ids that make up a recall line: ``prefix key infix value suffix``."""

    words: np.ndarray
    prefix: np.ndarray
    infix: np.ndarray
    suffix: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> RecallFormat:
        """Takes every one-token lower-case word of the vocabulary as key or value."""
        vocab = tokenizer.get_vocab()
        words = sorted(index for token, index in vocab.items() if _WORD.match(token))
        if len(words) < 64:
            raise ValueError(f"tokenizer has {len(words)} one-token words; recall needs 64 or more")

        def ids(text: str) -> np.ndarray:
            return np.asarray(tokenizer.encode(text).ids, dtype=np.int64)  # type: ignore[attr-defined]

        return cls(np.asarray(words, dtype=np.int64), ids("#:"), ids(" ="), ids("\n"))

    @property
    def line_length(self) -> int:
        """Tokens of a line."""
        return len(self.prefix) + len(self.infix) + len(self.suffix) + 2

    @property
    def value_offset(self) -> int:
        """Index of the value token within a line."""
        return len(self.prefix) + len(self.infix) + 1

    def line(self, key: int, value: int) -> np.ndarray:
        """The whole line, (line_length,) int64."""
        return np.concatenate((self.prefix, [key], self.infix, [value], self.suffix))

    def question(self, key: int) -> np.ndarray:
        """The line up to where the value is due."""
        return np.concatenate((self.prefix, [key], self.infix))


def needle_prompt(
    form: RecallFormat,
    text: Sequence[int] | np.ndarray,
    distance: int,
    rng: np.random.Generator,
    distractors: int = 8,
) -> tuple[np.ndarray, int]:
    """A prompt of ``text`` with one needle ``distance`` tokens before the question.

    ``distractors`` other lines stand at random line starts of the text, so that copying the
    latest value does not pay.

    Args:
        text: token ids to hide the needle in; at least ``distance`` of them.
        distance: tokens from the needle's value to the place where it is asked for.

    Returns:
        prompt (N,) int64, ending right before the value, and the value's token id.
    """
    text = np.asarray(text, dtype=np.int64)
    if len(text) < distance:
        raise ValueError(f"text has {len(text)} tokens; distance {distance} needs as many")
    chosen = rng.choice(form.words, size=2 * (distractors + 1), replace=False)
    keys, values = chosen[::2], chosen[1::2]
    question = form.question(keys[0])
    behind = distance - len(question) - len(form.suffix)
    between = distractors * form.line_length
    filler = text[len(text) - (behind - between) :] if behind > between else text[:0]
    starts = np.flatnonzero(np.isin(filler, form.suffix[-1:])) + 1
    places = np.sort(rng.choice(starts, size=distractors)) if len(starts) else np.zeros(0, int)
    pieces = np.split(filler, places)
    parts = [text[: len(text) - len(filler)], form.line(keys[0], values[0]), pieces[0]]
    for index, piece in enumerate(pieces[1:], start=1):
        parts += [form.line(keys[index], values[index]), piece]
    return np.concatenate((*parts, question)), int(values[0])
