"""CarambaStaticLayer: a packed layer of fixed size whose decode step is a few ops on plain tensors.

Lengths are tensors and all slots are always passed, so ``torch.compile`` produces one graph, and a CUDA graph can
replay it. ``update`` returns the codes; the attention call that follows finds their layer in `current`.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import StaticLayer

from caramba_fast.hf.compat import tokens_to_remove
from caramba_fast.hf.layers import KEYS_AND_VALUES, StoringLayer
from caramba_fast.hf.lazy_tensors import values_of
from caramba_fast.hf.rotary import appended, to_append
from caramba_fast.ops import KVView, append_, decode_attention, extend_attention
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS
from caramba_fast.ops.hadamard import rotated


class Current(threading.local):
    """The static layer that this thread updated last, whose attention call comes next."""

    layer: CarambaStaticLayer | None = None


class Traced:
    """`Current` for compiled code, which cannot guard on a `threading.local`."""

    layer: CarambaStaticLayer | None = None


current, traced = Current(), Traced()
_CODES = WeakTensorKeyDictionary()  # the codes of all static layers, to tell codes from keys


class CarambaStaticLayer(StoringLayer, StaticLayer):
    """K and V of one attention layer, packed, for ``max_cache_len`` tokens a row.

    Attributes:
        counted: tokens the host knows of; compiled steps add tokens without updating it.
        mask_is_ours: whether our mask function made the mask of the next attention call.
        sources: the newest keys and values while gradients are enabled.
    """

    is_compileable = True
    mask_is_ours = False
    sources: tuple[Tensor, ...] = ()
    k: KVView
    v: KVView

    def __init__(self, max_cache_len: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_cache_len = max_cache_len
        with torch.inference_mode(False):  # else it is read-only outside of it
            self.cumulative_length = torch.tensor(0, device="cpu")
        self.is_empty, self.counted = True, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Knows the codes of a copy, which attention would take for keys, and its views, which are made anew."""
        vars(self).update(state)
        if self.is_initialized:
            self._take_views()

    def __repr__(self) -> str:
        return f"CarambaStaticLayer({self.max_cache_len} tokens)"

    def _first_room(self) -> int:
        return self.max_cache_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocates everything for keys and values like these (B, H_kv, T, D)."""
        super().lazy_initialization(key_states, value_states)
        store = self._made()
        batch, device = store.batch_size, store.device
        self.batch_size = batch
        self.n_kv_heads, self.residual_len = store.n_kv_heads, store.residual_len
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.starts = torch.zeros_like(self.lengths)
            self.cumulative_length = self.cumulative_length.to(device)
        self.take_starts()
        self._take_views()
        if not torch.compiler.is_compiling():
            # compiled code looks for the matrix of a rotation
            for stream in store.streams.values():
                rotated(key_states.new_empty(1, stream.head_dim), stream.config.rotate)
            for tensor in (self.cumulative_length, *self._buffers()):
                torch._dynamo.mark_static_address(tensor)

    def _take_views(self) -> None:
        """Refreshes the views of the store's buffers, which compiled steps work on."""
        store = self._made()
        self.k, self.v = store.k.view, store.v.view
        self.keys: Tensor | None = self.k.codes
        self.values: Tensor | None = self.v.codes
        if not torch.compiler.is_compiling():
            _CODES[self.keys] = None

    def _buffers(self) -> list[Tensor]:
        store = self._made()
        return [self.lengths, self.starts, *store.k.buffers, *store.v.buffers]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T, D) keys and values; returns the codes, or a first prompt unquantized if it is exact.

        Raises ValueError, before writing, if they do not fit. A compiled step cannot raise; it drops what does not fit.
        """
        tokens, eager = key_states.shape[2], not torch.compiler.is_compiling()
        if eager:
            self.check_room(self.counted, tokens)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_rows(key_states.shape[0])
        exact = self.is_empty and self.common.settings.prefill == "exact"
        if self.is_empty and eager:
            self._follow(key_states)
            self._first(values_of(key_states).detach(), value_states.detach())
        elif eager:
            keys, rope = to_append(key_states)
            new = keys.detach(), value_states.detach()
            options = {"cache_leftpad": self.starts} | ({} if rope is None else rope.options())
            store = self._made()
            if store.ring_len and tokens > store.tail_slack:
                self._tell_store()
                store.append(*new, cache_leftpad=self.starts, rope=rope)
            else:
                store.plans.append(new, self.lengths, options)
            if rope is not None:
                appended(key_states, rope)
            self._advance(tokens)
        else:
            new = key_states.detach(), value_states.detach()
            self._check_compiled(*new)
            append_(self.k, self.v, *new, self.lengths, cache_leftpad=self.starts)
            self._advance(tokens)
        place = current if eager else traced
        place.layer = None if exact else self
        if exact:
            # It was the prompt's mask; an exact prompt does not read this layer.
            self.mask_is_ours = False
            return key_states, value_states
        if eager:
            self.sources = (key_states, value_states) if torch.is_grad_enabled() else ()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _check_compiled(self, *new: Tensor) -> None:
        """Lets a compiled pass raise RuntimeError, when it runs, for keys and values as in `overflow`."""
        if self.held_below == math.inf:
            return
        column = self.cumulative_length + torch.arange(new[0].shape[2], device=self.lengths.device)
        padding = (column < self.starts[:, None])[:, None, :, None]
        for name, stream, x in zip(
            KEYS_AND_VALUES, self._made().streams.values(), new, strict=True
        ):
            size = rotated(x, stream.config.rotate).masked_fill(padding, 0).abs()
            torch._assert_async(
                ((size <= stream.largest) | ~size.isfinite()).all(),
                f"{name} are too large, since {self.holds(stream)}",
            )

    def _advance(self, tokens: int) -> None:
        # A compiled step cannot raise if tokens do not fit; the clamp keeps kernels within the buffers.
        self.lengths.add_(tokens).clamp_(max=self.max_cache_len)
        self.cumulative_length.add_(tokens)
        self.is_empty = False
        if not torch.compiler.is_compiling():
            self.counted += tokens

    def check_room(self, held: int, tokens: int) -> None:
        """Raises ValueError if ``tokens`` more do not fit after ``held``."""
        if held + tokens > self.max_cache_len:
            raise ValueError(
                f"{self.common.model}: a row of the static cache has room for {self.max_cache_len} tokens, holds "
                f"{held}, and {tokens} more came; make a CarambaStaticCache with a larger max_cache_len"
            )

    def check_rows(self, rows: int) -> None:
        """Raises ValueError if the buffers are of another number of rows."""
        if self.is_initialized and rows != self.batch_size:
            raise ValueError(
                f"{self.common.model}: the static cache has {self.batch_size} rows, and {rows} came; "
                "make another one"
            )

    def count(self) -> int:
        """Tokens of a row, compiled steps included, read from the device."""
        self.counted = int(self.cumulative_length) if self.is_initialized else 0
        return self.counted

    def _tell_store(self) -> None:
        """Updates the store's count of tokens, which steps do not update; reads the length from the device."""
        store = self._made()
        for _ in range(self.count() - store.pos):
            store.after_replay()
        store.lengths.set(store.lengths.host)

    def _first(self, keys: Tensor, values: Tensor) -> None:
        """Stores the first tokens, which attention may read unquantized."""
        self.take_starts()
        store = self._made()
        exact = self.common.settings.prefill == "exact"
        store.append(keys, values, cache_leftpad=self.common.leftpad, will_attend=not exact)
        self._take_views()
        self._advance(keys.shape[2])

    def take_starts(self) -> None:
        """Copies the rows' starts into the buffer that steps read; does nothing before that is allocated."""
        leftpad = self.common.leftpad
        if not self.is_initialized:
            return
        self.starts.zero_() if leftpad is None else self.starts.copy_(leftpad)

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """Attention of the T newest tokens: (B, H_q, T, D) -> (B, H_q, T, D_v)."""
        tokens = query.shape[2]
        starts, window = self.starts, self.sliding_window
        if self.chunked:
            starts = self._chunk_starts(tokens)
        elif window is not None:
            options["window_size"] = (window - 1, 0)
        if self.residual_len:
            options["residual_len"] = self.residual_len
        if not torch.compiler.is_compiling():
            options["cache_leftpad"] = starts
            store = self._made()
            out = store.plans.attend([query], self.lengths, options)[0]
            if store.attendable > store.tail_slack:  # the append had to widen the tails
                store.narrow_tails()
                self._take_views()
            return out
        op = decode_attention if tokens <= MAX_QUERY_TOKENS else extend_attention
        found = op(
            query, self.k, self.v, self.lengths, n_kv_heads=self.n_kv_heads, cache_leftpad=starts,
            **options,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found

    def check_call(self, tokens: int, mask: Tensor | None, weights: bool) -> None:
        """Raises ValueError for what a static cache does not do: the caller's own mask, and returning weights.

        The ``tokens`` just stored are taken back first, so that the cache is what it was before the refused pass. A
        flag tracks whose mask it is, because masks may be copied or sliced before they get here.
        """
        ours, self.mask_is_ours = self.mask_is_ours, False  # a refused pass, too, has used it up
        if weights:
            self._forget(tokens)
            raise ValueError(
                "output_attentions=True: a static cache gives no weights; use CarambaCache, or restore(model)"
            )
        if mask is not None and not ours:
            self._forget(tokens)
            raise ValueError(
                "a static cache takes attention_mask as (B, tokens), not a mask "
                f"{tuple(mask.shape)} of the caller's own; use CarambaCache"
            )

    def check_chunks(self, tokens: int) -> None:
        """Raises ValueError if the layer attends within chunks and cannot take so many ``tokens`` at once."""
        if self.chunked and tokens > 1:
            raise ValueError(
                f"{self.common.model}: attention within chunks takes one token at a time of a static cache; "
                "prefill at once, or use CarambaCache"
            )

    def _chunk_starts(self, tokens: int) -> Tensor:
        self.check_chunks(tokens)
        newest, chunk = self.lengths - 1 - self.starts, self.sliding_window
        assert chunk is not None
        return self.starts + torch.div(newest, chunk, rounding_mode="floor") * chunk

    def get_seq_length(self, *_: Any) -> Any:
        """Tokens cached, as a tensor on the device; 0 before the first."""
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """All slots, from the first."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Capacity of a row in tokens."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        """Removes all tokens; the buffers stay at their addresses."""
        if self.is_initialized:
            self._made().reset()
            self.lengths.zero_()
            self.starts.zero_()
            self.cumulative_length.zero_()
            self._take_views()
        self.is_empty, self.counted = True, 0

    def activate_past_recording(self) -> None:
        """Does nothing: a static layer drops no tokens."""

    def crop(self, count: int) -> None:
        """Removes the newest tokens; ``count`` means what it means for `Cache.crop` of the installed transformers.

        Reads the length from the device, so it cannot be used in compiled steps.
        """
        if not self.is_initialized:
            return
        held = self.count()
        self._remove(min(tokens_to_remove(count, held), held))

    def take_back(self, tokens: int) -> None:
        """Removes the newest ``tokens`` of an uncompiled pass that failed."""
        self._remove(tokens)

    def _remove(self, removed: int) -> None:
        self._tell_store()
        self._made().crop(removed)
        self.lengths.sub_(removed)
        self.cumulative_length.sub_(removed)
        self.counted -= removed
        self.is_empty = not self.counted

    def _forget(self, tokens: int) -> None:
        """Removes the newest tokens of an uncompiled pass; while a pass is compiled, nothing is stored yet."""
        if not torch.compiler.is_compiling():
            self.take_back(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders rows: new row b is old row ``beam_idx[b]``."""
        if self.is_initialized:
            index = beam_idx.to(self.lengths.device)
            for buffer in self._buffers():
                buffer.copy_(buffer.index_select(0, index))


def attended_layer(key: Any) -> CarambaStaticLayer | None:
    """The static layer that owns the codes ``key``, if it is the last that this thread updated; once per update."""
    for place in (traced,) if torch.compiler.is_compiling() else (current, traced):
        layer = place.layer
        if layer is not None and key is layer.keys:
            place.layer = None  # do not keep the cache alive
            return layer
    return None


def check_no_codes(key: Tensor) -> None:
    """Raises RuntimeError for codes of a static layer whose attention call was not expected now."""
    known = not torch.compiler.is_compiling() and key in _CODES
    if known or not key.is_floating_point():
        raise RuntimeError(
            "attention got the codes of a static cache whose update was not the last one of this thread: "
            "CarambaStaticCache needs models whose layers attend in the thread that updates, once for each update; "
            "use CarambaCache"
        )
