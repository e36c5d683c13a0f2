"""Our attention in a model for the time of one forward pass, and what it had before afterwards.

Which attention a model uses is written in its config, which every thread and every other user of the model sees.
What was there before is kept once a config, however many passes run at the same time, and the last one puts it
back. In between the others get our function too, which gives plain tensors what ``sdpa`` gives them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from caramba_fast.hf.registering import register


@dataclass
class _Held:
    passes: int
    before: str


_lock = threading.Lock()
_held: dict[int, _Held] = {}


def decoder_configs(model: PreTrainedModel) -> list[Any]:
    """The configs whose attention can be ours: those of decoders that are on the attention interface.

    Others compute attention themselves, from masks of their own kind.
    """
    decoder = (model.config, model.config.get_text_config(decoder=True))
    found: dict[int, Any] = {}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not module._can_set_attn_implementation():
            continue
        if any(module.config is config for config in decoder):
            found.setdefault(id(module.config), module.config)
    return list(found.values())


@contextmanager
def our_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Within it, models of these configs use our attention."""
    name = register()
    with _lock:
        for config in configs:
            held = _held.setdefault(id(config), _Held(0, config._attn_implementation))
            held.passes += 1
            config._attn_implementation_internal = name
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _release(config)


def _release(config: Any) -> None:
    held = _held[id(config)]
    held.passes -= 1
    if not held.passes:
        del _held[id(config)]
        config._attn_implementation_internal = held.before


def implementation(config: Any) -> str:
    """The attention of a config outside of `our_attention`."""
    with _lock:
        held = _held.get(id(config))
        return str(config._attn_implementation if held is None else held.before)


def set_implementation(config: Any, name: str) -> None:
    """Gives a config an attention; under `our_attention`, the one it will have afterwards."""
    with _lock:
        held = _held.get(id(config))
        if held is None:
            config._attn_implementation_internal = name
        else:
            held.before = name
