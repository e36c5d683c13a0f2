"""SpeculativeGenerator: a draft guesses several tokens, one pass of the target says which of them stand.

A round:
1. the draft proposes up to K tokens behind each row (a smaller model, or what followed the newest tokens before);
2. one multi-token pass of the target reads the pending token and the draft of every row;
3. each row accepts on its own, and gets one more token: what was rejected drawn again, or the next one;
4. both caches forget what was rejected, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from caramba_fast.infer.acceptance import accept
from caramba_fast.infer.config import AUTO, GenerateConfig
from caramba_fast.infer.draft_length import DraftLength, SpeculationStats
from caramba_fast.infer.drafts import Draft, Drafted, ModelDraft
from caramba_fast.infer.generator import Generator
from caramba_fast.infer.lookup import LookupDraft
from caramba_fast.infer.prompts import Prompts
from caramba_fast.infer.run import Hooks, Run
from caramba_fast.infer.spec_config import SpeculativeConfig
from caramba_fast.infer.stopping import Decoder
from caramba_fast.models import LanguageModel


class SpeculativeGenerator(Generator):
    """Generates what `Generator` would, in fewer passes of the target model.

    Greedy tokens are the same for any draft; sampled ones have the same distribution, all settings of both models
    considered. Rows of a batch accept each on their own.

    Args:
        target_model: the model whose tokens are wanted.
        draft_model: a smaller one with the same vocabulary; None drafts by prompt lookup.
        config: settings; by default `SpeculativeConfig()`.
        device, tokenizer, overrides: as in `Generator`.

    Raises:
        ValueError: the vocabularies differ, or what `Generator` raises.
    """

    config: SpeculativeConfig

    def __init__(
        self,
        target_model: LanguageModel,
        draft_model: LanguageModel | None = None,
        config: SpeculativeConfig | None = None,
        device: torch.device | str | None = None,
        *,
        tokenizer: Decoder | None = None,
        **overrides: Any,
    ) -> None:
        settings = config or SpeculativeConfig()
        if not isinstance(settings, SpeculativeConfig):
            raise TypeError(f"config is a {type(settings).__name__}; a SpeculativeConfig is needed")
        super().__init__(target_model, settings, device, tokenizer=tokenizer, **overrides)
        self._check_tail()
        self.draft_model = draft_model
        self._draft_generator: Generator | None = None
        self._draft = self._make_draft(device)
        self._length = DraftLength(self.config)

    def _check_tail(self) -> None:
        """Raises ValueError where the fp16 tail of the cache cannot take a draft back."""
        config = self.config
        if config.cache_kind == AUTO:
            return  # candidates have tails for the longest draft
        longest = config.spec_k_max if config.spec_k_adaptive else config.spec_k
        for stream in config.stream_configs().values():
            if stream.residual_len and longest + 1 > stream.tail_slack:
                raise ValueError(
                    f"spec_k reaches {longest}; with tail_slack={stream.tail_slack} of the cache up to "
                    f"{stream.tail_slack - 1} is allowed"
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
        return ModelDraft(generator._talk, own, self._rng)

    # -- figures ------------------------------------------------------------------------

    @property
    def stats(self) -> SpeculationStats:
        """What speculation did in the last run."""
        return self._length.stats

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens of the last run; nan before any was drafted."""
        return self.stats.acceptance_rate

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row got from one pass of the target in the last run."""
        return self.stats.tokens_per_pass

    @property
    def report(self) -> dict[str, Any]:
        """As `Generator.report`, with what speculation did."""
        return {**super().report, "speculation": self.stats.as_dict()}

    # -- the run ------------------------------------------------------------------------

    def _begin(self, prompts: Prompts, config: GenerateConfig, hooks: Hooks) -> tuple[Run, Tensor]:
        before, expanded = self._snapshot(), self._expanded
        rows = len(self._talk.rows) or len(prompts.rows)
        run, logits = super()._begin(prompts, config, hooks)
        self._length = DraftLength(cast(SpeculativeConfig, config))
        try:
            with torch.no_grad():
                self._draft.feed(prompts.rows)
                copies = len(run.starts) // rows
                if copies > 1:
                    self._draft.take([row for row in range(rows) for _ in range(copies)])
        except BaseException:
            self._restore(before, expanded)
            raise
        if isinstance(self._draft, ModelDraft):
            self._draft.config, self._draft.rng = config, run.rng
            self._draft.edits = run.edits
        return run, logits

    def _steps(self, run: Run, logits: Tensor, hooks: Hooks) -> Iterator[list[int]]:
        """Yields columns of tokens: the n-th new token of every row once all have one or have ended."""
        given = 0
        try:
            with torch.no_grad():
                run.choose(logits)
            while True:
                while given < run.complete_columns:
                    column = run.column(given)
                    given += 1
                    if hooks.streamer is not None:
                        hooks.streamer.put(torch.tensor(column))
                    yield column
                    self._check_current(run)
                if run.is_over:
                    break
                run.watch.resume()
                with torch.no_grad():
                    self._round(run)
            if hooks.streamer is not None:
                hooks.streamer.end()
        finally:
            if self._run_state is run:
                self._settle()

    def _round(self, run: Run) -> None:
        """Draft, verify, accept: every row that is alive gets at least one token."""
        talk, alive = self._talk, run.alive
        before = talk.snapshot(), self._draft.snapshot(), list(run.reasons)
        try:
            counts = self._counts(run)
            drafted = Drafted([[] for _ in counts], None)
            if any(counts):
                drafted = self._draft.propose(talk.rows, counts, run.new)
            lengths = [len(row) for row in talk.rows]
            logits = self._verified(drafted, alive)
            scores = self._scores(run, logits, drafted)
            config = cast(SpeculativeConfig, run.config)
            kept, behind = accept(scores, drafted, config, config.spec_method, run.rng)
            given = self._give(run, drafted, kept, behind, scores, logits)
            if any(drafted.tokens):
                self._crop([min(*pair) for pair in zip(kept, given, strict=True)], lengths, alive)
        except BaseException:
            talk.restore(before[0])
            self._draft.restore(before[1])
            run.reasons = before[2]
            raise
        accepted = sum(min(*pair) for pair in zip(kept, given, strict=True))
        self._length.saw(sum(map(len, drafted.tokens)), accepted, sum(given), sum(alive))
        run.watch.step(sum(given))
        run.stop_if_late()

    def _counts(self, run: Run) -> list[int]:
        """Tokens to draft for each row: K, but not past a row's limit."""
        limits = run.stopping.limits
        return [
            min(self._length.k, limit - new - 1) if goes_on else 0
            for limit, new, goes_on in zip(limits, run.new, run.alive, strict=True)
        ]

    def _verified(self, drafted: Drafted, alive: list[bool]) -> Tensor:
        """(B, K + 1, V) logits of the target before each drafted token and behind the last."""
        talk = self._talk
        if any(drafted.tokens):
            logits = talk.verify(drafted.tokens, alive)
        else:
            logits = talk.step([row.tokens[-1] for row in talk.rows], alive)[:, None]
        if all(alive):
            return logits
        ended = torch.tensor([not goes_on for goes_on in alive], device=logits.device)
        return logits.masked_fill(ended[:, None, None], 0.0)  # they may be anything, NaN too

    def _scores(self, run: Run, logits: Tensor, drafted: Drafted) -> Tensor:
        """The logits, edited; each position as its row would be if the draft before it stood."""
        if not run.edits:
            return logits
        scores, new = logits.to(torch.float32, copy=True), run.new
        for index, (row, draft) in enumerate(zip(self._talk.rows, drafted.tokens, strict=True)):
            for place in range(len(draft) + 1):
                scores[index, place] = run.edits.scores_of_row(
                    logits[index, place], row, new[index] + place, index
                )
                if place < len(draft):
                    row.push(draft[place])
            row.pop(len(draft))
        return scores

    def _give(
        self,
        run: Run,
        drafted: Drafted,
        kept: list[int],
        behind: list[int],
        scores: Tensor,
        logits: Tensor,
    ) -> list[int]:
        """Gives each row what it accepted and the token behind it, up to where it ends; how many each took."""
        extra = cast(SpeculativeConfig, run.config).spec_extra_token
        given = [0] * len(kept)
        for row, goes_on in enumerate(run.alive):
            if goes_on:
                draft, count = drafted.tokens[row], kept[row]
                free = count == len(draft) and len(draft) > 0 and not extra
                tokens = draft[:count] if free else [*draft[:count], behind[row]]
                given[row] = run.give(row, tokens, scores[row], logits[row])
        return given

    def _crop(self, kept: list[int], lengths: list[int], alive: list[bool]) -> None:
        """Both caches forget what was rejected; the newest token of a row waits for the next pass.

        A row that had ended was fed nothing: its cache is as it was.
        """
        rows, held = self._talk.rows, self._talk.cached
        agreed = [length + count for length, count in zip(lengths, kept, strict=True)]
        cached = [
            min(count, len(row) - 1) if goes_on else before
            for count, row, goes_on, before in zip(agreed, rows, alive, held, strict=True)
        ]
        self._talk.settle_at(cached)
        self._draft.follow(rows, agreed)

    # -- both caches ---------------------------------------------------------------------

    def reset(self) -> None:
        """As `Generator.reset`; the draft's cache too."""
        super().reset()
        self._draft.reset()

    def _snapshot(self) -> Any:
        return super()._snapshot(), self._draft.snapshot()

    def _restore(self, before: Any, expanded: bool) -> None:
        super()._restore(before[0], expanded)
        self._draft.restore(before[1])

    def rollback(self, n: Any) -> None:
        """As `Generator.rollback`; the draft's cache too."""
        super().rollback(n)
        rows = self._talk.rows
        self._draft.follow(rows, [len(row) for row in rows])


__all__ = ["SpeculationStats", "SpeculativeConfig", "SpeculativeGenerator"]
