"""Generator: prompts in, tokens out, over a cache that outlives the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import Calibration, ModelKVCache
from caramba_fast.cache.rows import Counts
from caramba_fast.infer.beam_search import beam_search
from caramba_fast.infer.cache_choice import CacheChoice, ChosenCache
from caramba_fast.infer.config import AUTO, CacheFields, GenerateConfig, SpeculativeConfig
from caramba_fast.infer.cuda_graph import DecodeGraphs
from caramba_fast.infer.decode_plan import DecodePlan
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.output import GenerateOutput, GenerationMetrics, Stopwatch
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields
from caramba_fast.infer.sampling import random_state, set_random_state
from caramba_fast.infer.sequence import Prompts, TokenIds, read_prompts
from caramba_fast.infer.session import Hooks, Run, Session
from caramba_fast.infer.stopping import Decoder, Stopping, eos_ids, row_limits
from caramba_fast.infer.tokenizer import find_tokenizer
from caramba_fast.models import LanguageModel
from caramba_fast.models.registry import as_language_model, checkpoint_folder, load

Mask = Tensor | Sequence[Sequence[int]] | None
#: A kind whose transforms take constants: with "auto" a calibration is checked against it.
CALIBRATED = "q4"


class Generator:
    """Generates with a model and keeps the conversation until `reset`.

    A second `generate` continues where the first one ended: the last sampled token, which is not in
    the cache yet, is fed first, then the new input.

    Args:
        model: a `LanguageModel`, such as `caramba_fast.models.Transformer`, or what
            `caramba_fast.models.as_language_model` wraps: a causal language model of transformers, a
            ``model(tokens, ctx=...)``.
        config: settings; by default `GenerateConfig()`.
        device: moves the model there first; by default the model stays where it is.
        tokenizer: anything with ``decode(ids) -> str``; stop strings need it.
        calibration_ids: (N,) or (B, T) token ids of text like the model's own, on which ``cache_kind="auto"``
            measures quality; without, the model writes it.
        overrides: fields of GenerateConfig to change.

    Raises:
        TypeError: the model lacks something of `LanguageModel`; the message lists what.
        ValueError: settings that are wrong in themselves or for this model.
        RecordingError: (from a decode step) cuda_graph=True and the model cannot be recorded.
    """

    _speculates = False

    def __init__(
        self,
        model: LanguageModel | Any,
        config: GenerateConfig | None = None,
        device: torch.device | str | None = None,
        *,
        tokenizer: Decoder | None = None,
        calibration_ids: Tensor | Sequence[int] | None = None,
        **overrides: Any,
    ) -> None:
        if isinstance(config, SpeculativeConfig) and not self._speculates:
            raise TypeError("config is a SpeculativeConfig, which SpeculativeGenerator takes")
        if device is not None and isinstance(model, nn.Module):
            model.to(device)
        self.model, self.tokenizer = as_language_model(model), tokenizer
        self.config = (config or GenerateConfig()).updated(**overrides)
        self.eos_ids = self._eos_ids(self.config)
        self._cache_bytes, self._bytes_per_token = 0, 0.0
        self._run_state: Run | None = None
        self._measured: tuple[Stopwatch, int, int] | None = None
        self._expanded = False  # num_return_sequences has multiplied the rows
        self._row_factor = 1  # rows of caches there will be for each row that is fed
        self._reseed = False  # the call under way was given a seed of its own
        self._calibration: Calibration | None = None
        if self.config.cache_calibration is not None:
            self._calibration = Calibration.load(self.config.cache_calibration)
            self._new_cache(1, torch.device("meta"))  # says at once what does not fit the model
        self._choice = CacheChoice(
            self.model, self.config, self._calibration, calibration_ids, tokenizer
        )
        self._choice.check_budget(1)
        self._graphs = DecodeGraphs(self.model, self.config.cuda_graph)
        self._plan = DecodePlan(self.config)
        self._session = Session(
            self.model, self._new_cache, self._graphs, self._fill(self.config), self.config.max_seq_len,
            self.config.prefill_chunk, self._plan.plan_for,
        )  # fmt: skip
        self._check_call(self.config)
        self._rng = self._seeded(self.config)

    @classmethod
    def from_checkpoint(cls, path: str | Path, tokenizer: Any = None, **options: Any) -> Generator:
        """A generator for a Hugging Face checkpoint folder, with its tokenizer.

        Arguments and errors are those of `caramba_fast.infer.generator.from_checkpoint`.
        """
        return from_checkpoint(path, tokenizer, **options)

    # -- settings -----------------------------------------------------------------------

    def _eos_ids(self, config: GenerateConfig) -> frozenset[int]:
        return eos_ids(config, self.model)

    def _seeded(self, config: GenerateConfig) -> torch.Generator | None:
        if config.seed is None:
            return None
        return torch.Generator(device=self.model.device).manual_seed(config.seed)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id of the config, else of the model."""
        return self._pad(self.config)

    def _pad(self, config: GenerateConfig) -> int | None:
        if config.pad_token_id is not None:
            return config.pad_token_id
        pad = self.model.pad_token_id
        return pad if pad is not None and 0 <= pad < self.model.vocab_size else None

    def _fill(self, config: GenerateConfig) -> int:
        """What stands behind the end of a row: the padding id, else an eos id."""
        pad = self._pad(config)
        return pad if pad is not None else min(self._eos_ids(config), default=0)

    @property
    def cache(self) -> ModelKVCache | None:
        """The cache of the conversation, or None before the first prompt."""
        return self._session.cache

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of every row of the conversation, generated ones included."""
        return [list(row.tokens) for row in self._session.rows]

    @property
    def decode_graph(self) -> str:
        """Whether decode steps are replays of one CUDA graph, or why they are not."""
        return self._graphs.state(self.cache)

    @property
    def metrics(self) -> GenerationMetrics | None:
        """Figures of the last run, so far; None before the first."""
        if self._measured is None or not self._measured[0].steps:
            return None
        watch, rows, prompt_tokens = self._measured
        return watch.report(rows, prompt_tokens, self._cache_bytes, self._bytes_per_token)

    @property
    def report(self) -> dict[str, Any]:
        """What is in force: how the cache is stored, what it takes, how decode steps run."""
        plan = self.cache_plan
        return {
            "cache_kind": self.config.cache_name if plan is None else plan.spec,
            "cache_chosen": None if plan is None else plan.reason,
            "cache_bytes": self._cache_bytes,
            "bytes_per_token": self._bytes_per_token,
            "cache_reads": getattr(self.model, "reads_of", lambda _: "packed")(self.cache),
            "decode_plan": self._plan.describe(),
            "decode_graph": self.decode_graph,
        }

    @property
    def cache_plan(self) -> ChosenCache | None:
        """What ``cache_kind="auto"`` chose for the conversation's batch size, and from which figures."""
        return self._choice.latest

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
        return self._session.feed(self._read(input_ids, attention_mask).rows)

    @torch.no_grad()
    def decode_step(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Feeds one token a row, (B,), and returns the logits (B, V) of the next."""
        ids = torch.as_tensor(token_ids)
        self._end_run()
        if self.cache is None:
            raise RuntimeError("decode_step before any prefill: there is no cache yet")
        if ids.shape != (self.cache.batch_size,):
            raise ValueError(
                f"token_ids has shape {tuple(ids.shape)}; ({self.cache.batch_size},) is needed"
            )
        rows = self._read(ids[:, None], torch.ones_like(ids)[:, None]).rows
        self._session.check_room([1] * len(rows), [0] * len(rows))
        if any(self._session.pending):
            return self._session.feed(rows)
        before = self._session.snapshot()
        alive, tokens = [True] * len(rows), [row[0] for row in rows]
        try:
            self._session.note(tokens, alive)
            return self._session.step(tokens, alive)
        except BaseException:
            self._session.restore(before)
            raise

    def rollback(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row (or ``n[b]`` of row b) from the conversation.

        A token that was sampled last and is not in the cache yet counts as one.
        """
        self._end_run()
        if self.cache is None:
            raise RuntimeError("rollback before any prefill: there is nothing to remove")
        self._session.rollback(n)

    def reset(self) -> None:
        """Ends the conversation; the next prompt starts a new one and may have another batch size.

        Sampling goes on from where the seed has brought it.
        """
        self._run_state = None
        self._expanded = False
        self._session.reset()

    # -- whole runs ---------------------------------------------------------------------

    def generate(
        self,
        input_ids: TokenIds,
        attention_mask: Mask = None,
        *,
        hooks: Hooks | None = None,
        **options: Any,
    ) -> Tensor | GenerateOutput:
        """Generates for every row until it ends.

        Args:
            input_ids: (B, T) or (T,) token ids, or ragged lists. Without a mask, in a batch of two
                rows or more, leading and trailing ``pad_token_id`` are padding.
            attention_mask: (B, T), 1 for real tokens.
            hooks: logits processors, stopping criteria, streamer; its fields may be given as ``options``.
            options: fields of `Hooks`, and of GenerateConfig for this call alone (not those of the cache).

        Returns:
            (B, T + new) int64 on the model's device: this call's input, padding moved to the front,
            then the new tokens. Rows that ended earlier hold pad_token_id (else an eos id) behind
            their end-of-sequence token. With ``num_return_sequences`` = N, each prompt gives N rows. With
            ``return_dict``, a `GenerateOutput`.

        Raises:
            ValueError, TypeError: bad input or settings, or prompt + new tokens exceed max_seq_len; raised
                before anything changes. Whatever fails later (Ctrl-C too) leaves the conversation as it was,
                and random numbers where they were, if there is a seed.
        """
        config, hooks = self._call(hooks, options)
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

    def generate_iter(
        self,
        input_ids: TokenIds,
        attention_mask: Mask = None,
        *,
        hooks: Hooks | None = None,
        **options: Any,
    ) -> Iterator[int] | Iterator[Tensor]:
        """Like `generate`, one step at a time.

        However it ends (to its end, left early, by an error or Ctrl-C), the conversation then holds the prompt and
        what has been yielded; where nothing has been, it is as it was. An interrupt in the very hand-over of a
        token may leave that token in the conversation.

        Yields:
            an int for a single row, else a (B,) int64 tensor on the CPU, in which rows that ended
            hold the padding id.
        """
        config, hooks = self._call(hooks, options)
        if config.num_beams > 1:
            raise ValueError(
                f"num_beams is {config.num_beams}; generate_iter allows 1, since beams are known at the end"
            )
        prompts = self._read(input_ids, attention_mask, config)
        self._check_run(prompts, config)
        steps = self._stream(prompts, config, hooks)
        if len(prompts.rows) * config.num_return_sequences == 1:
            return (int(tokens[0]) for tokens in steps)
        return (torch.tensor(tokens) for tokens in steps)

    def _stream(
        self, prompts: Prompts, config: GenerateConfig, hooks: Hooks
    ) -> Iterator[list[int]]:
        self._session.check_rows(len(prompts.rows))
        before, expanded = self._snapshot(), self._expanded
        run: Run | None = None
        given = 0
        try:
            run, logits = self._begin(prompts, config, hooks)
            for column in self._steps(run, logits, hooks):
                given += 1
                yield column
        finally:
            if run is None or (not given and self._run_state is run):
                self._restore(before, expanded)
            elif self._run_state is run:  # else the conversation went on without this iteration
                self._run_state = None
                self._keep(run, given)

    def _keep(self, run: Run, given: int) -> None:
        """Rows end where the consumer stopped: behind the tokens of ``given`` steps."""
        self._session.keep([min(len(row), row.start + given) for row in run.rows])

    def _steps(self, run: Run, logits: Tensor, hooks: Hooks) -> Iterator[list[int]]:
        """Yields the tokens of each step."""
        while True:
            with torch.no_grad():
                chosen = run.choose(logits)
            if hooks.streamer is not None:
                hooks.streamer.put(torch.tensor(chosen))
            yield chosen
            self._check_current(run)
            if run.is_over:
                break
            run.watch.resume()
            with torch.no_grad():
                logits = self._session.step(chosen, run.alive)
        if hooks.streamer is not None:
            hooks.streamer.end()

    def _check_current(self, run: Run) -> None:
        if self._run_state is not run:
            raise RuntimeError(
                "the conversation went on without this iteration; it cannot continue"
            )

    # -- inside -------------------------------------------------------------------------

    def _call(self, hooks: Hooks | None, options: dict[str, Any]) -> tuple[GenerateConfig, Hooks]:
        """The settings and hooks of one call."""
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
        _ = hooks.processors, hooks.criteria  # says at once what cannot be called
        if config.num_beams > 1 and hooks.streamer is not None:
            raise ValueError(
                f"a streamer is given and num_beams is {config.num_beams}; 1 is allowed, since beams are "
                "known at the end"
            )
        return config, hooks

    @property
    def _of_the_generator(self) -> set[str]:
        """Settings that one call cannot change: of the cache, and how it was chosen and is read."""
        parts = (CacheFields, CachePolicyFields, DecodePlanFields)
        return {name for part in parts for name in part.model_fields}

    def _check_call(self, config: GenerateConfig) -> None:
        """What can be said of settings before there is a prompt."""
        if config.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop holds the string {config.stop_strings[0]!r}, which needs Generator(tokenizer=...); "
                "without one, ids are allowed"
            )
        LogitsProcessors(config, self.model.vocab_size, self._eos_ids(config), torch.device("cpu"))

    def _check_run(self, prompts: Prompts, config: GenerateConfig) -> list[int]:
        """Raises ValueError unless prompts and what follows fit; most new tokens of each row."""
        held = [len(row) for row in self._session.rows] or [0] * len(prompts.rows)
        whole = [n + new for n, new in zip(held, prompts.lens, strict=True)]
        limits = row_limits(config, whole)
        positions = getattr(self.model, "max_positions", None)
        if positions is not None and max(map(sum, zip(whole, limits, strict=True))) - 1 > positions:
            raise ValueError(
                f"the prompt and max_new_tokens={config.max_new_tokens} need "
                f"{max(map(sum, zip(whole, limits, strict=True))) - 1} positions; the model has {positions}"
            )
        self._session.check_room(prompts.lens, [limit - 1 for limit in limits])
        return limits

    def _begin(self, prompts: Prompts, config: GenerateConfig, hooks: Hooks) -> tuple[Run, Tensor]:
        """Feeds the prompts; the run, and the logits (B, V) its first tokens follow from."""
        watch = Stopwatch()
        limits = self._check_run(prompts, config)
        copies = 1 if self._expanded or config.num_beams > 1 else config.num_return_sequences
        self._row_factor = copies if config.num_beams == 1 else 1 + config.num_beams
        self._session.fill = self._fill(config)
        with torch.no_grad():
            logits = self._session.feed(prompts.rows)
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
            self._cache_bytes = self._session.cache.nbytes
        eos, fill = self._eos_ids(config), self._session.fill
        processors = LogitsProcessors(
            config, self.model.vocab_size, eos, logits.device, hooks.processors,
            hooks.prefix_allowed_tokens_fn, fill,
        )  # fmt: skip
        stopping = Stopping(config, eos, self.tokenizer, hooks.criteria, fill, watch.began)
        rng = self._seeded(config) if self._reseed else self._rng
        run = Run(self._session, config, processors, stopping, rng, limits, watch)
        self._run_state = run
        self._measured = (watch, len(limits), sum(prompts.lens))
        if hooks.streamer is not None:
            hooks.streamer.put(prompts.padded_front(fill, torch.device("cpu")))
        return run, logits

    def _finish_beams(self, prompts: Prompts, run: Run, logits: Tensor) -> Tensor | GenerateOutput:
        with torch.no_grad():
            found = beam_search(
                run, logits, 1 if self._expanded else run.config.num_return_sequences
            )
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
            scores=run.kept_scores, logits=run.kept_logits, **extra,
        )  # fmt: skip

    def _end_run(self) -> None:
        """Ends a run that is under way: what was fed to rows that had ended is removed again."""
        self._run_state = None
        self._session.drop_padding()

    def _snapshot(self) -> Any:
        self._end_run()
        return self._session.snapshot(tails=True), random_state(self._rng)

    def _restore(self, before: Any, expanded: bool) -> None:
        self._run_state, self._expanded, self._row_factor = None, expanded, 1
        self._session.restore(before[0])
        set_random_state(self._rng, before[1])

    def _read(
        self, input_ids: TokenIds, attention_mask: Mask, config: GenerateConfig | None = None
    ) -> Prompts:
        self._end_run()
        pad = self._pad(config or self.config)
        prompts = read_prompts(input_ids, attention_mask, pad, self.model.vocab_size)
        self._session.check_rows(len(prompts.rows))
        return prompts

    def _new_cache(self, rows: int, device: torch.device | None = None) -> ModelKVCache:
        kind = self.config.cache_kind
        if device is None:
            most, self._row_factor = rows * self._row_factor, 1
            kind = self._choice.kind(most)
            self._choice.check_budget(most)
        elif kind == AUTO:
            kind = CALIBRATED
        cache = ModelKVCache(
            self.model.cache_layout,
            rows,
            self.config.max_seq_len,
            device=device or self.model.device,
            prefill=self.config.prefill,
            calibration=self._calibration,
            **self.config.stream_configs(kind),
        )
        self._cache_bytes, self._bytes_per_token = cache.nbytes, cache.bytes_per_token
        return cache


def generate(
    model: LanguageModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    config: GenerateConfig | None = None,
    attention_mask: Mask = None,
    hooks: Hooks | None = None,
    tokenizer: Decoder | None = None,
    **overrides: Any,
) -> Tensor | GenerateOutput:
    """Generates once, from nothing: `Generator.generate` without the conversation.

    Args:
        model, input_ids, attention_mask, hooks, tokenizer: as in `Generator`.
        max_new_tokens: shorthand for the field of the config.
        config: settings; ``overrides`` change single fields of it, or are fields of `Hooks`.

    Returns:
        As `Generator.generate`.
    """
    if max_new_tokens is not None:
        overrides["max_new_tokens"] = max_new_tokens
    given = {name: overrides.pop(name) for name in Hooks.__dataclass_fields__ if name in overrides}
    generator = Generator(model, config, tokenizer=tokenizer, **overrides)
    return generator.generate(input_ids, attention_mask, hooks=hooks, **given)


def from_checkpoint(
    path: str | Path,
    tokenizer: Any = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    config: GenerateConfig | None = None,
    **overrides: Any,
) -> Generator:
    """A `Generator` for the model in a Hugging Face checkpoint folder, with its tokenizer.

    Args:
        path: the folder; Llama, Mistral, Qwen2, Qwen3 and DBA load natively, others through transformers.
        tokenizer: a tokenizer folder, a ``tokenizer.json``, or a tokenizer object; None takes the checkpoint's
            own, and leaves `Generator.tokenizer` at None if it has none.
        device, dtype: of the weights; dtype None for what the checkpoint stores.
        config, overrides: settings, as in `Generator`.

    Returns:
        the generator; its ``tokenizer`` is a `TextTokenizer`.

    Raises:
        CheckpointError: a path or folder that cannot be used; the message says why.
        FileNotFoundError, TypeError: no tokenizer at the path given for it.
        ModuleNotFoundError: a library this checkpoint needs is missing.
        ValueError: settings that are wrong.
    """
    folder = checkpoint_folder(path)
    text = find_tokenizer(folder, tokenizer)
    model = load(folder, device, dtype)
    return Generator(model, config, tokenizer=text, **overrides)
