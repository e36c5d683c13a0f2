"""One rank of a tensor-parallel Llama of transformers, under torchrun: arguments are FOLDER OUT WAY...

Writes the tokens of the stock cache, of ours and of our generator, and what ours stores.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from caramba_fast import Generator, accelerate, restore

ROWS = [[5, 9, 17, 8, 21, 5, 9, 17, 8, 33, 40, 5, 9], [77, 5, 3, 22, 61, 30, 4, 4, 19, 2, 8, 50, 6]]
NEW = 9


def by_transformers(folder: str) -> Any:
    """Sharded by ``from_pretrained``."""
    auto = transformers.AutoModelForCausalLM
    if hasattr(transformers, "DistributedConfig"):
        config = transformers.DistributedConfig(tp_plan="auto")
        return auto.from_pretrained(folder, distributed_config=config)
    return auto.from_pretrained(folder, tp_plan="auto")


def by_torch(folder: str) -> Any:
    """The layers of a whole model sharded by torch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def tokens(model: Any) -> tuple[list[list[int]], Any]:
    """Greedy tokens of ``model.generate()``, and its cache."""
    ids = torch.tensor(ROWS)
    out = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences.tolist(), out.past_key_values


def check(way: str, folder: str, out: str) -> None:
    model = {"transformers": by_transformers, "torch": by_torch}[way](folder).eval()
    found: dict[str, Any] = {"stock": tokens(model)[0]}
    for kind in ("fp32", "q4"):
        accelerate(model, kind)
        found[kind], cache = tokens(model)
        found[f"{kind} dequantizations"] = cache.dequantizations
        found["heads"] = cache.layers[0].store.n_kv_heads
    restore(model)
    generator = Generator(
        model, cache_kind="fp32", temperature=0.0, max_seq_len=64, ignore_eos=True
    )
    found["generator"] = generator.generate(torch.tensor(ROWS), max_new_tokens=NEW).tolist()
    found["reads"] = generator.report["cache_reads"]
    name = f"{way}{dist.get_rank()}.json"
    Path(out, name).write_text(json.dumps(found), encoding="utf-8")


def main(folder: str, out: str, *ways: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in ways:
        check(way, folder, out)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo sometimes abort an ordinary exit on a busy machine


if __name__ == "__main__":
    main(*sys.argv[1:])
