"""Generator: prompts in, tokens out, over a cache that outlives the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import Calibration, ModelKVCache
from caramba_fast.cache.lengths import Counts
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.graph import DecodeGraphs, RecordingError
from caramba_fast.infer.metrics import GenerationMetrics, Stopwatch
from caramba_fast.infer.prompts import Prompts, TokenIds, read_prompts
from caramba_fast.infer.sampling import sample
from caramba_fast.models import LanguageModel

Mask = Tensor | Sequence[Sequence[int]] | None


class Generator:
    """Generates with a model and keeps the conversation until `reset`.

    A second `generate` continues where the first one ended: the last sampled token, which is not in
    the cache yet, is fed first, then the new input.

    Args:
        model: a `LanguageModel`, such as `caramba_fast.models.Transformer`.
        config: settings; by default `GenerateConfig()`.
        device: moves the model there first; by default the model stays where it is.
        overrides: fields of GenerateConfig to change.

    Raises:
        TypeError: the model lacks something of `LanguageModel`; the message lists what.
        ValueError: settings that are wrong in themselves or for this model.
        RecordingError: (from a decode step) cuda_graph=True and the model cannot be recorded.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: GenerateConfig | None = None,
        device: torch.device | str | None = None,
        **overrides: Any,
    ) -> None:
        _check_model(model)
        if device is not None and isinstance(model, nn.Module):
            model.to(device)
        self.model = model
        self.config = (config or GenerateConfig()).updated(**overrides)
        self.eos_ids = self._eos_ids()
        self._cache: ModelKVCache | None = None
        self._cache_bytes, self._bytes_per_token = 0, 0.0
        self._run_state: _Run | None = None
        self._measured: tuple[Stopwatch, int, int] | None = None
        self._pending: list[list[int]] = []  # sampled, not yet in the cache; one list a row
        self._calibration: Calibration | None = None
        if self.config.cache_calibration is not None:
            self._calibration = Calibration.load(self.config.cache_calibration)
            self._new_cache(1, torch.device("meta"))  # says at once what does not fit the model
        self._graphs = DecodeGraphs(model, self.config.cuda_graph)
        self._rng: torch.Generator | None = None
        if self.config.seed is not None:
            self._rng = torch.Generator(device=model.device).manual_seed(self.config.seed)

    # -- settings -----------------------------------------------------------------------

    def _eos_ids(self) -> frozenset[int]:
        given = self.config.eos_token_id
        if self.config.ignore_eos:
            return frozenset()
        if given is None:
            given = getattr(self.model, "eos_token_ids", None) or self.model.eos_token_id
        ids = (given,) if isinstance(given, int) else tuple(given or ())
        for name, index in [("eos_token_id", i) for i in ids] + [
            ("pad_token_id", self.config.pad_token_id)
        ]:
            if index is not None and index >= self.model.vocab_size:
                raise ValueError(
                    f"{name} is {index}; the model's vocabulary allows 0 to {self.model.vocab_size - 1}"
                )
        return frozenset(ids)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id of the config, else of the model."""
        if self.config.pad_token_id is not None:
            return self.config.pad_token_id
        pad = self.model.pad_token_id
        return pad if pad is not None and 0 <= pad < self.model.vocab_size else None

    @property
    def _fill(self) -> int:
        pad = self.pad_token_id
        return pad if pad is not None else min(self.eos_ids, default=0)

    @property
    def cache(self) -> ModelKVCache | None:
        """The cache of the conversation, or None before the first prompt."""
        return self._cache

    @property
    def decode_graph(self) -> str:
        """Whether decode steps are replays of one CUDA graph, or why they are not."""
        return self._graphs.state(self._cache)

    # -- step by step -------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, input_ids: TokenIds, attention_mask: Mask = None) -> Tensor:
        """Feeds prompts behind what the cache holds.

        Args:
            input_ids: (B, T) or (T,) token ids, or ragged lists of them.
            attention_mask: (B, T), 1 for real tokens.

        Returns:
            logits (B, V) of the token that follows each row's last one.

        Raises:
            ValueError, TypeError: bad input, or more than max_seq_len tokens; nothing has changed.
        """
        return self._feed(self._read(input_ids, attention_mask), room=0)

    @torch.no_grad()
    def decode_step(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Feeds one token a row, (B,), and returns the logits (B, V) of the next."""
        ids = torch.as_tensor(token_ids)
        self._settle()
        if self._cache is None:
            raise RuntimeError("decode_step before any prefill: there is no cache yet")
        if ids.shape != (self._cache.batch_size,):
            raise ValueError(
                f"token_ids has shape {tuple(ids.shape)}; ({self._cache.batch_size},) is needed"
            )
        return self._feed(self._read(ids[:, None], torch.ones_like(ids)[:, None]), room=0)

    def rollback(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row (or ``n[b]`` of row b) from the conversation.

        A token that was sampled last and is not in the cache yet counts as one.
        """
        self._settle()
        if self._cache is None:
            raise RuntimeError("rollback before any prefill: there is nothing to remove")
        counts = self._cache[0].lengths.per_row("n", n)
        held = [c + len(p) for c, p in zip(self._cache.row_lengths, self._pending, strict=True)]
        for row, (count, length) in enumerate(zip(counts, held, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(
                    f"cannot roll back {count} tokens of row {row}, which holds {length}"
                )
        dropped = [min(c, len(p)) for c, p in zip(counts, self._pending, strict=True)]
        self._cache.crop([c - d for c, d in zip(counts, dropped, strict=True)])
        self._pending = [p[: len(p) - d] for p, d in zip(self._pending, dropped, strict=True)]

    def reset(self) -> None:
        """Ends the conversation; the next prompt starts a new one and may have another batch size.

        Sampling goes on from where the seed has brought it.
        """
        self._run_state = None
        self._cache = None
        self._pending = []

    # -- whole runs ---------------------------------------------------------------------

    def generate(self, input_ids: TokenIds, attention_mask: Mask = None) -> Tensor:
        """Generates up to ``max_new_tokens`` tokens for every row.

        Args:
            input_ids: (B, T) or (T,) token ids, or ragged lists. Without a mask, in a batch of two
                rows or more, leading and trailing ``pad_token_id`` are padding.
            attention_mask: (B, T), 1 for real tokens.

        Returns:
            (B, T + new) int64 on the model's device: this call's input, padding moved to the front,
            then the new tokens. Rows that ended earlier hold pad_token_id (else an eos id) behind
            their end-of-sequence token.

        Raises:
            ValueError, TypeError: bad input, or prompt + new tokens exceed max_seq_len; raised before
                anything changes.
        """
        prompts = self._read(input_ids, attention_mask)
        before = self._snapshot()
        try:
            steps = list(self._run(prompts))
        except BaseException:
            self._restore(before)
            raise
        device = self.model.device
        new = torch.stack(steps, dim=1).to(device)
        return torch.cat((prompts.padded_front(self._fill, device), new), dim=1)

    def generate_iter(
        self, input_ids: TokenIds, attention_mask: Mask = None
    ) -> Iterator[int] | Iterator[Tensor]:
        """Like `generate`, one step at a time.

        Yields:
            an int for a single row, else a (B,) int64 tensor on the CPU, in which rows that ended
            hold the padding id.
        """
        prompts = self._read(input_ids, attention_mask)
        self._check_room(prompts, self.config.max_new_tokens - 1)
        steps = self._run(prompts)
        if len(prompts.rows) == 1:
            return (int(token) for token in steps)
        return steps

    def _run(self, prompts: Prompts) -> Iterator[Tensor]:
        """Yields (B,) tokens on the CPU; however it ends, the conversation stays consistent."""
        watch = Stopwatch()
        rows = len(prompts.rows)
        with torch.no_grad():
            logits = self._feed(prompts, room=self.config.max_new_tokens - 1)
        cache = self._cache
        assert cache is not None
        run = self._run_state = _Run(rows)
        self._measured = (watch, rows, sum(prompts.lens))
        last: list[int] = []
        try:
            for index in range(self.config.max_new_tokens):
                if self._run_state is not run:
                    raise RuntimeError(
                        "the conversation went on without this iteration; it cannot continue"
                    )
                if index:
                    watch.resume()
                with torch.no_grad():
                    if index:
                        fed = torch.tensor(last, device=self.model.device)
                        logits = self._forward(fed[:, None])
                        run.fed()
                        self._pending = [
                            [] if a else p for a, p in zip(run.alive, self._pending, strict=True)
                        ]
                    sampled = sample(logits, self.config, self._rng).tolist()
                last = [
                    token if a else self._fill for token, a in zip(sampled, run.alive, strict=True)
                ]
                self._pending = [
                    [t] if a else p for t, a, p in zip(last, run.alive, self._pending, strict=True)
                ]
                watch.step(sum(run.alive))
                run.alive = [
                    a and t not in self.eos_ids for a, t in zip(run.alive, last, strict=True)
                ]
                yield torch.tensor(last)
                if not any(run.alive):
                    return
        finally:
            if self._run_state is run:
                self._settle()

    @property
    def metrics(self) -> GenerationMetrics | None:
        """Figures of the last run, so far; None before the first."""
        if self._measured is None or not self._measured[0].steps:
            return None
        watch, rows, prompt_tokens = self._measured
        return watch.report(rows, prompt_tokens, self._cache_bytes, self._bytes_per_token)

    # -- inside -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends a run that is under way: what was fed to rows that had ended is removed again."""
        run, self._run_state = self._run_state, None
        if run is not None and self._cache is not None and any(run.surplus):
            self._cache.crop(run.surplus)

    def _snapshot(self) -> tuple[ModelKVCache | None, list[int], list[list[int]]]:
        self._settle()
        lengths = [] if self._cache is None else self._cache.row_lengths
        return self._cache, lengths, self._pending

    def _restore(self, snapshot: tuple[ModelKVCache | None, list[int], list[list[int]]]) -> None:
        self._run_state = None
        self._cache, lengths, self._pending = snapshot
        if self._cache is not None:
            self._cache.restore(lengths)

    def _read(self, input_ids: TokenIds, attention_mask: Mask) -> Prompts:
        self._settle()
        prompts = read_prompts(input_ids, attention_mask, self.pad_token_id, self.model.vocab_size)
        if self._cache is not None and self._cache.batch_size != len(prompts.rows):
            raise ValueError(
                f"the conversation has {self._cache.batch_size} rows and this input "
                f"{len(prompts.rows)}; call reset() to start another"
            )
        return prompts

    def _check_room(self, prompts: Prompts, room: int) -> None:
        held = [0] * len(prompts.rows) if self._cache is None else self._cache.row_lengths
        pending = self._pending or [[]] * len(prompts.rows)
        for row, (length, waiting, new) in enumerate(zip(held, pending, prompts.lens, strict=True)):
            needed = length + len(waiting) + new + room
            if needed > self.config.max_seq_len:
                raise ValueError(
                    f"row {row} needs {needed} cached tokens ({length + len(waiting)} held, {new} of "
                    f"input, {room} generated), more than max_seq_len={self.config.max_seq_len}"
                )

    def _feed(self, prompts: Prompts, room: int) -> Tensor:
        """Pending tokens and prompts through the model; logits (B, V) after each row's last token."""
        self._check_room(prompts, room)
        pending = self._pending or [[]] * len(prompts.rows)
        rows = [p + row for p, row in zip(pending, prompts.rows, strict=True)]
        before = self._snapshot()
        if self._cache is None:
            self._cache = self._new_cache(len(rows), self.model.device)
        try:
            logits = self._feed_pieces(rows)
        except BaseException:
            self._restore(before)
            raise
        self._pending = [[] for _ in rows]
        return logits

    def _new_cache(self, rows: int, device: torch.device) -> ModelKVCache:
        cache = ModelKVCache(
            self.model.cache_layout,
            rows,
            self.config.max_seq_len,
            device=device,
            prefill=self.config.prefill,
            calibration=self._calibration,
            **self.config.stream_configs(),
        )
        self._cache_bytes, self._bytes_per_token = cache.nbytes, cache.bytes_per_token
        return cache

    def _feed_pieces(self, rows: list[list[int]]) -> Tensor:
        """The rows through the model, in as many pieces as the cache asks for."""
        cache, device = self._cache, self.model.device
        assert cache is not None
        longest = max(map(len, rows))
        step = min(longest, self.config.prefill_chunk or longest)
        logits: Tensor | None = None
        start = 0
        while start < longest:
            pieces = [row[start : start + step] for row in rows]
            start += step
            width, lens = max(map(len, pieces)), [len(piece) for piece in pieces]
            tokens = torch.tensor(
                [p + [self._fill] * (width - len(p)) for p in pieces], device=device
            )
            index = torch.tensor([max(length - 1, 0) for length in lens], device=device)
            padded = None if min(lens) == width else lens
            latest = self._forward(tokens, query_lens=padded, logits_index=index)
            fresh = torch.tensor([length > 0 for length in lens], device=device)[:, None]
            logits = latest if logits is None else torch.where(fresh, latest, logits)
        assert logits is not None
        return logits

    def _forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """One forward pass; if it fails, the cache is as it was."""
        cache = self._cache
        assert cache is not None
        before = cache.row_lengths
        step = tokens.shape[1] == 1 and options.get("query_lens") is None and cache.pos > 0
        try:
            if step and self._graphs.reason is None:
                return self._graphs.step(cache, tokens)
            return self.model.forward(tokens, cache, **options)[:, -1]
        except RecordingError as error:
            cache.restore(before)
            self._graphs.give_up(str(error))
            return self._forward(tokens, **options)
        except BaseException:
            cache.restore(before)
            raise


def generate(
    model: LanguageModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    config: GenerateConfig | None = None,
    attention_mask: Mask = None,
    **overrides: Any,
) -> Tensor:
    """Generates once, from nothing: `Generator.generate` without the conversation.

    Args:
        model, input_ids, attention_mask: as in `Generator`.
        max_new_tokens: shorthand for the field of the config.
        config: settings; ``overrides`` change single fields of it.

    Returns:
        (B, T + new) int64, as `Generator.generate`.
    """
    if max_new_tokens is not None:
        overrides["max_new_tokens"] = max_new_tokens
    return Generator(model, config, **overrides).generate(input_ids, attention_mask)


class _Run:
    """A run under way: which rows still write, and the padding fed to those that do not."""

    def __init__(self, rows: int) -> None:
        self.alive = [True] * rows
        self.surplus = [0] * rows

    def fed(self) -> None:
        """One token was fed to every row."""
        self.surplus = [s + (not a) for s, a in zip(self.surplus, self.alive, strict=True)]


def _check_model(model: object) -> None:
    needed = ("forward", "eos_token_id", "pad_token_id", "vocab_size", "device", "cache_layout")
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise TypeError(
            f"{type(model).__name__} is no LanguageModel: it lacks {', '.join(missing)} "
            "(see caramba_fast.models.LanguageModel)"
        )
