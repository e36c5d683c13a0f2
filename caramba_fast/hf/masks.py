"""The mask function: represents masks by a few numbers, so that decode steps do not materialize them.

Masks that transformers makes for decoders are causal, within a sliding window or a chunk, and start at a row's first
token. They are recognised by the functions they are composed of. Any other mask, and padding between tokens, is
materialized as for ``sdpa``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from caramba_fast.hf.compat import MaskCall
from caramba_fast.hf.lazy_tensors import LazyTensor
from caramba_fast.hf.scope import foreign, inside, mask_function


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, padding aside.

    Attributes:
        causal: no key after the query's own.
        window: only the newest ``window`` keys, the query's own included; None for no limit.
        chunk: only keys in the query's chunk of this many tokens, counted from the row's first; None for no chunks.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None

    def hides(self, keys: int) -> bool:
        """Whether the window or chunk can hide any of ``keys`` tokens from the newest one."""
        reach = min(x for x in (self.window, self.chunk, keys + 1) if x is not None)
        return keys > reach


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a transformers mask function; None if it is not recognised."""
    found = _read(function)
    return found if found is not None and found.causal else None


def _read(function: Any) -> Pattern | None:
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = function.__qualname__.partition(".")[0]
    names = function.__code__.co_freevars
    held = dict(
        zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    if maker == "sliding_window_overlay":
        return Pattern(window=int(held["sliding_window"]))
    if maker == "chunked_overlay":
        return Pattern(chunk=int(held["chunk_size"]))
    if maker != "and_masks":
        return None
    found: Pattern | None = Pattern()
    for part in held["mask_functions"]:
        found = _both(found, _read(part))
    return found


def _both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    if a is None or b is None:
        return None
    for name in ("window", "chunk"):
        if getattr(a, name) is not None and getattr(b, name) is not None:
            return None
    return replace(
        a, causal=a.causal or b.causal, window=a.window or b.window, chunk=a.chunk or b.chunk
    )


class PatternMask(LazyTensor):
    """Lazy mask (B, 1, T, L) bool, True where a query sees a key.

    A slice that keeps the newest queries is again a `PatternMask`: Gemma 4 drops the older queries before layers that
    share keys and values. ``leftpad`` is (B,) int32, the slot of each row's first token; None for slot 0.
    """

    pattern: Pattern
    leftpad: Tensor | None

    @classmethod
    def of(
        cls, shape: Sequence[int], device: torch.device, pattern: Pattern, leftpad: Tensor | None
    ) -> PatternMask:
        """The mask (B, 1, T, L) of the newest T of L tokens."""
        made = cls._empty(tuple(shape), torch.bool, device)
        made.pattern, made.leftpad = pattern, leftpad
        return made

    def _make(self) -> Tensor:
        """The mask that stock ``sdpa`` would get, built without ``vmap``, which does not run inside another op."""
        queries, keys = self.shape[2:]
        key = torch.arange(keys, device=self.device)
        query = torch.arange(keys - queries, keys, device=self.device)[:, None]
        start = 0 if self.leftpad is None else self.leftpad.to(self.device)[:, None, None, None]
        seen = (key <= query) & (key >= start)
        if self.pattern.window is not None:
            seen = seen & (key > query - self.pattern.window)
        if self.pattern.chunk is not None:
            chunk = self.pattern.chunk
            seen = seen & ((key - start) // chunk == (query - start) // chunk)
        return seen.expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs ops on the materialized mask, except slices that keep the newest queries."""
        newest = _newest(func, args)
        if newest is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        mask = args[0]
        shape = (*mask.shape[:2], newest, mask.shape[3])
        return cls.of(shape, mask.device, mask.pattern, mask.leftpad)


def _newest(func: Any, args: tuple[Any, ...]) -> int | None:
    """How many queries a slice of a mask keeps; None for other ops, and for slices that keep anything else."""
    if func is torch.ops.aten.alias.default:
        return int(args[0].shape[2])
    if func is not torch.ops.aten.slice.Tensor:
        return None
    given: tuple[Any, ...] = (*args, *(0, None, None, 1)[len(args) - 1 :])
    mask, dim, start, end, step = given
    size, first = mask.shape[dim], start or 0
    first = max(first + size, 0) if first < 0 else first
    if step != 1 or not (end is None or end >= size) or (first and dim != 2) or first >= size:
        return None
    return int(mask.shape[2] - (first if dim == 2 else 0))


def _place(call: MaskCall) -> torch.device:
    """Device of the mask if the caller does not name one (transformers before 5.x)."""
    position = call.given.get("cache_position")
    return position.device if isinstance(position, Tensor) else torch.device("cpu")


def starts(padding: Tensor | None, keys: int) -> tuple[Tensor | None, bool]:
    """Where each row starts, (B,) int32 or None if all start at 0; and whether all rows are free of gaps."""
    if padding is None:
        return None, True
    padding = padding[:, :keys].to(torch.bool)
    if bool(padding.all()):
        return None, padding.shape[1] == keys
    leftpad = padding.shape[1] - padding.sum(-1)
    columns = torch.arange(padding.shape[1], device=padding.device)
    regular = torch.equal(padding, columns >= leftpad[:, None])
    return leftpad.to(torch.int32), regular and padding.shape[1] == keys


class Compiling:
    """The static cache for which a compiled pass makes masks; set and consumed within one pass.

    Not a `threading.local`: compiled code would guard on it, and those guards fail at once after a write.
    """

    cache: Any = None


_eager = threading.local()  # the cache that this thread makes masks for, and their number of keys
_compiling = Compiling()


def expect_compiled_mask(cache: Any) -> None:
    """`expect_mask` for compiled code."""
    _compiling.cache = cache


def _starts_in_compiled(call: MaskCall) -> None:
    """Sets a static cache's row starts from the mask, using tensor ops only.

    A compiled pass raises RuntimeError when it runs with padding other than left padding.
    """
    cache = _compiling.cache
    if cache is None:
        return
    _compiling.cache = None
    for layer in cache.layers:  # after a graph break they may run eagerly, and check it
        layer.mask_is_ours = True
    if call.padding is None:
        return
    seen = call.padding.to(torch.bool)
    starts = seen.to(torch.int32).argmax(-1).to(torch.int32)
    columns = torch.arange(seen.shape[1], device=seen.device)
    to_come = columns >= cache.layers[0].cumulative_length + call.queries
    torch._assert_async(
        ((seen == (columns >= starts[:, None])) | to_come).all(),
        "a static cache takes padding in front of rows alone; use CarambaCache for padding between tokens",
    )
    for layer in cache.layers:
        layer.starts.copy_(starts)


def expect_mask(cache: Any, keys: int, window: int | None = None) -> None:
    """Announces that ``cache`` will return ``keys`` tokens: the next mask of that length is for it.

    ``window`` is the sliding window of the layer whose mask sizes were queried.
    """
    _eager.cache, _eager.keys, _eager.window = weakref.ref(cache), keys, window


def _expecting(keys: int) -> Any:
    found, wanted = getattr(_eager, "cache", None), getattr(_eager, "keys", None)
    _eager.cache = None
    return found() if found is not None and wanted == keys else None


def _forgotten(call: MaskCall, pattern: Pattern | None) -> int:
    """How many of the oldest keys a stock layer would have dropped although its mask shows them (Moshi)."""
    window = _eager.window
    if window is None or pattern != Pattern(causal=True):
        return 0
    return max(call.keys - call.queries - (window - 1), 0)


def caramba_mask(**given: Any) -> Tensor | None:
    """The mask function that `AttentionMaskInterface` has under our name.

    Returns None where ``sdpa`` gets none, a `PatternMask` for our caches, else the mask of ``sdpa``; raises ValueError
    if a static cache cannot follow the mask. If another thread runs the model while one of our passes has switched its
    attention: the result of the model's own mask function.
    """
    if torch.compiler.is_compiling():
        call = MaskCall.of(**given)
        _starts_in_compiled(call)
        return _of_stock_cache(call)
    theirs = foreign(given.get("config"))
    if theirs is not None:
        make = mask_function(theirs)
        return None if make is None else make(**given)
    call = MaskCall.of(**given)
    if inside.masks is not None:
        inside.masks(call.function)
    cache = _expecting(call.keys)
    if cache is None:
        return _of_stock_cache(call)
    cache.check_rows(call.batch, given.get("config"))
    if cache.is_compileable:
        _start_static(cache, call)
        return call.dense()
    leftpad, regular = starts(
        call.padding if getattr(cache, "has_padding", True) else None, call.keys
    )
    pattern = pattern_of(call.function)
    known = cache.rows_start_at(leftpad if regular else None)
    forgotten = _forgotten(call, pattern)
    if pattern is None or not regular or not known:
        seen = call.dense(allow_is_causal_skip=False)
        if seen is not None and forgotten:
            seen = seen & (torch.arange(call.keys, device=seen.device) >= forgotten)
        return seen
    if leftpad is not None:
        leftpad = cache.common.leftpad
    place = torch.device(call.given.get("device") or _place(call))
    if forgotten:
        zeros = torch.zeros(call.batch, dtype=torch.int32, device=place)
        leftpad = (zeros if leftpad is None else leftpad).clamp(min=forgotten)
    trivial = leftpad is None and not pattern.hides(call.keys)
    may_skip = given.get("allow_is_causal_skip", True)
    if trivial and may_skip and call.queries in (1, call.keys):
        return None
    shape = (call.batch, 1, call.queries, call.keys)
    return PatternMask.of(shape, place, pattern, leftpad)


def _of_stock_cache(call: MaskCall) -> Tensor | None:
    """The mask of ``sdpa``, with None only for one query that sees all keys, or as many queries as keys (causal).

    With more keys (a prompt on a stock static cache), ``sdpa`` would align the first query with the first key.
    """
    mask = call.dense()
    if mask is None and call.queries not in (1, call.keys):
        mask = call.dense(allow_is_causal_skip=False)
    return mask


def _start_static(cache: Any, call: MaskCall) -> None:
    """Sets a static cache's row starts from the prompt's mask; they stay fixed afterwards.

    Raises ValueError if the mask differs from what the cache's layers will do.
    """
    leftpad, regular = None, True
    if call.padding is not None:
        # the mask may already have columns for future tokens
        known = min(call.padding.shape[1], cache.layers[0].counted + call.queries)
        leftpad, regular = starts(call.padding[:, :known], known)
    if not cache.exact_next and not _attends_alike(cache, call, leftpad):
        raise ValueError(
            "a static cache attends causally, within its layers' windows or chunks, and this mask says something "
            "else; use CarambaCache"
        )
    if not regular:
        raise ValueError(
            "a static cache takes padding in front of rows alone; use CarambaCache for padding between tokens"
        )
    if not cache.rows_start_at(leftpad):
        raise ValueError(
            "the mask says that rows start elsewhere than the mask of the prompt did, which a static cache keeps; give "
            "it attention_mask for all tokens of every row, or use CarambaCache"
        )
    for layer in cache.layers:
        layer.mask_is_ours = True


def _attends_alike(cache: Any, call: MaskCall, leftpad: Tensor | None) -> bool:
    """Whether a mask shows what the layers of a static cache will attend to.

    A mask of an unknown function is compared by its values: of an image's tokens that see each other, a later step sees
    what it would see without.
    """
    if pattern_of(call.function) is not None:
        return True
    seen = call.dense(allow_is_causal_skip=False)
    if seen is None:
        return False
    window, layers = _eager.window, cache.layers
    chunked = any(layer.chunked for layer in layers if layer.sliding_window == window)
    pattern = Pattern(True, chunk=window) if chunked else Pattern(True, window=window)
    known = layers[0].counted + call.queries
    shape = (call.batch, 1, call.queries, known)
    wanted = PatternMask.of(shape, seen.device, pattern, leftpad).dense()
    return torch.equal(seen[..., :known], wanted) and not bool(seen[..., known:].any())
