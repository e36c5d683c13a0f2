"""Stopping: when a row ends: eos ids, stop strings and ids, length and time limits, the caller's criteria."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any, Protocol

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.logits import padded
from caramba_fast.infer.sequence import FinishReason, TokenSequence
from caramba_fast.infer.tokenizer import text_after

#: As Hugging Face's ``StoppingCriteria``: (input_ids (B, L), scores) -> bool or (B,) bools.
StoppingCriterion = Callable[..., "Tensor | bool"]
#: Extra tokens decoded when looking for stop strings, since a token may hold only part of a character.
SLACK = 8


class Decoder(Protocol):
    """Turns token ids into text: a `tokenizers.Tokenizer` or a transformers tokenizer."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""


class Stopping:
    """Decides after each token whether its row has ended.

    Args:
        config, eos_ids, tokenizer: settings, ids that end a row, and the decoder for stop strings.
        criteria: the caller's; called with all tokens, left-padded with ``fill``, and the scores kept so far or None.
        began: when the call began (``time.monotonic``), from which max_time counts; by default now.
    """

    def __init__(
        self,
        config: GenerateConfig,
        eos_ids: frozenset[int],
        tokenizer: Decoder | None,
        criteria: Sequence[StoppingCriterion],
        fill: int,
        began: float | None = None,
    ) -> None:
        self._eos, self._stop_ids = eos_ids, frozenset(config.stop_ids)
        self._strings, self._min_new = config.stop_strings, config.min_new_tokens
        self._decode = _decoding(tokenizer) if tokenizer is not None else None
        self._window = SLACK + max((len(s.encode()) for s in self._strings), default=0)
        self._criteria, self._fill = tuple(criteria), fill
        began = time.monotonic() if began is None else began
        self._deadline = None if config.max_time is None else began + config.max_time

    def after(self, row: TokenSequence) -> FinishReason | None:
        """Why a row ends with its newest token; None if it goes on."""
        token = row.tokens[-1]
        if token in self._eos:
            return "eos"
        if token in self._stop_ids or self.stop_text(row):
            return "stop"
        if row.new >= row.limit:
            return "length"
        return None

    def end(
        self, rows: Sequence[TokenSequence], alive: Sequence[bool], scores: Sequence[Tensor] | None
    ) -> None:
        """Sets the finish reason of every row that ends; rows ``alive`` have just got a token.

        ``scores`` are those kept so far, (B, V) per step, for the caller's criteria.
        """
        for row, goes_on in zip(rows, alive, strict=True):
            if goes_on:
                row.finish_reason = self.after(row)
        if self._criteria and any(row.finish_reason is None for row in rows):
            kept = None if scores is None else tuple(scores)
            _end(rows, self.by_criteria(rows, kept), "criteria")
        self.end_late(rows)

    def end_late(self, rows: Sequence[TokenSequence]) -> None:
        """Ends every row once ``max_time`` is over."""
        if self.out_of_time:
            _end(rows, [True] * len(rows), "time")

    def stop_text(self, row: TokenSequence) -> str:
        """The text of a row from the first stop string on that its newest token completes; empty if there is none.

        It has the text of special tokens, too.
        """
        if not self._strings or row.new <= self._min_new:
            return ""
        assert self._decode is not None
        count = min(row.new, self._window)
        newest, before = row.tokens[-count:], row.tokens[-count - SLACK : -count]
        text, early = text_after(self._decode, before, newest), self._min_new - (row.new - count)
        held = 0
        if early > 0:  # a stop string that ends within min_new_tokens does not count
            # An unfinished character is none yet: its place may be that of the one it becomes.
            least = text_after(self._decode, before, newest[:early])
            held = len(commonprefix([text, least]))  # noqa: RUF071 - of characters, as is meant here
        places = (text.find(s, max(0, held - len(s) + 1)) for s in self._strings)
        found = [place for place in places if place >= 0]
        return text[min(found) :] if found else ""

    @property
    def endings(self) -> frozenset[int]:
        """The ids that end a row."""
        return self._eos | self._stop_ids

    @property
    def has_criteria(self) -> bool:
        """Whether the caller gave criteria."""
        return bool(self._criteria)

    @property
    def out_of_time(self) -> bool:
        """Whether ``max_time`` is over."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def by_criteria(
        self,
        rows: Sequence[TokenSequence],
        scores: tuple[Tensor, ...] | None,
        new: int | None = None,
    ) -> list[bool]:
        """Which rows the caller's criteria end; they see at most ``new`` new tokens (`padded`)."""
        ended = [False] * len(rows)
        ids = padded(rows, self._fill, torch.device("cpu"), new)
        for criterion in self._criteria:
            said = torch.as_tensor(criterion(ids, scores)).to(torch.bool).cpu()
            said = said.expand(len(rows)) if said.ndim == 0 else said
            if said.shape != (len(rows),):
                raise ValueError(
                    f"a stopping criterion returned {tuple(said.shape)} bools; one or ({len(rows)},) is needed"
                )
            ended = [a or b for a, b in zip(ended, said.tolist(), strict=True)]
        return ended


def _end(rows: Sequence[TokenSequence], which: Sequence[bool], reason: FinishReason) -> None:
    for row, ends in zip(rows, which, strict=True):
        if ends and row.finish_reason is None:
            row.finish_reason = reason


def _decoding(tokenizer: Decoder) -> Callable[[list[int]], str]:
    """A decode function that keeps special tokens if it can, since a stop string may be one."""
    decode: Callable[..., str] = tokenizer.decode
    try:
        decode([], skip_special_tokens=False)
    except TypeError:
        return decode
    return partial(decode, skip_special_tokens=False)


def eos_ids(config: GenerateConfig, model: Any) -> frozenset[int]:
    """The ids that end a row: those of the settings, else the model's own.

    Raises ValueError if one of them, or the padding id, is outside the vocabulary.
    """
    given, whose, instead = config.eos_token_id, "eos_token_id", ""
    if given is None and not config.ignore_eos:
        given = ids_that_end(model)
        whose = "the model's own eos_token_id (of its config or generation config)"
        instead = "; set eos_token_id, or ignore_eos=True"
    ids = (given,) if isinstance(given, int) else given or ()
    named = [*((whose, i, instead) for i in ids), ("pad_token_id", config.pad_token_id, "")]
    for name, index, way in named:
        if index is not None and index >= model.vocab_size:
            raise ValueError(
                f"{name} is {index}; the model's vocabulary allows 0 to {model.vocab_size - 1}{way}"
            )
    return frozenset(ids)


def ids_that_end(model: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of a model, in its order; empty if it has none, which some configs write as -1."""
    found = getattr(model, "eos_token_ids", None) or model.eos_token_id
    ids = (found,) if isinstance(found, int) else found or ()
    return tuple(index for index in ids if index >= 0)


def row_limits(config: GenerateConfig, held: Sequence[int]) -> list[int]:
    """Most new tokens of each row, which holds ``held`` tokens with its prompt.

    Raises ValueError if a row has already reached max_length.
    """
    if config.max_length is None:
        return [config.max_new_tokens] * len(held)
    for row, count in enumerate(held):
        if count >= config.max_length:
            raise ValueError(
                f"row {row} holds {count} tokens, prompt included; max_length={config.max_length} allows "
                "no new one"
            )
    return [config.max_length - count for count in held]


def warn_past_positions(model: object, needed: int) -> None:
    """Warns if a row may exceed the number of positions the model was trained for."""
    most = getattr(model, "trained_positions", None)
    if most is not None and needed > most:
        warnings.warn(
            f"a row may grow beyond the {most} positions that the model was made for (max_position_embeddings): what "
            "it writes there can be much worse, whatever the cache",
            stacklevel=2,
        )


def check_fits(
    rooms: Mapping[str, int | None], prompt: int, new: int, *, held: int = 0, row: int | None = None
) -> None:
    """Raises ValueError if a row and its new tokens need more room than there is.

    The last generated token is not fed, so it needs no room.

    Args:
        rooms: limits in tokens by name; None for no limit.
        prompt, new, held: prompt tokens, most new ones, and tokens of earlier calls.
        row: index for the message.
    """
    needed = held + prompt + new - 1
    for what, most in rooms.items():
        if most is not None and needed > most:
            who = "" if row is None else f"row {row}: "
            before = f"{held} tokens held, " if held else ""
            raise ValueError(
                f"{who}{before}the prompt of {prompt} tokens and {new} new ones need room for {needed}; "
                f"{what} allows {most}"
            )
