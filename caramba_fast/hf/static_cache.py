"""CarambaStaticCache: packed layers of fixed size, for ``torch.compile(fullgraph=True)`` and CUDA graphs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.hf.capabilities import capabilities_of
from caramba_fast.hf.compat import query_length
from caramba_fast.hf.masks import expect_compiled_mask, expect_mask
from caramba_fast.hf.packed_cache import StoringCache
from caramba_fast.hf.scope import NAME, implementation
from caramba_fast.hf.settings import CacheArgument, CacheSettings
from caramba_fast.hf.static_layer import CarambaStaticLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.hf.settings import StorageOptions


class CarambaStaticCache(StoringCache):
    """A cache of fixed size: like `CarambaCache`, but decode steps have no host-side state.

    Prompts run uncompiled, as with transformers' own static cache. Another cache of the same sizes does not trigger
    recompilation. It can be cropped between steps; transformers accepts it for prompt lookup and assisted generation
    from 5.1 on.

    Args:
        model: the model the cache is for. It must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``).
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_cache_len: capacity of a row in tokens. Exceeding it raises ValueError where masks are made outside of
            compiled code, as in `generate`. A forward pass compiled as a whole cannot raise; it drops the excess
            tokens.
        options: as in `CacheSettings.of`.

    Raises:
        TypeError: the model's attention needs keys and values as tensors, or it has layers of other kinds.
        ValueError: our attention is not in use; or unknown kind or setting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheArgument = "q4",
        *,
        max_cache_len: int,
        **options: Unpack[StorageOptions],
    ) -> None:
        self._make(model, CacheSettings.of(cache, **options), max_cache_len)

    @classmethod
    def of(
        cls, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int
    ) -> CarambaStaticCache:
        """Makes a cache from existing settings."""
        made = cls.__new__(cls)
        made._make(model, settings, max_cache_len)
        return made

    def _make(self, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int) -> None:
        _check_reads_packed(model)
        self._fill(model, settings, max_cache_len, partial(CarambaStaticLayer, max_cache_len))

    def initialize(self, model: PreTrainedModel, rows: int) -> None:
        """Allocates all layers for ``rows`` rows ahead of the first tokens, so that prompts can run compiled, too."""
        embeddings: Any = model.get_input_embeddings()
        like = embeddings.weight
        for index, shape in capabilities_of(model).attention_shapes.items():
            heads = (rows, shape.n_kv_heads, 0)
            k, v = (
                torch.empty(*heads, dim // shape.n_kv_heads, dtype=like.dtype, device=like.device)
                for dim in (shape.k_dim, shape.v_dim)
            )
            self.layers[index].lazy_initialization(k, v)

    @property
    def max_cache_len(self) -> int:
        """Capacity of a row in tokens."""
        return int(self.layers[0].max_cache_len)

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Number of slots a layer returns, and the first one; the mask function is called next.

        Raises ValueError, before anything is written, if the new tokens do not fit or the model has lost our attention.
        """
        sizes = Cache.get_mask_sizes(self, given, layer_idx)
        if torch.compiler.is_compiling():
            expect_compiled_mask(self)
        else:
            _check_attention(self.common.model, self.common.config)
            tokens = query_length(given)
            self._check_room(tokens)
            for layer in () if self.exact_next else self.layers:
                layer.check_chunks(tokens)
            expect_mask(self, sizes[0], self.layers[layer_idx].sliding_window)
        return sizes

    def _check_room(self, tokens: int) -> None:
        """Reads the length from the device, except during CUDA graph capture, which does not allow that.

        After a compiled prompt, which the host knows nothing of, it also reads where the rows start.
        """
        layer = self.layers[0]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        known, held = layer.counted, layer.count()
        layer.check_room(held, tokens)
        if held and not known:
            self.common.leftpad = layer.starts.clone() if bool(layer.starts.any()) else None

    def check_rows(self, rows: int, config: Any = None) -> None:
        """Raises ValueError if the cache was made for another number of rows, or a model of fewer layers."""
        self.common.check_layers(len(self.layers), config)
        self.layers[0].check_rows(rows)

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Records where the mask says rows start, (B,) or None for slot 0; False if that contradicts what is stored."""
        before, first = self.common.leftpad, self.layers[0]
        if not self.common.rows_start_at(leftpad, first.counted):
            return False
        if self.common.leftpad is not before:
            for layer in self.layers:
                layer.take_starts()  # now: a compiled prompt gets no other chance
        return True

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed(f"batch_repeat_interleave({repeats})")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed(f"batch_select_indices of {indices.numel()}")

    def offload(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed(f"offload({layer_idx})")

    def prefetch(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed(f"prefetch({layer_idx})")

    def state_dict(self) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed("state_dict")

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: rows, device and buffers are fixed."""
        self._fixed("load_state_dict")

    def _fixed(self, asked: str) -> NoReturn:
        """Raises NotImplementedError: compiled steps rely on fixed rows, device and buffers."""
        raise NotImplementedError(
            f"CarambaStaticCache has no {asked}: its rows and memory stay as they are, for compiled steps; use "
            "CarambaCache (or pickle this one, to keep it)"
        )

    @property
    def exact_next(self) -> bool:
        """Whether the next tokens attend to each other unquantized; any mask is then supported."""
        return bool(self.layers[0].is_empty and self.common.settings.prefill == "exact")


def _check_reads_packed(model: PreTrainedModel) -> None:
    """Raises TypeError if the model's steps need dequantized tensors, ValueError if it does not use our attention."""
    name, known = type(model).__name__, capabilities_of(model)
    if not known.configs:
        raise TypeError(
            f"the attention of {name} is not on the attention interface of transformers, so it cannot read a static "
            "cache; use CarambaCache (cache_implementation=None), which gives it tensors"
        )
    _check_attention(name, model.config.get_text_config(decoder=True))
    if known.lenders:
        raise TypeError(
            f"{name} has layers that attend to keys and values of earlier ones, which a static cache gives once; "
            "use CarambaCache"
        )
    if getattr(model.config.get_text_config(), "cross_attention_layers", None):
        raise TypeError(
            f"some layers of {name} store images in place of tokens (cross_attention_layers); use CarambaCache"
        )
    if known.dequantizations:
        raise TypeError(
            f"the attention of {name} needs keys and values as tensors, which a static cache does not have; "
            "use CarambaCache"
        )


def _check_attention(name: str, config: Any) -> None:
    """Raises ValueError if a model with this text config does not use our attention."""
    if implementation(config) != NAME:
        raise ValueError(
            f"{name} does not use our attention, which a static cache needs: accelerate(model), or register() "
            f'and model.set_attn_implementation("{NAME}")'
        )
