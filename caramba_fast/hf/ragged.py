"""A transformers ``Cache`` over the pages of a `RaggedBatch`: tokens of many requests in one row, for one forward pass.

To the model they are one sequence of N tokens with positions of their own; attention takes each token to the pages
of its request. Nothing is padded and no mask is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import RaggedBatch
from caramba_fast.cache.ragged import RaggedLayer
from caramba_fast.hf.capabilities import Findings
from caramba_fast.hf.layers import TensorsNeededError
from caramba_fast.hf.lazy_tensors import PackedStates
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.packed_trial import reading
from caramba_fast.hf.scope import our_attention

if TYPE_CHECKING:
    from caramba_fast.hf.adapter import HuggingFaceModel


#: Kinds of RoPE whose frequencies depend on the longest position there is.
CHANGING_ROPE = ("dynamic", "longrope")


class _Pages:
    """One layer of a batch as `caramba_attention` reads a store."""

    def __init__(self, layer: RaggedLayer) -> None:
        self.layer = layer

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """(1, H_q, N, D) -> (1, H_q, N, D_v)."""
        out = self.layer.attend_tokens(query[0].transpose(0, 1), **options)
        return out.transpose(0, 1)[None]


class RaggedStepLayer(CacheLayerMixin):
    """One layer of one forward pass.

    Args:
        layer: its part of the batch.
        longest: tokens of the longest sequence, new ones included.
    """

    is_sliding = False  # windows are in the mask: all tokens are kept
    packed_only = True

    def __init__(self, layer: RaggedLayer, longest: int) -> None:
        super().__init__()
        self.layer, self.length, self.store = layer, longest, _Pages(layer)
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: the pages are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (1, H_kv, N, D) keys and values; what it returns stands for the pages."""
        self.layer.append_tokens(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        made: Any = self
        return PackedStates.of(made, "k", key_states), PackedStates.of(made, "v", value_states)

    def get_seq_length(self, *_: Any) -> int:
        """None before the batch: every token has a position of its own."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Tokens of the longest sequence: as far as a window can reach back."""
        return self.length, 0

    def get_max_length(self) -> int:
        """No limit that a model would have to know."""
        return -1

    get_max_cache_shape = get_max_length  # the name it had in transformers 4

    def serves(self, tokens: int) -> bool:  # noqa: ARG002 - pages have no tail
        """Whether that many queries can be attended from: any number."""
        return True

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Places in a sequence -> slots: the same."""
        return tokens

    def dequantized(self, *_: Any) -> NoReturn:
        """Pages of many sequences are no tensor.

        Raises:
            TensorsNeededError: always.
        """
        raise TensorsNeededError("its attention (or its mask) needs keys and values as tensors")


class RaggedCache(Cache):
    """What a model is given as ``past_key_values``.

    Args:
        batch: where each token belongs.
        findings: which of the model's layers each of the batch's belongs to.
    """

    def __init__(self, batch: RaggedBatch, findings: Findings) -> None:
        places = findings.places
        found = {
            place: RaggedStepLayer(layer, batch.longest)
            for place, layer in zip(places, batch.layers, strict=True)
        }
        some = found[places[0]]
        super().__init__(layers=[found.get(i, some) for i in range(max(places) + 1)])

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0])
        return sizes

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Sequences start at their first page; False for anything else."""
        return leftpad is None


def why_not_ragged(model: HuggingFaceModel) -> str | None:
    """Why a model cannot take tokens of many requests side by side; None if it can."""
    if model.why_dense is not None:
        return model.why_dense
    if reading(model.model, model._findings).chunks:
        return "its layers attend within chunks, which start elsewhere in every request"
    return None


def ragged_limit(model: HuggingFaceModel) -> int | None:
    """Most tokens of a sequence; None for no limit.

    Some kinds of RoPE choose their frequencies by the longest position of a pass: beyond the length they were trained
    for, a token's keys would depend on who else is in the batch.
    """
    config = model.model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    found = [
        part.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for part in parts
        if (part.get("rope_type") or part.get("type")) in CHANGING_ROPE
    ]
    return min(found, default=None)


def forward_ragged(
    model: HuggingFaceModel, ids: Tensor, batch: RaggedBatch, rows: Tensor
) -> Tensor:
    """Tokens (N,) of many sequences through the model; (M, V) logits behind those of ``rows`` (M,)."""
    findings = model._findings
    kept = rows if len(rows) else rows.new_zeros(1)  # none at all would mean every one
    options: dict[str, Any] = {"logits_to_keep": kept} if model._keeps_logits else {}
    with our_attention(reading(model.model, findings).configs):
        logits: Tensor = model.model(
            input_ids=ids[None], position_ids=batch.positions[None], use_cache=True,
            past_key_values=RaggedCache(batch, findings), **options,
        ).logits[0]  # fmt: skip
    return logits[: len(rows)] if options else torch.index_select(logits, 0, rows)
