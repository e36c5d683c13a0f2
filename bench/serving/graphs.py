"""Checks that an engine decodes the same with and without CUDA graphs.

``python -m caramba_fast.bench.serving.graphs [--device cpu] [--kinds q4 ...] [--shard I/N] [--time-limit SECONDS]``

A small model serves requests that join and leave. Each decode step runs three times on the same pages: as a replayed
graph; with the same padding but without a graph; and unpadded, as in engines without graphs. All three write the same
tokens to the same slots. The logits of the first two should be equal, those of the third equal up to the rounding of
another batch size, and a replay may only change its own sequences' pages and rings. The exit status is 1 if any of
this fails or no graph was recorded. On the CPU a plain step replaces the replay, which checks the padding and this
script. ``--shard`` takes every N-th kind, without times, since other shards run at the same time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.kernels.parity import described
from caramba_fast.bench.kernels.shards import Shard
from caramba_fast.cache import RaggedBatch, Stretch
from caramba_fast.infer.cuda_graph import BatchGraph, BatchGraphs, Recorder
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.serve import Engine

KINDS = ("q4", "fp16", "q8", "nf4")
ROWS = 6
#: Largest relative difference of a row's logits: replayed from padded, and padded from ragged. Products in bf16 round
#: by 1/512.
REPLAYED, RAGGED = 1e-3, 0.05
SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, initializer_range=0.1, max_position_embeddings=512,
)  # fmt: skip


class Steps:
    """A recorder that records nothing: a replay is the step itself."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once."""
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Returns the step itself."""
        return step


class Compared(BatchGraphs):
    """Runs each step three times and keeps the largest difference.

    Attributes:
        worst: largest relative difference of a row, between replayed and padded, and between padded and ragged.
        strays: number of other sequences' pages, rings and sinks that a replay changed.
        steps: number of compared steps.
        latest: input of the last compared step.
    """

    def __init__(self, engine: Engine) -> None:
        model: Any = engine.model
        super().__init__(model, engine.pool, None, ROWS)
        if model.device.type == "cpu":
            self.reason = None
        self.worst, self.steps, self.strays = [0.0, 0.0], 0, 0
        self.latest: tuple[Sequence[int], Sequence[Stretch]] = ((), ())
        self._others = {rows: BatchGraph(model, rows, engine.pool, Steps()) for rows in self.sizes}

    def _recorder(self) -> Recorder:
        return Steps() if self._model.device.type == "cpu" else super()._recorder()

    def logits(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> Tensor | None:
        """As `BatchGraphs.logits`."""
        before = [x.clone() for x, _ in self._memory()]
        replayed = super().logits(tokens, stretches)
        if replayed is None:
            return None
        pages = {s.pages[s.start // self._pool.page_size] for s in stretches}
        mine = {True: pages, False: {s.ring for s in stretches}}
        for was, (x, is_pages) in zip(before, self._memory(), strict=True):
            changed = (x.view(torch.uint8) != was.view(torch.uint8)).flatten(1).any(1).nonzero()
            self.strays += len({*changed.flatten().tolist()} - mine[is_pages])
        rows = next(size for size in self.sizes if size >= len(stretches))
        padded = self._others[rows].step(tokens, stretches)
        ragged = self.ragged(tokens, stretches)
        for place, (a, b) in enumerate(((replayed, padded), (padded, ragged))):
            off = (a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)
            found = float(off.nan_to_num(torch.inf).max())
            self.worst[place] = max(self.worst[place], found)
        self.steps, self.latest = self.steps + 1, (tokens, stretches)
        return replayed

    def _memory(self) -> Iterator[tuple[Tensor, bool]]:
        """Buffers of the pool, and whether their rows are pages."""
        yield from ((x, True) for x in self._pool.page_buffers)
        yield from ((x, False) for x in self._pool._sides)

    def ragged(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> Tensor:
        """The step as in an engine without graphs."""
        ids = torch.tensor(tokens, device=self._model.device)
        model, rows = self._model, torch.arange(len(tokens), device=ids.device)
        found: Tensor = model.forward_ragged(ids, RaggedBatch(stretches, self._pool), rows)
        return found

    @torch.no_grad()
    def milliseconds(self, count: int = 50) -> Iterator[float]:
        """Median time of the latest step, replayed and without graphs."""
        for run in (super().logits, self.ragged):
            times = []
            for _ in range(count):
                torch.cuda.synchronize()
                began = time.perf_counter()
                run(*self.latest)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            yield 1e3 * sorted(times)[count // 2]


def compared(kind: str, device: str) -> Compared:
    """Serves the requests with a cache of this kind."""
    torch.manual_seed(5)
    model = Transformer(ModelConfig(**SIZES)).eval().requires_grad_(False)
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    engine = Engine(model, cache_kind=kind, max_seq_len=512, max_batch_size=ROWS, page_size=32)
    found = engine._core.runner.graphs = Compared(engine)
    waiting = [(length, 40 + 9 * place) for place, length in enumerate((9, 33, 200, 5, 90, 64, 40))]
    step = 0
    while engine.has_unfinished or waiting:
        if step % 5 == 0 and waiting:
            length, new = waiting.pop()
            prompt = torch.randint(0, SIZES["vocab_size"], (length,)).tolist()
            engine.add_request(prompt, max_new_tokens=new, temperature=0.0, ignore_eos=True)
        for event in engine.step():
            if event.output is not None and event.output.error is not None:
                raise RuntimeError(event.output.error)
        step += 1
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all compared kinds agree, 1 if one does not or none was compared."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument(
        "--shard", type=Shard.parse, metavar="I/N", help="every N-th kind, not timed"
    )
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds")
    args = parser.parse_args(argv)
    kinds = args.kinds if args.shard is None else args.shard.of(args.kinds)
    began, status, done = time.monotonic(), 0, 0
    for kind in kinds:
        if time.monotonic() - began > args.time_limit:
            print(f"{kind}: no time: left out")
            continue
        done += 1
        try:
            found = compared(kind, args.device)
        except Exception as error:  # the other kinds are checked
            print(f"{kind}: FAILED: {described(error)}", flush=True)
            status = 1
            continue
        good = found.worst[0] <= REPLAYED and found.worst[1] <= RAGGED
        good = good and found.reason is None and found.steps > 0 and not found.strays
        status = status if good else 1
        print(
            f"{kind}: {'ok' if good else 'FAILED'}: {found.steps} decode steps, {found.state()}; replayed from padded "
            f"{found.worst[0]:.2g} (allowed {REPLAYED}), padded from ragged {found.worst[1]:.2g} (allowed {RAGGED}), "
            f"{found.strays} rows of others changed",
            flush=True,
        )
        if args.device != "cpu" and good and args.shard is None:
            graph, ragged = found.milliseconds()
            print(f"{kind}: ms a step: {graph:.3f} as a graph, {ragged:.3f} one by one", flush=True)
    return status if done or not kinds else 1


if __name__ == "__main__":
    sys.exit(main())
