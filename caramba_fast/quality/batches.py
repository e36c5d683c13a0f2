"""What is read to measure caches: windows of text and rows of needles, in batches.

Everything is drawn with a seed, and asking for more tokens or needles only adds to what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from caramba_fast.quality.recall import RecallFormat, pairs_that_fit, recall_rows

_FEWEST_WINDOWS = 2
#: Rows needles are spread over at least: an interval needs some.
_FEWEST_ROWS = 8


@dataclass(frozen=True)
class Batch:
    """Rows that are measured together.

    Attributes:
        ids: (B, context) int64 tokens.
        positions: (B, N) predictions to score, or None for all.
        depths: (B, N) where the needles stand, or None for text.
    """

    ids: np.ndarray
    positions: np.ndarray | None = None
    depths: np.ndarray | None = None

    @property
    def scored(self) -> tuple[int, int]:
        """Shape of the batch's scores."""
        rows, length = self.ids.shape
        return rows, length - 1 if self.positions is None else self.positions.shape[1]


def text_batches(
    text: np.ndarray, context: int, tokens: int, rows: int, bos_token_id: int | None, seed: int
) -> Iterator[Batch]:
    """Windows of ``context`` tokens, ``tokens`` in all if the text has as many, in random order.

    Windows do not overlap. With ``bos_token_id`` that is the first token of each.

    Raises:
        ValueError: the text, or ``tokens``, is too short for two windows.
    """
    size = context - (bos_token_id is not None)
    there, wanted = len(text) // size, tokens // context
    if min(there, wanted) < _FEWEST_WINDOWS:
        short = f"the text has {len(text)} tokens" if there < wanted else f"tokens is {tokens}"
        raise ValueError(
            f"{short}; {_FEWEST_WINDOWS} windows of context {context} need {_FEWEST_WINDOWS * context}"
        )
    order = np.random.default_rng((seed, context)).permutation(there)[:wanted]
    windows = text[: there * size].reshape(there, size)[order]
    for start in range(0, len(windows), rows):
        yield Batch(_behind_bos(windows[start : start + rows], bos_token_id))


def needle_batches(
    form: RecallFormat,
    text: np.ndarray,
    context: int,
    needles: int,
    rows: int,
    bos_token_id: int | None,
    seed: int,
) -> Iterator[Batch]:
    """Rows of ``context`` tokens with needles in them, ``needles`` or somewhat more in all.

    Raises:
        ValueError: the context is too short for a needle, or the text too short for a row.
    """
    bos = int(bos_token_id is not None)
    pairs = min(pairs_that_fit(form, context - bos), max(1, needles // _FEWEST_ROWS))
    if not pairs:
        raise ValueError(
            f"context is {context}; a needle needs {4 * form.line_length + bos} tokens or more: "
            "switch needles off for it"
        )
    rng = np.random.default_rng((seed, context, pairs))
    count = max(_FEWEST_ROWS, -(-needles // pairs))
    drawn = [recall_rows(form, text, context - bos, pairs, rng) for _ in range(count)]
    for start in range(0, count, rows):
        some = drawn[start : start + rows]
        yield Batch(
            _behind_bos(np.stack([row.ids for row in some]), bos_token_id),
            np.stack([row.positions for row in some]) + bos,
            np.stack([row.depths for row in some]),
        )


def _behind_bos(ids: np.ndarray, bos_token_id: int | None) -> np.ndarray:
    if bos_token_id is None:
        return ids
    return np.concatenate((np.full((len(ids), 1), bos_token_id), ids), axis=1)
