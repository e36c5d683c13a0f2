"""What survivors check when a rank is killed, or only late."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed_models import ids, model

from caramba_fast.cache import ModelKVCache
from caramba_fast.distributed import RankGroup, RankLostError, context_parallel

TIMEOUT = 20.0


def check_a_rank_that_is_late_is_not_called_dead():
    pair = RankGroup(dist.new_group([0, 1]), timeout=0.5, heartbeat=0.2)
    if pair.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            pair.all_gather(torch.zeros(1))
        assert not isinstance(caught.value, RankLostError), caught.value
    else:
        time.sleep(3)
    dist.barrier()


@torch.no_grad()
def check_a_killed_rank_is_named():
    group = RankGroup(timeout=TIMEOUT, heartbeat=0.2)
    given = context_parallel(model("gqa"), group)
    cache = ModelKVCache(given.cache_layout, 1, 300)
    given.forward(ids(1, 140), cache)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(
        RankLostError, match=r"rank 1 of 2 gone: no sign of life for 1\.2 s"
    ) as caught:
        for _ in range(100):
            given.forward(ids(1, 1), cache)
    assert caught.value.ranks == [1]
    assert time.monotonic() - began < TIMEOUT
    with pytest.raises(RankLostError, match="rank 1 of 2"):  # from now on without waiting
        given.forward(ids(1, 1), cache)
