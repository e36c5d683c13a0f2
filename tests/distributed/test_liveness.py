"""Which rank is named when one dies without a word and the others leave as soon as they know."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

#: Rounds for each victim.
EACH = 4
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
    told = "none" if loss is None else f"{loss.ranks} {loss.certain}"
    os.write(1, f"{victim} {told}\\n".encode())  # at once: others write as well
    os._exit(0)

folder, rounds = sys.argv[1], int(sys.argv[2])
for turn, victim in ((turn, victim) for victim in range(3) for turn in range(rounds)):
    children = []
    for index in range(3):
        child = os.fork()
        if child == 0:
            rank(index, f"{folder}/{victim}-{turn}", victim, 0.5 * ((turn + index) % 3) * (index == 2))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What the others were told, a line each behind the number of the victim."""
    command = [sys.executable, "-c", ROUNDS, tmp_path_factory.mktemp("rounds"), str(EACH)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_rank_that_died_is_named(victim: int, rounds: subprocess.CompletedProcess[str]) -> None:
    """The process with the store leaves once the others know, not before: they would take it for the dead one."""
    assert rounds.returncode == 0, rounds.stderr
    lines = [line.split(" ", 1) for line in rounds.stdout.splitlines()]
    told = Counter(what for of, what in lines if of == str(victim))
    right = told[f"[{victim}] True"]
    honest = sum(n for what, n in told.items() if what.endswith("False") and str(victim) in what)
    assert right + honest == 2 * EACH, f"{dict(told)}\n{rounds.stderr[-500:]}"
    assert right >= EACH, told


def test_what_cannot_be_known_is_not_claimed() -> None:
    from caramba_fast.distributed import RankLostError

    error = RankLostError([0, 2], 3, "its store is closed", certain=False)
    assert error.ranks == [0, 2] and str(error).startswith("one of ranks 0, 2 of 3 is gone")


#: Two ranks make groups; then one leaves, and a new process takes its place in another world.
REPLACED = """
import os, sys, time, warnings
import torch, torch.distributed as dist
from caramba_fast.distributed import RankGroup
warnings.simplefilter("ignore")

def world(rank, file):
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    groups = [RankGroup(timeout=20.0) for _ in range(2)]
    for group in groups:
        assert group.all_gather(torch.tensor([rank])).tolist() == [[0], [1]]
        found = group.gather_on_host(torch.tensor([rank]))
        assert found.tolist() == [[0], [1]]
    for group in groups:
        group.close()
    dist.destroy_process_group()

folder, children = sys.argv[1], []
for rank, worlds in ((0, "ab"), (1, "a"), (1, "b")):
    if (child := os.fork()) == 0:
        for name in worlds:
            world(rank, f"{folder}/{name}")
        os.write(1, b"met\\n")
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def test_a_process_that_replaces_another_meets_those_that_stayed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPLACED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["met"] * 3, done.stderr
