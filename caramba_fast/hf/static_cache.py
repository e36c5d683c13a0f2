"""CarambaStaticCache: packed layers of fixed size, for ``torch.compile(fullgraph=True)`` and CUDA graphs."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.hf.checks import evaluating
from caramba_fast.hf.common import Common
from caramba_fast.hf.compat import query_length
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.packed_cache import CarambaCache
from caramba_fast.hf.packed_layer import CarambaLayer
from caramba_fast.hf.registering import NAME
from caramba_fast.hf.settings import CacheArgument, CacheSettings
from caramba_fast.hf.static_layer import CarambaStaticLayer


class CarambaStaticCache(Cache):
    """``past_key_values`` of fixed size: as `CarambaCache`, with nothing of a decode step on the host.

    Prompts run uncompiled, as with transformers' own static cache. Another cache of the same sizes does not make
    ``torch.compile`` compile again. It can be cropped between steps; transformers takes it for prompt lookup and
    assistants from 5.1 on.

    Args:
        model: the model it is for, which must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``).
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_cache_len: tokens a row has room for. More raise where masks are made outside of compiled code, as in
            `generate`; a forward pass that is compiled as a whole cannot raise, and drops them.
        options: as in `CacheSettings.of`.

    Raises:
        TypeError: a model whose attention needs keys and values as tensors, or has layers of other kinds.
        ValueError: our attention is not in use, or a kind or setting that does not exist.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheArgument = "q4",
        *,
        max_cache_len: int,
        **options: Any,
    ) -> None:
        self._make(model, CacheSettings.of(cache, **options), max_cache_len)

    @classmethod
    def of(
        cls, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int
    ) -> CarambaStaticCache:
        """The same, from settings that are made already."""
        made = cls.__new__(cls)
        made._make(model, settings, max_cache_len)
        return made

    def _make(self, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int) -> None:
        check_reads_packed(model)
        makers = CarambaCache.of(model, settings, max_cache_len)
        self.common: Common = makers.common
        layers: list[Any] = []
        for maker in makers.layers:
            assert isinstance(maker, CarambaLayer)
            layers.append(CarambaStaticLayer(max_cache_len, maker))
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def max_cache_len(self) -> int:
        """Tokens a row has room for."""
        return int(self.layers[0].max_cache_len)

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Slots a layer returns, and the first one; the mask function is called next.

        Raises:
            ValueError: the tokens that are coming do not fit, before any is written.
        """
        sizes = super().get_mask_sizes(given, layer_idx)
        if not torch.compiler.is_compiling():
            self._check_room(query_length(given))
            expect_mask(self, sizes[0])
        return sizes

    def _check_room(self, tokens: int) -> None:
        """Reads the length from the device, but not while a CUDA graph is recorded, which could not hold that."""
        layer = self.layers[0]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        layer.check_room(layer.count(), tokens)

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Where rows start, (B,) or None for 0, told by the mask of the prompt."""
        if self.layers[0].is_empty:
            self.common.leftpad = leftpad
        return True


_READS_PACKED: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


@torch.no_grad()
def check_reads_packed(model: PreTrainedModel) -> None:
    """Raises where a step of ``model`` asks the cache for tensors: two small forward passes, once.

    Raises:
        TypeError: it does, or it has layers that are not packed.
        ValueError: it does not use our attention.
    """
    name = type(model).__name__
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise ValueError(
            f"{name} does not use our attention, which a static cache needs: accelerate(model), or register() "
            f'and model.set_attn_implementation("{NAME}")'
        )
    if model not in _READS_PACKED:
        cache = CarambaCache(model, "fp32")
        if not all(isinstance(layer, CarambaLayer) for layer in cache.layers):
            raise TypeError(f"{name} has layers of other kinds than attention; use CarambaCache")
        embeddings: Any = model.get_input_embeddings()
        ids = torch.zeros(1, 2, dtype=torch.int64, device=embeddings.weight.device)
        with warnings.catch_warnings(), evaluating(model):
            warnings.simplefilter("ignore")
            for part in (ids, ids[:, :1]):
                model(input_ids=part, past_key_values=cache, use_cache=True)
        _READS_PACKED[model] = cache.dequantizations
    if _READS_PACKED[model]:
        raise TypeError(
            f"the attention of {name} needs keys and values as tensors, which a static cache does not have; "
            "use CarambaCache"
        )
