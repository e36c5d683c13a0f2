"""Context parallelism: ``torchrun --nproc-per-node 2 examples/torchrun_context_parallel.py``.

The tokens of the cache are spread over the ranks by pages. The demo model of the package continues a prompt that is
longer than any one rank can hold, with the same result as in one process. Nothing is downloaded; CPUs use gloo, GPUs
NCCL.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from caramba_fast.distributed import RankGroup, context_parallel
from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import load_demo
from caramba_fast.models.demos import demo_tokenizer, held_out_text

#: Most tokens of a row on each rank.
ROOM = 512


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--cache", default="q4", help="q4, q8, fp16, … (default q4)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = RankGroup()
    most = ROOM * group.size
    model, tokenizer = load_demo(device=device), demo_tokenizer()
    prompt = tokenizer.encode(held_out_text()[:60_000]).ids[: most - options.max_new_tokens]
    config = GenerateConfig(
        cache=options.cache, max_seq_len=most, max_new_tokens=options.max_new_tokens,
        do_sample=False, ignore_eos=True, prefill="stored", prefill_chunk=256,
    )  # fmt: skip

    generator = Generator(context_parallel(model, group, rank_tokens=[ROOM] * group.size), config)
    generator.prefill([prompt[:-1]])
    before = vars(group.traffic).copy()
    written = generator.generate([prompt[-1:]])[0, 1:].tolist()
    steps = options.max_new_tokens  # one token each, the first one the prompt's last
    moved = {name: (value - before[name]) // steps for name, value in vars(group.traffic).items()}

    held = (
        group.all_gather(torch.tensor([generator.cache.nbytes], device=device)).flatten().tolist()
    )
    if group.rank == 0:
        report(prompt, written, held, moved, tokenizer)
        compare(Generator(model, config), prompt, written)
    dist.barrier()
    group.close()
    dist.destroy_process_group()


def report(
    prompt: list[int], written: list[int], held: list[int], moved: dict[str, int], tokenizer
) -> None:
    print(f"prompt of {len(prompt)} tokens, room for {ROOM} on each of {len(held)} ranks")
    print(f"tokens: {written}")
    print(f"text: {tokenizer.decode(written)!r}")
    for rank, count in enumerate(held):
        print(f"rank {rank} holds {count:,} bytes of cache")
    print(
        f"bytes moved per token: {moved['given']:,} given by each rank to {moved['collectives']} collectives, "
        f"{moved['received']:,} received"
    )


def compare(generator: Generator, prompt: list[int], written: list[int]) -> None:
    """Compares with one process whose cache holds the whole prompt."""
    generator.prefill([prompt[:-1]])
    expected = generator.generate([prompt[-1:]])[0, 1:].tolist()
    print(f"one process holds {generator.cache.nbytes:,} bytes of cache")
    if written != expected:
        raise SystemExit(f"one process writes something else: {expected}")
    print(f"the same {len(written)} tokens as one process")


if __name__ == "__main__":
    main()
