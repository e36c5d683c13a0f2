"""Our attention in a model for the time of one forward pass, and what it had before afterwards.

Which attention a model uses is written in its config, which every thread and every other user of the model sees.
What was there before is kept once a config, however many passes run at the same time, and the last one puts it
back. In between our functions hand the passes of others on to what they had (`caramba_fast.hf.holding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from caramba_fast.hf.holding import NAME, Held, held, implementation, inside, lock
from caramba_fast.hf.registering import register

__all__ = ["decoder_configs", "implementation", "our_attention", "set_implementation"]


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
    """Within it, passes of this thread over models of these configs use our attention."""
    register()
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
