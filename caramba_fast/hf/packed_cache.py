"""CarambaCache: a transformers cache whose attention layers are packed and read without dequantizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache.state import deepcopied
from caramba_fast.hf.cache_state import load_state, move_stock, state_of
from caramba_fast.hf.capabilities import capabilities_of, check_cacheable
from caramba_fast.hf.compat import EMPTY, query_length
from caramba_fast.hf.growing_layer import CarambaLayer
from caramba_fast.hf.hybrid_layer import packed_layers
from caramba_fast.hf.layers import Common, StoringLayer
from caramba_fast.hf.rotary import before_rotation
from caramba_fast.hf.scope import decoder_configs
from caramba_fast.hf.settings import CacheArgument, CacheSettings
from caramba_fast.hf.step_cache import PackedCache
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.hf.settings import StorageOptions


class New(NamedTuple):
    """The ``tokens`` that a layer has stored in this pass: keys and values, until they are checked."""

    layer: StoringLayer
    tokens: int
    states: tuple[Tensor, ...]


@torch.no_grad()
def _surely_held(stored: Sequence[New]) -> bool:
    """Whether all layers hold these keys and values, by their largest magnitude; False for NaN."""
    alike: dict[tuple[torch.Size, float], list[Tensor]] = {}
    for x, growth in (before_rotation(x) for new in stored for x in new.states):
        alike.setdefault((x.shape, growth), []).append(x)
    held = min(new.layer.held_below for new in stored)
    for (_, growth), parts in alike.items():
        least, largest = torch.aminmax(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
        most = held / growth
        if not (-most <= float(least) and float(largest) <= most):
            return False
    return True


class StoringCache(PackedCache):
    """Base of `CarambaCache` and `CarambaStaticCache`; ``common`` is the state shared by the layers."""

    common: Common
    #: Index of the last packed layer.
    _last = -1
    _new: list[New]

    def _fill(
        self,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None,
        kind: Callable[..., Any],
    ) -> None:
        check_cacheable(model)
        config = model.config.get_text_config(decoder=True)
        name, on_interface, self._new = type(model).__name__, bool(decoder_configs(model)), []
        self.common = Common(name, settings, config, on_interface, room)
        if (
            settings.k.divides_bytes
        ):  # probed here, because stores are created in the middle of a forward pass
            self.common.query_rms = capabilities_of(model).query_rms
        Cache.__init__(self, layers=packed_layers(self.common, kind))
        packed = (i for i, layer in enumerate(self.layers) if isinstance(layer, StoringLayer))
        self._last = max(packed, default=-1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a layer; see `PackedLayer.update`.

        On a CPU, raises ValueError for keys or values too large for how they are stored, and takes back what was stored
        in this pass. A few tokens are checked with the last layer, because a check takes as long as a short op.
        """
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        if not torch.compiler.is_compiling():
            self._check_range(layer_idx, key_states, value_states)
        return found

    def _check_range(self, index: int, keys: Tensor, values: Tensor) -> None:
        layer, tokens, stored = self.layers[index], keys.shape[2], self._new
        if stored and index <= stored[-1].layer.index:  # of an earlier pass
            stored.clear()
        if getattr(layer, "held_below", math.inf) < math.inf:
            stored.append(New(layer, tokens, (keys, values)))
            if tokens <= MAX_QUERY_TOKENS and index < self._last:
                return
        if not stored:
            return
        if not _surely_held(stored):
            for new in stored:
                problem = new.layer.overflow(*new.states) if new.states else None
                if problem:
                    raise ValueError(f"{problem}{self._take_back()}")
        self._new = [] if index >= self._last else [new._replace(states=()) for new in stored]

    def _take_back(self) -> str:
        """Removes what the layers have stored in this pass, or everything if one of them has no way back."""
        stored, self._new = self._new, []
        others = (x for x in self.layers if not isinstance(x, (StoringLayer, *EMPTY)))
        if next(others, None) is not None or not all(
            new.layer.can_take_back(new.tokens) for new in stored
        ):
            self.reset()
            return "; the cache is empty now"
        for new in stored:
            new.layer.take_back(new.tokens)
        return ""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]``."""
        super().reorder_cache(beam_idx)
        self._move_starts(beam_idx)

    __deepcopy__ = deepcopied

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


def expect(cache: CarambaCache, first: int, longest: int) -> None:
    """Makes room for rows of ``first`` tokens, which may grow to ``longest``; ValueError beyond ``max_seq_len``."""
    cache.common.check_length(longest)
    cache.common.longest = max(longest, cache.common.longest or 0)
    cache.reserve(first)


class CarambaCache(StoringCache):
    """A quantized cache for a transformers model: its ``cache=``, or ``past_key_values=`` before transformers 5.24.

    Full, sliding-window and chunked attention layers are packed; layers of other kinds (linear attention, convolutions)
    are those of a stock `DynamicCache`. Memory is allocated with the first tokens, and grows unless ``max_seq_len`` is
    given; `reserve` allocates ahead.

    Args:
        model: the model the cache is for. It must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``), or every step dequantizes.
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_seq_len: most tokens of a row, padding included; memory for them is allocated with the first tokens.
            Exceeding it raises ValueError before anything is written. None for no limit.
        offloading: whether layers stay on the CPU while they are not attended to.
        options: ``prefill`` and the fields of `CacheSettings.of`.

    Raises:
        TypeError: the model cannot use such a cache (encoder-decoder, recurrent, …); the message says why.
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
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

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
