"""HuggingFaceModel: any causal language model of transformers as our `LanguageModel`.

K and V of every layer go into our caches and come back dense to the model's own attention: right for every
model that uses a transformers cache, at the cost of dequantizing what a step attends to.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from caramba_fast.cache import AnyLayerShape, ModelKVCache
from caramba_fast.hf.cache import DenseCache
from caramba_fast.hf.checks import check_padding, check_servable
from caramba_fast.hf.frame import Frame
from caramba_fast.hf.probe import probe
from caramba_fast.models.recording import refuse_recording


class HuggingFaceModel(nn.Module):
    """A transformers causal language model that reads and grows a `ModelKVCache`.

    Args:
        model: as `AutoModelForCausalLM` gives it; it stays usable by itself and is not changed.

    Raises:
        TypeError: an encoder-decoder, a recurrent or hybrid model, or one without a language-model head; the
            message has the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_servable(model)
        self.model = model
        self._findings = probe(model)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._keeps_logits = "logits_to_keep" in accepted
        self.training = model.training

    # -- what generation asks -----------------------------------------------------------

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids, of the generation config first."""
        eos = self._special("eos_token_id")
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`, or None."""
        return next(iter(self.eos_token_ids), None)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id of the generation config, else of the model's config, or None."""
        return self._special("pad_token_id")

    def _special(self, name: str) -> Any:
        for config in (self.model.generation_config, self.model.config.get_text_config()):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._findings.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids go: that of the input embeddings."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer that caches stores, as the model itself does it."""
        return list(self._findings.shapes)

    @property
    def why_not_recorded(self) -> str:
        """Why a decode step cannot be replayed as a CUDA graph."""
        return "K and V of a Hugging Face model come back dense, and grow from step to step"

    @property
    def max_positions(self) -> int | None:
        """The length of the model's table of positions; None where positions are computed."""
        return self._findings.max_positions

    # -- the forward pass ---------------------------------------------------------------

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
            ValueError: more tokens in a row than the model has positions, rows of different lengths for a
                model whose positions count padding, or no room in the cache.
            RuntimeError: under CUDA graph recording: dense K and V grow from step to step.
        """
        if kv_cache is None:
            logits = self._without_cache(query_token_ids)
            return logits if logits_index is None else _picked(logits, logits_index)
        refuse_recording(self.device, self.why_not_recorded)
        batch, length = query_token_ids.shape
        new = [length] * batch if query_lens is None else list(query_lens)
        window = kv_cache.reach.local_window
        if window is not None and kv_cache.prefill == "exact" and kv_cache.pos == 0:
            window = None  # such a prompt does not read the cache
        if window is not None and length > 1:
            logits = self._one_by_one(query_token_ids, kv_cache, new)
            return logits if logits_index is None else _picked(logits, logits_index)
        frame = Frame(kv_cache.row_lengths, new, self.device, window)
        return self._in_frame(query_token_ids, kv_cache, frame, logits_index)

    def _without_cache(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V), attending among the tokens alone."""
        frame = Frame([0] * len(ids), [ids.shape[1]] * len(ids), self.device)
        options, _ = self._options(frame, None)
        return self.model(input_ids=ids, use_cache=False, **options).logits

    def _in_frame(
        self, ids: Tensor, kv_cache: ModelKVCache, frame: Frame, logits_index: Tensor | None
    ) -> Tensor:
        """The model over ``ids`` (B, T) moved to the front, and what it says moved back."""
        self._check_frame(frame)
        index = None if logits_index is None else frame.query_column(logits_index)
        options, rows = self._options(frame, index)
        cache = DenseCache(kv_cache, frame, self._findings.places)
        front = frame.queries_to_front(ids)
        logits = self.model(
            input_ids=front, past_key_values=cache, use_cache=True, **options
        ).logits
        if index is None:
            return frame.queries_to_end(logits, 1, ids.shape[1])
        return _picked(logits, index if rows is None else rows)

    def _check_frame(self, frame: Frame) -> None:
        if frame.padded_keys:
            check_padding(self.model)
        limit = self._findings.max_positions
        if limit is not None and frame.total > limit:
            raise ValueError(
                f"a row would have {frame.total} tokens; the model has {limit} positions "
                "(max_position_embeddings)"
            )

    def _one_by_one(self, ids: Tensor, kv_cache: ModelKVCache, new: list[int]) -> Tensor:
        """(B, T) -> (B, T, V), a column at a time: a mask of two dimensions has one window for all queries."""
        parts = [
            self.forward(ids[:, i : i + 1], kv_cache, query_lens=[int(count > i) for count in new])
            for i in range(max(new))
        ]
        parts += parts[-1:] * (ids.shape[1] - len(parts))
        return torch.cat(parts, dim=1)

    def _options(self, frame: Frame, index: Tensor | None) -> tuple[dict[str, Any], Tensor | None]:
        """Keyword arguments of the model, and where in what it returns the logits of ``index`` are."""
        options: dict[str, Any] = {"attention_mask": frame.attention_mask}
        if self._takes_positions:
            options["position_ids"] = frame.position_ids
        if index is None or not self._keeps_logits or frame.tokens == 1:
            return options, None
        wanted, rows = torch.unique(index, return_inverse=True)
        options["logits_to_keep"] = wanted
        return options, rows


def _picked(logits: Tensor, index: Tensor) -> Tensor:
    """(B, T, V) at one place a row -> (B, 1, V)."""
    return logits[torch.arange(len(logits), device=logits.device), index.to(logits.device)][:, None]
