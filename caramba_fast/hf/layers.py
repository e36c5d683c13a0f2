"""Layers of a transformers ``Cache`` whose keys and values attention reads packed, without dequantizing them first.

The store of a `PackedLayer` grows (`CarambaLayer`), has a fixed size (`CarambaStaticLayer`), or lives for a single
forward pass (`StepLayer`, `RaggedStepLayer`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from caramba_fast.cache import LayerKVCache, Rope
from caramba_fast.cache.stream import CacheTensor
from caramba_fast.hf.compat import stock_layers
from caramba_fast.hf.lazy_tensors import PackedStates
from caramba_fast.hf.rotary import appended, rotated_keys, to_append
from caramba_fast.hf.scope import INSTEAD, NAME, implementation
from caramba_fast.hf.settings import CacheSettings
from caramba_fast.ops.hadamard import rotated

KEYS_AND_VALUES = ("keys", "values")
#: Advice for keys or values too large for fp16.
HELD_BY = "cache='bf16' or 'fp32', for both, holds all of them"


class TensorsNeededError(RuntimeError):
    """The model's own code needs the keys or values of a packed read as tensors."""


class DropoutActiveError(TensorsNeededError):
    """A packed read with dropout, which a model has only in train mode."""


def check_no_dropout(key: Any) -> None:
    """Raises DropoutActiveError for keys that can only be read packed."""
    if isinstance(key, PackedStates) and key.layer.packed_only:
        raise DropoutActiveError("dropout is active, and packed reads have none: model.eval()")


@dataclass
class Common:
    """State shared by all layers of a cache.

    Attributes:
        model: the model's name, for messages.
        settings: how K and V are stored.
        config: the decoder's config, which names its attention implementation.
        on_interface: whether that attention can be replaced by ours.
        room: tokens per row to allocate from the start, if known.
        longest: most tokens that a row is expected to have, beyond which buffers do not grow ahead; None if unknown.
        limit: most tokens of a row; None for no limit.
        leftpad: (B,) int32, the slot of each row's first token; None for slot 0. Replaced, never modified in place.
        query_rms: layer index -> RMS of its queries (`Capabilities.query_rms`).
        dequantized: how many times keys or values were dequantized to tensors.
        fits: another config that `check_layers` has accepted.
    """

    model: str
    settings: CacheSettings
    config: Any = None
    on_interface: bool = True
    room: int | None = None
    longest: int | None = None
    limit: int | None = None
    leftpad: Tensor | None = None
    query_rms: dict[int, Tensor] = field(default_factory=dict)
    dequantized: int = 0
    fits: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Common:
        """The state of a copied cache: it follows the attention of the same model, so the config is not copied.

        If the model is copied along, and before the cache, the config is that of the new model.
        """
        made = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            if name not in ("config", "fits"):
                setattr(made, name, copy.deepcopy(value, memo))
        made.config = memo.get(id(self.config), self.config)
        return made

    def why_dequantized(self) -> str:
        """Likely reason why a layer had to be dequantized."""
        if not self.on_interface:
            return f"its attention is not on the attention interface of transformers; {INSTEAD}"
        if self.config is not None and implementation(self.config) != NAME:
            return "it has its own attention; caramba_fast.accelerate(model) gives it one that reads packed"
        return f"its attention (or its mask) needs keys and values as tensors; {INSTEAD}"

    def check_layers(self, layers: int, config: Any) -> None:
        """Raises ValueError if a model with this text config has more than ``layers`` layers with a cache."""
        if config is None or config is self.config or config is self.fits:
            return
        needed = len(stock_layers(config))
        if needed > layers:
            raise ValueError(
                f"a cache for {self.model}, of {layers} layers, does not serve a model of {needed}; "
                "a CarambaCache is made for the model that uses it"
            )
        self.fits = config

    def check_length(self, tokens: int) -> None:
        """Raises ValueError if rows of ``tokens`` exceed `limit`."""
        if self.limit is not None and tokens > self.limit:
            raise ValueError(
                f"{self.model}: rows of {tokens} tokens do not fit a cache with max_seq_len={self.limit}; make a "
                "CarambaCache with a larger one, or without, which grows"
            )

    def rows_start_at(self, leftpad: Tensor | None, length: int) -> bool:
        """Records where the rows start, (B,) or None for slot 0; returns False if that contradicts what is known.

        A row that holds only padding among its ``length`` tokens may turn out to start later than assumed.
        """
        known = self.leftpad
        if known is None and leftpad is None:
            return True
        if length == 0:
            self.leftpad = leftpad
            return True
        given = known if leftpad is None else leftpad
        assert given is not None
        zeros = torch.zeros_like(given)
        before = zeros if known is None else known.to(given.device)
        now = zeros if leftpad is None else leftpad
        if before.shape != now.shape:
            return False
        if torch.equal(before, now):  # keep the same tensor: calls prepared with it can be repeated
            return True
        if not bool(((now == before) | ((before >= length) & (now >= length))).all()):
            return False
        self.leftpad = leftpad
        return True


class PackedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, read packed.

    Attributes:
        store: has ``attend(query, **options)`` and ``ring_len``; None before the first tokens.
        packed_only: whether the layer cannot be dequantized to tensors.
        real_queries: per row, the number of query columns that are not padding; None for all.
    """

    store: Any
    packed_only = True
    real_queries: list[int] | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest row so far."""
        raise NotImplementedError

    @property
    def leftpad(self) -> Tensor | None:
        """(B,) int32: slot in the store where each row starts; None for slot 0."""
        return None

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        """Stores (B, H_kv, T, D) keys and values; returns whether attention should use them unquantized.

        ``rope`` is applied to the keys as they are stored, and to the queries of the same step.
        """
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T, D) keys and values; returns stand-ins for everything stored.

        On an empty cache with ``prefill="exact"`` it returns the given keys and values instead.
        """
        keys, rope = to_append(key_states)
        values = value_states
        if torch.is_grad_enabled():
            keys, values = keys.detach(), values.detach()
        exact = self._append(keys, values, rope)
        if rope is not None:
            appended(key_states, rope)
        if exact:
            return key_states, value_states
        return PackedStates.both(self, key_states, value_states)

    def get_max_length(self) -> int:
        """-1: no limit that the model needs to know."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be queries of `store`."""
        return not self.store.ring_len or tokens <= self.store.attendable

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Token positions (B,) -> slots in the store; None stands for the first token."""
        return tokens

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """Per row: where it starts, and the index of its token in the first of the ``tokens`` newest columns."""
        raise NotImplementedError

    def dequantized(self, stream: str, dtype: torch.dtype, length: int) -> Tensor:  # noqa: ARG002
        """The first ``length`` keys ("k") or values ("v") of every row, as a tensor.

        Raises TensorsNeededError if the layer is packed-only: its masks do not fit tensors.
        """
        raise TensorsNeededError("its attention (or its mask) needs keys and values as tensors")


class StoringLayer(CacheLayerMixin):
    """A layer that lives as long as its cache and creates its store when the first keys and values arrive.

    Args:
        index, common: its index in the model, and the state shared by the layers of the cache.
        window: for sliding or chunked layers, the most tokens a query can see; None for all.
        chunked: whether the layer attends within chunks, whose starts differ by row.
        lends: whether later layers also attend to its keys and values.
    """

    is_croppable = True
    #: The layer surely holds keys and values of lower magnitude; infinite if it holds whatever the model's dtype does,
    #: and where nothing is checked (see `StoringCache`).
    held_below = math.inf

    def __init__(
        self,
        index: int,
        common: Common,
        window: int | None = None,
        chunked: bool = False,
        lends: bool = False,
    ) -> None:
        CacheLayerMixin.__init__(self)  # not super(): some layers have more bases
        self.index, self.common, self.lends = index, common, lends
        self.sliding_window, self.chunked = window, chunked
        self.is_sliding = window is not None
        self.store: LayerKVCache | None = None

    def _made(self) -> LayerKVCache:
        assert self.store is not None
        return self.store

    def _first_room(self) -> int:
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Creates the store, for keys and values of these shapes (B, H_kv, T, D)."""
        values = key_states if value_states is None else value_states
        batch, heads, tokens, dim = key_states.shape
        k_cfg, v_cfg = self.common.settings.k, self.common.settings.v
        if self.is_sliding:  # no sinks: the first tokens leave the window first
            k_cfg, v_cfg = (c.model_copy(update={"sink_len": 0}) for c in (k_cfg, v_cfg))
        with torch.inference_mode(False):
            self.store = LayerKVCache(
                batch, max(self._first_room(), tokens, 1), heads * dim, heads * values.shape[3],
                k_cfg, v_cfg, key_states.device, heads, query_rms=partial(self._query_rms, (heads, dim)),
            )  # fmt: skip
        self.store.attended_again = self.lends
        self.dtype, self.device = key_states.dtype, key_states.device
        self._set_held_below()
        self.is_initialized = True

    def _follow(self, keys: Tensor) -> None:
        """A layer without tokens takes the dtype and the device of the first that come."""
        if (self.dtype, self.device) != (keys.dtype, keys.device):
            self.dtype, self.device = keys.dtype, keys.device
            self._set_held_below()

    def _set_held_below(self) -> None:
        self.held_below = math.inf
        if self.device.type != "cpu":
            return
        streams = self._made().streams.values()
        if torch.finfo(self.dtype).max > min(stream.largest for stream in streams):
            # a rotation is orthonormal
            self.held_below = min(
                x.largest / (math.sqrt(x.head_dim) if x.config.rotate else 1.0) for x in streams
            )

    def overflow(self, keys: Tensor, values: Tensor) -> str | None:
        """Which of the newest keys and values (B, H_kv, T, D), just stored, are too large for it; None if none are.

        Padding in front of rows does not count, nor do infinite values and NaN, which are the model's own.
        """
        store, leftpad = self._made(), self.common.leftpad
        end = int(self.get_seq_length())
        for name, stream, new in zip(
            KEYS_AND_VALUES, store.streams.values(), (keys, values), strict=True
        ):
            x = rotated(rotated_keys(new).detach(), stream.config.rotate)
            if leftpad is not None:
                column = torch.arange(end - x.shape[2], end, device=x.device)
                x = x.masked_fill((column < leftpad[:, None])[:, None, :, None], 0)
            found = float(x.abs().max())
            if stream.largest < found < math.inf:
                place = f"{self.common.model}: layer {self.index}"
                return f"{place} has {name} of up to {found:.6g}, and {self.holds(stream)}"
        return None

    def holds(self, stream: CacheTensor) -> str:
        """How large the values of a stream may be, for messages."""
        kinds = "/".join(x.config.kind.value for x in self._made().streams.values())
        return f"a cache in {kinds} holds them up to {stream.largest:,.0f}: {HELD_BY}"

    def can_take_back(self, tokens: int) -> bool:  # noqa: ARG002
        """Whether `take_back` is possible."""
        return True

    def take_back(self, tokens: int) -> None:
        """Removes the newest ``tokens``, of an uncompiled pass that failed."""
        raise NotImplementedError

    def _query_rms(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Empty for keys of another shape than the model's, for example of a subset of its heads."""
        found = self.common.query_rms.get(self.index)
        return {} if found is None or found.shape != shape else {"k": found}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.store is None else self.store.nbytes
