"""CarambaLayer: one packed layer of a `CarambaCache`, with a store that grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache import LayerKVCache, Rope
from caramba_fast.hf.compat import query_length, tokens_to_remove
from caramba_fast.hf.layers import PackedLayer, StoringLayer
from caramba_fast.hf.lazy_tensors import PackedStates, values_of
from caramba_fast.hf.scope import NAME, implementation, inside, once

#: Initial capacity of a row in tokens, if the final length is unknown, and the factor by which it grows.
FIRST_ROOM, GROWTH = 256, 1.5
#: Tokens a sliding layer keeps beyond its window, so that as many can be rolled back.
SLACK = 128


class CarambaLayer(StoringLayer, PackedLayer):
    """One layer of a `CarambaCache`. A sliding-window layer drops tokens that no query can see any more."""

    is_compileable = False
    packed_only = False
    #: Memo of the last `slots_of`: its argument, the tokens dropped at that time, the result.
    _slots: tuple[Tensor, int, Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped, self.record_past = 0, False

    def __repr__(self) -> str:
        settings = self.common.settings
        return (
            f"CarambaLayer({settings.k.kind.value}/{settings.v.kind.value}, {self.length} tokens)"
        )

    @property
    def length(self) -> int:
        """Tokens of a row so far, including padding and tokens dropped by a sliding window."""
        return 0 if self.store is None else self.dropped + self.store.pos

    @property
    def leftpad(self) -> Tensor | None:
        """(B,) int32: slot in the store where each row starts; None for slot 0."""
        return self.slots_of(self.common.leftpad)

    def slots_of(self, tokens: Tensor | None) -> Tensor | None:
        """Token positions (B,) -> slots in the store; None stands for the first token."""
        if tokens is None or not self.dropped:
            return tokens
        if self._slots is None or self._slots[0] is not tokens or self._slots[1] != self.dropped:
            self._slots = (tokens, self.dropped, (tokens - self.dropped).clamp(min=0))
        return self._slots[2]

    @property
    def keys(self) -> Tensor | None:
        """Keys (B, H_kv, length, D) of all tokens, dequantized on use; None before the first token."""
        return self._states("k")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse_states(value)

    @property
    def values(self) -> Tensor | None:
        """Values (B, H_kv, length, D_v), as `keys`."""
        return self._states("v")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse_states(value)

    def _states(self, stream: str) -> Tensor | None:
        store = self.store
        if store is None or store.is_empty:
            return None
        shape = (store.batch_size, store.n_kv_heads, 0, store.streams[stream].head_dim)
        return PackedStates.of(
            self, stream, torch.empty(shape, dtype=self.dtype, device=self.device)
        )

    def _refuse_states(self, value: Tensor | None) -> None:
        if value is not None:  # transformers sets None in the constructor
            raise AttributeError("keys and values of a packed layer are written by update()")

    @property
    def batch_size(self) -> int:
        """Number of rows; AttributeError before the first tokens, as in transformers' own layers."""
        if self.store is None:
            raise AttributeError("batch_size: the layer has seen no tokens")
        return self.store.batch_size

    def get_seq_length(self, *_: Any) -> int:
        """Tokens cached."""
        return self.length

    def get_mask_sizes(self, given: Any, *_: Any) -> tuple[int, int]:
        """Number of tokens that `update` will return for this many queries, and the slot of the first."""
        first = self._first_given()
        return self.length + query_length(given) - first, first

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `PackedLayer.update`; a model with its own attention gets the tokens a stock layer would return."""
        first = self._first_given()
        k, v = super().update(key_states, value_states, *args, **kwargs)
        return (values_of(k)[:, :, first:], values_of(v)[:, :, first:]) if first else (k, v)

    def _first_given(self) -> int:
        """First token that `update` returns; not every model's own masks apply the window of its caches."""
        common, window = self.common, self.sliding_window
        if window is None or (common.on_interface and implementation(common.config) == NAME):
            return 0
        return max(self.length - window + 1, 0)

    def _first_room(self) -> int:
        return min(self._room, self.common.room or FIRST_ROOM)

    def _append(self, keys: Tensor, values: Tensor, rope: Rope | None) -> bool:
        known = self.store
        again = known is not None and self._takes(known.pos + keys.shape[2])
        if again and self._made().append_again((keys, values), self.leftpad, rope):
            return False
        store = self._store_for(keys, values)
        exact = store.is_empty and self.common.settings.prefill == "exact"
        store.append(keys, values, cache_leftpad=self.leftpad, will_attend=not exact, rope=rope)
        if exact:
            self._leave_behind(0)
        return exact

    def _store_for(self, keys: Tensor, values: Tensor) -> LayerKVCache:
        self.common.check_length(self.length + keys.shape[2])
        if self.store is None:
            self.lazy_initialization(keys, values)
        store = self._made()
        if keys.shape[0] != store.batch_size:
            self.check_rows(keys.shape[0])
            self.lazy_initialization(keys, values)
            store = self._made()
        if store.device != keys.device:
            store = self.store = store.to(keys.device)
        if store.is_empty:
            self._follow(keys)
        self._leave_behind(keys.shape[2])
        store = self._made()
        needed = store.pos + keys.shape[2]
        if needed > store.max_seq_len:
            ahead = int(GROWTH * store.max_seq_len)
            most = min(self._room, self.common.longest or ahead)
            store.grow(max(needed, min(ahead, most) if needed <= most else ahead))
        return store

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if the layer holds tokens of another number of rows."""
        store = self.store
        if store is not None and store.batch_size != rows and not store.is_empty:
            raise ValueError(
                f"{self.common.model}: the cache holds {store.batch_size} rows, and {rows} came; "
                "start a new cache, or call cache.batch_select_indices / cache.batch_repeat_interleave first"
            )

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of ``tokens``, or for as many tokens as a sliding layer keeps."""
        store = self.store
        wanted = min(tokens - self.dropped, self._room)
        if store is not None and wanted > store.max_seq_len:
            store.grow(wanted)

    @property
    def _room(self) -> int:
        """Most tokens the layer has room for while steps are short: 1.5 windows and twice `SLACK`."""
        return 2**62 if self.sliding_window is None else self.sliding_window * 3 // 2 + 2 * SLACK

    def _takes(self, tokens: int) -> bool:
        """Whether the layer may hold so many tokens in its store, and drops none of them first."""
        limit = self.common.limit
        allowed = limit is None or self.dropped + tokens <= limit
        return allowed and (self.sliding_window is None or self._keeps_all(tokens))

    def _keeps_all(self, tokens: int) -> bool:
        """Whether the store of a sliding layer has none to drop when it holds so many tokens."""
        return self.record_past or tokens <= self._room

    def _leave_behind(self, coming: int) -> None:
        """Drops tokens that no query can see any more, if ``coming`` new ones would not fit otherwise."""
        store, window = self._made(), self.sliding_window
        if window is None or self._keeps_all(store.pos + coming):
            return
        step = store.group
        count = max(store.pos - (window - 1) - SLACK, 0) // step * step
        if count:
            room = max(self._room, store.pos - count + coming)
            expected = max(self.common.room or 0, self.common.longest or 0) or room
            room = min(room, max(expected, store.pos - count + coming))
            moved, dropped = store.without_front(count, room), self.dropped + count
            # In one call: an interrupt comes before or after it.
            vars(self).update(store=moved, dropped=dropped)

    def rows_for(self, tokens: int, leftpad: Tensor | None) -> tuple[list[int], list[int]]:
        """Per row: where it starts, and the index of its token in the first of the ``tokens`` newest columns."""
        rows = [0] * self._made().batch_size if leftpad is None else leftpad.tolist()
        return rows, [self.length - tokens - row for row in rows]

    def dequantized(self, stream: str, dtype: torch.dtype, length: int) -> Tensor:
        """The first ``length`` keys ("k") or values ("v") of every row, as a tensor; counts and warns about this."""
        common = self.common
        common.dequantized += 1
        why = common.why_dequantized()
        said = f"{common.model}: keys and values are dequantized at every step, which is right, but slow: {why}"
        once(common.config, said, said)
        if not torch.compiler.is_compiling():
            inside.dequantized = True
        store = self._made()
        streams = store.get(dtype, self.leftpad, as_read=True, queries=store.lengths.newest)
        found = streams[0 if stream == "k" else 1]
        left_behind = found.new_zeros(*found.shape[:2], self.dropped, found.shape[3])
        return torch.cat((left_behind, found), dim=2)[:, :, :length]

    def activate_past_recording(self) -> None:
        """Keeps all tokens until `crop`, including those outside the sliding window."""
        self.record_past = True

    def removed_by(self, count: int) -> int:
        """How many tokens ``crop(count)`` removes; ``count`` means what it means for the installed transformers.

        Raises RuntimeError if tokens already dropped by the sliding window would become visible again.
        """
        removed = min(tokens_to_remove(count, self.length), self.length)
        if not self.can_take_back(removed):
            raise RuntimeError(
                f"{self.common.model}: {removed} tokens are to be taken off, and the sliding window of layer "
                f"{self.index} keeps {SLACK} beyond its own; activate_past_recording() before they come"
            )
        return removed

    def crop(self, count: int) -> None:
        """Removes the newest tokens; argument and errors as in `removed_by`."""
        store = self.store
        if store is None:
            return
        store.crop(self.removed_by(count))
        recording, self.record_past = self.record_past, False
        self._leave_behind(0)
        self.record_past = recording

    def can_take_back(self, tokens: int) -> bool:
        """Whether no token that the window has dropped would become visible again."""
        return not self.dropped or self._made().pos - tokens >= (self.sliding_window or 0) - 1

    def take_back(self, tokens: int) -> None:
        """Removes the newest ``tokens``, of a pass that failed."""
        self._made().crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]``."""
        if self.length:
            self._made().reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row ``repeats`` times, as ``repeat_interleave``."""
        rows = 0 if self.store is None else self.store.batch_size
        self._take([row for row in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows: their numbers, or a bool for each."""
        indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._take(indices.tolist())

    def _take(self, rows: list[int]) -> None:
        if self.store is not None:
            self.store = self.store.select_rows(rows)

    def reset(self) -> None:
        """Removes all tokens; the memory stays allocated."""
        if self.store is not None:
            self.store.reset()
            self.dropped = 0

    def offload(self) -> None:
        """Moves what is stored to the CPU."""
        if self.store is not None:
            self.store = self.store.to("cpu")

    def prefetch(self) -> None:
        """Moves it back to the device of the model's keys."""
        if self.store is not None and self.store.device != self.device:
            self.store = self.store.to(self.device)
