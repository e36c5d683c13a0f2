"""Common: what the layers of one cache share.

CarambaLayer: one layer of a `CarambaCache`, over a `LayerKVCache`.

A transformers ``Cache`` over a `ModelKVCache` for one forward pass that reads it as it is stored.

K and V go in as the model makes them; what comes back stands for the layer, and our attention function reads that
packed. Rows stay as they lie in our caches, padded at the end.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from caramba_fast.cache import LayerKVCache, LayerShape, ModelKVCache
from caramba_fast.hf.capabilities import Findings
from caramba_fast.hf.compat import query_length, tokens_to_remove
from caramba_fast.hf.dense_cache import as_read
from caramba_fast.hf.lazy_tensors import PackedStates
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.row_layout import EndFrame
from caramba_fast.hf.scope import NAME, implementation
from caramba_fast.hf.settings import CacheSettings


@dataclass
class Common:
    """What all layers of a cache share.

    Attributes:
        model: the model's name, for messages.
        config: the decoder's, which names its attention.
        on_interface: whether that attention can be ours.
        settings: how K and V are stored.
        room: tokens a row is to have room for from the start, if known.
        limit: most tokens of a row; None for no limit.
        leftpad: (B,) int32, where rows start; None for slot 0. Replaced as a whole, never written into.
        dequantized: how many times keys or values were asked for as tensors.
        warned: whether that was warned of.
        told: layers of a static cache whose mask, in the pass that is coming, was made by our mask function.
    """

    model: str
    settings: CacheSettings
    config: Any = None
    on_interface: bool = True
    room: int | None = None
    limit: int | None = None
    leftpad: Tensor | None = None
    dequantized: int = 0
    warned: bool = False
    told: set[int] = field(default_factory=set)

    def why_dequantized(self) -> str:
        """Why a layer is asked for tensors."""
        if not self.on_interface:
            return "its attention is not on the attention interface of transformers"
        if self.config is not None and implementation(self.config) != NAME:
            return "it has its own attention; caramba_fast.accelerate(model) gives it one that reads packed"
        return "its attention (or its mask) needs keys and values as tensors"

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
        if torch.equal(
            before, now
        ):  # the tensor that is known stays: calls made with it can be repeated
            return True
        if not bool(((now == before) | ((before >= length) & (now >= length))).all()):
            return False
        self.leftpad = leftpad
        return True


#: Tokens a row has room for at first, where nobody says how many are to come, and how it grows then.
FIRST_ROOM, GROWTH = 256, 1.5
#: Tokens a sliding layer keeps beyond its window, so that as many can be taken off again.
SLACK = 128


class CarambaLayer(CacheLayerMixin):
    """K and V of one attention layer, packed.

    Args:
        index: which layer of the model.
        common: what the layers of a cache share.
        shape: what is known of the layer's keys and values; sizes come from the first tensors.
        window: tokens a query of a sliding or chunked layer reaches back at most; None for all.
        chunked: whether the layer attends within chunks, whose starts differ by row.
        lends: whether later layers attend to its keys and values as well.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True
    packed_only = False  # it can be dequantized
    #: Query columns of each row that are no padding; None for all.
    real_queries: list[int] | None = None
    #: What `slots_of` was asked last, how many tokens were dropped then, and the answer.
    _slots: tuple[Tensor, int, Tensor] | None = None

    def __init__(
        self,
        index: int,
        common: Common,
        shape: LayerShape | None = None,
        window: int | None = None,
        chunked: bool = False,
        lends: bool = False,
    ) -> None:
        CacheLayerMixin.__init__(self)  # not super(): hybrid layers have more bases
        self.index, self.common, self.shape, self.lends = index, common, shape, lends
        self.sliding_window, self.chunked = window, chunked
        self.is_sliding = window is not None
        self.store: LayerKVCache | None = None
        self.dropped, self.record_past = 0, False

    def __repr__(self) -> str:
        settings = self.common.settings
        return (
            f"CarambaLayer({settings.k.kind.value}/{settings.v.kind.value}, {self.length} tokens)"
        )

    # -- what it holds ------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of a row so far, padding and what a window has left behind included."""
        return 0 if self.store is None else self.dropped + self.store.pos

    @property
    def leftpad(self) -> Tensor | None:
        """(B,) int32: in which slot of what is stored rows start; None for the first."""
        return self.slots_of(self.common.leftpad)

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Places in a row (B,) -> slots of what is stored; None for the first token."""
        if tokens is None or not self.dropped:
            return tokens
        if self._slots is None or self._slots[0] is not tokens or self._slots[1] != self.dropped:
            self._slots = (tokens, self.dropped, (tokens - self.dropped).clamp(min=0))
        return self._slots[2]

    @property
    def keys(self) -> Tensor | None:
        """Keys (B, H_kv, length, D) of all tokens, dequantized when an op asks for values; None before the first."""
        return self._states("k")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._not_set(value)

    @property
    def values(self) -> Tensor | None:
        """Values (B, H_kv, length, D_v), as `keys`."""
        return self._states("v")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._not_set(value)

    def _states(self, stream: str) -> Tensor | None:
        if self.store is None or self.store.is_empty:
            return None
        dim = self.store.streams[stream].head_dim
        like = torch.empty(
            self.store.batch_size,
            self.store.n_kv_heads,
            0,
            dim,
            dtype=self.dtype,
            device=self.device,
        )
        return PackedStates.of(self, stream, like)

    def _not_set(self, value: Tensor | None) -> None:
        """Raises AttributeError for tensors: `update` writes, and nothing else."""
        if value is not None:  # transformers sets None in the constructor
            raise AttributeError("keys and values of a packed layer are written by update()")

    @property
    def batch_size(self) -> int:
        """Rows; an AttributeError before the first tokens, as in transformers' own layers."""
        if self.store is None:
            raise AttributeError("batch_size: the layer has seen no tokens")
        return self.store.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.store is None else self.store.nbytes

    def get_seq_length(self, *_: Any) -> int:
        """Tokens cached."""
        return self.length

    def get_mask_sizes(self, given: Any, *_: Any) -> tuple[int, int]:
        """Tokens `update` will return for so many queries, and the first one's slot."""
        return self.length + query_length(given), 0

    def get_max_length(self) -> int:
        """No limit: it grows."""
        return -1

    get_max_cache_shape = get_max_length  # the name it had in transformers 4

    # -- growing ------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Makes the store for keys and values like these (B, H_kv, T, D)."""
        values = key_states if value_states is None else value_states
        batch, heads, tokens, dim = key_states.shape
        settings, known = self.common.settings, self.shape
        k_cfg, v_cfg = settings.k, settings.v
        if self.chunked:  # rows of a chunk start elsewhere than the phases of their keys
            k_cfg = k_cfg.model_copy(update={"center": False})
        if self.is_sliding:  # the first tokens are the first to be left behind
            k_cfg, v_cfg = (c.model_copy(update={"sink_len": 0}) for c in (k_cfg, v_cfg))
        fits = known is not None and known.n_kv_heads == heads and known.k_dim == heads * dim
        measured = settings.calibration
        with torch.inference_mode(False):
            self.store = LayerKVCache(
                batch, max(min(self._room, self.common.room or FIRST_ROOM), tokens, 1), heads * dim,
                heads * values.shape[3], k_cfg, v_cfg, key_states.device, heads,
                rope=known.rope if known is not None and fits else None,
                key_bias=known.key_bias if known is not None and fits else None,
                calibration=None if measured is None else dict(measured.layers[self.index]),
                constants_from_prompt=settings.prefill == "exact",
            )  # fmt: skip
        self.store.attended_again = self.lends
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T, D) keys and values; what it returns stands for all that are stored.

        A first prompt is given back as it came, if the cache is to be exact there.
        """
        store = self._store_for(key_states, value_states)
        exact = store.is_empty and self.common.settings.prefill == "exact"
        store.append(
            key_states.detach(),
            value_states.detach(),
            cache_leftpad=self.leftpad,
            will_attend=not exact,
        )
        if exact:
            self._leave_behind(0)
            return key_states, value_states
        return PackedStates.of(self, "k", key_states), PackedStates.of(self, "v", value_states)

    def _store_for(self, keys: Tensor, values: Tensor) -> LayerKVCache:
        self.common.check_length(self.length + keys.shape[2])
        if self.store is None:
            self.lazy_initialization(keys, values)
        store = self.store
        assert store is not None
        if keys.shape[0] != store.batch_size:
            if not store.is_empty:
                raise ValueError(
                    f"{self.common.model}: the cache holds {store.batch_size} rows, and {keys.shape[0]} came; "
                    "start a new cache, or call cache.batch_select_indices / cache.batch_repeat_interleave first"
                )
            self.lazy_initialization(keys, values)
            assert self.store is not None
            store = self.store
        if store.device != keys.device:
            store = self.store = store.to(keys.device)
        self._leave_behind(keys.shape[2])
        needed = store.pos + keys.shape[2]
        if needed > store.max_seq_len:
            store.grow(max(needed, int(GROWTH * store.max_seq_len)))
        return store

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of ``tokens``, or for as many as the layer keeps."""
        store = self.store
        wanted = min(tokens - self.dropped, self._room)
        if store is not None and wanted > store.max_seq_len:
            store.grow(wanted)

    # -- windows ------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """Most tokens the layer has room for while steps are short: a window and a half."""
        return 2**62 if self.sliding_window is None else self.sliding_window * 3 // 2 + 2 * SLACK

    def _leave_behind(self, coming: int) -> None:
        """Drops tokens no query will see any more, if there is no room for ``coming`` ones otherwise."""
        store = self.store
        assert store is not None
        if self.sliding_window is None or self.record_past or store.pos + coming <= self._room:
            return
        ring = store.residual_len + store.tail_slack if store.residual_len else 1
        count = max(store.pos - (self.sliding_window - 1) - SLACK, 0) // ring * ring
        if count and not (self.common.leftpad is not None and self._centers):
            room = max(self._room, store.pos - count + coming)
            store.drop_front(
                count, min(room, max(self.common.room or room, store.pos - count + coming))
            )
            self.dropped += count

    @property
    def _centers(self) -> bool:
        """Whether phases of keys count from where their row starts."""
        return self.store is not None and self.store.k.transform.bias is not None

    # -- reading ------------------------------------------------------------------------

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be attended from."""
        store = self.store
        assert store is not None
        return not store.residual_len or tokens <= store.attendable

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """For each row where it starts, and its token that is the first of the ``tokens`` newest columns."""
        rows = [0] * self._rows if leftpad is None else leftpad.tolist()
        return rows, [self.length - tokens - row for row in rows]

    def dequantized(self, stream: str, dtype: torch.dtype, length: int) -> Tensor:
        """The first ``length`` keys ("k") or values ("v") of every row, as a tensor; it is counted."""
        common = self.common
        common.dequantized += 1
        if not common.warned:
            common.warned = True
            warnings.warn(
                f"{common.model}, layer {self.index} (and others, maybe): its keys and values are dequantized at every "
                f"step, which is right, but slow: {self.common.why_dequantized()}",
                stacklevel=2,
            )
        assert self.store is not None
        found = as_read(self.store, dtype, self.leftpad)[0 if stream == "k" else 1]
        left_behind = found.new_zeros(*found.shape[:2], self.dropped, found.shape[3])
        return torch.cat((left_behind, found), dim=2)[:, :, :length]

    # -- shrinking and moving -----------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Keeps all tokens until `crop`, also those a window has left behind."""
        self.record_past = True

    def crop(self, count: int) -> None:
        """Takes tokens off the end; ``count`` is what `Cache.crop` takes in this transformers.

        Raises:
            RuntimeError: so many that tokens would be seen again which a window has left behind.
        """
        store = self.store
        if store is None:
            return
        removed = min(tokens_to_remove(count, self.length), self.length)
        kept = store.pos - removed
        if self.dropped and kept < (self.sliding_window or 0) - 1:
            raise RuntimeError(
                f"{self.common.model}: {removed} tokens are to be taken off, and the sliding window of layer "
                f"{self.index} keeps {SLACK} beyond its own; activate_past_recording() before they come"
            )
        store.crop(removed)
        recording, self.record_past = self.record_past, False
        self._leave_behind(0)
        self.record_past = recording

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        if self.length:
            assert self.store is not None
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        self._take([row for row in range(self._rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows: their numbers, or a bool for each."""
        indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._take(indices.tolist())

    @property
    def _rows(self) -> int:
        return 0 if self.store is None else self.store.batch_size

    def _take(self, rows: list[int]) -> None:
        if self.store is not None:
            self.store = self.store.select_rows(rows)

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        if self.store is not None:
            self.store.reset()
            self.dropped = 0

    def offload(self) -> None:
        """Moves what is stored to the CPU."""
        if self.store is not None:
            self.store = self.store.to("cpu")

    def prefetch(self) -> None:
        """Moves it back to where the model's keys are."""
        if self.store is not None and self.store.device != self.device:
            self.store = self.store.to(self.device)


class TensorsNeededError(RuntimeError):
    """A model's own code has asked for keys and values of a packed read as tensors."""


class DropoutActiveError(TensorsNeededError):
    """A packed read with dropout, which a model has in train mode alone."""


def check_no_dropout(key: Any) -> None:
    """Raises DropoutActiveError for keys that can only be read as they are stored."""
    if isinstance(key, PackedStates) and key.layer.packed_only:
        raise DropoutActiveError("dropout is active, and packed reads have none: model.eval()")


class StepLayer(CacheLayerMixin):
    """One layer of one forward pass.

    Args:
        store: our cache of the layer; it may hold tokens.
        frame: how rows lie in this forward pass.
        exact: on an empty cache, hand back K and V as they came, not as they are stored.
    """

    is_sliding = False  # windows are in the mask: all tokens are kept
    packed_only = True  # tensors would be laid out in another frame

    def __init__(self, store: LayerKVCache, frame: EndFrame, exact: bool) -> None:
        super().__init__()
        self.store, self.frame = store, frame
        self.exact = exact and store.is_empty
        self.is_initialized = not store.is_empty

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: our cache has its memory already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T', D) keys and values; what it returns stands for all that are stored."""
        frame = self.frame
        self.store.append(
            key_states.detach(), value_states.detach(),
            frame.new if frame.padded_queries else None,
            will_attend=not self.exact,
        )  # fmt: skip
        if self.exact:
            return key_states, value_states
        return PackedStates.of(self, "k", key_states), PackedStates.of(self, "v", value_states)

    # -- what is asked of it --------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.store.pos

    def get_seq_length(self, *_: Any) -> int:
        """Columns before the queries."""
        return self.frame.past

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Tokens of the longest row after `update`, and the first one's slot."""
        return self.frame.total, 0

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.store.max_seq_len

    get_max_cache_shape = get_max_length  # the name it had in transformers 4

    # -- reading --------------------------------------------------------------------------

    def serves(self, tokens: int) -> bool:
        """Whether the newest ``tokens`` can be attended from."""
        return not self.store.residual_len or tokens <= self.store.attendable

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Places in a row -> slots: the same, since nothing is left behind."""
        return tokens

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """For each row where it starts, and its token that is the first of the ``tokens`` newest columns."""
        assert tokens == self.frame.tokens and leftpad is None
        return [0] * len(self.frame.held), self.frame.held

    @property
    def real_queries(self) -> list[int]:
        """Of the query columns of each row, how many are no padding."""
        return self.frame.new

    def dequantized(self, *_: Any) -> NoReturn:
        """Masks of this frame do not fit tensors.

        Raises:
            TensorsNeededError: always.
        """
        raise TensorsNeededError("its attention (or its mask) needs keys and values as tensors")


class StepCache(Cache):
    """What a model is given as ``past_key_values`` in one forward pass.

    Args:
        kv_cache: our caches, one for each layer that has one.
        frame: how rows lie.
        findings: which of the model's layers each of our caches belongs to.
    """

    def __init__(self, kv_cache: ModelKVCache, frame: EndFrame, findings: Findings) -> None:
        exact, places = kv_cache.prefill == "exact", findings.places
        found: dict[int, StepLayer] = {}
        for place, store in zip(places, kv_cache, strict=True):
            assert isinstance(store, LayerKVCache)
            store.attended_again = place in findings.lenders
            found[place] = StepLayer(store, frame, exact)
        some = found[places[0]]  # layers without K and V of their own answer about lengths
        super().__init__(layers=[found.get(i, some) for i in range(max(places) + 1)])

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0])
        return sizes

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Rows start at the first slot; False for anything else."""
        return leftpad is None
