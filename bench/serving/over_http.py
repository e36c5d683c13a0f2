"""The same load through HTTP: ``python -m caramba_fast.bench.serving.over_http [--publish] [--quick] [--peers]``.

`CONCURRENCY` clients send the requests of `serve_load`, each the next when the last is answered: to an `Engine` in this
process, and to servers in others (`http_servers`): ours, streamed and whole, and with ``--peers`` those of transformers
and llama.cpp. All take the load in turn, in rounds; a ratio is the median over rounds. Beside tokens a second, two
figures show the cost of HTTP: processor time per token in the model's process, without clients, and the share of time
the engine was between two steps. Tokens a second also depend on what else the machine does, clients included where they
share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from caramba_fast.bench.environment import environment
from caramba_fast.bench.kernels.timing import quantile
from caramba_fast.bench.out import write_table
from caramba_fast.bench.pages.http_page import FILE, PAGE, PART, lines_of
from caramba_fast.bench.pages.sections import add_targets, measured
from caramba_fast.bench.real.models import model_folder, title
from caramba_fast.bench.real.weights import four_bits
from caramba_fast.bench.serving.http_servers import (
    Server,
    llama_server,
    ours,
    transformers_serve,
)
from caramba_fast.bench.serving.serve_load import CONCURRENCY, Item, load, percentiles
from caramba_fast.bench.serving.serve_systems import BATCH_TOKENS, GREEDY, PAGE_SIZE
from caramba_fast.cli.models import load_to_decode
from caramba_fast.infer.tokenizer import TextTokenizer, find_tokenizer
from caramba_fast.models import held_out_text
from caramba_fast.models.packed import why_not_packed
from caramba_fast.models.registry import model_folder as local_folder
from caramba_fast.serve import Engine

ENGINE, OURS = "engine", ("engine", "http, streamed", "http, whole")
COLUMNS = (
    "model", "dtype", "packed", "system", "cache", "rounds", "requests", "tokens", "tokens_per_s", "tokens_per_s_p20",
    "tokens_per_s_p80", "vs_engine", "cpu_ms_per_token", "cpu_vs_engine", "between_steps", "ttft_p50_ms",
    "ttft_p99_ms", "other_texts", "load_average", "threads", "device", "torch", "triton", "commit", "source",
)  # fmt: skip
ANSWERS_S = 600


@dataclass
class Taken:
    """Figures of one round of one system.

    Attributes:
        seconds: wall time of all requests.
        cpu_s: processor time of the process that computes.
        tokens: number generated.
        ttft_s: time to first token of each request; if not streamed, its whole time.
        texts: the answers.
        busy_s: wall time in steps of the engine; None if unknown.
    """

    seconds: float
    cpu_s: float
    tokens: int
    ttft_s: list[float]
    texts: list[str]
    busy_s: float | None = None


class Direct:
    """An `Engine` in this process, with a fixed number of concurrent requests."""

    name = ENGINE

    def __init__(self, folder: Path, cache: str, dtype: str, tokenizer: TextTokenizer) -> None:
        self.engine = Engine(
            load_to_decode(folder, "cpu", dtype), cache_kind=cache, page_size=PAGE_SIZE, tokenizer=tokenizer,
            max_batch_size=CONCURRENCY, max_batch_tokens=BATCH_TOKENS, **GREEDY,
        )  # fmt: skip

    def run(self, items: Sequence[Item], number: int) -> Taken:
        """Serves the load."""
        engine, left = self.engine, list(enumerate(items))[::-1]
        sent, texts = dict[str, float](), dict[str, str]()
        first, new = dict[str, float](), 0
        began, cpu, busy = time.perf_counter(), time.process_time(), engine.metrics.busy_s
        while left or engine.has_unfinished:
            while left and len(engine.under_way) < CONCURRENCY:
                place, item = left.pop()
                name = engine.add_request(
                    item.prompt, request_id=str(place), max_new_tokens=item.new_tokens,
                    cache_salt=f"{number} {place}",
                )  # fmt: skip
                sent[name] = time.perf_counter()
            for event in engine.step():
                first.setdefault(event.request_id, time.perf_counter())
                new += len(event.tokens)
                if event.output is not None:
                    texts[event.request_id] = event.output.texts[0]
        return Taken(
            time.perf_counter() - began, time.process_time() - cpu, new,
            [first[name] - at for name, at in sent.items()], [texts[str(n)] for n in range(len(items))],
            engine.metrics.busy_s - busy,
        )  # fmt: skip


class OverHTTP:
    """Clients of a server, with or without streaming."""

    def __init__(
        self,
        server: Server,
        address: str,
        process: int,
        tokenizer: TextTokenizer,
        streamed: bool = True,
    ) -> None:
        self.server, self.address, self.process = server, address, process
        self.tokenizer, self.streamed = tokenizer, streamed
        self.name = f"{server.name}, {'streamed' if streamed else 'whole'}"

    def run(self, items: Sequence[Item], number: int) -> Taken:
        """Serves the load."""
        return asyncio.run(self._run(items, number))

    async def _run(self, items: Sequence[Item], number: int) -> Taken:
        left, found = list(enumerate(items))[::-1], dict[int, tuple[str, int, float]]()
        # A connection for each request: llama.cpp's server closes kept ones while they are used again.
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=ANSWERS_S, limits=limits) as http:
            busy = await self._busy(http)
            began, cpu = time.perf_counter(), cpu_seconds(self.process)

            async def client() -> None:
                while left:
                    place, item = left.pop()
                    found[place] = await self._ask(http, item, f"{self.name} {number} {place}")

            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
            seconds, used = time.perf_counter() - began, cpu_seconds(self.process) - cpu
            took = None if busy is None else (await self._busy(http) or 0.0) - busy
        outcomes = [found[place] for place in range(len(items))]
        for (_, new, _), item in zip(outcomes, items, strict=True):
            if new != item.new_tokens:
                raise RuntimeError(f"a request got {new} tokens, {item.new_tokens} were wanted")
        return Taken(
            seconds, used, sum(new for _, new, _ in outcomes), [ttft for *_, ttft in outcomes],
            [text for text, *_ in outcomes], took,
        )  # fmt: skip

    async def _busy(self, http: httpx.AsyncClient) -> float | None:
        """Seconds our server has spent in steps; None for other servers."""
        if self.name not in OURS:
            return None
        lines = (await http.get(f"{self.address}/metrics")).text.splitlines()
        (value,) = (
            line.split()[1] for line in lines if line.startswith("caramba_fast_busy_s_total ")
        )
        return float(value)

    async def _ask(self, http: httpx.AsyncClient, item: Item, salt: str) -> tuple[str, int, float]:
        """The text, its number of tokens, and the time of the first."""
        body = self.server.body(item, salt, self.tokenizer)
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent, first, text, usage = time.perf_counter(), 0.0, "", None
        async with http.stream("POST", f"{self.address}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            if not self.streamed:
                whole = json.loads(await answer.aread())
                took = time.perf_counter() - sent
                return whole["choices"][0]["text"], whole["usage"]["completion_tokens"], took
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - sent
                    chunk = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    usage = chunk.get("usage") or usage
        if usage is None:
            raise RuntimeError(f"a stream ended without usage: {line}")
        return text, usage["completion_tokens"], first


def cpu_seconds(process: int) -> float:
    """Processor time of a process so far, all threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(given: argparse.Namespace, path: Path) -> None:
    """Rounds in which all systems take the load in turn."""
    is_demo = given.model.partition(":")[0] == "demo"
    folder = local_folder(given.model) if is_demo else model_folder(given.model)
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder} has no tokenizer")
    items = load(tokenizer.encode(held_out_text()), given.requests)
    direct = Direct(folder, given.cache, given.dtype, tokenizer)
    servers = [ours(folder, given.cache, given.dtype)]
    if given.peers:
        gguf = folder.parent / f"{folder.name}.gguf"
        if gguf.exists():
            gguf = four_bits(gguf, "Q4_0")[0]  # with which llama.cpp is faster than with its Q4_1
        servers += [transformers_serve(folder, given.dtype), llama_server(gguf, given.cache)]
    with ExitStack() as stack:
        listed: list[Direct | OverHTTP] = [direct]
        for server in servers:
            if server.why_not is not None:
                print(f"  {server.name}: {server.why_not}", flush=True)
                continue
            address, process = stack.enter_context(server.running())
            listed.append(OverHTTP(server, address, process, tokenizer))
            if server is servers[0]:
                listed.append(OverHTTP(server, address, process, tokenizer, streamed=False))
        found: dict[str, list[Taken]] = {system.name: [] for system in listed}
        for number in range(-1, given.rounds):
            first = number % len(listed)
            for system in (*listed[first:], *listed[:first]):
                done = system.run(items[:2] if number < 0 else items, number)
                if number >= 0:  # the first warms up
                    found[system.name].append(done)
                    print(f"  {system.name}: {done.tokens / done.seconds:.1f} tokens/s, "
                          f"{1e3 * done.cpu_s / done.tokens:.2f} ms of the processor a token", flush=True)  # fmt: skip
    about = {
        "model": title(given.model), "dtype": given.dtype,
        "packed": why_not_packed(getattr(torch, given.dtype)) is None, "cache": given.cache, "rounds": given.rounds,
        "requests": len(items), "threads": torch.get_num_threads(), "load_average": f"{os.getloadavg()[0]:.1f}",
        **environment(torch.device("cpu")),
    }  # fmt: skip
    write_table(path, COLUMNS, [{**row, **about} for row in rows_of(found)])


def rows_of(found: dict[str, list[Taken]]) -> Iterator[dict[str, Any]]:
    """A row for each system."""
    base = found[ENGINE]
    for name, runs in found.items():
        rates = [run.tokens / run.seconds for run in runs]
        both = list(zip(runs, base, strict=True))
        ttft = percentiles([value for run in runs for value in run.ttft_s])
        yield {
            "system": name, "tokens": runs[0].tokens,
            "tokens_per_s": round(statistics.median(rates), 1),
            "tokens_per_s_p20": round(quantile(rates, 0.2), 1),
            "tokens_per_s_p80": round(quantile(rates, 0.8), 1),
            "vs_engine": round(statistics.median(b.seconds / a.seconds for a, b in both), 3),
            "cpu_ms_per_token": round(statistics.median(1e3 * run.cpu_s / run.tokens for run in runs), 3),
            "cpu_vs_engine": round(statistics.median(a.cpu_s / b.cpu_s for a, b in both), 3),
            "between_steps": "" if runs[0].busy_s is None else
            round(statistics.median(1 - (run.busy_s or 0.0) / run.seconds for run in runs), 4),
            "ttft_p50_ms": round(1e3 * ttft[0], 1), "ttft_p99_ms": round(1e3 * ttft[1], 1),
            "other_texts": "" if name not in OURS else
            sum(x != y for a, b in both for x, y in zip(a.texts, b.texts, strict=True)),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="caramba_fast.bench.serving.over_http", description=__doc__
    )
    add_targets(parser, "CSV file to write")
    parser.add_argument(
        "--quick", action="store_true", help="the demo model, few requests, seconds"
    )
    parser.add_argument(
        "--model", default="smollm2", help="of `bench.real.models`, a folder, or 'demo'"
    )
    parser.add_argument("--cache", default="q8")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights"
    )
    parser.add_argument(
        "--peers", action="store_true", help="beside `transformers serve` and llama.cpp's server"
    )
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    if given.quick:
        given.model, given.requests, given.rounds = "demo", 16, 1
    return measured(given, FILE, measure, PART, lines_of, PAGE)


if __name__ == "__main__":
    raise SystemExit(main())
