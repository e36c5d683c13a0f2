"""Generator: generates with a model and keeps its KV cache between calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba_fast.config.names import names_of
from caramba_fast.infer.beam_search import BeamSearch
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.fields import CacheFields
from caramba_fast.infer.grammar import grammar_of
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.output import GenerateOutput
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields
from caramba_fast.infer.run import Hooks, Run, Stopwatch, alone
from caramba_fast.infer.saved import SavableGenerator
from caramba_fast.infer.sequence import Prompts, TokenIds
from caramba_fast.infer.stepwise import Mask
from caramba_fast.infer.stopping import (
    Decoder,
    Stopping,
    check_fits,
    eos_ids,
    row_limits,
    warn_past_positions,
)
from caramba_fast.infer.tokenizer import find_tokenizer
from caramba_fast.models import LanguageModel
from caramba_fast.models.registry import checkpoint_folder, load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.infer.options import GenerateOptions, OnceOptions, RunOptions


class Generator(SavableGenerator):
    """Generates with a model and keeps the conversation until `reset`.

    A second `generate` continues the first: it feeds the last sampled token, which is not in the cache yet, then the
    new input. It takes one call at a time, and refuses another (RuntimeError): threads need a generator each, and may
    share the model.

    Args:
        model: a `LanguageModel`, such as `caramba_fast.models.Transformer`, or a model that
            `caramba_fast.models.as_language_model` wraps: a causal language model of transformers (also in a
            ``PeftModel``), or a ``model(tokens, ctx=...)``.
        config: settings; by default `GenerateConfig()`.
        device: device to move the model to; by default it is not moved.
        tokenizer: anything with ``decode(ids) -> str``; stop strings need it. Text prompts also need ``encode``.
        calibration_ids: (N,) or (B, T) token ids of representative text, on which ``cache="auto"`` measures quality;
            by default the model generates it. ValueError with any other cache.
        overrides: fields of GenerateConfig to change.

    Raises:
        TypeError: the model lacks parts of `LanguageModel`; the message lists them.
        ValueError: settings that are invalid by themselves or for this model.
        RecordingError: (a RuntimeError, from a decode step) cuda_graph=True and the model cannot be recorded, or
            compile=True and it cannot be compiled.
    """

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        tokenizer: Any = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = torch.float32,
        revision: str | None = None,
        config: GenerateConfig | None = None,
        **overrides: Unpack[GenerateOptions],
    ) -> Generator:
        """A generator for a Hugging Face checkpoint, with its tokenizer.

        Args:
            path: a folder, a ``.gguf`` file or a Hub id; Llama, Mistral, Qwen2, Qwen3 and DBA load natively, others
                through transformers.
            tokenizer: a tokenizer folder, a ``tokenizer.json``, or a tokenizer object; None takes the checkpoint's
                own, and leaves `Generator.tokenizer` at None if it has none.
            device, dtype: device and dtype of the weights; dtype None or "auto" for that of the checkpoint.
            revision: branch, tag or commit, if path is a Hub id.
            config, overrides: settings, as in `Generator`.

        Returns:
            the generator; its ``tokenizer`` is a `TextTokenizer`.

        Raises:
            CheckpointError: the path cannot be used; the message says why.
            FileNotFoundError, TypeError: no tokenizer at the path given for it.
            ModuleNotFoundError: a library this checkpoint needs is missing.
            ValueError: settings that are wrong.
        """
        folder = checkpoint_folder(path, revision)
        text = find_tokenizer(folder, tokenizer)
        return Generator(load(folder, device, dtype), config, tokenizer=text, **overrides)

    @alone
    def generate(
        self,
        input_ids: TokenIds,
        attention_mask: Mask = None,
        *,
        hooks: Hooks | None = None,
        **options: Unpack[RunOptions],
    ) -> Tensor | GenerateOutput:
        """Generates until every row has ended.

        Args:
            input_ids: (B, T) or (T,) token ids, or ragged lists; the output of a transformers tokenizer (ids and mask);
                or, with a ``tokenizer``, a text or several, to which it adds BOS at the start of a conversation. In a
                tensor or array of two rows or more without a mask, leading and trailing ``pad_token_id`` are padding.
                In lists all ids are real.
            attention_mask: (B, T), 1 for real tokens.
            hooks: logits processors, stopping criteria, streamer; its fields may also be passed as ``options``.
            options: fields of `Hooks`, and fields of GenerateConfig for this call only (not those of the cache).

        Returns:
            (B, T + new) int64 on the model's device: this call's input with padding moved to the front, then the new
            tokens. Rows that ended earlier are filled with pad_token_id (else an eos id) after their end-of-sequence
            token. With ``num_return_sequences`` = N, each prompt has N rows. With ``return_dict``, a `GenerateOutput`.

        Raises:
            ValueError, TypeError: invalid input or settings, or prompt + new tokens exceed max_seq_len; raised before
                anything changes. After any later failure (Ctrl-C too) the conversation is as before, and with a seed
                so is the random state.
        """
        config, hooks = self._call(hooks, {**options})
        prompts = self._read(input_ids, attention_mask, config)
        before, expanded = self._snapshot(), self._expanded
        try:
            run, logits = self._begin(prompts, config, hooks)
            if config.num_beams > 1:
                return self._finish_beams(prompts, run, logits)
            for _ in self._steps(run, logits, hooks):
                pass
            self._end_run()
            return self._result(prompts, run, run.continuations())
        except BaseException:
            self._restore(before, expanded)
            raise

    @alone
    def generate_iter(
        self,
        input_ids: TokenIds,
        attention_mask: Mask = None,
        *,
        hooks: Hooks | None = None,
        **options: Unpack[RunOptions],
    ) -> Iterator[int] | Iterator[Tensor]:
        """Like `generate`, one step at a time.

        If it stops early (iterator closed, an error, Ctrl-C), the conversation holds the prompt and the tokens yielded;
        if there are none, it is as before. An interrupt while a token is handed over may leave that token in it.

        Yields:
            an int for a single row, else a (B,) int64 tensor on the CPU, with the padding id for rows that ended.

        Raises:
            ValueError, TypeError: as `generate`, and for num_beams above 1; raised by the call, not by the iterator.
        """
        config, hooks = self._call(hooks, {**options})
        if config.num_beams > 1:
            raise ValueError(
                f"num_beams is {config.num_beams}; generate_iter allows 1, since beams are known at the end"
            )
        prompts = self._read(input_ids, attention_mask, config)
        self._check_run(prompts, config)
        steps = self._turns.one_by_one(self._stream(prompts, config, hooks, self._reseed))
        if len(prompts.rows) * config.num_return_sequences == 1:
            return (int(tokens[0]) for tokens in steps)
        return (torch.tensor(tokens, device="cpu") for tokens in steps)

    def _stream(
        self, prompts: Prompts, config: GenerateConfig, hooks: Hooks, reseed: bool
    ) -> Iterator[list[int]]:
        self._session.check_rows(len(prompts.rows))
        before, expanded = self._snapshot(), self._expanded
        run: Run | None = None
        try:
            self._reseed = reseed  # other calls may have come since this one was made
            run, logits = self._begin(prompts, config, hooks)
            run.may_be_left = True
            for column in self._steps(run, logits, hooks):
                run.given += 1
                yield column
        finally:
            if run is None or (not run.given and self._run_state is run):
                self._restore(before, expanded)
            elif self._run_state is run:  # else the conversation went on without this iteration
                self._end_run()

    def _steps(self, run: Run, logits: Tensor, hooks: Hooks) -> Iterator[list[int]]:
        while True:
            with torch.no_grad():
                chosen = run.choose(logits)
            if hooks.streamer is not None:
                hooks.streamer.put(torch.tensor(chosen, device="cpu"))
            yield chosen
            self._check_current(run)
            alive = run.alive
            if not any(alive):
                break
            run.watch.resume()
            with torch.no_grad():
                logits = self._session.step(chosen, alive)
        if hooks.streamer is not None:
            hooks.streamer.end()

    def _check_current(self, run: Run) -> None:
        if self._run_state is not run:
            raise RuntimeError(
                "the conversation went on without this iteration; it cannot continue"
            )

    def _call(self, hooks: Hooks | None, options: dict[str, Any]) -> tuple[GenerateConfig, Hooks]:
        given = {name: options.pop(name) for name in Hooks.__dataclass_fields__ if name in options}
        if hooks is not None and given:
            raise ValueError(f"hooks and {next(iter(given))} are both given; give one of them")
        fixed = [name for name in options if name in self._of_the_generator]
        if fixed:
            raise ValueError(
                f"{fixed[0]} belongs to the generator's cache; set it in Generator(...), not in one call"
            )
        config = self.config.updated(**options) if options else self.config
        if options:
            self._check_call(config)
        self._reseed = "seed" in options
        hooks = hooks or Hooks(**given)
        _ = hooks.processors, hooks.criteria  # raises if one is not callable
        if config.num_beams > 1 and hooks.streamer is not None:
            raise ValueError(
                f"a streamer is given and num_beams is {config.num_beams}; 1 is allowed, since beams are "
                "known at the end"
            )
        return config, hooks

    @property
    def _of_the_generator(self) -> set[str]:
        """Settings that one call cannot change: those of the cache, its policy and its decode plan."""
        parts = (CacheFields, CachePolicyFields, DecodePlanFields)
        return {name for part in parts for name in names_of(part)}

    def _rooms(self, config: GenerateConfig) -> dict[str, int | None]:
        """Limits in tokens of a row, by name."""
        positions = getattr(self.model, "max_positions", None)
        return {
            f"max_seq_len={config.max_seq_len}": config.max_seq_len,
            f"the model with {positions} positions": positions,
        }

    def _check_run(self, prompts: Prompts, config: GenerateConfig) -> list[int]:
        """Most new tokens of each row; raises ValueError if prompts and new tokens do not fit."""
        held = [len(row) for row in self._session.rows] or [0] * len(prompts.rows)
        whole = [n + new for n, new in zip(held, prompts.lens, strict=True)]
        limits = row_limits(config, whole)
        rooms, room = self._rooms(config), zip(held, prompts.lens, limits, strict=True)
        for row, (before, prompt, new) in enumerate(room):
            check_fits(rooms, prompt, new, held=before, row=row)
        warn_past_positions(self.model, max(map(sum, zip(whole, limits, strict=True))) - 1)
        return limits

    def _begin(self, prompts: Prompts, config: GenerateConfig, hooks: Hooks) -> tuple[Run, Tensor]:
        """Processes the prompts; returns the run and the logits (B, V) of the first new tokens."""
        watch = Stopwatch()
        limits = self._check_run(prompts, config)
        copies = 1 if self._expanded or config.num_beams > 1 else config.num_return_sequences
        factor = copies if config.num_beams == 1 else 1 + config.num_beams
        self._choice.expect_rows(self._session.cache, factor)
        self._session.fill = self._fill(config)
        rng = self._seeded(config) if self._reseed else self._rng
        self._begin_on_ranks(prompts.rows, config, rng)
        with torch.no_grad():
            # Measuring to choose a cache is not part of the first step.
            logits = self._session.feed(prompts.rows, ready=watch.resume)
        if copies > 1:
            self._session.select_rows(
                [row for row in range(len(prompts.rows)) for _ in range(copies)]
            )
            logits, limits = (
                logits.repeat_interleave(copies, 0),
                [n for n in limits for _ in range(copies)],
            )
            self._expanded = True
            assert self._session.cache is not None
            self._choice.cache_bytes = self._session.cache.nbytes
        eos, fill = eos_ids(config, self.model), self._session.fill
        processors = LogitsProcessors(
            config, self.model.vocab_size, eos, logits.device, hooks.processors,
            hooks.prefix_allowed_tokens_fn, fill,
            grammar_of(config, self.tokenizer, self.model.vocab_size, eos),
        )  # fmt: skip
        stopping = Stopping(config, eos, self.tokenizer, hooks.criteria, fill, watch.began)
        run = Run(self._session, config, processors, stopping, rng, limits, watch)
        self._run_state = run
        self._measured = (watch, len(limits), sum(prompts.lens))
        if hooks.streamer is not None:
            hooks.streamer.put(prompts.padded_front(fill, torch.device("cpu")))
        return run, logits

    def _finish_beams(self, prompts: Prompts, run: Run, logits: Tensor) -> Tensor | GenerateOutput:
        with torch.no_grad():
            wanted = 1 if self._expanded else run.config.num_return_sequences
            found = BeamSearch(run).search(logits, wanted)
        assert self._session.cache is not None
        self._choice.cache_bytes = self._session.cache.nbytes
        run.watch.new_tokens = sum(run.new)  # of the answers; its steps were those of all beams
        self._measured = (run.watch, len(run.rows), sum(prompts.lens))
        self._end_run()
        self._expanded = self._expanded or run.config.num_return_sequences > 1
        return self._result(
            prompts,
            run,
            found.tokens,
            sequences_scores=found.scores,
            beam_indices=found.beam_indices,
        )

    def _result(
        self, prompts: Prompts, run: Run, new: Tensor, **extra: Any
    ) -> Tensor | GenerateOutput:
        device = self.model.device
        given = prompts.padded_front(self._session.fill, device)
        given = given.repeat_interleave(len(new) // len(given), 0)
        sequences = torch.cat((given, new.to(device)), dim=1)
        if not run.config.return_dict:
            return sequences
        metrics = self.metrics
        assert metrics is not None
        return GenerateOutput(
            sequences, [row.finish_reason or "length" for row in run.rows], run.new, metrics, self.report,
            scores=run.kept_scores, logits=run.kept_logits,
            logprobs=None if run.config.logprobs is None else run.logprobs, **extra,
        )  # fmt: skip


def generate(
    model: LanguageModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    config: GenerateConfig | None = None,
    attention_mask: Mask = None,
    hooks: Hooks | None = None,
    tokenizer: Decoder | None = None,
    **overrides: Unpack[OnceOptions],
) -> Tensor | GenerateOutput:
    """Generates once: `Generator.generate` without a conversation.

    Args:
        model, input_ids, attention_mask, hooks, tokenizer: as in `Generator`.
        max_new_tokens: shorthand for the field of the config.
        config: settings; ``overrides`` change single fields of it, or are fields of `Hooks`.

    Returns:
        As `Generator.generate`.
    """
    options: dict[str, Any] = {**overrides}
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    given = {name: options.pop(name) for name in Hooks.__dataclass_fields__ if name in options}
    generator = Generator(model, config, tokenizer=tokenizer, **options)
    return generator.generate(input_ids, attention_mask, hooks=hooks, **given)
