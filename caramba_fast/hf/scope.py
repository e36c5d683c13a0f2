"""Which attention a config has while our passes hold it, and which passes are ours.

A config is seen by every thread. While one of our passes has put our attention into it, the passes of other threads
reach our functions too: those are to get what the config had before.

Our attention in a model for the time of one forward pass, and what it had before afterwards.

Which attention a model uses is written in its config, which every thread and every other user of the model sees.
What was there before is kept once a config, however many passes run at the same time, and the last one puts it
back. In between our functions hand the passes of others on to what they had (`caramba_fast.hf.scope`).
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
#: What code that asks transformers for its attention has in it.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@dataclass
class Held:
    """A config with our attention in it: how many passes need that, and what it had before."""

    passes: int
    before: str


class Inside(threading.local):
    """How many of our passes this thread is in: those that read packed, and those that read tensors of our caches.

    ``dequantized`` is whether a cache of ours has given tensors since this thread's last attention over tensors.
    ``queries``, in a pass that asks how large queries are, takes a layer's number, queries, and the number of kv heads.
    ``masks``, in a pass that asks which masks a model makes, takes the function of each.
    """

    passes = 0
    dense = 0
    dequantized = False
    queries: Callable[[int | None, Tensor, int], None] | None = None
    masks: Callable[[Any], None] | None = None


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


#: What to do about slow reads that nothing makes faster.
INSTEAD = "a stock cache is faster, where there is memory for it"


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


def decoder_configs(model: PreTrainedModel) -> list[Any]:
    """The configs whose attention can be ours: those of decoders that are on the attention interface.

    Others compute attention themselves, from masks of their own kind.
    """
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
    """Whether attention over a cache takes no mask for none at all, as BigBird-Pegasus does, which always gets one.

    A causal mask is left out where ``sdpa`` needs none; what `sdpa` cannot serve may not count on that.
    """
    return getattr(module, "layer_idx", None) is not None and (
        getattr(module, "is_causal", True) is False
    )


@functools.cache
def _attends_itself(layer: type[nn.Module]) -> bool:
    """Whether a layer computes attention over a cache itself, beside others that are on the interface (GIT)."""
    try:
        code = inspect.getsource(layer.forward)
    except (OSError, TypeError):  # not from a file
        return False
    return bool(re.search(r"past_key_values?\.update\(", code)) and INTERFACE not in code


@contextmanager
def our_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Within it, passes of this thread over models of these configs use our attention."""
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
    if current != NAME:  # what a user has chosen since the first of the passes began
        known.before = current
    known.passes += 1
    config._attn_implementation_internal = NAME


def _release(config: Any) -> None:
    """Puts back what was there, unless a user has chosen another since."""
    known = held[id(config)]
    known.passes -= 1
    if not known.passes:
        del held[id(config)]
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = known.before


def set_implementation(config: Any, name: str) -> None:
    """Gives a config an attention; under `our_attention`, the one it will have afterwards."""
    with lock:
        known = held.get(id(config))
        if known is not None:
            known.before = name
        if known is None or config._attn_implementation != NAME:
            config._attn_implementation_internal = name
