"""The engine under asyncio: streams, back-pressure, cancelling, and faults."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.engines import alone, engine, text

from caramba_fast.serve import AsyncEngine, Engine, EngineStoppedError
from caramba_fast.serve.input_processor import InputProcessor


def test_many_at_once_get_what_they_would_get_alone() -> None:
    prompts = [text(seed, 10 + 7 * seed) for seed in range(9)]

    async def serve() -> list[list[int]]:
        async with AsyncEngine(engine(max_waiting=2, max_batch_size=3)) as server:
            jobs = (server.generate(p, max_new_tokens=8, temperature=0.0) for p in prompts)
            return [output.generated_tokens for output in await asyncio.gather(*jobs)]

    given = (("max_new_tokens", 8), ("temperature", 0.0))
    assert asyncio.run(serve()) == [alone("q4", tuple(p), given) for p in prompts]


def test_a_slow_reader_is_waited_for_and_nobody_else() -> None:
    async def serve() -> None:
        inner = engine()
        async with AsyncEngine(inner, stream_buffer=4) as server:
            given = dict(max_new_tokens=60, ignore_eos=True, temperature=0.0)
            slow = server.stream(text(1, 20), **given)
            first = await anext(slow)
            for _ in range(3):
                await server.generate(text(2, 20), **given)
            (name,) = inner.under_way
            assert server._streams[name].events.qsize() <= 5, "what piles up is bounded"
            tokens = [*first.tokens]
            async for event in slow:
                tokens += event.tokens
            assert tokens == alone("q4", tuple(text(1, 20)), tuple(sorted(given.items())))

    asyncio.run(serve())


def test_leaving_a_stream_cancels_its_request() -> None:
    async def serve() -> None:
        inner = engine()
        async with AsyncEngine(inner) as server:
            stream = server.stream(text(1, 20), max_new_tokens=200, ignore_eos=True)
            await anext(stream)
            await stream.aclose()
            await server.generate(text(2, 5), max_new_tokens=2)
            assert inner.under_way == []
            assert inner.metrics.pages_held == 0
            assert inner.problems() == []

    asyncio.run(serve())


@pytest.mark.parametrize("closed", [False, True])
def test_an_id_may_be_given_again_before_the_last_events_of_its_first_request_are_read(
    closed: bool,
) -> None:
    """Whoever reads those late, or leaves them, ends nothing of the request that has the id by now."""

    async def serve() -> None:
        inner = engine()
        async with AsyncEngine(inner) as server:
            given = dict(request_id="a", ignore_eos=True, temperature=0.0)
            first = server.stream(text(1, 20), max_new_tokens=2, **given)
            await anext(first)
            while inner.is_under_way("a"):
                await asyncio.sleep(0)
            again = asyncio.create_task(server.generate(text(2, 20), max_new_tokens=40, **given))
            while not inner.is_under_way("a"):
                await asyncio.sleep(0)
            if closed:
                await first.aclose()
            else:
                assert [len(event.tokens) async for event in first] == [1]
            output = await asyncio.wait_for(again, 20)
            assert output.finish_reasons == ["length"]
            assert len(output.generated_tokens) == 40

    asyncio.run(serve())


def test_a_cancelled_request_says_so() -> None:
    async def serve() -> list[str]:
        async with AsyncEngine(engine()) as server:
            job = asyncio.create_task(
                server.generate(text(1, 20), max_new_tokens=200, ignore_eos=True, request_id="a")
            )
            while not server.engine.is_under_way("a"):
                await asyncio.sleep(0)
            await server.cancel("a")
            return (await job).finish_reasons

    assert asyncio.run(serve()) == ["cancelled"]


def test_bad_requests_raise_where_they_are_made() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine()) as server:
            with pytest.raises(ValueError, match="the prompt is empty"):
                await server.generate([])

    asyncio.run(serve())


def test_closing_ends_what_is_under_way() -> None:
    async def serve() -> Engine:
        inner = engine()
        async with AsyncEngine(inner) as server:
            job = asyncio.create_task(
                server.generate(text(1, 20), max_new_tokens=200, ignore_eos=True)
            )
            while not inner.has_unfinished:
                await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="was closed"):
            await job
        with pytest.raises(EngineStoppedError, match="was closed"):
            await server.generate([1])
        return inner

    inner = asyncio.run(serve())
    assert not inner.has_unfinished
    assert inner.problems() == []


def test_a_fault_of_the_engine_reaches_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = engine()

    def step() -> None:
        raise MemoryError("no more")

    async def serve() -> None:
        async with AsyncEngine(inner) as server:
            monkeypatch.setattr(inner, "step", step)
            with pytest.raises(EngineStoppedError, match="no more"):
                await server.generate(text(1, 20))

    asyncio.run(serve())


def test_a_fault_reaches_those_who_were_about_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = engine()

    def step() -> None:
        time.sleep(0.1)
        raise MemoryError("no more")

    async def serve() -> None:
        async with AsyncEngine(inner) as server:
            monkeypatch.setattr(inner, "step", step)
            first = asyncio.create_task(server.generate(text(1, 20)))
            await asyncio.sleep(0.05)
            second = asyncio.create_task(server.generate(text(2, 20)))
            for job in (first, second):
                with pytest.raises(EngineStoppedError, match="no more"):
                    await asyncio.wait_for(job, 5)

    asyncio.run(serve())


def test_a_request_that_cannot_be_taken_on_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, such as a lack of memory for its own tensors."""
    inner, (bad, good) = engine(), (text(1, 9), text(2, 9))
    take_on = inner.take_on

    def without_memory(prepared: Any) -> str:
        if prepared.tokens == bad:
            raise RuntimeError("out of memory")
        return take_on(prepared)

    monkeypatch.setattr(inner, "take_on", without_memory)

    async def serve() -> None:
        async with AsyncEngine(inner) as server:
            with pytest.raises(RuntimeError, match="out of memory"):
                await asyncio.wait_for(server.generate(bad, max_new_tokens=2), 10)
            output = await asyncio.wait_for(server.generate(good, max_new_tokens=2), 10)
            assert len(output.generated_tokens) == 2

    asyncio.run(serve())


def test_closing_turns_away_those_who_wait_for_a_place() -> None:
    async def serve() -> list[Any]:
        async with AsyncEngine(engine(max_waiting=1, max_batch_size=1)) as server:
            jobs = [
                asyncio.create_task(
                    server.generate(text(i, 20), max_new_tokens=200, ignore_eos=True)
                )
                for i in range(5)
            ]
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5)

    found = asyncio.run(serve())
    assert all(isinstance(x, EngineStoppedError) for x in found[1:])


def test_readers_who_do_not_read_leave_places_to_others() -> None:
    async def serve() -> None:
        inner = engine(max_waiting=1, max_batch_size=1)
        async with AsyncEngine(inner, stream_buffer=2) as server:
            asleep = server.stream(text(1, 20), max_new_tokens=50, ignore_eos=True)
            await anext(asleep)
            for seed in range(4):
                job = server.generate(text(seed, 10), max_new_tokens=4, ignore_eos=True)
                await asyncio.wait_for(job, 5)
            await asleep.aclose()

    asyncio.run(serve())


def test_a_deadline_holds_for_who_is_paused() -> None:
    async def serve() -> None:
        inner = engine()
        async with AsyncEngine(inner, stream_buffer=1) as server:
            given = dict(max_new_tokens=200, ignore_eos=True, deadline=0.2)
            asleep = server.stream(text(1, 20), **given)
            await anext(asleep)
            await asyncio.sleep(0.5)
            assert inner.under_way == []
            reasons = [event.finish_reason async for event in asleep]
            assert reasons[-1] == "deadline"

    asyncio.run(serve())


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(("limit", "reason"), [("deadline", "deadline"), ("max_time", "time")])
def test_who_waits_for_a_place_ends_by_its_deadline(limit: str, reason: str, paused: bool) -> None:
    """As one that waits in the engine does, whether the engine steps meanwhile or has nothing to do."""

    async def serve() -> None:
        inner = engine(max_waiting=1, max_batch_size=1, max_seq_len=2048)
        async with AsyncEngine(inner) as server:
            long = dict(max_new_tokens=2000, ignore_eos=True)
            jobs = [asyncio.create_task(server.generate(text(i, 20), **long)) for i in range(2)]
            while len(inner.under_way) < 2:
                await asyncio.sleep(0)
            for name in inner.under_way:
                inner.set_paused(name, paused)
            ended = await asyncio.wait_for(server.generate(text(2, 20), **{limit: 0.05}), 20)
            assert (ended.finish_reasons, ended.answers) == ([reason], [[]])
            assert len(inner.under_way) == 2, "it was not its turn"
            assert inner.metrics.failed == (reason == "deadline")
            assert not any(job.done() for job in jobs)
        await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(serve())


@pytest.mark.parametrize(("limit", "reason"), [("deadline", "deadline"), ("max_time", "time")])
def test_waiting_for_another_text_to_be_read_counts_towards_a_limit_of_time(
    limit: str, reason: str
) -> None:
    class Slow:
        def encode(self, text: str, **_: Any) -> list[int]:
            time.sleep(0.2 if text == "slow" else 0.0)
            return [5, 6]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * len(ids)

    async def serve() -> None:
        async with AsyncEngine(engine(tokenizer=Slow())) as server:
            slow = asyncio.create_task(server.generate("slow", max_new_tokens=1))
            await asyncio.sleep(0)
            late = await server.generate("ab", max_new_tokens=2, **{limit: 0.1})
            assert (late.finish_reasons, late.answers) == ([reason], [[]])
            assert (await slow).finish_reasons == ["length"]

    asyncio.run(serve())


def test_who_gives_up_waiting_for_a_place_leaves_nothing() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine(max_waiting=1, max_batch_size=1)) as server:
            long = dict(max_new_tokens=200, ignore_eos=True)
            jobs = [asyncio.create_task(server.generate(text(i, 20), **long)) for i in range(2)]
            while len(server.engine.under_way) < 2:
                await asyncio.sleep(0)
            for name in server.engine.under_way:
                server.engine.set_paused(name, True)
            for late in (None, 0.05):
                given_up = asyncio.create_task(server.generate(text(2, 20), deadline=late))
                while not server._waiting:
                    await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                assert not server._waiting
            await asyncio.sleep(0.1)
            assert len(server.engine.under_way) == 2 and server.engine.metrics.failed == 0
            assert not any(job.done() for job in jobs)
        await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(serve())


def test_prompts_are_looked_at_once_however_long_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner, seen = engine(max_waiting=2, max_batch_size=2), []
    tokens = InputProcessor.tokens
    monkeypatch.setattr(InputProcessor, "tokens", lambda self, x: seen.append(x) or tokens(self, x))

    async def serve() -> None:
        async with AsyncEngine(inner) as server:
            jobs = (server.generate(text(i, 9), max_new_tokens=2) for i in range(40))
            await asyncio.gather(*jobs)

    asyncio.run(serve())
    assert len(seen) == 40


def test_one_driver_at_a_time() -> None:
    inner = engine()

    async def serve() -> None:
        async with AsyncEngine(inner):
            with pytest.raises(RuntimeError, match="runs already"):
                async with AsyncEngine(inner):
                    pass
        async with AsyncEngine(inner) as server:
            await server.generate([1, 2], max_new_tokens=1)

    asyncio.run(serve())
    with pytest.raises(EngineStoppedError, match="async with"):
        asyncio.run(AsyncEngine(inner).generate([1]))


def test_a_prepared_request_takes_no_more_settings() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine()) as server:
            prepared = await server.prepared(text(1, 20), max_new_tokens=2)
            with pytest.raises(TypeError, match=r"give temperature, seed to prepared\("):
                await server.generate(prepared, temperature=0.5, seed=1)
            with pytest.raises(TypeError, match="give a config to"):
                await server.generate(prepared, server.engine.config)
            assert len((await server.generate(prepared)).generated_tokens) == 2

    asyncio.run(serve())


def test_another_event_loop_is_refused_rather_than_left_waiting() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine()) as server:
            prepared = await server.prepared(text(1, 20), max_new_tokens=2)
            for prompt in (text(1, 20), prepared):
                ask = server.generate(prompt)
                with pytest.raises(RuntimeError, match="runs in another event loop"):
                    await asyncio.to_thread(asyncio.run, asyncio.wait_for(ask, 20))
            with pytest.raises(RuntimeError, match="runs in another event loop"):
                await asyncio.to_thread(asyncio.run, server.cancel("a"))
            assert len((await server.generate(prepared)).generated_tokens) == 2

    asyncio.run(serve())


def test_a_buffer_has_room_for_something() -> None:
    with pytest.raises(ValueError, match="stream_buffer is 0"):
        AsyncEngine(engine(), stream_buffer=0)


def test_none_cancels_no_request_that_waits_without_a_name() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine(max_waiting=1, max_batch_size=1)) as server:
            given = dict(max_new_tokens=9, ignore_eos=True)
            calls = [asyncio.create_task(server.generate([1, 2], **given)) for _ in range(4)]
            while not server._waiting:
                await asyncio.sleep(0)
            with pytest.raises(KeyError, match="request None is not under way"):
                await server.cancel(None)  # type: ignore[arg-type]
            for output in await asyncio.gather(*calls):
                assert output.finish_reasons == ["length"]

    asyncio.run(serve())


def test_who_waits_for_a_place_can_be_cancelled() -> None:
    async def serve() -> None:
        async with AsyncEngine(engine(max_waiting=1, max_batch_size=1)) as server:
            given = dict(max_new_tokens=200, ignore_eos=True)
            calls = [
                asyncio.create_task(server.generate([1, 2], request_id=name, **given))
                for name in "abcd"
            ]
            while not server.engine.is_under_way("a") or [
                x.request_id for x in server._waiting.values()
            ][-2:] != ["c", "d"]:
                await asyncio.sleep(0)
            await server.cancel("d")
            assert (await calls[3]).finish_reasons == ["cancelled"]
            with pytest.raises(KeyError):
                await server.cancel("d")
            assert not calls[2].done()
            for name in "abc":
                await server.cancel(name)
            for output in await asyncio.gather(*calls[:3]):
                assert output.finish_reasons == ["cancelled"]
            assert not server.engine.under_way and server.engine.problems() == []

    asyncio.run(serve())
