"""Tensor parallelism: each rank caches the heads it has, and all of them give the tokens of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.hf_matrix import tiny
from support.hf_tensor_parallel_rank import tokens

from caramba_fast.distributed import context_parallel
from caramba_fast.hf import HuggingFaceModel

RANK = Path(__file__).parents[1] / "support" / "hf_tensor_parallel_rank.py"


WAYS = ["torch", *(["transformers"] if importlib.util.find_spec("accelerate") else [])]
Run = tuple[Any, Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A model, and what two ranks left of it, one way after the other."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    path = os.pathsep.join(filter(None, [str(RANK.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, str(RANK), str(folder), str(folder), *WAYS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    return model, folder, done


@pytest.mark.parametrize("way", ["torch", "transformers"])
def test_two_ranks_give_the_tokens_of_one(way: str, run: Run) -> None:
    if way not in WAYS:
        pytest.skip("transformers' own tensor parallelism needs the package accelerate")
    model, folder, done = run
    expected = tokens(model)[0]
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((folder / f"{way}{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["heads"] == model.config.num_key_value_heads // 2
    assert found[0]["stock"] == found[0]["fp32"] == found[0]["generator"] == expected
    assert found[0]["fp32 dequantizations"] == found[0]["q4 dequantizations"] == 0
    assert found[0]["reads"] == "packed"
    assert len(found[0]["q4"][0]) == len(expected[0])


def test_its_tokens_are_not_spread_over_ranks() -> None:
    with pytest.raises(TypeError, match="LlamaForCausalLM of transformers reads caches that hold"):
        context_parallel(HuggingFaceModel(tiny("llama")), Mock(size=2, rank=0))
    with pytest.raises(TypeError, match="model is a LlamaForCausalLM; context parallelism is for"):
        context_parallel(tiny("llama"), Mock(size=2, rank=0))
