"""A transformers model with its stock cache and with ours: ``python examples/hf_generate.py [MODEL_ID]``.

MODEL_ID is any decoder-only model of the Hub, such as Qwen/Qwen2.5-0.5B-Instruct, or a folder; the default is the demo
model of the package, without any download. Both caches generate greedily after prompts of several lengths
(``--contexts 64 4096 16384``); the difference between caches shows at long contexts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from caramba_fast.hf import accelerate, restore
from caramba_fast.models import demo_path, held_out_text


class Written(NamedTuple):
    """The text generated after a prompt, and its cost."""

    text: str
    tokens_per_s: float
    nbytes: int


class Clock(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Records the time of each token; the first entry is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:  # noqa: ARG002 - transformers' name
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_per_s(self) -> float:
        """From the median step, without the first token, whose time is the prefill's."""
        steps = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        return 1 / statistics.median(steps)


def write(model: Any, tokenizer: Any, ids: torch.Tensor, count: int) -> Written:
    """Generates ``count`` greedy tokens after ``ids`` (1, T)."""
    clock = Clock()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, return_dict_in_generate=True, streamer=clock,
    )  # fmt: skip
    cache = out[
        "cache" if "cache" in out else "past_key_values"
    ]  # its name before transformers 5.24
    nbytes = getattr(cache, "nbytes", None)  # only our cache has it
    if nbytes is None:
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return Written(text, clock.tokens_per_s, nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("model_id", nargs="?", default=str(demo_path()))
    parser.add_argument("--cache", default="q4", help="q4, q8, q8/q4, nf4, … (default q4)")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[64, 1024, 4096], metavar="TOKENS"
    )
    parser.add_argument(
        "--text", type=Path, help="prompts begin it; Python source of the package by default"
    )
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model_id)
    model = AutoModelForCausalLM.from_pretrained(options.model_id, dtype="auto").to(device)
    if device == "cpu" and model.dtype == torch.float16:
        model = model.float()
    text = held_out_text() if options.text is None else options.text.read_text("utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids.to(device)
    room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 2**62)

    print(f"{'context':>8} {'cache':14} {'tokens/s':>9} {'× stock':>8} {'MiB':>8}  continues with")
    for context in options.contexts:
        if context > min(ids.shape[1], room - options.max_new_tokens):
            print(
                f"{context:8,} left out: the text has {ids.shape[1]:,} tokens, the model {room:,} positions"
            )
            continue
        prompt = ids[:, :context]
        stock = write(model, tokenizer, prompt, options.max_new_tokens)
        accelerate(model, cache=options.cache)
        ours = write(model, tokenizer, prompt, options.max_new_tokens)
        restore(model)
        for name, found in (("DynamicCache", stock), (options.cache, ours)):
            print(
                f"{context:8,} {name:14} {found.tokens_per_s:9.1f} {found.tokens_per_s / stock.tokens_per_s:8.2f} "
                f"{found.nbytes / 2**20:8.2f}  {found.text[:60]!r}"
            )


if __name__ == "__main__":
    main()
