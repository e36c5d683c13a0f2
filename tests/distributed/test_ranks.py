"""Several ranks do what one process does; every check that needs them runs in real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.distributed_models import ids, model
from support.distributed_ranks import Ranks, checks_of

from caramba_fast.bench.serving import scaling
from caramba_fast.bench.serving.traffic import StepShape, decode_step
from caramba_fast.cache import ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.distributed import (
    ContextParallelKVCache,
    PageSpread,
    RankGroup,
    context_parallel,
    tensor_parallel,
)
from caramba_fast.distributed.heartbeat import Heartbeat, StoreHolder
from caramba_fast.distributed.placement import Placement, Queries
from caramba_fast.infer import Generator

ROOT = Path(__file__).resolve().parents[2]
BOTH = "check_heads_and_tokens_at_once"
CHECKS = {
    2: [
        *checks_of("support.distributed_context_checks"),
        *checks_of("support.distributed_generator_checks"),
        *checks_of("support.distributed_tensor_checks", BOTH),
    ],
    4: [
        *checks_of(
            "support.distributed_context_checks", "check_the_fast_kernels_agree", "check_options_of_a_layer",
            "check_what_cannot_be_exact_is_refused", "check_exact_prefill_sinks_and_mixed_kinds",
        ),
        "support.distributed_generator_checks.check_the_generator_writes_the_same_tokens",
        f"support.distributed_tensor_checks.{BOTH}",
    ],
}  # fmt: skip
_results: dict[int, list[dict[str, str]]] = {}


@pytest.mark.parametrize(("size", "check"), [(n, check) for n in CHECKS for check in CHECKS[n]])
def test_ranks(size: int, check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes of one size run all their checks at the first of these tests."""
    if size not in _results:
        _results[size] = Ranks(size, tmp_path_factory.mktemp("ranks"), CHECKS[size]).finish()
    found = {rank: result.get(check) for rank, result in enumerate(_results[size])}
    wrong = [f"rank {rank}: {text}" for rank, text in found.items() if text != "ok"]
    assert not wrong, "\n".join(wrong)


def test_ranks_that_are_stuck_or_die_are_named(tmp_path: Path) -> None:
    """Rank 3 dies in the last check but one, and rank 0, which holds the store, in the last."""
    checks = checks_of("support.distributed_loss_checks")
    found = Ranks(4, tmp_path, checks, holder="rank0").finish()
    for rank, last in enumerate((-1, None, None, -2)):
        wrong = "\n".join(text for text in found[rank].values() if text != "ok")
        assert found[rank] == dict.fromkeys(checks[:last], "ok"), f"rank {rank}: {wrong}"


def test_the_example_runs_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(ROOT / "examples" / "torchrun_context_parallel.py"), "--max-new-tokens", "8"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the same 8 tokens as one process" in done.stdout
    assert "bytes moved per token" in done.stdout


# -- one process --------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[RankGroup]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = RankGroup()
    yield group
    group.close()
    dist.destroy_process_group()


@torch.no_grad()
def test_one_rank_is_a_process_of_its_own(alone: RankGroup) -> None:
    settings = cache_configs("q8")
    given = model("gqa")
    plain = ModelKVCache(given.cache_layout, 1, 300, **settings)
    spread = ContextParallelKVCache(given.cache_layout, 1, 300, group=alone, **settings)
    expected = [given.forward(ids(1, n), plain) for n in (200, 1)]
    for parallel in (context_parallel(given, alone), tensor_parallel(given, alone)):
        assert parallel.cache_layout[0].n_kv_heads == given.cache_layout[0].n_kv_heads
        spread.reset()
        for n, logits in zip((200, 1), expected, strict=True):
            torch.testing.assert_close(
                parallel.forward(ids(1, n), spread), logits, atol=1e-4, rtol=0
            )
    assert vars(alone.traffic) == {"collectives": 0, "given": 0, "received": 0}


@pytest.mark.parametrize(
    ("holder", "ranks", "named"), [(1, [1], "rank 1 of 3"), (None, [], "torchrun"), (0, None, "")]
)
def test_a_store_that_answers_no_more_is_a_loss_to_all_but_its_holder(holder, ranks, named) -> None:
    """Everybody comes, then no call returns; nobody asks, as nobody can who waits in the device."""
    over, told, store = threading.Event(), threading.Event(), Mock()
    store.check, store.get = lambda keys: keys != ["verdict"], lambda _: b"1" * over.wait()
    heart = Heartbeat(store, StoreHolder(holder, "torchrun"), 0, 3, 5, told.set, interval=0.02)
    assert told.wait(5 if named else 1) == bool(named)
    assert (heart.loss.ranks if heart.loss else None) == ranks
    assert str(heart.loss or "").startswith(f"{named} gone: no sign of life for" * bool(named))
    over.set()
    heart.stop()


def test_the_store_of_torchrun_is_of_no_rank(alone: RankGroup, monkeypatch) -> None:
    assert alone._holder().rank == 0
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert alone._holder().rank is None


def test_without_torch_distributed_there_is_no_group() -> None:
    with pytest.raises(
        RuntimeError, match=r"not initialised; call torch.distributed.init_process_group"
    ):
        RankGroup()


def test_bad_settings_are_refused(alone: RankGroup) -> None:
    with pytest.raises(ValueError, match="timeout is 0; a positive number of seconds"):
        RankGroup(timeout=0)
    with pytest.raises(ValueError, match="page_size is 33; a multiple of 32 is needed"):
        context_parallel(model("gqa"), alone, page_size=33)
    with pytest.raises(
        ValueError, match=r"rank_tokens is \[1, 2\]; one count of 0 or more for each of 1"
    ):
        context_parallel(model("gqa"), alone, rank_tokens=[1, 2])
    with pytest.raises(TypeError, match=r"model is a Linear; context parallelism is for Language"):
        context_parallel(torch.nn.Linear(2, 2), alone)
    with pytest.raises(
        TypeError, match=r"it lacks cache_layout, vocab_size, eos_token_id, pad_tok"
    ):
        context_parallel(torch.nn.Linear(2, 2), alone)
    raw = torch.nn.Module()
    raw.cache_layout, raw.forward = model("gqa").cache_layout, lambda tokens, ctx: tokens
    with pytest.raises(TypeError, match=r"for model\(tokens, ctx=...\) give .*ContextModel"):
        context_parallel(raw, alone)
    parallel = context_parallel(model("gqa"), alone)
    with pytest.raises(ValueError, match="device is meta, but the model is a ParallelModel on cpu"):
        Generator(parallel, device="meta")
    Generator(parallel, device="cpu")
    with pytest.raises(TypeError, match="pages"):
        context_parallel(model("gqa"), alone, pages=3)
    with pytest.raises(ValueError, match="8 kv heads do not divide by 3 ranks"):
        decode_step(StepShape(1, 8, 8, 8, 1, 4, 1.0), 5, tensor=3)
    with pytest.raises(ValueError, match="tokens is 0"):
        decode_step(StepShape(1, 8, 8, 8, 1, 4, 1.0), 0)


# -- who holds what -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank_tokens", "owners"),
    [
        (None, [0, 1, 2, 0, 1, 2, 0]),
        ([32, 100, 500], [0, 1, 2, 1, 2, 1, 2]),
        ([0, 64, 999], [1, 2, 1, 2, 2, 2, 2]),
    ],
)
def test_pages_go_round_to_ranks_with_room(rank_tokens, owners) -> None:
    spread = PageSpread(200, 3, 32, rank_tokens)
    assert spread.owners.tolist() == owners
    holder = [owners[t // 32] for t in range(200)]
    for rank in range(3):
        for n in (-5, 0, 1, 31, 32, 33, 64, 150, 200, 999):
            assert spread.count(rank, np.array(n)) == holder[: max(n, 0)].count(rank)
        assert spread.positions_of(rank, 20, 150).tolist() == [
            t for t in range(20, 150) if holder[t] == rank
        ]


def test_rooms_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"max_seq_len is 200, 7 pages of 32 tokens; .* room for 5 \(\[100, 64\]"
    ):
        PageSpread(200, 2, 32, [100, 64])


def test_a_rank_stores_its_own_tokens_whatever_other_rows_store() -> None:
    """A row's tokens for a rank may all be among the first, as many as another row has, and yet not in front."""
    spread, held, added, tokens = PageSpread(400, 3, 32), (0, 180), (60, 30), 60
    for rank in range(3):
        plan = Placement(spread, rank, torch.device("cpu")).append(held, added, tokens)
        for row, (start, count) in enumerate(zip(held, added, strict=True)):
            index = range(tokens) if plan.index is None else plan.index[row].tolist()
            stored = [start + i for i in index[: plan.counts[row]]]
            assert stored == spread.positions_of(rank, start, start + count).tolist()


@pytest.mark.parametrize("left", [-1, 40])
@pytest.mark.parametrize("behind", [0, 33])
def test_plans_show_every_query_the_keys_at_or_before_it(behind: int, left: int) -> None:
    """Each call's queries and visible local slots, spelled out, against the positions themselves."""
    spread, rows, tokens = PageSpread(400, 3, 32), (130, 0, 310), 90
    count = (90, 41, 77)
    for rank in range(3):
        own = spread.positions_of(rank, 0, 400)
        seen: dict[tuple[int, int], set[int]] = {}
        placement = Placement(spread, rank, torch.device("cpu"))
        for call in placement.read(Queries(rows, count, tokens, behind, left)):
            width = call.tokens.shape[1]
            kept = set(range(call.tokens.numel())) if call.kept is None else set(call.kept.tolist())
            for j, row in enumerate(call.rows.tolist()):
                lens = width if call.query_lens is None else int(call.query_lens[j])
                for i in range(width):
                    if j * width + i not in kept:
                        continue
                    end = int(call.seqlens[j]) - (lens - 1 - i if call.grows else 0)
                    start = max(0, end - 1 - call.left) if call.left >= 0 else 0
                    key = row, int(call.tokens[j, i])
                    assert key not in seen
                    seen[key] = set(own[start:end].tolist())
        for row in range(3):
            for i in range(count[row]):
                p = rows[row] + i
                first = 0 if left < 0 else max(0, p - left)
                expected = {t for t in own.tolist() if first <= t <= p - behind}
                assert seen.pop((row, i), set()) == expected
        assert not seen, "calls for queries that are not there"


# -- the page -----------------------------------------------------------------------------------


def test_the_page_is_that_of_the_formulas() -> None:
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.published(page) == page, (
        "run python -m caramba_fast.bench.serving.scaling --publish"
    )
    for devices in scaling.DEVICES[1:]:
        assert f"| {devices} | tokens |" in page


def test_bytes_fall_and_rise_as_ranks_are_added() -> None:
    shape = StepShape(2, 64, 8, 4, 16, 4, 100.0)
    steps = [decode_step(shape, 4096, context=n) for n in (1, 2, 4)]
    assert [s.cache_read for s in steps] == [2 * 4096 * 100 // n for n in (1, 2, 4)]
    part = 8 * (16 * 4 + 4)
    assert [s.received for s in steps] == [0, 2 * part, 2 * 3 * part]
    heads = decode_step(shape, 4096, tensor=4)
    assert (heads.collectives, heads.given, heads.received) == (4, 4 * 256, 4 * 384)


def test_importing_the_package_leaves_the_parallel_layers_alone() -> None:
    code = "import sys, caramba_fast.cache, caramba_fast.models; print([m for m in sys.modules if 'distributed' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "caramba_fast.distributed" not in done.stdout
    assert "torch.distributed.tensor" not in done.stdout
