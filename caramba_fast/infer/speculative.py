"""SpeculativeGenerator: speculative decoding; a draft proposes tokens and one pass of the target verifies them.

A round:
1. the draft (a smaller model or prompt lookup) proposes up to K tokens for each row;
2. one multi-token pass of the target processes the pending token and the draft of every row;
3. each row accepts a prefix of its draft and gets one more token: the rejected one resampled, or the next one;
4. both caches drop the rejected tokens, row by row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from caramba_fast.config.spec import TAIL_SLACK
from caramba_fast.infer.config import AUTO, DraftConfig, GenerateConfig, SpeculativeConfig
from caramba_fast.infer.drafts import (
    Draft,
    Drafted,
    DraftLength,
    ModelDraft,
    SpeculationStats,
    accept,
)
from caramba_fast.infer.generator import Generator
from caramba_fast.infer.lookup import LookupDraft
from caramba_fast.infer.run import Hooks, Run, blank_ended
from caramba_fast.infer.sampling import NOTHING, check_chosen, draw_again, random_state
from caramba_fast.infer.sequence import Prompts
from caramba_fast.infer.stopping import Decoder
from caramba_fast.models import LanguageModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.infer.options import SpeculativeOptions


class SpeculativeGenerator(Generator):
    """Generates what `Generator` would, in fewer passes of the target model.

    Greedy tokens are the same for any draft; sampled ones have the same distribution. Rows of a batch accept
    independently, unless buckets of a decode plan differ in windows: the longest row decides the bucket of all.

    Args:
        target_model: the model to generate with.
        draft_model: a smaller model with the same vocabulary; None drafts by prompt lookup.
        config: settings; by default `SpeculativeConfig()`.
        device, tokenizer, calibration_ids, overrides: as in `Generator`.

    Raises:
        TypeError: config is no `SpeculativeConfig`; otherwise as `Generator`.
        ValueError: the vocabularies differ, or ``tail_slack`` is too small for the draft; otherwise as `Generator`.
    """

    config: SpeculativeConfig
    _draft: Draft
    _speculates = True

    def __init__(
        self,
        target_model: LanguageModel,
        draft_model: LanguageModel | None = None,
        config: SpeculativeConfig | None = None,
        device: torch.device | str | None = None,
        *,
        tokenizer: Decoder | None = None,
        calibration_ids: Tensor | Sequence[int] | None = None,
        **overrides: Unpack[SpeculativeOptions],
    ) -> None:
        settings = config or SpeculativeConfig()
        if not isinstance(settings, SpeculativeConfig):
            raise TypeError(f"config is a {type(settings).__name__}; a SpeculativeConfig is needed")
        self.draft_model = draft_model
        more: dict[str, Any] = {**overrides}
        super().__init__(
            target_model,
            settings,
            device,
            tokenizer=tokenizer,
            calibration_ids=calibration_ids,
            **more,
        )
        self._draft_generator: Generator | None = None
        self._draft = self._make_draft(device)
        self._length = DraftLength(self.config)

    def _check_call(self, config: GenerateConfig) -> None:
        super()._check_call(config)
        assert isinstance(config, SpeculativeConfig)
        self._check_tail(config.longest_draft, self.config)
        if self.draft_model is not None:
            self._check_tail(config.longest_draft, self.config.for_draft())

    def _check_tail(self, longest: int, cached: SpeculativeConfig | DraftConfig) -> None:
        """Raises ValueError if the cache's fp16 tail cannot drop a draft of ``longest`` tokens."""
        slacks = [max(TAIL_SLACK, cached.longest_draft + 1)]  # of candidates, with AUTO
        if cached.cache != AUTO:
            streams = cached.stream_configs().values()
            slacks = [x.tail_slack for x in streams if x.residual_len or x.group > 1]
        if slacks and longest + 1 > min(slacks):
            raise ValueError(
                f"spec_k reaches {longest}; with tail_slack={min(slacks)} of the cache up to "
                f"{min(slacks) - 1} is allowed"
            )

    def _make_draft(self, device: torch.device | str | None) -> Draft:
        config = self.config
        if self.draft_model is None:
            return LookupDraft(config.lookup_max_ngram, config.lookup_min_ngram)
        own = config.for_draft()
        generator = Generator(self.draft_model, own, device)
        sizes = self.model.vocab_size, generator.model.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"draft_model has a vocabulary of {sizes[1]} and the target of {sizes[0]}; "
                "speculation needs the same one"
            )
        self._draft_generator = generator
        # Its own generator: draws of the draft must not advance the target's.
        return ModelDraft(generator._session, own, generator._rng)

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of the last run."""
        return self._length.stats

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens of the last run; nan before any was drafted."""
        return self.stats.acceptance_rate

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per row and pass of the target in the last run."""
        return self.stats.tokens_per_pass

    @property
    def _of_the_generator(self) -> set[str]:
        own = {"spec_draft_cache_kind", "lookup_max_ngram", "lookup_min_ngram"}
        return super()._of_the_generator | own

    @property
    def report(self) -> dict[str, Any]:
        """`Generator.report` with the statistics of speculation."""
        return {**super().report, "speculation": self.stats.as_dict()}

    def _begin(self, prompts: Prompts, config: GenerateConfig, hooks: Hooks) -> tuple[Run, Tensor]:
        rows = len(self._session.rows) or len(prompts.rows)
        reseed = self._reseed
        run, logits = super()._begin(prompts, config, hooks)
        self._length = DraftLength(settings := cast(SpeculativeConfig, config))
        with torch.no_grad():
            copies = len(run.limits) // rows
            self._draft.feed(self._session.rows[::copies])
            if copies > 1:
                self._draft.select_rows([row for row in range(rows) for _ in range(copies)])
        if isinstance(self._draft, ModelDraft):
            self._draft.config, self._draft.processors = config, run.processors
            self._draft.endings = run.stopping.endings
            if reseed and self._draft_generator is not None:
                self._draft.rng = self._draft_generator._seeded(settings.for_draft())
        return run, logits

    def _rooms(self, config: GenerateConfig) -> dict[str, int | None]:
        positions = getattr(self.draft_model, "max_positions", None)
        most = None if positions is None else positions - 1  # the draft reads one token further
        return {**super()._rooms(config), "the draft model": most}

    def _steps(self, run: Run, logits: Tensor, hooks: Hooks) -> Iterator[list[int]]:
        """Yields the n-th new token of every row once every row has one or has ended."""
        given, self._start = 0, random_state(run.rng)  # before the first draw
        with torch.no_grad():
            run.choose(logits)
        while True:
            while given < run.complete_columns:
                column = run.column(given)
                given += 1
                if hooks.streamer is not None:
                    hooks.streamer.put(torch.tensor(column, device="cpu"))
                yield column
                self._check_current(run)
            if run.is_over:
                break
            run.watch.resume()
            with torch.no_grad():
                self._round(run)
        if hooks.streamer is not None:
            hooks.streamer.end()

    def _keep(self, run: Run, given: int) -> None:
        """Also drops accepted tokens that were never yielded, from the draft's cache too."""
        super()._keep(run, given)
        rows = self._session.rows
        _draw_as_plain(run, self._start, given)
        self._draft.follow(rows, [len(row) for row in rows])

    def _round(self, run: Run) -> None:
        """Drafts, verifies, accepts; every live row that is not too far ahead gets at least one token."""
        session, most = self._session, _allowed(run)
        alive = [count is not None for count in most]
        before = session.snapshot(), self._draft.snapshot()
        try:
            counts = self._counts(run, most)
            drafted = Drafted([[] for _ in counts], None)
            if any(counts):
                drafted = self._draft.propose(session.rows, counts)
            lengths = [len(row) for row in session.rows]
            logits = self._verified(drafted, alive)
            scores = self._scores(run, logits, drafted, alive)
            config = cast(SpeculativeConfig, run.config)
            start = random_state(run.rng)
            kept, behind = accept(scores, drafted, config, config.spec_method, run.rng)
            _check_behind(run, kept, behind, scores, logits)
            given = self._give(run, drafted, kept, behind, scores, logits, alive)
            _draw_as_plain(run, start, given[0])
            if any(drafted.tokens):
                self._crop([min(*pair) for pair in zip(kept, given, strict=True)], lengths, alive)
        except BaseException:
            session.restore(before[0])
            self._draft.restore(before[1])
            raise
        accepted = sum(min(*pair) for pair in zip(kept, given, strict=True))
        self._length.saw(sum(map(len, drafted.tokens)), accepted, sum(given), sum(alive))
        run.watch.step(sum(given))
        run.stopping.end_late(run.rows)

    def _counts(self, run: Run, allowed: Sequence[int | None]) -> list[int]:
        """Tokens to draft for each row: K, limited by the row's length limit and ``allowed``."""
        most = self._length.k
        longest = max(self._session.cached)
        now = self._plan.plan_for(longest + 1).local_window
        while most and self._plan.plan_for(longest + 1 + most).local_window != now:
            most -= 1  # all tokens of a pass share one window
        return [
            0 if more is None else max(0, min(most, more, row.limit - row.new - 1))
            for row, more in zip(run.rows, allowed, strict=True)
        ]

    def _verified(self, drafted: Drafted, alive: list[bool]) -> Tensor:
        """Target logits (B, K + 1, V): before each drafted token and after the last."""
        session = self._session
        if any(drafted.tokens):
            logits = session.verify(drafted.tokens, alive)
        else:
            logits = session.step([row.tokens[-1] for row in session.rows], alive)[:, None]
        return blank_ended(logits, alive)

    def _scores(self, run: Run, logits: Tensor, drafted: Drafted, alive: list[bool]) -> Tensor:
        """Processed logits; each position as if the draft before it were accepted."""
        if not run.processors:
            return logits
        scores = logits.to(torch.float32, copy=True)
        rows, walking, steps = run.rows, list(alive), [0] * len(run.rows)
        for place in range(max(map(len, drafted.tokens)) + 1):
            edited = run.processors.scores(logits[:, place], rows, alive=walking)
            for index, draft in enumerate(drafted.tokens):
                if not walking[index]:
                    continue
                scores[index, place] = edited[index]
                walking[index] = place < len(draft)
                if walking[index]:
                    token = draft[place]
                    rows[index].push(token)
                    steps[index] += 1
                    # Nothing to verify after an end, or after a token that cannot be accepted.
                    if token in run.stopping.endings or edited[index, token] == -torch.inf:
                        walking[index] = False
                        del draft[place + 1 :]
        for row, taken in zip(rows, steps, strict=True):
            row.pop(taken)
        return scores

    def _give(
        self,
        run: Run,
        drafted: Drafted,
        kept: list[int],
        behind: list[int],
        scores: Tensor,
        logits: Tensor,
        alive: list[bool],
    ) -> list[int]:
        """Gives each row its accepted tokens and the next one, until it ends; returns how many each got."""
        extra = cast(SpeculativeConfig, run.config).spec_extra_token
        given = [0] * len(kept)
        for row, goes_on in enumerate(alive):
            if goes_on:
                draft, count = drafted.tokens[row], kept[row]
                free = count == len(draft) and len(draft) > 0 and not extra
                tokens = draft[:count] if free else [*draft[:count], behind[row]]
                given[row] = run.give(row, tokens, scores[row], logits[row])
        return given

    def _crop(self, kept: list[int], lengths: list[int], alive: list[bool]) -> None:
        """Drops rejected tokens from both caches; rows that had ended or wait were fed nothing."""
        rows, held = self._session.rows, self._session.cached
        agreed = [length + count for length, count in zip(lengths, kept, strict=True)]
        cached = [
            min(count, len(row) - 1) if goes_on else before
            for count, row, goes_on, before in zip(agreed, rows, alive, held, strict=True)
        ]
        self._session.keep_cached(cached)
        self._draft.follow(rows, agreed)

    def _forget(self) -> None:
        super()._forget()
        self._draft.reset()

    def _snapshot(self) -> Any:
        return super()._snapshot(), self._draft.snapshot(tails=True)

    def _restore(self, before: Any, expanded: bool) -> None:
        super()._restore(before[0], expanded)
        self._draft.restore(before[1])

    def _shorten(self, lengths: list[int]) -> None:
        rows = [row.first(n) for row, n in zip(self._session.rows, lengths, strict=True)]
        try:
            self._draft.follow(rows, lengths)
        except BaseException:
            self._draft.reset()  # it reads the conversation again
            raise
        super()._shorten(lengths)


def _allowed(run: Run) -> list[int | None]:
    """Most tokens to draft for each row; None for rows left out of this pass.

    If the consumer may stop between two columns, rows that are as far ahead as their fp16 rings can drop wait for the
    slowest one.
    """
    cache, least = run.session.cache, run.complete_columns
    ring = cache[0] if cache is not None and run.may_be_left else None
    slack = ring.tail_slack if ring is not None and ring.ring_len else sys.maxsize
    left = [slack - (row.new - least) for row in run.rows]
    return [
        None if row.finish_reason or count < 0 else count
        for row, count in zip(run.rows, left, strict=True)
    ]


def _check_behind(
    run: Run, kept: list[int], behind: list[int], scores: Tensor, logits: Tensor
) -> None:
    """Raises ValueError if no token can be chosen after the accepted part of a draft."""
    if NOTHING in behind:
        rows = torch.arange(len(kept), device=scores.device)
        place = torch.tensor(kept, device=scores.device)
        new = [count + more for count, more in zip(run.new, kept, strict=True)]
        check_chosen(behind, logits[rows, place], scores[rows, place], new)


def _draw_as_plain(run: Run, start: Tensor | None, count: int) -> None:
    """For one row and "sample_match": sets the random state to that after ``count`` tokens without a draft."""
    config = cast(SpeculativeConfig, run.config)
    if len(run.rows) == 1 and config.samples and config.spec_method == "sample_match":
        like = torch.empty(1, 1, device=run.session.model.device)
        draw_again(like, run.rng, start, count)


__all__ = ["SpeculationStats", "SpeculativeConfig", "SpeculativeGenerator"]
