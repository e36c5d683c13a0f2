"""Soak test: many clients, some of which disconnect: ``PYTHONPATH=tests python -m support.http_soak --seconds 600``.

The server has its own process. Clients request chats and completions of every sort, streamed or not, and some leave at
random. At the end the server gets SIGTERM under load and prints what its engine still holds. Every request must end in
a way its client understands, no page may leak, and memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

TESTS = Path(__file__).resolve().parents[1]
SCHEMA = {
    "type": "object", "properties": {"kind": {"enum": ["reader", "writer"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"], "additionalProperties": False,
}  # fmt: skip
#: Seconds after which a request counts as lost.
LOST_S = 120


@dataclass
class Report:
    """The results: bytes of the server's memory by seconds (``resident``), its output after it stopped (``after``).

    Attributes:
        ends: number of requests by outcome: answered, left, told to come again, stopped; anything else is a fault.
        wrong: responses that clients did not understand.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    after: dict[str, Any] = field(default_factory=dict)
    code: int | None = None

    def problems(self, seconds: float) -> list[str]:
        found = self.wrong[:5]
        found += [f"{name} is {self.after.get(name)}" for name in ("problems", "pages_held", "unfinished")
                  if self.after.get(name) not in ([], 0, False)]  # fmt: skip
        done = self.after.get("finished", 0)
        if not self.ends["answered"] <= done <= sum(self.ends.values()):
            found.append(f"{self.ends['answered']} were answered, and the server finished {done}")
        if self.code not in (0, -signal.SIGTERM):
            found.append(f"the server ended with {self.code}")
        if seconds < 60:
            return found  # too early: memory is still growing to what the load needs
        early, late = self.memory(seconds, 0.25, 0.5), self.memory(seconds, 0.75, 1.0)
        if late > 1.05 * early + 2**23:
            found.append(f"memory grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")
        return found

    def of_every_sort(self) -> bool:
        return self.ends["answered"] > 10 and self.ends["left"] > 5

    def memory(self, seconds: float, begin: float, end: float) -> float:
        """Mean bytes within a fraction of the time."""
        return fmean(b for at, b in self.resident if begin * seconds <= at <= end * seconds)


def serve(port: int) -> None:
    """Serves the demo model until stopped; then prints the remaining resources as JSON."""
    import uvicorn
    from support.http_server import NAME, new_engine

    from caramba_fast.serve.http.server import ServerConfig, create_app

    engine = new_engine(max_batch_size=16, max_waiting=40, cache_bytes=3 * 2**20)
    config = uvicorn.Config(
        create_app(engine, ServerConfig(NAME)), port=port, log_level="critical", timeout_graceful_shutdown=5
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn re-raises it after it has stopped
    uvicorn.Server(config).run()
    figures = engine.metrics
    print(json.dumps({
        "problems": engine.problems(), "pages_held": figures.pages_held, "unfinished": engine.has_unfinished,
        "finished": figures.finished, "cancelled": figures.cancelled, "failed": figures.failed,
        "preemptions": figures.preemptions,
        "prefix_hit_tokens": figures.prefix_hit_tokens, "steps": figures.steps,
    }), flush=True)  # fmt: skip


def body(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A route, and the body of a request to it."""
    shared = "def read(path):\n    return open(path).read()\n\n\n" * dice.choice((0, 2, 6))
    asked: dict[str, Any] = {
        "max_tokens": dice.choice((1, 4, 16, 48)),
        "stream": dice.random() < 0.6,
    }
    if dice.random() < 0.5:
        asked |= {"temperature": 0.8, "seed": dice.randrange(50), "n": dice.choice((1, 1, 1, 2))}
    else:
        asked["temperature"] = 0
    if dice.random() < 0.1:
        asked["stop"] = ["\n\n"]
    if dice.random() < 0.1:
        schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
        asked["response_format"] = schema
    prompt = f"{shared}def f{dice.randrange(1000)}("
    if dice.random() < 0.5:
        if dice.random() < 0.2:
            asked |= {"logprobs": True, "top_logprobs": 2}
        return "chat/completions", {**asked, "messages": [{"role": "user", "content": prompt}]}
    return "completions", {**asked, "prompt": prompt}


class Load:
    """Clients that send requests until they are told to stop."""

    def __init__(self, address: str, report: Report) -> None:
        self.address, self.report, self.stopping = address, report, False
        self.over = asyncio.Event()

    async def client(self, number: int) -> None:
        dice = random.Random(number)
        async with httpx.AsyncClient(timeout=LOST_S) as http:
            while not self.over.is_set():
                how = await self._one(http, dice)
                self.report.ends[how] += 1
                if how == "told to come again":
                    await asyncio.sleep(0.05)
                elif how == "stopped":
                    return

    async def _one(self, http: httpx.AsyncClient, dice: random.Random) -> str:
        route, asked = body(dice)
        leaves = dice.random() < 0.25
        try:
            work = self._ask(http, route, asked, dice.randint(1, 6) if leaves else None)
            patience = dice.uniform(0.0, 1.0) if leaves and not asked["stream"] else None
            return await asyncio.wait_for(work, patience)
        except asyncio.TimeoutError:
            return "left"
        except httpx.TimeoutException:
            self.report.wrong.append(f"lost: {asked}")
            return "lost"
        except httpx.TransportError as error:
            if self.stopping:
                return "stopped"
            self.report.wrong.append(f"{error!r}: {asked}")
            return "broken"

    async def _ask(
        self, http: httpx.AsyncClient, route: str, asked: dict[str, Any], lines: int | None
    ) -> str:
        async with http.stream("POST", f"{self.address}/v1/{route}", json=asked) as found:
            if found.status_code == 429:
                return "told to come again"
            if found.status_code == 503 and self.stopping:
                return "stopped"
            if found.status_code != 200:
                self.report.wrong.append(f"{found.status_code}: {await found.aread()!r}")
                return "refused"
            if not asked["stream"]:
                await found.aread()
                return self._whole(asked, found.json())
            return await self._pieces(asked, found, lines)

    async def _pieces(self, asked: dict[str, Any], found: httpx.Response, most: int | None) -> str:
        ends, last, seen = 0, "", 0
        async for line in found.aiter_lines():
            if not line:
                continue
            last, seen = line, seen + 1
            if line.startswith('data: {"error"'):
                return self._error(line)
            if line != "data: [DONE]":
                choices = json.loads(line.removeprefix("data: "))["choices"]
                ends += sum(choice["finish_reason"] is not None for choice in choices)
            if seen == most:
                return "left"
        if last != "data: [DONE]" or ends != asked.get("n", 1):
            return self._error(f"a stream ended with {last!r}, {ends} ends: {asked}")
        return "answered"

    def _error(self, said: str) -> str:
        if self.stopping:
            return "stopped"
        self.report.wrong.append(said)
        return "broken"

    def _whole(self, asked: dict[str, Any], found: dict[str, Any]) -> str:
        choices = found["choices"]
        new = found["usage"]["completion_tokens"]
        self.report.tokens += new
        right = len(choices) == asked.get("n", 1) and new <= asked["max_tokens"] * len(choices)
        for choice in choices:
            text = choice["text"] if "prompt" in asked else choice["message"]["content"]
            if (
                "response_format" in asked
                and choice["finish_reason"] == "stop"
                and "stop" not in asked
            ):
                right = right and set(json.loads(text)) == {"kind", "ok"}
        if not right:
            self.report.wrong.append(f"{found}: {asked}")
        return "answered" if right else "wrong"


async def drive(address: str, process: Any, report: Report, seconds: float, clients: int) -> None:
    """Runs the clients, then sends SIGTERM under load."""
    load = Load(address, report)
    began = time.monotonic()
    tasks = [asyncio.create_task(load.client(number)) for number in range(clients)]
    await asyncio.to_thread(_watch, process, report, began, seconds)
    load.stopping = True
    process.send_signal(signal.SIGTERM)
    await asyncio.wait(tasks, timeout=30)
    load.over.set()
    for task in tasks:
        if not task.done():
            report.wrong.append(
                "a client was still waiting half a minute after the server was told to stop"
            )
            task.cancel()
        elif task.exception() is not None:
            report.wrong.append(repr(task.exception()))


def _watch(process: Any, report: Report, began: float, seconds: float) -> None:
    """Samples the server's memory in a thread until time is over and some requests were answered and some left."""
    while (at := time.monotonic() - began) < seconds or (
        at < LOST_S and not report.of_every_sort()
    ):
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        report.resident.append((at, pages * os.sysconf("SC_PAGE_SIZE")))
        time.sleep(min(0.5, seconds / 20))


def soak(seconds: float, clients: int = 64) -> Report:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = Report()
    command = [sys.executable, "-m", "support.http_soak", "--serve", str(port)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            end = time.monotonic() + 60
            while True:
                try:
                    if httpx.get(f"{address}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None and time.monotonic() < end, "the server is not up"
                    time.sleep(0.05)
            asyncio.run(drive(address, process, report, seconds, clients))
            said, _ = process.communicate(timeout=60)
            report.code = process.returncode
            report.after = (
                json.loads(said.splitlines()[-1]) if said.strip() else {"problems": "no word"}
            )
        finally:
            process.kill()
    return report


def main() -> None:
    """Runs by hand; exit status 1 if a check fails."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    report = soak(args.seconds, args.clients)
    quarters = [report.memory(args.seconds, n / 4, (n + 1) / 4) / 2**20 for n in range(4)]
    print(f"{args.clients} clients, {args.seconds:.0f} s: {dict(report.ends)}")
    print(f"resident MiB, by quarters: {', '.join(f'{q:.1f}' for q in quarters)}")
    print(f"the server: {report.after}, exit {report.code}")
    problems = report.problems(args.seconds)
    print("\n".join(problems) or "nothing was lost, no page is held, memory stayed")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
