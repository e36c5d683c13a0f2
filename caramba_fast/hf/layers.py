"""Layers of a transformers ``Cache`` whose keys and values attention reads as they are stored.

`PackedLayer` is what attention sees. Beneath it is a store that grows (`CarambaLayer`, of a `CarambaCache`), one of
fixed size (`CarambaStaticLayer`), or one that serves a single forward pass (`StepLayer`, `RaggedStepLayer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from caramba_fast.cache import LayerKVCache, Rope
from caramba_fast.hf.lazy_tensors import PackedStates
from caramba_fast.hf.rotary import appended, to_append
from caramba_fast.hf.scope import INSTEAD, NAME, implementation
from caramba_fast.hf.settings import CacheSettings


class TensorsNeededError(RuntimeError):
    """A model's own code has asked for keys and values of a packed read as tensors."""


class DropoutActiveError(TensorsNeededError):
    """A packed read with dropout, which a model has in train mode alone."""


def check_no_dropout(key: Any) -> None:
    """Raises DropoutActiveError for keys that can only be read as they are stored."""
    if isinstance(key, PackedStates) and key.layer.packed_only:
        raise DropoutActiveError("dropout is active, and packed reads have none: model.eval()")


@dataclass
class Common:
    """What all layers of a cache share.

    Attributes:
        model: the model's name, for messages.
        settings: how K and V are stored.
        config: the decoder's, which names its attention.
        on_interface: whether that attention can be ours.
        room: tokens a row is to have room for from the start, if known.
        limit: most tokens of a row; None for no limit.
        leftpad: (B,) int32, where rows start; None for slot 0. Replaced as a whole, never written into.
        query_rms: how large the queries of each layer are, by its number (`Capabilities.query_rms`).
        dequantized: how many times keys or values were asked for as tensors.
    """

    model: str
    settings: CacheSettings
    config: Any = None
    on_interface: bool = True
    room: int | None = None
    limit: int | None = None
    leftpad: Tensor | None = None
    query_rms: dict[int, Tensor] = field(default_factory=dict)
    dequantized: int = 0

    def why_dequantized(self) -> str:
        """Why a layer may have been asked for tensors."""
        if not self.on_interface:
            return f"its attention is not on the attention interface of transformers; {INSTEAD}"
        if self.config is not None and implementation(self.config) != NAME:
            return "it has its own attention; caramba_fast.accelerate(model) gives it one that reads packed"
        return f"its attention (or its mask) needs keys and values as tensors; {INSTEAD}"

    def check_length(self, tokens: int) -> None:
        """Raises ValueError for rows of ``tokens``, if that is more than a row may have."""
        if self.limit is not None and tokens > self.limit:
            raise ValueError(
                f"{self.model}: rows of {tokens} tokens do not fit a cache with max_seq_len={self.limit}; make a "
                "CarambaCache with a larger one, or without, which grows"
            )

    def rows_start_at(self, leftpad: Tensor | None, length: int) -> bool:
        """Where rows start that hold ``length`` tokens, (B,) or None for 0; False where that contradicts what is known.

        A row of which nothing but padding is stored yet may start later than it seemed.
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
        if torch.equal(before, now):  # the known tensor stays: calls made with it can be repeated
            return True
        if not bool(((now == before) | ((before >= length) & (now >= length))).all()):
            return False
        self.leftpad = leftpad
        return True


class PackedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, read as they are stored.

    Attributes:
        store: has ``attend(query, **options)`` and ``ring_len``; None before the first tokens.
        packed_only: whether there are no tensors of it.
        real_queries: query columns of each row that are no padding; None for all.
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
        """(B,) int32: in which slot of what is stored rows start; None for the first."""
        return None

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        """Stores (B, H_kv, T, D) keys and values; whether they are to be attended to as they came.

        ``rope`` turns the keys on their way, and the queries beside them.
        """
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T, D) keys and values; what it returns stands for all that are stored.

        A first prompt is given back as it came, if the cache is to be exact there.
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
        return PackedStates.of(self, "k", key_states), PackedStates.of(self, "v", value_states)

    def get_max_length(self) -> int:
        """No limit that a model would have to know."""
        return -1

    get_max_cache_shape = get_max_length  # the name it had in transformers 4

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be attended from."""
        return not self.store.ring_len or tokens <= self.store.attendable

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Places in a row (B,) -> slots of what is stored; None for the first token."""
        return tokens

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """For each row where it starts, and its token that is the first of the ``tokens`` newest columns."""
        raise NotImplementedError

    def dequantized(self, stream: str, dtype: torch.dtype, length: int) -> Tensor:  # noqa: ARG002
        """The first ``length`` keys ("k") or values ("v") of every row, as a tensor.

        Raises:
            TensorsNeededError: a layer whose masks do not fit tensors.
        """
        raise TensorsNeededError("its attention (or its mask) needs keys and values as tensors")


class StoringLayer(CacheLayerMixin):
    """A layer that lives as long as its cache, and makes its store when the first keys and values come.

    Args:
        index: which layer of the model.
        common: what the layers of a cache share.
        window: tokens a query of a sliding or chunked layer reaches back at most; None for all.
        chunked: whether the layer attends within chunks, whose starts differ by row.
        lends: whether later layers attend to its keys and values as well.
    """

    is_croppable = True

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
        """The store, once there is one."""
        assert self.store is not None
        return self.store

    def _first_room(self) -> int:
        """Tokens a row has room for at first."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Makes the store for keys and values like these (B, H_kv, T, D)."""
        values = key_states if value_states is None else value_states
        batch, heads, tokens, dim = key_states.shape
        k_cfg, v_cfg = self.common.settings.k, self.common.settings.v
        if self.is_sliding:  # the first tokens are the first to be left behind
            k_cfg, v_cfg = (c.model_copy(update={"sink_len": 0}) for c in (k_cfg, v_cfg))
        with torch.inference_mode(False):
            self.store = LayerKVCache(
                batch, max(self._first_room(), tokens, 1), heads * dim, heads * values.shape[3],
                k_cfg, v_cfg, key_states.device, heads, query_rms=partial(self._query_rms, (heads, dim)),
            )  # fmt: skip
        self.store.attended_again = self.lends
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _query_rms(self, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Nothing for keys of another shape than the model's own, as of a part of its heads."""
        found = self.common.query_rms.get(self.index)
        return {} if found is None or found.shape != shape else {"k": found}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.store is None else self.store.nbytes
