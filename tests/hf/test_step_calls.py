"""A decode step of an accelerated model repeats what its cache has planned, through few calls of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.hf_matrix import tiny

import caramba_fast
from caramba_fast.hf import CarambaCache, accelerate, restore
from caramba_fast.hf.growing_layer import CarambaLayer

ROOT = str(Path(caramba_fast.__file__).parent)


@contextmanager
def stepping(family: str, options: dict[str, Any], **changes: Any) -> Iterator[Callable[[], Any]]:
    """A step of one token, after a prompt and a few steps."""
    model = accelerate(tiny(family, **changes), "q4")
    cache = CarambaCache(model, "q4", **options)

    def step() -> Any:
        return model(torch.tensor([[7]]), past_key_values=cache).logits

    try:
        with torch.no_grad():
            model(torch.arange(5, 25)[None], past_key_values=cache)
            for _ in range(3):
                step()
            yield step
    finally:
        restore(model)


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("llama", {"max_seq_len": 100}), ("mistral", {})]
)
def test_limits_and_windows_do_not_slow_a_step(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stepping(family, options) as step:
        wanted = step()

        def refuse(*_: Any) -> Any:
            raise AssertionError("a step was checked anew")

        monkeypatch.setattr(CarambaLayer, "_store_for", refuse)
        assert step().shape == wanted.shape


def test_a_layer_takes_few_calls() -> None:
    """Each takes longer than in a loop: the weights have displaced its code from the processor's caches."""
    counts = []
    for layers in (2, 4):
        with stepping("llama", {"max_seq_len": 100}, num_hidden_layers=layers) as step:
            names: list[str] = []

            def note(frame: FrameType, event: str, _: object, names: list[str] = names) -> None:
                if event == "call" and frame.f_code.co_filename.startswith(ROOT):
                    names.append(frame.f_code.co_name)

            sys.setprofile(note)
            try:
                step()
            finally:
                sys.setprofile(None)
            counts.append(len(names))
    assert 0 < (counts[1] - counts[0]) / 2 <= 70
