"""Tensor parallelism: each rank caches the heads it has, and all of them give the tokens of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.hf_matrix import tiny
from support.hf_tensor_parallel_rank import tokens

RANK = Path(__file__).parents[1] / "support" / "hf_tensor_parallel_rank.py"


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("way", ["torch", "transformers"])
def test_two_ranks_give_the_tokens_of_one(way: str, tmp_path: Path) -> None:
    if way == "transformers" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers' own tensor parallelism needs the package accelerate")
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    expected = tokens(model)[0]
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
        [*command, str(RANK), way, str(tmp_path), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["heads"] == model.config.num_key_value_heads // 2
    assert found[0]["stock"] == found[0]["fp32"] == found[0]["generator"] == expected
    assert found[0]["fp32 dequantizations"] == found[0]["q4 dequantizations"] == 0
    assert found[0]["reads"] == "packed"
    assert len(found[0]["q4"][0]) == len(expected[0])
