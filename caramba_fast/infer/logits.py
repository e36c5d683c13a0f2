"""Logits processors: penalties, biases, banned and allowed tokens.

The order is that of Hugging Face's ``generate``: the built-in ones, the caller's processors, then temperature and
filters (`caramba_fast.infer.sampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.grammar import Grammar
from caramba_fast.infer.sequence import TokenSequence

#: As Hugging Face's ``LogitsProcessor``: (input_ids (B, L), scores (B, V)) -> scores (B, V).
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
#: As Hugging Face's ``prefix_allowed_tokens_fn``: (row, token ids (L,)) -> ids that may follow.
AllowedTokens = Callable[[int, Tensor], Sequence[int]]


class LogitsProcessors:
    """All logits processors of a config and a caller.

    Args:
        vocab_size: number of logits.
        eos_ids: ids that end a row; before ``min_new_tokens`` they and ``stop`` ids are banned, unless the grammar
            allows nothing else.
        processors: the caller's, called in turn with all tokens, left-padded with ``fill``.
        allowed: the caller's ``prefix_allowed_tokens_fn``.
        grammar: constraint on the new tokens, or None.

    Raises:
        ValueError: an id outside the vocabulary; the message names the field.
    """

    def __init__(
        self,
        config: GenerateConfig,
        vocab_size: int,
        eos_ids: frozenset[int],
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
        allowed: AllowedTokens | None = None,
        fill: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        _check_ids(config, vocab_size)
        self._config, self._vocab, self._device = config, vocab_size, device
        self._grammar = grammar
        self._processors, self._allowed, self._fill = tuple(processors), allowed, fill
        endings = sorted(eos_ids | frozenset(config.stop_ids))
        self._endings = torch.tensor(endings, dtype=torch.int64, device=device)
        self._bias = self._dense(config.logit_bias or {})
        self._banned = self._dense(dict.fromkeys(config.suppress_tokens, -torch.inf))
        self._sequences = tuple(config.sequence_bias)
        bad = [
            words for words in config.bad_words_ids if not (len(words) == 1 and words[0] in eos_ids)
        ]
        self._bad = tuple((words, -torch.inf) for words in bad)
        self._min_new = config.min_new_tokens if endings else 0

    def _dense(self, biases: dict[int, float]) -> Tensor | None:
        if not biases:
            return None
        dense = torch.zeros(self._vocab, device="cpu")
        tokens, values = (
            torch.tensor(list(x), device="cpu") for x in zip(*biases.items(), strict=True)
        )
        dense[tokens] = values
        return dense.to(self._device)

    @property
    def per_row(self) -> bool:
        """Whether processing depends on the tokens of a row."""
        config = self._config
        return bool(
            config.repetition_penalty != 1.0 or config.no_repeat_ngram_size
            or config.presence_penalty or config.frequency_penalty
            or self._sequences or self._bad or self._min_new or self._allowed or self._grammar
        )  # fmt: skip

    def __bool__(self) -> bool:
        whole = self._bias is not None or self._banned is not None or bool(self._processors)
        return whole or self.per_row

    def scores(
        self,
        logits: Tensor,
        rows: Sequence[TokenSequence],
        *,
        which: Sequence[int] | None = None,
        alive: Sequence[bool] | None = None,
    ) -> Tensor:
        """Logits (B, V) -> scores (B, V) float32, or the logits themselves if there is nothing to do.

        Args:
            rows: the tokens of each row, prompt included.
            which: the prompt of each row, for ``prefix_allowed_tokens_fn``; by default its own index.
            alive: rows that go on; per-row processing skips the others. By default all.
        """
        if not self:
            return logits
        scores = logits.to(torch.float32, copy=True)
        if self._bias is not None:
            scores += self._bias
        if self.per_row:
            for place, row in enumerate(rows):
                if alive is None or alive[place]:
                    self._edit(scores[place], row, place if which is None else which[place])
        if self._banned is not None:
            scores += self._banned
        return self._processed(scores, rows, alive) if self._processors else scores

    def _processed(
        self, scores: Tensor, rows: Sequence[TokenSequence], alive: Sequence[bool] | None
    ) -> Tensor:
        """Scores after the caller's processors, which see each row as if no other had more new tokens."""
        going = [place for place in range(len(rows)) if alive is None or alive[place]]
        found = scores.clone()
        for new in {rows[place].new for place in going}:
            ids, edited = padded(rows, self._fill, self._device, new), scores.clone()
            for processor in self._processors:
                edited = processor(ids, edited)
            for place in going:
                if rows[place].new == new:
                    found[place] = edited[place]
        return found

    def _edit(self, scores: Tensor, row: TokenSequence, index: int) -> None:
        """Processes the scores (V,) of one row in place."""
        config = self._config
        for words, bias in self._sequences:
            if row.ends_with(words[:-1]):
                scores[words[-1]] += bias
        if config.repetition_penalty != 1.0:
            penalty = config.repetition_penalty
            lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
            seen = row.seen(self._vocab, scores.device)
            scores.copy_(torch.where(seen, lowered, scores))
        if config.presence_penalty or config.frequency_penalty:
            self._penalize(scores, row)
        if config.no_repeat_ngram_size:
            self._ban(scores, row.repeats(config.no_repeat_ngram_size))
        self._ban(scores, [words[-1] for words, _ in self._bad if row.ends_with(words[:-1])])
        if self._allowed is not None:
            self._keep_allowed(scores, row, index)
        if self._grammar is not None:
            self._grammar.mask(scores, row, index)
        if row.new < self._min_new:
            endings = scores[self._endings]
            scores[self._endings] = -torch.inf
            # What the grammar says is complete ends all the same.
            if self._grammar is not None and not (scores > -torch.inf).any():
                scores[self._endings] = endings

    def _penalize(self, scores: Tensor, row: TokenSequence) -> None:
        new = torch.tensor(row.new_tokens, dtype=torch.int64, device=scores.device)
        cost = torch.full(new.shape, self._config.frequency_penalty, device=scores.device)
        scores.index_add_(0, new, cost, alpha=-1)
        scores[new.unique()] -= self._config.presence_penalty

    def _ban(self, scores: Tensor, ids: Sequence[int]) -> None:
        if ids:
            scores[torch.tensor(list(ids), device=scores.device)] = -torch.inf

    def _keep_allowed(self, scores: Tensor, row: TokenSequence, index: int) -> None:
        assert self._allowed is not None
        ids = list(self._allowed(index, torch.tensor(row.tokens, device=scores.device)))
        if not ids:
            raise ValueError(
                f"prefix_allowed_tokens_fn allows nothing for row {index}; at least one id is needed"
            )
        kept = torch.full_like(scores, -torch.inf)
        place = torch.tensor(ids, device=scores.device)
        kept[place] = scores[place]
        scores.copy_(kept)


def padded(
    rows: Sequence[TokenSequence], fill: int, device: torch.device, new: int | None = None
) -> Tensor:
    """(B, L) int64: prompts left-padded, new tokens right-padded, so that all first new tokens are in one column.

    ``new`` of them are shown, by default as many as the longest row has.
    """
    first = max(row.start for row in rows)
    new = max(row.new for row in rows) if new is None else new
    ids = torch.full((len(rows), first + new), fill, dtype=torch.int64, device="cpu")
    for index, row in enumerate(rows):
        if len(row):
            place, shown = first - row.start, row.start + min(new, row.new)
            held = torch.frombuffer(row.tokens, dtype=torch.int64)
            ids[index, place : place + shown] = held[:shown]
    return ids.to(device)


def _check_ids(config: GenerateConfig, vocab_size: int) -> None:
    named = {
        "logit_bias": list(config.logit_bias or {}),
        "sequence_bias": [token for words, _ in config.sequence_bias for token in words],
        "bad_words_ids": [token for words in config.bad_words_ids for token in words],
        "suppress_tokens": list(config.suppress_tokens),
        "stop": list(config.stop_ids),
    }
    for name, ids in named.items():
        for index in ids:
            if index >= vocab_size:
                raise ValueError(
                    f"{name} holds token id {index}; the model's vocabulary allows 0 to {vocab_size - 1}"
                )
