"""What differs between the versions of transformers that are supported: 4.57, 5.0 and the newest 5.x.

Everything else of this package is written for the newest; a difference is bridged here, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

OLDEST = (4, 57)
_ADVICE = "pip install 'transformers>=4.57'"

try:
    import transformers
except ImportError as error:  # pragma: no cover - the tests have it
    raise ImportError(f"caramba_fast.hf needs transformers, which is missing: {_ADVICE}") from error


def check_version(found: str) -> None:
    """Raises ImportError where transformers ``found`` is older than what is supported."""
    parts = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2])
    if parts < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"caramba_fast.hf needs transformers >= {oldest}, found {found}: {_ADVICE}"
        )


check_version(transformers.__version__)

from transformers import cache_utils, masking_utils  # noqa: E402 - after the version is known to have it
from transformers.cache_utils import (  # noqa: E402
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

#: Whether `Cache.crop` takes tokens to remove (0 or below); before, the length to keep (or below 0).
CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters


def tokens_to_remove(count: int, length: int) -> int:
    """How many tokens ``Cache.crop(count)`` takes off a row of ``length``.

    Raises:
        ValueError: a length to keep, where transformers takes tokens to remove.
    """
    if CROP_REMOVES:
        if count > 0:
            raise ValueError(
                f"crop({count}): transformers {transformers.__version__} takes the tokens to remove as a "
                f"negative number; to keep {count} tokens, crop({min(count - length, 0)})"
            )
        return -count
    return max(length - count, 0) if count >= 0 else -count


def query_length(given: Any) -> int:
    """Query tokens, from what `get_mask_sizes` is given: their number, or before 5.x their positions."""
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else int(given)


try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before 5.1 a keyword always says so
    _active_collector = None  # type: ignore[assignment]


def weights_are_recorded() -> bool:
    """Whether the pass that runs records what attention returns as its weights, for ``output_attentions``."""
    recorded = None if _active_collector is None else _active_collector.get()
    return bool(recorded) and "attentions" in recorded


@dataclass(frozen=True)
class MaskCall:
    """The arguments of a registered mask function.

    Attributes:
        batch, queries, keys: sizes of the mask.
        function: tells which query sees which key.
        padding: (B, tokens) bool, False where a row has no token; None for all True.
        given: everything, as it came.
    """

    batch: int
    queries: int
    keys: int
    function: Callable[..., Any]
    padding: Tensor | None
    given: dict[str, Any]

    @classmethod
    def of(cls, **given: Any) -> MaskCall:
        """From the keywords of either version."""
        queries = given.get("q_length", given.get("cache_position"))
        padding = given.get("attention_mask")
        return cls(
            given["batch_size"], query_length(queries), given["kv_length"],
            given.get("mask_function", masking_utils.causal_mask_function), padding, given,
        )  # fmt: skip

    def dense(self, **changes: Any) -> Tensor | None:
        """What stock ``sdpa`` gets: (B, 1, T, L) bool, or None where it needs no mask."""
        return masking_utils.sdpa_mask(**{**self.given, **changes})


def stock_layers(config: Any) -> list[Any]:
    """The layers a stock `DynamicCache` has for a model of this text config, empty."""
    return list(DynamicCache(config=config).layers)


def keeps_only_tokens(layer: Any) -> bool:
    """Whether a stock layer keeps K and V of tokens and nothing else."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


#: Stock layers that keep nothing: their attention reads what an earlier layer keeps. There are none before 5.1.
EMPTY: tuple[Any, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)
#: Stock layers that keep K and V of tokens beside a state of linear attention; there are none before 5.1.
HYBRIDS: tuple[Any, ...] = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)


#: What those have besides.
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)


def is_hybrid(layer: Any) -> bool:
    """Whether a stock layer keeps K and V of tokens beside a state."""
    return type(layer) in HYBRIDS


def is_chunked(config: Any, index: int) -> bool:
    """Whether a layer attends within chunks, from the model's text config."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[index] == "chunked_attention")
    windowed = getattr(config, "sliding_window", None) is not None
    return not windowed and getattr(config, "attention_chunk_size", None) is not None


def lenders(config: Any) -> frozenset[int]:
    """Layers whose keys and values later layers attend to as well (Gemma 3n), from the model's text config."""
    borrowing = getattr(config, "num_kv_shared_layers", None) or 0
    types = getattr(config, "layer_types", None)
    if not borrowing or types is None:
        return frozenset()
    own = types[: len(types) - borrowing]
    found = {kind: index for index, kind in enumerate(own)}
    return frozenset(found[kind] for kind in types[len(own) :] if kind in found)
