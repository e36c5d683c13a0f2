"""Needles: lines hidden in text that the model must retrieve later (needle in a haystack).

A line reads ``#: key = value``; key and value are words of one token each. The model has to complete ``#: key =`` with
the value given earlier. The demo model is trained on lines of this format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from caramba_fast.config import KVCacheKind, cache_configs
from caramba_fast.models import LanguageModel
from caramba_fast.quality.compare import new_session

#: A lower-case word with a leading space, in the notation of byte-level BPE and SentencePiece.
_WORD = re.compile(r"^[Ġ▁][a-z]{3,}$")
_FEWEST_WORDS = 64


class Tokenizer(Protocol):
    """The common interface of ``tokenizers.Tokenizer`` and transformers tokenizers used here."""

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        """Token ids, or an encoding with ``ids``."""


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> np.ndarray:
    """The tokens of ``text``, (N,) int64; with ``special``, including special tokens the tokenizer adds."""
    encoding = tokenizer.encode(text, add_special_tokens=special)
    return np.asarray(getattr(encoding, "ids", encoding), dtype=np.int64)


@dataclass(frozen=True)
class RecallFormat:
    """Token ids that make up a recall line: ``prefix key infix value suffix``."""

    words: np.ndarray
    prefix: np.ndarray
    infix: np.ndarray
    suffix: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> RecallFormat:
        """Uses every one-token lower-case word of the vocabulary as key or value.

        The rest of a line is taken from two consecutive tokenized lines, since a tokenizer may tokenize the start of a
        text differently. Raises ValueError for fewer than 64 such words, or lines not of the form ``prefix key infix
        value suffix``.
        """
        vocab = tokenizer.get_vocab()
        words = sorted((index, token) for token, index in vocab.items() if _WORD.match(token))
        if len(words) < _FEWEST_WORDS:
            raise ValueError(
                f"the tokenizer has {len(words)} one-token words like 'Ġvalue' or '▁value'; needles need "
                f"{_FEWEST_WORDS} or more: switch them off"
            )
        (key, first), (value, second) = words[0], words[1]
        line = f"#: {first[1:]} = {second[1:]}\n"
        ids = token_ids(tokenizer, "\n" + 2 * line)
        keys, values = (np.flatnonzero(ids == index) for index in (key, value))
        if len(keys) == 2 == len(values) and keys[0] < values[0] < keys[1] < values[1]:
            infix, between = ids[keys[0] + 1 : values[0]], ids[values[0] + 1 : keys[1]]
            suffix = ids[values[1] + 1 :]
            prefix = between[len(suffix) :]
            if len(suffix) and len(prefix) and np.array_equal(between[: len(suffix)], suffix):
                return cls(np.asarray([index for index, _ in words]), prefix, infix, suffix)
        raise ValueError(
            f"the tokenizer writes {line!r} as {ids.tolist()} (twice, behind a line end), where one token a "
            "word and a line end of its own are needed: switch needles off"
        )

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
        """The line up to the value, without it."""
        return np.concatenate((self.prefix, [key], self.infix))


def needle_prompt(
    form: RecallFormat,
    text: Sequence[int] | np.ndarray,
    distance: int,
    rng: np.random.Generator,
    distractors: int = 8,
) -> tuple[np.ndarray, int]:
    """A prompt of ``text`` with one needle ``distance`` tokens before the question, (N,) int64, and the value's id.

    It ends right before the value to be predicted; ``text`` has at least ``distance`` tokens. ``distractors`` other
    lines are inserted at random line starts, so that copying the latest value does not work.
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


@dataclass(frozen=True)
class RecallRow:
    """A text with many needles and, at its end, the question for each of them.

    Attributes:
        ids: (T,) int64 tokens.
        positions: (pairs,) the tokens at which the values are to be predicted, ascending.
        answers: (pairs,) the values.
        depths: (pairs,) position of each value, as a share of the text before the questions: 0 is its start.
        distances: (pairs,) tokens from each value to its prediction.
    """

    ids: np.ndarray
    positions: np.ndarray
    answers: np.ndarray
    depths: np.ndarray
    distances: np.ndarray


def recall_rows(
    form: RecallFormat,
    text: Sequence[int] | np.ndarray,
    length: int,
    pairs: int,
    rng: np.random.Generator,
) -> RecallRow:
    """Hides ``pairs`` lines ``#: key = value`` in a text and asks for all of them, in random order.

    Each question is followed by its true value, so that one forward pass measures every needle, independently of the
    model's answers. Keys and values of a row are all different, so that each answer is determined by its line alone.
    Lines are inserted at random line starts, one in each of ``pairs`` equal parts of the text (rounded to line starts).

    Args:
        form: the line format.
        text: token ids; a random span of it is used.
        length: tokens of the row.
        pairs: number of needles.
        rng: draws span, words, places and order.

    Raises:
        ValueError: too few words for so many pairs, no room for them, or too little text.
    """
    text = np.asarray(text, dtype=np.int64)
    if pairs < 1 or 2 * pairs > len(form.words):
        raise ValueError(
            f"pairs is {pairs}; 1 to {len(form.words) // 2} is allowed with {len(form.words)} words"
        )
    room = length - 2 * pairs * form.line_length
    if room < 1:
        raise ValueError(
            f"{pairs} needles take {2 * pairs * form.line_length} tokens with their questions; the "
            f"length is {length}"
        )
    if len(text) < room:
        raise ValueError(f"text has {len(text)} tokens; {room} are needed around {pairs} needles")
    start = rng.integers(len(text) - room + 1)
    filler = text[start : start + room]
    words = rng.choice(form.words, size=2 * pairs, replace=False)
    keys, values = words[:pairs], words[pairs:]
    pieces = np.split(filler, _places(form, filler, pairs, rng))
    parts, given, end = [pieces[0]], np.zeros(pairs, dtype=np.int64), len(pieces[0])
    for index, piece in enumerate(pieces[1:]):
        given[index] = end + form.value_offset
        parts += [form.line(keys[index], values[index]), piece]
        end += form.line_length + len(piece)
    order = rng.permutation(pairs)
    asked = end + form.line_length * np.arange(pairs) + form.value_offset
    ids = np.concatenate((*parts, *(form.line(keys[i], values[i]) for i in order)))
    return RecallRow(ids, asked - 1, values[order], given[order] / end, asked - given[order])


def pairs_that_fit(form: RecallFormat, length: int) -> int:
    """Number of needles whose lines and questions fill half of a row; 0 if none fits."""
    return min(length // (4 * form.line_length), len(form.words) // 2)


def _places(
    form: RecallFormat, filler: np.ndarray, pairs: int, rng: np.random.Generator
) -> np.ndarray:
    """Ascending offsets in the filler, at line starts if it has any."""
    drawn = (np.arange(pairs) + rng.random(pairs)) * len(filler) / pairs
    starts = np.flatnonzero(filler == form.suffix[-1]) + 1
    if not len(starts):
        return drawn.astype(np.int64)
    return starts[np.searchsorted(starts, drawn).clip(max=len(starts) - 1)]


def draw_needles(
    form: RecallFormat, text: Sequence[int] | np.ndarray, distance: int, trials: int, seed: int = 0
) -> list[tuple[np.ndarray, int]]:
    """``trials`` (prompt, answer) pairs, each in a random span of ``text``; spans may overlap.

    Raises ValueError if ``text`` has fewer than ``distance`` + 64 tokens.
    """
    rng = np.random.default_rng(seed)
    text = np.asarray(text)
    size = distance + 64
    if len(text) < size:
        raise ValueError(f"text has {len(text)} tokens; distance {distance} needs {size}")
    starts = rng.integers(len(text) - size + 1, size=trials)
    return [needle_prompt(form, text[start : start + size], distance, rng) for start in starts]


@torch.no_grad()
def retrieval_rate(
    model: LanguageModel,
    needles: Sequence[tuple[np.ndarray, int]],
    kind: KVCacheKind | str,
    *,
    batch_size: int = 8,
) -> float:
    """Share of needles answered exactly (greedy) when K and V are stored as ``kind``."""
    hits = 0
    for start in range(0, len(needles), batch_size):
        batch = needles[start : start + batch_size]
        session = new_session(
            model, len(batch), max(len(prompt) for prompt, _ in batch), cache_configs(kind),
            prefill="stored",
        )  # fmt: skip
        answers = torch.tensor([answer for _, answer in batch], device="cpu")
        logits = session.feed([prompt.tolist() for prompt, _ in batch])
        hits += int((logits.argmax(-1).cpu() == answers).sum())
    return hits / len(needles)
