"""Which attention a config has while our passes hold it, and which passes are ours.

A config is seen by every thread. While one of our passes has put our attention into it, the passes of other threads
reach our functions too: those are to get what the config had before.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: For ``attn_implementation=`` and ``model.set_attn_implementation``.
NAME = "caramba_fast"


@dataclass
class Held:
    """A config with our attention in it: how many passes need that, and what it had before."""

    passes: int
    before: str


class Inside(threading.local):
    """How many of our passes this thread is in: those that read packed, and those that read tensors of our caches."""

    passes = 0
    dense = 0


@contextmanager
def dense_pass() -> Iterator[None]:
    """A pass whose attention gets tensors that come from a cache of ours."""
    inside.dense += 1
    try:
        yield
    finally:
        inside.dense -= 1


lock = threading.Lock()
held: dict[int, Held] = {}
inside = Inside()
_said: dict[int, set[str]] = {}  # what was said of a config, by its id


def once(config: Any, topic: str, message: str) -> None:
    """Warns of a topic, once for each config."""
    known = _said.get(id(config))
    if known is None:
        known = _said[id(config)] = set()
        if config is not None:  # another may get its id
            weakref.finalize(config, _said.pop, id(config), None)
    if topic not in known:
        known.add(topic)
        warnings.warn(message, stacklevel=2)


def implementation(config: Any) -> str:
    """The attention of a config outside of our passes."""
    with lock:
        current, known = config._attn_implementation, held.get(id(config))
        return str(current if known is None or current != NAME else known.before)


def foreign(config: Any) -> str | None:
    """What is meant in place of our functions, in a pass that is not ours; None where they are."""
    if inside.passes or config is None:
        return None
    name = implementation(config)
    return None if name == NAME else name


def mask_function(name: str) -> Callable[..., Any] | None:
    """The mask function of an attention of transformers; None for one that gets no masks."""
    found: Callable[..., Any] | None = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return found


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention of that name for an attention layer.

    Raises:
        RuntimeError: "eager", of a model whose code has no ``eager_attention_forward``.
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
