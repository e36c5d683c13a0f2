"""HuggingFaceModel: adapts any transformers causal language model to our `LanguageModel`.

K and V go into our caches. If our attention function can serve the model, it reads them packed. Otherwise each step
dequantizes what it attends to for the model's own attention, correct for every model that uses a transformers cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache import AnyLayerShape, ModelKVCache, RaggedBatch
from caramba_fast.hf.attention import pieces
from caramba_fast.hf.capabilities import capabilities_of, check_servable
from caramba_fast.hf.changing_rope import (
    CHANGING_ROPE,
    FIRST_PASS,
    as_if_new,
    check_shortened,
    check_turned_alike,
    dynamic_ropes,
    rope_limit,
)
from caramba_fast.hf.compat import CACHE
from caramba_fast.hf.layers import DropoutActiveError, TensorsNeededError
from caramba_fast.hf.packed_trial import COMPILED, is_compiled, why_not_beside
from caramba_fast.hf.row_layout import LeftPadded, RightPadded, RowLayout
from caramba_fast.hf.scope import INSTEAD, dense_pass, once, our_attention
from caramba_fast.hf.step_cache import DenseCache, RaggedCache, StepCache
from caramba_fast.models.protocol import refuse_recording


class ModelFacts(nn.Module):
    """Special token ids, sizes, and what layers cache, from configs and from probing the model.

    Raises TypeError if the layers do not keep keys and values the way a transformers Cache does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._capabilities = capabilities_of(model)
        self._capabilities.shapes  # noqa: B018 - raises for models that cannot be served

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids: those of the generation config, else of the model's config."""
        eos = self._special("eos_token_id")
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`, or None."""
        return next(iter(self.eos_token_ids), None)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id: that of the generation config, else of the model's config, or None."""
        return self._special("pad_token_id")

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence id: that of the generation config, else of the model's config, or None."""
        return self._special("bos_token_id")

    def _special(self, name: str) -> Any:
        for config in (self.model.generation_config, self.model.config.get_text_config()):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    @property
    def vocab_size(self) -> int:
        """Width of the logits; probed again after ``resize_token_embeddings``."""
        self._capabilities = capabilities_of(self.model)
        return self._capabilities.vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the input embeddings, where token ids go."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each caching layer stores, as found by probing the model."""
        known = self._capabilities
        return [
            replace(shape, query_rms=partial(known.keys_query_rms, index))
            for index, shape in known.shapes.items()
        ]

    @property
    def trained_positions(self) -> int | None:
        """The longest sequence the model was trained for, in tokens; None if its config does not say."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None

    @property
    def max_positions(self) -> int | None:
        """The length of the model's table of positions; None if positions are computed."""
        return self._capabilities.max_positions


class HuggingFaceModel(ModelFacts):
    """A transformers causal language model that reads and grows a `ModelKVCache`.

    Args:
        model: as loaded by `AutoModelForCausalLM`. It stays usable by itself; every call leaves it unchanged.

    Raises:
        TypeError: an encoder-decoder, a recurrent or hybrid model, or one without a language-model head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_servable(model)
        super().__init__(model)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._keeps_logits = "logits_to_keep" in accepted
        self._needs_tensors: str | None = None  # a reason that the trial did not reveal
        self._dropout: str | None = None  # set if the latest pass had dropout (train mode)
        self._ropes = dynamic_ropes(model)
        self.training = model.training

    @property
    def why_dense(self) -> str | None:
        """Why keys and values are dequantized at every step; None if they are read packed.

        The first access runs a few small trial forward passes.
        """
        return self._capabilities.why_dense or self._needs_tensors

    @property
    def cache_reads(self) -> str:
        """ "packed", or "dense: " and the reason."""
        return self.reads_of(None)

    def reads_of(self, kv_cache: ModelKVCache | None) -> str:
        """`cache_reads` for a particular cache, which may differ; None for caches in general."""
        reason = self.why_dense if kv_cache is None else self._why_dense(kv_cache)
        reason = reason or self._dropout
        return "packed" if reason is None else f"dense: {reason}"

    @property
    def why_not_spread(self) -> str:
        """Why the tokens of its caches cannot be spread over ranks."""
        return f"{type(self.model).__name__} of transformers reads caches that hold all tokens"

    @property
    def why_not_recorded(self) -> str:
        """Why a decode step cannot be replayed as a CUDA graph."""
        return (
            f"{type(self.model).__name__} of transformers is told lengths, positions and masks by the host at "
            "every step, which a graph would keep (a native caramba_fast.models.Transformer is recorded)"
        )

    def forward(
        self,
        query_token_ids: Tensor,
        kv_cache: ModelKVCache | None = None,
        *,
        query_lens: Sequence[int] | None = None,
        logits_index: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, V) logits, or (B, 1, V) with ``logits_index``, as `LanguageModel`.

        Raises:
            ValueError: a row exceeds the model's positions, rows differ in length and the model's positions count
                padding, or the cache is full.
            RuntimeError: during CUDA graph capture; see `why_not_recorded`.
        """
        if kv_cache is None:
            logits = self._without_cache(query_token_ids)
            return logits if logits_index is None else _picked(logits, logits_index)
        refuse_recording(self.device, self.why_not_recorded)
        batch, length = query_token_ids.shape
        new = [length] * batch if query_lens is None else list(query_lens)
        reason = self._why_dense(kv_cache)
        if reason is None:
            before = kv_cache.row_lengths
            try:
                logits = self._packed(query_token_ids, kv_cache, new, logits_index)
            except TensorsNeededError as error:
                kv_cache.restore(before)
                reason = self._why_tensors(error)
            else:
                if self._dropout is not None and not self.model.training:
                    self._dropout = None
                return logits
        self._warn(reason)
        return self._dense(query_token_ids, kv_cache, new, logits_index)

    def _why_tensors(self, error: TensorsNeededError) -> str:
        """Why this pass has to dequantize; remembered for all later passes, unless the reason is dropout."""
        if isinstance(error, DropoutActiveError):
            self._dropout = str(error)
        else:
            self._needs_tensors = COMPILED if is_compiled(self.model) else str(error)
        return self._needs_tensors or str(error)

    def _why_dense(self, kv_cache: ModelKVCache) -> str | None:
        chunks, place = self._capabilities.chunks, kv_cache.seq_lens.device
        if place != self.device:
            return f"the cache is on {place} and the model on {self.device}"
        if chunks and next(iter(kv_cache[0].streams.values())).sink is not None:
            return "sink_len keeps the first tokens of a row, and its layers attend within chunks"
        return self.why_dense

    def _warn(self, reason: str) -> None:
        once(
            self.model.config, reason,
            f"{type(self.model).__name__}: keys and values are dequantized at every step, which is right, but "
            f"slow: {reason}; {INSTEAD}",
        )  # fmt: skip

    @property
    def why_not_ragged(self) -> str | None:
        """Why the serving engine cannot run tokens of many requests in one ragged batch; None if it can (by trial)."""
        if self.why_dense is not None:
            return self.why_dense
        if self._capabilities.chunks:
            return "its layers attend within chunks, which start elsewhere in every request"
        if self._capabilities.forgets_beyond() is not None:
            return "its caches have a window that its masks do not have"
        if getattr(
            self.model.config.get_text_config(decoder=True), "attn_temperature_tuning", False
        ):
            return "it counts positions over all tokens of a pass (attn_temperature_tuning)"
        return why_not_beside(self.model, self.cache_layout, self.forward_ragged)

    @property
    def ragged_limit(self) -> int | None:
        """Most tokens of a sequence in a ragged batch; None for no limit.

        Beyond it some RoPE types would choose frequencies by the longest sequence of the batch.
        """
        return rope_limit(self.model, CHANGING_ROPE)

    def forward_ragged(self, ids: Tensor, batch: RaggedBatch, rows: Tensor) -> Tensor:
        """Tokens (N,) of many sequences -> (M, V) logits after those with indices ``rows`` (M,), as `Transformer`."""
        kept = rows if len(rows) else rows.new_zeros(1)  # an empty logits_to_keep would mean all
        options: dict[str, Any] = {"logits_to_keep": kept} if self._keeps_logits else {}
        with our_attention(self._capabilities.configs), as_if_new(self._ropes):
            logits: Tensor = self.model(
                input_ids=ids[None], position_ids=batch.positions[None], use_cache=True,
                **{CACHE: RaggedCache(batch, self._capabilities.places)}, **options,
            ).logits[0]  # fmt: skip
        return logits[: len(rows)] if options else torch.index_select(logits, 0, rows)

    def _packed(
        self, ids: Tensor, kv_cache: ModelKVCache, new: list[int], index: Tensor | None
    ) -> Tensor:
        """(B, T) -> (B, T, V) or (B, 1, V), with right-padded rows, as in the cache."""
        layout = RightPadded(kv_cache.row_lengths, new, self.device)
        ids = layout.without_padding(ids, 1 if self.pad_token_id == 0 else 0)
        parts = self._parts(layout, kv_cache)
        if len(parts) < 2:
            return self._run(ids, kv_cache, layout, index)
        self._check_lengths(layout)
        found = [
            self._packed(ids[:, a:b], kv_cache, [min(max(n - a, 0), b - a) for n in new], None)
            for a, b in parts
        ]
        logits = layout.from_layout(torch.cat(found, dim=1), 1, ids.shape[1])
        return logits if index is None else _picked(logits, index)

    def _parts(self, layout: RightPadded, kv_cache: ModelKVCache) -> list[tuple[int, int]]:
        """Ranges of columns to run separately, so that no row of ragged batches enters another chunk within one."""
        chunks = self._capabilities.chunks.values()
        exact = kv_cache.prefill == "exact" and kv_cache.pos == 0
        if not chunks or exact or not layout.padded_queries or layout.total <= min(chunks):
            return []
        return pieces(layout.held, layout.new, layout.tokens, min(chunks))

    def _dense(
        self, ids: Tensor, kv_cache: ModelKVCache, new: list[int], index: Tensor | None
    ) -> Tensor:
        """(B, T) -> (B, T, V) or (B, 1, V), with left-padded rows."""
        window = kv_cache.reach.local_window
        if window is not None and self._capabilities.chunks:
            raise ValueError(
                f"{type(self.model).__name__} attends within chunks, and this cache is read as tensors: "
                f"{self.reads_of(kv_cache)}; local_window={window} of a decode plan is for packed reads there"
            )
        if window is not None and kv_cache.prefill == "exact" and kv_cache.pos == 0:
            window = None  # an exact prompt does not read the cache
        if window is not None and ids.shape[1] > 1:
            logits = self._one_by_one(ids, kv_cache, new)
            return logits if index is None else _picked(logits, index)
        layout = LeftPadded(kv_cache.row_lengths, new, self.device, window)
        return self._run(ids, kv_cache, layout, index)

    def _without_cache(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V), attending only to the given tokens."""
        layout = LeftPadded([0] * len(ids), [ids.shape[1]] * len(ids), self.device)
        options, _ = self._options(layout, None)
        with as_if_new(self._ropes):
            return self.model(input_ids=ids, use_cache=False, **options).logits

    def _run(
        self, ids: Tensor, kv_cache: ModelKVCache, layout: RowLayout, logits_index: Tensor | None
    ) -> Tensor:
        """Runs the model on ``ids`` (B, T) in a layout; returns logits in the layout of ``ids``."""
        self._check_lengths(layout)
        index = None if logits_index is None else layout.query_column(logits_index)
        options, rows = self._options(layout, index)
        known = self._capabilities
        cache: Cache
        if isinstance(layout, LeftPadded):
            cache, attention = DenseCache(kv_cache, layout, known.places), dense_pass()
        else:
            assert isinstance(layout, RightPadded)
            cache = StepCache(kv_cache, layout, known.places, known.lenders)
            attention = our_attention(known.configs)
        if not max(layout.held):
            FIRST_PASS[kv_cache] = layout.total
        with attention, as_if_new(self._ropes):
            logits = self.model(
                input_ids=layout.to_layout(ids), use_cache=True, **{CACHE: cache}, **options
            ).logits
        if index is None:
            return layout.from_layout(logits, 1, ids.shape[1])
        return _picked(logits, index if rows is None else rows)

    def _check_lengths(self, layout: RowLayout) -> None:
        if layout.padded_keys:
            self._capabilities.check_padding()
        self._capabilities.check_remembered(layout.total)
        limit = self._capabilities.max_positions
        if limit is not None and layout.total > limit:
            raise ValueError(
                f"a row would have {layout.total} tokens; the model has {limit} positions "
                "(max_position_embeddings)"
            )
        check_turned_alike(self.model, layout.held, layout.new)

    def check_shortened(self, kv_cache: ModelKVCache, left: Sequence[int]) -> None:
        """Raises ValueError if generation cannot continue after cutting the rows of a cache to ``left`` tokens."""
        check_shortened(self.model, kv_cache, left)

    def _one_by_one(self, ids: Tensor, kv_cache: ModelKVCache, new: list[int]) -> Tensor:
        """(B, T) -> (B, T, V), one column at a time: a two-dimensional mask has one window for all queries."""
        parts = [
            self._dense(ids[:, i : i + 1], kv_cache, [int(count > i) for count in new], None)
            for i in range(max(new))
        ]
        parts += parts[-1:] * (ids.shape[1] - len(parts))
        return torch.cat(parts, dim=1)

    def _options(
        self, layout: RowLayout, index: Tensor | None
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Keyword arguments of the model, and the positions in its output of the logits for ``index``."""
        options: dict[str, Any] = {"attention_mask": layout.attention_mask}
        if self._takes_positions:
            options["position_ids"] = layout.position_ids
        if index is None or not self._keeps_logits or layout.tokens == 1:
            return options, None
        wanted, rows = torch.unique(index, return_inverse=True)
        options["logits_to_keep"] = wanted
        return options, rows


def _picked(logits: Tensor, index: Tensor) -> Tensor:
    return logits[torch.arange(len(logits), device=logits.device), index.to(logits.device)][:, None]
