"""ModelFacts: what generation asks of a model of transformers besides its forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from caramba_fast.cache import AnyLayerShape, LayerShape
from caramba_fast.hf.probe import probe
from caramba_fast.hf.reads import chunks_of


class ModelFacts(nn.Module):
    """Special ids, sizes, and what layers cache, from configs and from asking the model.

    Args:
        model: a causal language model.

    Raises:
        TypeError: its layers do not keep keys and values the way a transformers Cache does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._findings = probe(model)

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
        """Width of the logits; after ``resize_token_embeddings`` the model is asked again."""
        found = probe(self.model)
        if found is not self._findings:
            self._findings = found
        return found.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids go: that of the input embeddings."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer that caches stores, as the model itself does it.

        Rows of a chunk start elsewhere than the phases of their keys: those layers' RoPE is left unsaid.
        """
        chunks = chunks_of(self.model)
        return [
            replace(shape, rope=None, key_bias=None)
            if place in chunks and isinstance(shape, LayerShape)
            else shape
            for place, shape in zip(self._findings.places, self._findings.shapes, strict=True)
        ]

    @property
    def max_positions(self) -> int | None:
        """The length of the model's table of positions; None where positions are computed."""
        return self._findings.max_positions
