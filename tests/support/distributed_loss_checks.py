"""Checks of lost ranks: late, stuck, or killed, and which rank the error names.

Run in turn by four ranks, the first of which holds the store; the last two checks kill ranks 3 and 0.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.distributed_models import ids, model

from caramba_fast.cache import ModelKVCache
from caramba_fast.distributed import RankGroup, RankLostError, context_parallel, tensor_parallel

#: Timeouts in seconds of groups that a test waits for, and of others; `torch.distributed` itself waits for 60.
SHORT, TIMEOUT = 3.0, 20.0
BEAT = 0.2
PATIENCE = r"no sign of life for 1\.2 s"


@functools.cache
def group_of(ranks, timeout=TIMEOUT, heartbeat=BEAT):
    """A group, which all ranks have to make together; None on ranks that are not in it."""
    made = dist.new_group(list(ranks))
    return (
        RankGroup(made, timeout=timeout, heartbeat=heartbeat) if dist.get_rank() in ranks else None
    )


def check_groups_that_outlive_others_are_made():
    group_of((0, 1, 2))
    group_of((1, 2))


def check_a_rank_that_is_late_is_not_called_dead():
    pair = group_of((0, 1), timeout=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            pair.all_gather(torch.zeros(1))
        assert not isinstance(caught.value, RankLostError), caught.value
    elif dist.get_rank() == 1:
        time.sleep(3)
    dist.barrier()


def check_other_errors_are_not_delayed():
    group = group_of((0, 1, 2, 3), heartbeat=0.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), group.guarded():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert time.monotonic() - began < 1
    dist.barrier()


def while_stopped(victim, act):
    """All others `act` while the victim is stopped; then it resumes."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    others = dist.new_group([rank for rank in range(len(pids)) if rank != victim])
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        try:
            time.sleep(2 * BEAT)
            act()
            dist.barrier(others)
        finally:
            os.kill(int(pids[victim]), signal.SIGCONT)
    dist.barrier()


def loses(group, act, message, ranks):
    """Asserts that `act` raises the loss of these ranks, after the group's timeout and the time to identify them."""
    began = time.monotonic()
    with pytest.raises(RankLostError, match=message) as caught:
        act()
    assert caught.value.ranks == ranks
    assert time.monotonic() - began < group.timeout + 5
    with pytest.raises(RankLostError, match=message):  # now without waiting
        group.all_gather(torch.zeros(1))


@torch.no_grad()
def check_a_stuck_rank_is_named_by_one_it_shares_heads_with():
    group, act = group_of((0, 1), timeout=SHORT), lambda: None
    if group is not None:
        given = tensor_parallel(copy.deepcopy(model("gqa")), group)
        dist.barrier(group.process_group)  # so that slow loading does not count as late
        cache = ModelKVCache(given.cache_layout, 1, 300)
        given.forward(ids(1, 5), cache)
        act = functools.partial(given.forward, ids(1, 1), cache)
    gone = f"rank 1 of 2 gone: {PATIENCE}"
    while_stopped(1, lambda: loses(group, act, gone, [1]) if dist.get_rank() == 0 else None)


def check_a_stuck_rank_is_named_though_it_holds_the_store():
    group = group_of((0, 1, 2, 3), timeout=SHORT)
    act = functools.partial(group.all_gather, torch.zeros(1))
    while_stopped(0, lambda: loses(group, act, f"rank 0 of 4 gone: {PATIENCE}", [0]))


@torch.no_grad()
def check_a_killed_rank_is_named():
    """Its neighbours find the connection closed; the opposite rank waits for the timeout."""
    group = group_of((0, 1, 2, 3), timeout=SHORT + 1)
    given = context_parallel(model("gqa"), group)
    cache = ModelKVCache(given.cache_layout, 1, 300)
    dist.barrier()
    given.forward(ids(1, 140), cache)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    step = functools.partial(given.forward, ids(1, 1), cache)
    loses(group, step, f"rank 3 of 4 gone: {PATIENCE}", [3])


def check_the_store_dies_with_rank_0_and_no_other_is_blamed():
    """Ranks 1 and 2 continue in their own group, as its ranks 0 and 1, until the store is lost."""
    trio, pair = group_of((0, 1, 2)), group_of((1, 2))
    trio.all_gather(torch.zeros(1))
    if trio.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step = functools.partial(trio.all_gather, torch.zeros(1))
    loses(trio, step, "rank 0 of 3 gone: its store is closed", [0])

    def go_on():
        for _ in range(50):
            time.sleep(5 * BEAT)
            pair.all_gather(torch.zeros(1))

    name = re.escape("(global rank 0, not in this group) gone: its store is closed")
    loses(pair, go_on, name, [])
