"""Clients that give up at any moment: none takes a place or a page with it, and whoever stays is served.

``CARAMBA_FAST_STRESS_SECONDS`` makes it longer, ``CARAMBA_FAST_STRESS_SEED`` does one round again.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from random import Random

import pytest
from support.engines import alone, small_model, text
from support.interrupts import repeat

from caramba_fast.serve import AsyncEngine, Engine, Event

GREEDY = (("ignore_eos", True), ("max_new_tokens", 3), ("temperature", 0.0))
#: Long enough for a busy machine, short enough to be called a hang.
PATIENCE_S = 20.0


def engine(dice: Random) -> Engine:
    return Engine(
        small_model(), cache_kind="q4", max_seq_len=128, page_size=32, num_pages=dice.randint(4, 8),
        max_batch_size=dice.randint(1, 3), max_waiting=dice.randint(1, 3),
    )  # fmt: skip


def cancel_after(task: asyncio.Task[object], turns: int) -> None:
    """Cancels a task after so many turns of the loop, wherever it waits then."""
    if turns:
        asyncio.get_running_loop().call_soon(cancel_after, task, turns - 1)
    else:
        task.cancel()


async def client(server: AsyncEngine, dice: Random, number: int) -> None:
    """One that waits to the end, gives up after a time, or leaves its stream."""
    prompt = text(number, dice.randint(1, 40))
    given = dict(max_new_tokens=dice.choice((1, 1, 2, 9)), ignore_eos=True, temperature=0.0)
    for _ in range(dice.randrange(3)):
        await asyncio.sleep(0)
    way = dice.choice(("wait", "timeout", "leave"))
    if way == "leave":
        async with aclosing(server.stream(prompt, **given)) as events:
            async for _ in events:
                break
        return
    limit = PATIENCE_S if way == "wait" else dice.uniform(0.0, 0.02)
    try:
        await asyncio.wait_for(server.generate(prompt, **given), limit)
    except asyncio.TimeoutError:
        assert way == "timeout", "a client that waits was never served"


async def round_of(dice: Random) -> None:
    inner = engine(dice)
    loop, step, tasks = asyncio.get_running_loop(), inner.step, list[asyncio.Task[None]]()

    def step_and_cancel() -> list[Event]:
        """Places are handed out behind a step: that is when to give up."""
        events = step()
        if tasks and dice.random() < 0.3:
            loop.call_soon_threadsafe(cancel_after, dice.choice(tasks), dice.randrange(4))
        return events

    inner.step = step_and_cancel  # type: ignore[method-assign]
    async with AsyncEngine(inner, stream_buffer=dice.choice((1, 2, 64))) as server:
        tasks += [asyncio.create_task(client(server, dice, i)) for i in range(dice.randint(2, 30))]
        for task in tasks:
            if dice.random() < 0.3:
                cancel_after(task, dice.randrange(60))
        found = await asyncio.wait_for(
            asyncio.gather(*tasks, return_exceptions=True), 2 * PATIENCE_S
        )
        faults = [x for x in found if not isinstance(x, (asyncio.CancelledError, type(None)))]
        assert faults == []
        tasks.clear()
        last = asyncio.wait_for(server.generate(text(1, 9), **dict(GREEDY)), PATIENCE_S)
        assert (await last).generated_tokens == alone("q4", tuple(text(1, 9)), GREEDY)
        for _ in range(1000):
            if not inner.has_unfinished:
                break
            await asyncio.sleep(0.01)
        assert inner.under_way == []
        assert inner.free_places == inner.settings.max_waiting
        assert inner.metrics.pages_held == 0
        assert inner.problems() == []
    assert inner.driver is None


def test_clients_that_give_up_leave_nothing_behind() -> None:
    repeat(lambda dice: asyncio.run(round_of(dice)), seconds=4.0)


@pytest.mark.parametrize("turns", range(6))
def test_a_place_handed_to_one_who_leaves_goes_to_the_next(turns: int) -> None:
    """The instance: cancelled in the very turn of the loop in which its place is offered."""

    async def serve() -> None:
        inner = Engine(
            small_model(), cache_kind="q4", max_seq_len=128, max_batch_size=1, max_waiting=1
        )  # fmt: skip
        loop, step = asyncio.get_running_loop(), inner.step

        def step_and_cancel() -> list[Event]:
            events = step()
            if inner.free_places and len(jobs) > 3:
                loop.call_soon_threadsafe(cancel_after, jobs.pop(1), turns)
            return events

        inner.step = step_and_cancel  # type: ignore[method-assign]
        async with AsyncEngine(inner) as server:
            ask = partial(server.generate, text(1, 9), max_new_tokens=1, ignore_eos=True)
            jobs = [asyncio.create_task(ask()) for _ in range(4)]
            for job in (jobs[0], jobs[2], jobs[3]):
                await asyncio.wait_for(job, PATIENCE_S)

    asyncio.run(serve())
