"""Real ranks for tests: processes of this file, joined through a store held by the test itself, or by rank 0.

``python distributed_ranks.py SIZE PORT HOLDER OUT MODULE.FUNCTION...`` imports the modules once and forks the ranks;
each runs the functions in turn and writes the outcome of each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 240
#: Possible hosts of the ranks' store.
HOLDERS = ("test", "rank0")


def checks_of(module: str, *left_out: str) -> list[str]:
    """Names of the ``check_`` functions of a module, for `Ranks`."""
    names = vars(importlib.import_module(module))
    return [f"{module}.{n}" for n in names if n.startswith("check_") and n not in left_out]


class Ranks:
    def __init__(self, size: int, out: Path, functions: list[str], holder: str = "test") -> None:
        assert holder in HOLDERS
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.out, self.size, port = out, size, self.store.port
        given = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), given]))
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(size), str(port), holder, str(out), *functions],
            env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self) -> list[dict[str, str]]:
        """Results of each rank's checks by name: "ok" or a traceback; empty if it was killed."""
        try:
            text, _ = self.process.communicate(timeout=LIMIT)
            assert self.process.returncode == 0, f"a rank failed:\n{text}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the ranks as well
            self.process.wait()
        files = [self.out / f"rank{rank}.json" for rank in range(self.size)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def joined_store(rank: int, port: int, holder: str) -> dist.TCPStore:
    """The store of all ranks: the test's, or one in rank 0 whose port is published in the test's."""
    known = dist.TCPStore("127.0.0.1", port, is_master=False)
    if holder == "test":
        return known
    if rank == 0:
        held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        known.set("port", str(held.port))
        return held
    return dist.TCPStore("127.0.0.1", int(known.get("port")), is_master=False)


def main(rank: int, size: int, port: int, holder: str, out: str, functions: list[str]) -> None:
    """Joins the other ranks, runs the functions and writes their results; stops at the first failure."""
    torch.set_num_threads(1)
    store = joined_store(rank, port, holder)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    found: dict[str, str] = {}
    for name in functions:
        module, _, function = name.rpartition(".")
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            getattr(importlib.import_module(module), function)()
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
        Path(out, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        print(f"{name} {time.perf_counter() - began:.1f} s", flush=True)
        if found[name] != "ok":
            break
    os._exit(0)  # an orderly exit would wait for peers, which may be gone


def fork_ranks(size: int, port: int, holder: str, out: str, functions: list[str]) -> int:
    """Forks the ranks, which have imported everything by then; 1 if one of them failed, but for one that was killed."""
    torch.set_num_threads(1)
    for module in {name.rpartition(".")[0]: None for name in functions}:
        importlib.import_module(module)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                main(rank, size, port, holder, out, functions)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(1)  # main() ends the process itself
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank, end in enumerate(ends):
        if end not in (0, -signal.SIGKILL):
            print(f"rank {rank} ended with {end}")
    return int(any(end not in (0, -signal.SIGKILL) for end in ends))


if __name__ == "__main__":
    raise SystemExit(fork_ranks(*map(int, sys.argv[1:3]), *sys.argv[3:5], sys.argv[5:]))
