"""What a decode step of `Generator` goes through: a reader follows it through few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.generators import new_model

import caramba_fast
from caramba_fast import GenerateConfig, Generator

ROOT = str(Path(caramba_fast.__file__).parent)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_k": 20}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("kind", ["fp16", "q8", "q4", "q4:plain"])
def test_a_step_goes_through_twelve_files(kind: str, options: dict[str, Any]) -> None:
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename[len(ROOT) + 1 :])

    config = GenerateConfig(cache_kind=kind, max_seq_len=512, **options)
    steps = Generator(new_model(torch.device("cpu")), config).generate_iter(
        torch.arange(5, 55)[None], max_new_tokens=12
    )
    for _ in range(8):
        next(steps)
    sys.setprofile(note)
    next(steps)
    sys.setprofile(None)
    assert len(set(files)) <= 12, sorted(set(files))
    layer = [name for name in files if name.startswith("cache/")]
    assert set(layer) == {"cache/interface.py", "cache/layer.py", "cache/plans.py"}
