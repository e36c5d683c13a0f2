"""CarambaCache: a transformers cache whose attention layers are packed and read without dequantizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.hf.cache_state import load_state, move_stock, state_of
from caramba_fast.hf.capabilities import capabilities_of, check_cacheable
from caramba_fast.hf.compat import query_length
from caramba_fast.hf.growing_layer import CarambaLayer
from caramba_fast.hf.hybrid_layer import packed_layers
from caramba_fast.hf.layers import Common, StoringLayer
from caramba_fast.hf.scope import decoder_configs
from caramba_fast.hf.settings import CacheArgument, CacheSettings
from caramba_fast.hf.step_cache import PackedCache

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.hf.settings import StorageOptions


class StoringCache(PackedCache):
    """Base of `CarambaCache` and `CarambaStaticCache`; ``common`` is the state shared by the layers."""

    common: Common

    def _fill(
        self,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None,
        kind: Callable[..., Any],
    ) -> None:
        check_cacheable(model)
        config = model.config.get_text_config(decoder=True)
        name, on_interface = type(model).__name__, bool(decoder_configs(model))
        self.common = Common(name, settings, config, on_interface, room)
        if (
            settings.k.divides_bytes
        ):  # probed here, because stores are created in the middle of a forward pass
            self.common.query_rms = capabilities_of(model).query_rms
        Cache.__init__(self, layers=packed_layers(self.common, kind))

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]``."""
        super().reorder_cache(beam_idx)
        self._move_starts(beam_idx)

    def _move_starts(self, index: Tensor) -> None:
        leftpad = self.common.leftpad
        if leftpad is not None:
            self.common.leftpad = leftpad[index.to(leftpad.device)]

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        super().reset()
        self.common.leftpad = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, StoringLayer))


class CarambaCache(StoringCache):
    """``past_key_values`` for a transformers model.

    Full, sliding-window and chunked attention layers are packed; layers of other kinds (linear attention, convolutions)
    are those of a stock `DynamicCache`. Memory is allocated with the first tokens, and grows unless ``max_seq_len`` is
    given; `reserve` allocates ahead.

    Args:
        model: the model the cache is for. It must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``), or every step dequantizes.
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_seq_len: most tokens of a row, padding included, allocated up front. Exceeding it raises ValueError before
            anything is written. None for no limit.
        offloading: whether layers stay on the CPU while they are not attended to.
        prefill, fields: as in `CacheSettings.of`.

    Raises:
        TypeError: the model keeps no keys and values of its own; the message says why.
        ValueError: unknown kind or setting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheArgument = "q4",
        *,
        max_seq_len: int | None = None,
        offloading: bool = False,
        **options: Unpack[StorageOptions],
    ) -> None:
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len is {max_seq_len}; 1 or more, or None for no limit")
        self._make(model, CacheSettings.of(cache, **options), max_seq_len, offloading)
        self.common.limit = max_seq_len

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None = None,
        offloading: bool = False,
    ) -> CarambaCache:
        """Makes a cache without a length limit from existing settings, with room for rows of ``room`` tokens."""
        made = cls.__new__(cls)
        made._make(model, settings, room, offloading)
        return made

    def _make(
        self,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None,
        offloading: bool,
    ) -> None:
        self._fill(model, settings, room, CarambaLayer)
        self.offloads = offloading

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a layer; see `CarambaLayer.update`. Runs uncompiled inside compiled models."""
        if torch.compiler.is_compiling():
            return _update(self, key_states, value_states, layer_idx, *args, **kwargs)
        if self.offloads:
            self._offload_others(layer_idx)
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return found

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """As `PackedCache.get_mask_sizes`; raises ValueError, before any layer is written, beyond ``max_seq_len``."""
        if self.common.limit is not None:
            self.common.check_length(self.length + query_length(given))
        return super().get_mask_sizes(given, layer_idx)

    def crop(self, count: int) -> None:
        """Removes the newest tokens, of all layers or, if one of them refuses, of none.

        ``count`` means what it means for `Cache.crop` of the installed transformers.
        """
        for layer in self._packed():
            layer.removed_by(count)
        # Layers of transformers first: the first of them may refuse, too.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, CarambaLayer)):
            layer.crop(count)

    def _offload_others(self, layer_idx: int) -> None:
        for index, layer in enumerate(self._packed()):
            if index != layer_idx:
                layer.offload()

    def check_rows(self, rows: int, config: Any = None) -> None:
        """Raises ValueError if the cache holds tokens of another number of rows, or is for a model of fewer layers."""
        self.common.check_layers(len(self.layers), config)
        self._packed()[0].check_rows(rows)

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Records where rows start, (B,) or None for slot 0; False if that contradicts what is stored."""
        if leftpad is None and self.common.leftpad is None:  # fast path: every step gets here
            return True
        return self.common.rows_start_at(leftpad, self.length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times, as ``repeat_interleave``."""
        super().batch_repeat_interleave(repeats)
        leftpad = self.common.leftpad
        if leftpad is not None:
            self.common.leftpad = leftpad.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        super().batch_select_indices(indices)
        self._move_starts(indices)

    def _packed(self) -> list[CarambaLayer]:
        return [layer for layer in self.layers if isinstance(layer, CarambaLayer)]

    @property
    def max_seq_len(self) -> int | None:
        """Most tokens of a row; None for no limit."""
        return self.common.limit

    @property
    def max_cache_len(self) -> int:
        """`max_seq_len` under the name that PEFT uses; -1 for no limit."""
        return -1 if self.common.limit is None else self.common.limit

    @property
    def length(self) -> int:
        """Tokens of a row, padding included."""
        return max((layer.length for layer in self._packed()), default=0)

    @property
    def dequantizations(self) -> int:
        """How many times keys or values of a layer were dequantized to tensors; ideally 0."""
        return self.common.dequantized

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of ``tokens``, also in layers without tokens yet; ValueError beyond ``max_seq_len``."""
        self.common.check_length(tokens)
        self.common.room = max(tokens, self.common.room or 0)
        for layer in self._packed():
            layer.reserve(tokens)

    def to(self, device: torch.device | str) -> CarambaCache:
        """Moves everything to a device; returns itself. Attention needs the cache on the model's device."""
        for layer in self.layers:
            if not isinstance(layer, CarambaLayer):
                move_stock(layer, device)
            elif layer.store is not None:
                layer.store = layer.store.to(device)
        if self.common.leftpad is not None:
            self.common.leftpad = self.common.leftpad.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The contents as tensors, numbers and names, for ``torch.save`` and loading with ``weights_only=True``.

        Non-attention layers of a hybrid model are saved as the installed version of transformers represents them.
        """
        return state_of(self.common, self.layers)

    def load_state_dict(
        self, state: dict[str, Any], device: torch.device | str | None = None
    ) -> CarambaCache:
        """Restores the state of a cache of the same model and storage; returns itself.

        ``device`` is by default that of the state's tensors. Raises ValueError if the state has another format, number
        or kind of layers, or storage.
        """
        load_state(self.common, self.layers, state, device)
        return self


@torch.compiler.disable(
    reason="lazy keys and values cannot be traced: each wrapper around would be, in vain"
)
def _update(cache: CarambaCache, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return cache.update(*args, **kwargs)
