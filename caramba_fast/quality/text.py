"""The text that caches are measured on: windows of text, and rows with hidden needles, in batches.

Tokens are real text, from the caller or sampled from the model, never random ids: attention to random ids is unlike
attention in use, and a cache that ruins real text may look harmless on them. Everything is drawn with a seed; asking
for more tokens or needles extends the earlier draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from caramba_fast.config import cache_configs
from caramba_fast.models import LanguageModel
from caramba_fast.quality.compare import new_session
from caramba_fast.quality.identity import token_tensor
from caramba_fast.quality.needles import RecallFormat, pairs_that_fit, recall_rows

#: Rows sampled at once.
SAMPLED_ROWS = 64
_FEWEST_WINDOWS = 2
#: Fewest rows that needles are spread over, so that there is an interval.
_FEWEST_ROWS = 8


def cut_windows(rows: np.ndarray, size: int) -> np.ndarray:
    """(R, N) tokens -> (W, size) non-overlapping windows, row by row; the remainder of a row is dropped."""
    return rows[:, : rows.shape[1] // size * size].reshape(-1, size)


def _behind_bos(rows: np.ndarray, bos_token_id: int | None) -> np.ndarray:
    """(W, N) tokens -> (W, 1 + N) with bos in front; unchanged without a bos."""
    if bos_token_id is None:
        return rows
    return np.concatenate((np.full((len(rows), 1), bos_token_id), rows), axis=1)


def rows_of_text(ids: Tensor, model: LanguageModel) -> Tensor:
    """Token ids of real text, (N,) or (B, T), as rows (B, T).

    Raises ValueError for another shape, no ids, or ids outside the vocabulary.
    """
    rows = ids[None] if ids.ndim == 1 else ids
    if rows.ndim != 2 or rows.numel() == 0:
        raise ValueError(f"calibration_ids has shape {tuple(ids.shape)}; (N,) or (B, T) is needed")
    if int(rows.min()) < 0 or int(rows.max()) >= model.vocab_size:
        raise ValueError(
            f"calibration_ids holds ids from {int(rows.min())} to {int(rows.max())}; the model knows 0 "
            f"to {model.vocab_size - 1}"
        )
    return rows


class Windows:
    """Windows of real text, in a random order fixed by the seed.

    Args:
        model: the model; the text is sampled from it if none is given.
        size: tokens of a window.
        given: (N,), (B, T) or nested lists of token ids of real text, or None.
        seed: seed of the order and of sampling.
        bos_token_id: first token of every window, for models that expect one.
        at_once: rows sampled per batch.

    Raises:
        ValueError: too little text, or ids outside the vocabulary.
    """

    def __init__(
        self,
        model: LanguageModel,
        size: int,
        given: Tensor | Sequence[int] | None = None,
        seed: int = 0,
        bos_token_id: int | None = None,
        at_once: int = SAMPLED_ROWS,
    ) -> None:
        self.model, self.size, self.seed = model, size, seed
        self.bos = bos_token_id if size > 1 else None
        self.at_once = at_once
        self._text = None if given is None else token_tensor(given)
        self._given = None if self._text is None else self._shuffled(self._text)
        self._sampled: list[Tensor] = []

    def _shuffled(self, ids: Tensor) -> Tensor:
        """(W, size) non-overlapping windows, in random order."""
        body = self.size - (self.bos is not None)
        rows = rows_of_text(ids, self.model)
        cut = cut_windows(rows.numpy(), body)
        if len(cut) < 2:
            raise ValueError(
                f"calibration_ids has rows of {rows.shape[1]} tokens, {len(cut)} windows of {body}; at least 2 "
                "are needed (cache_quality_prompt_len + cache_quality_decode_steps + 1 tokens each)"
            )
        order = torch.randperm(
            len(cut), generator=torch.Generator().manual_seed(self.seed), device="cpu"
        )
        return torch.from_numpy(_behind_bos(cut[order.numpy()], self.bos))

    def take(self, start: int, stop: int) -> Tensor:
        """Windows start to stop - 1, (n, size) int64 on the CPU; fewer if the text ends."""
        if self._given is not None:
            return self._given[start:stop]
        while sum(map(len, self._sampled)) < stop:
            seed = self.seed + len(self._sampled)
            self._sampled.append(sample_text(self.model, self.at_once, self.size, seed))
        return torch.cat(self._sampled)[start:stop]

    def filler(self, count: int) -> np.ndarray:
        """(N,) tokens to hide needles in: all given text, else at least ``count`` tokens sampled from the model."""
        text = self.take(0, -(-count // self.size)) if self._text is None else self._text
        return text.flatten().numpy()

    def describe(self) -> str:
        """The origin of the text, in words."""
        if self._given is None:
            return f"sampled from the model, temperature 1, seed {self.seed}"
        return f"{self._given.numel():,} given tokens"


@torch.no_grad()
def sample_text(model: LanguageModel, rows: int, length: int, seed: int = 0) -> Tensor:
    """Text sampled from the model at temperature 1, (rows, length) int64 on the CPU, with an unquantized cache.

    It starts from the model's bos token, else from eos (which precedes a new document), else from a random token.
    """
    rng = torch.Generator().manual_seed(seed)
    first = _first_token(model)
    drawn = torch.randint(model.vocab_size, (rows, 1), generator=rng, device="cpu")
    ids = drawn if first is None else torch.full_like(drawn, first)
    session = new_session(model, rows, length, cache_configs("fp32"))
    found = [ids]
    for _ in range(length - 1):
        logits = session.feed(ids.tolist()).float().cpu()
        _check_finite(logits)
        ids = torch.multinomial(logits.softmax(-1), 1, generator=rng)
        found.append(ids)
    return torch.cat(found, dim=1)


def _check_finite(logits: Tensor) -> None:
    """Raises ValueError unless a token can be drawn in every row of logits (rows, V) on the CPU."""
    for row, largest in enumerate(logits.amax(-1).tolist()):
        if not math.isfinite(largest):
            raise ValueError(
                f"row {row}: the model cannot write a text of its own: its logits are NaN or infinite"
            )


def _first_token(model: LanguageModel) -> int | None:
    bos = begin_token(model)
    return model.eos_token_id if bos is None else bos


def begin_token(model: LanguageModel) -> int | None:
    """The model's bos token id, if it or its config has one."""
    for holder in (model, getattr(model, "config", None)):
        found = getattr(holder, "bos_token_id", None)
        if isinstance(found, int) and 0 <= found < model.vocab_size:
            return found
    return None


@dataclass(frozen=True)
class Batch:
    """Rows that are measured together.

    Attributes:
        ids: (B, context) int64 tokens.
        positions: (B, N) predictions to score, or None for all.
        depths: (B, N) depths of the needles, or None for text.
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
    """Windows of ``context`` tokens in random order, ``tokens`` in all if the text has as many.

    Windows do not overlap and start with ``bos_token_id``, if given. Raises ValueError if the text, or ``tokens``, is
    too short for two.
    """
    size = context - (bos_token_id is not None)
    there, wanted = len(text) // size, tokens // context
    if min(there, wanted) < _FEWEST_WINDOWS:
        short = f"the text has {len(text)} tokens" if there < wanted else f"tokens is {tokens}"
        raise ValueError(
            f"{short}; {_FEWEST_WINDOWS} windows of context {context} need {_FEWEST_WINDOWS * context}"
        )
    order = np.random.default_rng((seed, context)).permutation(there)[:wanted]
    windows = cut_windows(text[None], size)[order]
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
    """Rows of ``context`` tokens with hidden needles, ``needles`` or somewhat more in all.

    Raises ValueError if the context is too short for a needle, or the text too short for a row.
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
