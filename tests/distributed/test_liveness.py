"""Which rank is named when one dies without a word and the others leave as soon as they know."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

#: Forks three ranks a round; the victim ends at once, the others when they have been told of it.
ROUNDS = """
import os, sys, time, warnings
from datetime import timedelta
import torch.distributed as dist
from caramba_fast.distributed.heartbeat import Heartbeat, StoreHolder
warnings.simplefilter("ignore")

def rank(index, port_file, victim, delay):
    if index == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(port_file + ".new", "w") as file:
            file.write(str(store.port))
        os.rename(port_file + ".new", port_file)
    else:
        while not os.path.exists(port_file):
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(open(port_file).read()), is_master=False)
    heart = Heartbeat(store, StoreHolder(0, "the store"), index, 3, 20.0, interval=0.1)
    if index == victim:
        time.sleep(0.3)
        os._exit(0)
    time.sleep(0.4 + delay)  # a collective fails after the death, in one rank sooner than in another
    loss = heart.find_loss()
    print(index, "none" if loss is None else f"{loss.ranks} {loss.certain}", flush=True)
    os._exit(0)

folder, rounds, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for turn in range(rounds):
    children = []
    for index in range(3):
        child = os.fork()
        if child == 0:
            rank(index, f"{folder}/{turn}", victim, 0.5 * ((turn + index) % 3) * (index == 2))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_rank_that_died_is_named(victim: int, tmp_path: Path) -> None:
    """The process with the store leaves once the others know, not before: they would take it for the dead one."""
    rounds = 4
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, tmp_path, str(rounds), str(victim)], capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = Counter(line.split(" ", 1)[1] for line in done.stdout.splitlines())
    right = told[f"[{victim}] True"]
    honest = sum(n for what, n in told.items() if what.endswith("False") and str(victim) in what)
    assert right + honest == 2 * rounds, f"{dict(told)}\\n{done.stderr[-500:]}"
    assert right >= rounds, told


def test_what_cannot_be_known_is_not_claimed() -> None:
    from caramba_fast.distributed import RankLostError

    error = RankLostError([0, 2], 3, "its store is closed", certain=False)
    assert error.ranks == [0, 2] and str(error).startswith("one of ranks 0, 2 of 3 is gone")
