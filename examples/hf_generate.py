"""A transformers model with its stock cache and with ours: ``python examples/hf_generate.py [MODEL_ID]``.

MODEL_ID is any decoder-only model of the Hub or a folder, such as Qwen/Qwen2.5-0.5B-Instruct; without one, the
demo model that comes with the package is used, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from caramba_fast.hf import accelerate, restore
from caramba_fast.models import demo_path

PROMPT = "def read_lines(path):\n    "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_id", nargs="?", default=str(demo_path()))
    parser.add_argument("--cache", default="q4", help="q4, q8, q8/q4, nf4, … (default q4)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model_id)
    model = AutoModelForCausalLM.from_pretrained(options.model_id, dtype="auto").to(device)
    if device == "cpu" and model.dtype == torch.float16:
        model = model.float()
    inputs = tokenizer(options.prompt, return_tensors="pt").to(device)

    stock = timed(model, inputs, options.max_new_tokens)
    accelerate(model, cache=options.cache)
    ours = timed(model, inputs, options.max_new_tokens)
    restore(model)

    for name, found in (("stock DynamicCache", stock), (f"caramba_fast {options.cache}", ours)):
        print(f"--- {name}\n{tokenizer.decode(found['tokens'], skip_special_tokens=True)}\n")
    for name, found in (("stock DynamicCache", stock), (f"caramba_fast {options.cache}", ours)):
        print(f"{name:24} {found['bytes'] / 2**10:10,.1f} KiB {found['rate']:8.1f} tokens/s")


def timed(model: Any, inputs: Any, count: int) -> dict[str, Any]:
    """Greedy tokens, bytes of the cache, and tokens per second of the second of two runs."""
    settings: dict[str, Any] = dict(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, return_dict_in_generate=True
    )
    model.generate(**inputs, **settings)
    started = time.perf_counter()
    out = model.generate(**inputs, **settings)
    seconds = time.perf_counter() - started
    cache = out.past_key_values
    nbytes = getattr(cache, "nbytes", None)
    if nbytes is None:
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"tokens": out.sequences[0], "bytes": nbytes, "rate": count / seconds}


if __name__ == "__main__":
    main()
