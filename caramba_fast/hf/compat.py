"""Differences between the supported versions of transformers: 4.57, 5.0 and the newest 5.x."""

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
    """Raises ImportError if version ``found`` of transformers is older than the oldest supported one."""
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
from transformers.generation.utils import GenerationMixin  # noqa: E402

#: Whether configs have ``rope_theta`` and ``rope_scaling`` in place of ``rope_parameters``.
BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5

#: The argument of ``forward`` and ``generate`` that holds the cache: "cache" from 5.24 on.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

#: Whether `Cache.crop` takes the tokens to remove, as a number <= 0. Older versions take the length to keep, or a
#: negative number of tokens to remove.
CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters


def tokens_to_remove(count: int, length: int) -> int:
    """How many tokens ``Cache.crop(count)`` removes from a row of ``length``.

    Raises ValueError if ``count`` is a length to keep, but this transformers takes tokens to remove.
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
    """Number of query tokens, from the argument of `get_mask_sizes`: that number, or before 5.x their positions."""
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else int(given)


try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before 5.1 the request always comes as a keyword argument
    _active_collector = None  # type: ignore[assignment]


def weights_are_recorded() -> bool:
    """Whether the current pass records attention weights for ``output_attentions``."""
    recorded = None if _active_collector is None else _active_collector.get()
    return bool(recorded) and "attentions" in recorded


@dataclass(frozen=True)
class MaskCall:
    """The arguments of a registered mask function.

    Attributes:
        batch, queries, keys: sizes of the mask.
        function: whether a query sees a key.
        padding: (B, tokens) bool, False for padding; None for no padding.
        given: all arguments, unchanged.
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
        """The mask that stock ``sdpa`` gets: (B, 1, T, L) bool, or None where it needs no mask."""
        return masking_utils.sdpa_mask(**{**self.given, **changes})


def stock_layers(config: Any) -> list[Any]:
    """The empty layers of a stock `DynamicCache` for a model with this text config."""
    return list(DynamicCache(config=config).layers)


def keeps_only_tokens(layer: Any) -> bool:
    """Whether a stock layer keeps only K and V of tokens."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


#: Stock layers that keep nothing: their attention reads the cache of an earlier layer. None before 5.1.
EMPTY: tuple[Any, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)
#: Stock layers that keep K and V of tokens and a linear-attention state. None before 5.1.
HYBRIDS: tuple[Any, ...] = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)


#: The base class of their linear-attention part.
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)


def is_hybrid(layer: Any) -> bool:
    """Whether a stock layer keeps both K and V of tokens and a linear-attention state."""
    return type(layer) in HYBRIDS


def is_chunked(config: Any, index: int) -> bool:
    """Whether a layer attends within chunks, from the model's text config."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return bool(types[index] == "chunked_attention")
    windowed = getattr(config, "sliding_window", None) is not None
    return not windowed and getattr(config, "attention_chunk_size", None) is not None


def lenders(config: Any) -> frozenset[int]:
    """Layers whose keys and values later layers also attend to (Gemma 3n), from the model's text config."""
    borrowing = getattr(config, "num_kv_shared_layers", None) or 0
    types = getattr(config, "layer_types", None)
    if not borrowing or types is None:
        return frozenset()
    own = types[: len(types) - borrowing]
    found = {kind: index for index, kind in enumerate(own)}
    return frozenset(found[kind] for kind in types[len(own) :] if kind in found)
