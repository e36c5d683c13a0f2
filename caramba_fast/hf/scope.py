"""Switches a model to our attention for one forward pass, safely across threads.

A model's config, shared by all its threads and users, names its attention implementation. The previous name is saved
once per config, however many of our passes run concurrently, and the last pass restores it. Meanwhile passes of other
threads reach our functions too; these forward them to the previous implementation.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: For ``attn_implementation=`` and ``model.set_attn_implementation``.
NAME = "caramba_fast"
#: Appears in the source of layers that use transformers' attention interface.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@dataclass
class Held:
    """A config switched to our attention: how many passes need that, and the implementation it had before."""

    passes: int
    before: str


class Inside(threading.local):
    """How many of our passes this thread is in.

    Attributes:
        passes: passes that read packed caches.
        dense: passes that read tensors dequantized from our caches.
        dequantized: whether one of our caches was dequantized since this thread's last attention over tensors.
        queries: in a probe of query sizes, called with a layer's index, its queries, and its number of KV heads.
        masks: in a probe of a model's masks, called with the function of each mask.
    """

    passes = 0
    dense = 0
    dequantized = False
    queries: Callable[[int | None, Tensor, int], None] | None = None
    masks: Callable[[Any], None] | None = None


@contextmanager
def dense_pass() -> Iterator[None]:
    """Marks a pass whose attention gets tensors dequantized from one of our caches."""
    inside.dense += 1
    try:
        yield
    finally:
        inside.dense -= 1


lock = threading.Lock()
held: dict[int, Held] = {}
inside = Inside()
_said: dict[int, set[str]] = {}  # topics already warned about, by id of the config


#: Advice for slow reads that cannot be made faster.
INSTEAD = "a stock cache is faster, where there is memory for it"


def once(config: Any, topic: str, message: str) -> None:
    """Warns about a topic once per config."""
    known = _said.get(id(config))
    if known is None:
        known = _said[id(config)] = set()
        if config is not None:  # its id may be reused
            weakref.finalize(config, _said.pop, id(config), None)
    if topic not in known:
        known.add(topic)
        warnings.warn(message, stacklevel=2)


def implementation(config: Any) -> str:
    """The attention implementation a config has outside of our passes."""
    with lock:
        current, known = config._attn_implementation, held.get(id(config))
        return str(current if known is None or current != NAME else known.before)


def foreign(config: Any) -> str | None:
    """In a pass that is not ours, the implementation that was meant instead of our functions; None if ours is meant."""
    if inside.passes or config is None:
        return None
    name = implementation(config)
    return None if name == NAME else name


def mask_function(name: str) -> Callable[..., Any] | None:
    """The mask function of a transformers attention implementation; None if it gets no masks."""
    found: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return found


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of that name for an attention layer.

    Raises RuntimeError if it is not registered, and the model's code has no ``eager_attention_forward`` either.
    """
    found = ALL_ATTENTION_FUNCTIONS.get(name)
    if found is None:
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise RuntimeError(
            f"{type(module).__name__} uses the attention {name!r}, which its code does not name, while another thread "
            "generates with the same model: use a copy of the model there"
        )
    return found


def decoder_configs(model: PreTrainedModel) -> list[Any]:
    """Configs whose attention can be switched to ours: those of decoders that use transformers' attention interface."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    if any(_attends_itself(kind) for kind in kinds):
        return []
    if not model._supports_sdpa and any(map(_would_see_all, model.modules())):
        return []
    decoder = (model.config, model.config.get_text_config(decoder=True))
    found: dict[int, Any] = {}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not module._can_set_attn_implementation():
            continue
        if any(module.config is config for config in decoder):
            found.setdefault(id(module.config), module.config)
    return list(found.values())


def _would_see_all(module: nn.Module) -> bool:
    """Whether a cached attention layer takes a missing mask to mean that every key is visible (BigBird-Pegasus).

    Our mask function omits a causal mask where ``sdpa`` needs none.
    """
    return getattr(module, "layer_idx", None) is not None and (
        getattr(module, "is_causal", True) is False
    )


@functools.cache
def _attends_itself(layer: type[nn.Module]) -> bool:
    """Whether a layer computes attention over a cache itself, next to others that use the interface (GIT)."""
    try:
        code = inspect.getsource(layer.forward)
    except (OSError, TypeError):  # not from a file
        return False
    return bool(re.search(r"\b(past_key_values?|cache)\.update\(", code)) and INTERFACE not in code


@contextmanager
def our_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Context in which this thread's passes over models with these configs use our attention."""
    with lock:
        for config in configs:
            _hold(config)
    inside.passes += 1
    try:
        yield
    finally:
        inside.passes -= 1
        with lock:
            for config in configs:
                _release(config)


def _hold(config: Any) -> None:
    current = config._attn_implementation
    known = held.setdefault(id(config), Held(0, current))
    if current != NAME:  # chosen by a user since the first of the passes began
        known.before = current
    known.passes += 1
    config._attn_implementation_internal = NAME


def _release(config: Any) -> None:
    """Restores the previous attention after the last pass, unless a user has chosen another since."""
    known = held[id(config)]
    known.passes -= 1
    if not known.passes:
        del held[id(config)]
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = known.before


def set_implementation(config: Any, name: str) -> None:
    """Sets a config's attention; within `our_attention`, the one it will have afterwards."""
    with lock:
        known = held.get(id(config))
        if known is not None:
            known.before = name
        if known is None or config._attn_implementation != NAME:
            config._attn_implementation_internal = name
