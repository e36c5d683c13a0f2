"""StepwiseGenerator: a model, its settings and one conversation, fed a prompt or a token at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import ModelKVCache
from caramba_fast.cache.lengths import Counts
from caramba_fast.config import short_name
from caramba_fast.infer.cache_choice import CacheChoice, ChosenCache
from caramba_fast.infer.compiled import CompiledSteps
from caramba_fast.infer.config import GenerateConfig, SpeculativeConfig
from caramba_fast.infer.cuda_graph import DecodeGraphs
from caramba_fast.infer.decode_plan import DecodePlan
from caramba_fast.infer.grammar import grammar_of
from caramba_fast.infer.logits import LogitsProcessors
from caramba_fast.infer.output import GenerationMetrics
from caramba_fast.infer.run import Run, Stopwatch, Turns, alone
from caramba_fast.infer.sampling import current_state, random_state, set_random_state
from caramba_fast.infer.sequence import Prompts, TokenIds, read_prompts
from caramba_fast.infer.session import Session
from caramba_fast.infer.stopping import Decoder, eos_ids
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.models import LanguageModel
from caramba_fast.models.identity import AdaptersInUse
from caramba_fast.models.registry import as_language_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.infer.options import GenerateOptions

Mask = Tensor | Sequence[Sequence[int]] | None

#: Settings in which ranks may differ: what one returns, where it keeps plans, and the seed (the random state has it).
OWN_OF_A_RANK = {
    "cache_plan_path",
    "logprobs",
    "output_logits",
    "output_scores",
    "return_dict",
    "seed",
}


class StepwiseGenerator:
    """`Generator` without `generate`: prefill, decode steps, rollback. Arguments and errors as in `Generator`."""

    _speculates = False

    def __init__(
        self,
        model: LanguageModel | Any,
        config: GenerateConfig | None = None,
        device: torch.device | str | None = None,
        *,
        tokenizer: Decoder | None = None,
        calibration_ids: Tensor | Sequence[int] | None = None,
        **overrides: Unpack[GenerateOptions],
    ) -> None:
        if isinstance(config, SpeculativeConfig) and not self._speculates:
            raise TypeError("config is a SpeculativeConfig, which SpeculativeGenerator takes")
        if device is not None and isinstance(model, nn.Module):
            model.to(device)
        self.model, self.tokenizer = as_language_model(model), tokenizer
        if device is not None and not isinstance(model, nn.Module):
            self._check_device(device)
        self.config = (config or GenerateConfig()).updated(**overrides)
        self.eos_ids = eos_ids(self.config, self.model)
        self._turns = Turns()
        self._run_state: Run | None = None
        self._adapters: AdaptersInUse | None = None  # when the model last processed tokens
        self._measured: tuple[Stopwatch, int, int] | None = None
        self._expanded = False  # num_return_sequences has multiplied the rows
        self._reseed = False  # the current call has a seed of its own
        self._choice = CacheChoice(self.model, self.config, calibration_ids, tokenizer)
        self._choice.check_budget(1)
        self._graphs = (
            CompiledSteps(self.model)
            if self.config.compile
            else DecodeGraphs(self.model, self.config.cuda_graph)
        )
        self._plan = DecodePlan(self.config)
        self._session = Session(
            self.model, self._choice.new_cache, self._graphs, self._fill(self.config), self.config.max_seq_len,
            self.config.prefill_chunk, self._plan,
        )  # fmt: skip
        self._check_call(self.config)
        self._rng = self._seeded(self.config)

    def _check_device(self, device: torch.device | str) -> None:
        """Raises ValueError unless a model that cannot be moved is on ``device``."""
        asked, found = (
            torch.empty(0, device=place).device for place in (device, self.model.device)
        )
        if asked != found:
            raise ValueError(
                f"device is {asked}, but the model is a {type(self.model).__name__} on {found}, which cannot be moved; "
                "move what it is made of before"
            )

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
        """The id after the end of a row: the padding id, else an eos id."""
        pad = self._pad(config)
        return pad if pad is not None else min(eos_ids(config, self.model), default=0)

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
        """Whether decode steps are replayed as a CUDA graph or compiled, or why not."""
        return self._graphs.state(self.cache)

    @property
    def metrics(self) -> GenerationMetrics | None:
        """Metrics of the last run so far; None before the first."""
        if self._measured is None or not self._measured[0].steps:
            return None
        watch, rows, prompt_tokens = self._measured
        return watch.report(
            rows, prompt_tokens, self._choice.cache_bytes, self._choice.bytes_per_token
        )

    @property
    def report(self) -> dict[str, Any]:
        """How the cache is stored, its size, and how decode steps run."""
        plan = self.cache_plan
        return {
            "cache_kind": self.config.cache_name if plan is None else short_name(plan.spec),
            "cache_chosen": None if plan is None else plan.reason,
            "cache_bytes": self._choice.cache_bytes,
            "bytes_per_token": self._choice.bytes_per_token,
            "cache_reads": getattr(self.model, "reads_of", lambda _: "packed")(self.cache),
            "decode_plan": self._plan.describe(),
            "decode_graph": self.decode_graph,
        }

    @property
    def cache_plan(self) -> ChosenCache | None:
        """The choice of ``cache="auto"`` for the conversation's batch size."""
        return self._choice.latest

    @alone
    @torch.no_grad()
    def prefill(self, input_ids: TokenIds, attention_mask: Mask = None) -> Tensor:
        """Feeds prompts to the model, after what the cache holds.

        Args:
            input_ids, attention_mask: as in `Generator.generate`.

        Returns:
            logits (B, V) of the token that follows each row's last one.

        Raises:
            ValueError, TypeError: invalid input, or more than max_seq_len tokens; nothing has changed.
        """
        rows = self._read(input_ids, attention_mask).rows
        self._session.check_room([len(row) for row in rows], [0] * len(rows))
        self._begin_on_ranks(rows)
        return self._session.feed(rows)

    @alone
    @torch.no_grad()
    def decode_step(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Feeds one token per row, (B,); returns the logits (B, V) of the next. RuntimeError before any prefill."""
        ids = torch.as_tensor(token_ids, device="cpu")
        if self.cache is None:
            raise RuntimeError("decode_step before any prefill: there is no cache yet")
        if ids.shape != (self.cache.batch_size,):
            raise ValueError(
                f"token_ids has shape {tuple(ids.shape)}; ({self.cache.batch_size},) is needed"
            )
        rows = self._read(ids[:, None], torch.ones_like(ids)[:, None]).rows
        self._session.check_room([1] * len(rows), [0] * len(rows))
        self._begin_on_ranks(rows)
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

    @alone
    def rollback(self, n: Counts) -> None:
        """Removes the newest ``n`` tokens of every row (or ``n[b]`` of row b) from the conversation.

        A pending token, sampled last and not in the cache yet, counts too.

        Raises:
            RuntimeError: there is no conversation.
            ValueError: more tokens than there are, or the keys were rotated for longrope's long text.

        After an error, and after Ctrl-C, the conversation is as before.
        """
        self._end_run()
        if self.cache is None:
            raise RuntimeError("rollback before any prefill: there is nothing to remove")
        self._shorten(self._session.lengths_without(n))

    def _shorten(self, lengths: list[int]) -> None:
        self._session.shorten(lengths)

    @alone
    def reset(self) -> None:
        """Ends the conversation; the next prompt starts a new one of any batch size. The random state is kept."""
        self._forget()

    def _forget(self) -> None:
        self._run_state = None
        self._expanded = False
        self._session.reset()

    def _check_call(self, config: GenerateConfig) -> None:
        """Checks settings that do not depend on a prompt."""
        if config.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop holds the string {config.stop_strings[0]!r}, which needs Generator(tokenizer=...); "
                "without one, ids are allowed"
            )
        if config.logprobs is not None and not config.return_dict:
            raise ValueError(
                f"logprobs is {config.logprobs} and return_dict is not True; they come with return_dict=True"
            )
        eos = eos_ids(config, self.model)
        grammar_of(config, self.tokenizer, self.model.vocab_size, eos)
        LogitsProcessors(config, self.model.vocab_size, eos, torch.device("cpu"))

    def _begin_on_ranks(
        self,
        rows: Sequence[Sequence[int]],
        config: GenerateConfig | None = None,
        rng: torch.Generator | None = None,
    ) -> None:
        """Begins the call together with the other ranks of a model over several; raises if theirs differs.

        ``config``, ``rng``: settings and random generator of a call that samples.
        """
        begin = getattr(self.model, "begin_together", None)
        if begin is not None:
            samples = config is not None and config.samples
            state = current_state(rng, self.model.device) if samples else None
            settings = (config or self.config).model_dump(exclude=OWN_OF_A_RANK)
            given = (self.tokens, [list(row) for row in rows])
            begin({
                "the tokens": given, "the cached tokens": self._session.cached, "the random state": state, **settings
            })  # fmt: skip

    def _end_run(self) -> None:
        """Ends a run that is under way: removes what its consumer has not got, and the padding fed to ended rows."""
        if self._run_state is not None and self._run_state.may_be_left:
            self._keep(self._run_state, self._run_state.given)
        self._run_state = None
        self._session.drop_padding()

    def _keep(self, run: Run, given: int) -> None:
        """Truncates rows to the tokens of the ``given`` steps that were yielded."""
        self._session.keep([min(len(row), row.start + given) for row in run.rows])

    def _snapshot(self) -> Any:
        self._end_run()
        return self._session.snapshot(tails=True), random_state(self._rng)

    def _restore(self, before: Any, expanded: bool) -> None:
        self._run_state, self._expanded, self._choice.row_factor = None, expanded, 1
        self._session.restore(before[0])
        set_random_state(self._rng, before[1])

    def _read(
        self, input_ids: TokenIds, attention_mask: Mask, config: GenerateConfig | None = None
    ) -> Prompts:
        pad = self._pad(config or self.config)
        texts = [input_ids] if isinstance(input_ids, str) else input_ids
        if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
            input_ids = self._encoded(texts, attention_mask)
        prompts = read_prompts(input_ids, attention_mask, pad, self.model.vocab_size)
        self._session.check_rows(len(prompts.rows))
        self._end_run()
        self._check_adapters(is_step=prompts.width == 1)
        return prompts

    def _check_adapters(self, *, is_step: bool) -> None:
        """Warns if the active adapters are not those the conversation was processed with."""
        known = self._adapters
        if known is not None and is_step and known.unchanged():
            return
        self._adapters = AdaptersInUse(self.model)
        if known is not None and self._session.rows and not known.same_as(self._adapters):
            warnings.warn(
                "the model uses other adapters than those that the tokens of this conversation were read with: they "
                "stay in its cache as they are; reset(), and give the text again, for what the model says now",
                stacklevel=5,  # the caller of a call in its turn
            )

    def _encoded(self, texts: Sequence[Any], attention_mask: Mask) -> list[list[int]]:
        if self.tokenizer is None:
            raise TypeError("input_ids is text, which needs Generator(tokenizer=...)")
        if attention_mask is not None:
            raise ValueError("attention_mask is given and input_ids is text, which has no padding")
        tokenizer, first = TextTokenizer.of(self.tokenizer), not self._session.rows
        return [tokenizer.encode(text, special=first) for text in texts]
