"""AsyncEngine: an `Engine` for asyncio, whose steps run in a thread of their own.

Requests are added and cancelled between steps. Whoever reads a stream slowly is waited for: its request is
paused while its buffer is full, so that nothing piles up, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from caramba_fast.serve.engine import Engine, EngineFullError
from caramba_fast.serve.request import Event, RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Self


class EngineStoppedError(RuntimeError):
    """The engine was closed, or broke, before the request had ended."""


class _Stream:
    """The events of one request that nobody has read yet."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.paused = False


class AsyncEngine:
    """Runs an engine in the background, within ``async with``.

    Args:
        engine: it; nobody else may step it meanwhile.
        stream_buffer: events of one request that may wait for their reader.

    Raises:
        ValueError: a buffer of less than 1.
    """

    def __init__(self, engine: Engine, *, stream_buffer: int = 64) -> None:
        if stream_buffer < 1:
            raise ValueError(f"stream_buffer is {stream_buffer}; 1 or more is allowed")
        self.engine, self.stream_buffer = engine, stream_buffer
        self._streams: dict[str, _Stream] = {}
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._between_steps, self._wake = asyncio.Lock(), asyncio.Event()
        self._stepped = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "caramba-fast-engine")
        self._error = None
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels what is under way, and stops."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._cancel_all)
        self._thread.shutdown()
        self._task = None
        self._end_streams()

    def _cancel_all(self) -> None:
        for name in self._streams:
            if self.engine.is_under_way(name):
                self.engine.cancel(name)
        if self._error is None and self._streams:
            self.engine.end_early()

    # -- requests -----------------------------------------------------------------------

    async def stream(self, prompt: Any, config: Any = None, **options: Any) -> AsyncIterator[Event]:
        """The events of one request as they come; leaving the loop cancels it.

        Args:
            prompt, config, options: as in `Engine.add_request`. Where ``max_waiting`` requests wait, this one waits
                for its place among them.

        Raises:
            ValueError, TypeError: what `Engine.add_request` refuses.
            EngineStoppedError: the engine was closed or broke before the request ended.
        """
        name, stream = await self._add(prompt, config, options)
        ended = False
        try:
            while not ended:
                event = await stream.events.get()
                if event is None:
                    raise EngineStoppedError(
                        f"request {name!r} did not end: {self._error or 'the engine was closed'}"
                    ) from self._error
                self._go_on(name, stream)
                ended = event.output is not None
                yield event
        finally:
            self._streams.pop(name, None)
            if not ended and self.engine.is_under_way(name):
                self.engine.cancel(name)
                self._wake.set()

    async def generate(self, prompt: Any, config: Any = None, **options: Any) -> RequestOutput:
        """One request from beginning to end; arguments and errors as in `stream`."""
        async for event in self.stream(prompt, config, **options):
            if event.output is not None:
                return event.output
        raise EngineStoppedError("the request's events ended before it did")

    async def cancel(self, request_id: str) -> None:
        """Ends a request; its stream gets the event that says so.

        Raises:
            KeyError: no such request is under way.
        """
        self.engine.cancel(request_id)
        self._wake.set()

    async def _add(self, prompt: Any, config: Any, options: dict[str, Any]) -> tuple[str, _Stream]:
        while True:
            if self._task is None or self._task.done():
                raise EngineStoppedError("the engine is not running; use it within 'async with'")
            async with self._between_steps:
                try:
                    name = self.engine.add_request(prompt, config, **options)
                except EngineFullError:
                    self._stepped.clear()
                else:
                    stream = self._streams[name] = _Stream()
                    self._wake.set()
                    return name, stream
            await self._stepped.wait()

    # -- in the background --------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                if not self.engine.can_step:
                    await self._wake.wait()
                async with self._between_steps:
                    events = await asyncio.shield(
                        loop.run_in_executor(self._thread, self.engine.step)
                    )
                self._hand_out(events)
                self._stepped.set()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
            self._stepped.set()
            self._end_streams()
            raise

    def _hand_out(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.events.put_nowait(event)
            full = stream.events.qsize() >= self.stream_buffer
            if full and not stream.paused and self.engine.is_under_way(event.request_id):
                stream.paused = True
                self.engine.pause(event.request_id)

    def _go_on(self, name: str, stream: _Stream) -> None:
        """Half of the buffer is read: the request continues."""
        if stream.paused and stream.events.qsize() <= self.stream_buffer // 2:
            stream.paused = False
            if self.engine.is_under_way(name):
                self.engine.resume(name)
                self._wake.set()

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.events.put_nowait(None)
