"""AsyncEngine: an `Engine` for asyncio, whose steps run in a thread of their own.

Requests are added and cancelled between steps. A request whose event buffer is full is paused until its reader has
caught up; the others go on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from caramba_fast.serve.engine import Engine
from caramba_fast.serve.input_processor import Prepared
from caramba_fast.serve.metrics import RequestTimes
from caramba_fast.serve.request import Event, RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from caramba_fast.serve.options import RequestOptions


Result = TypeVar("Result")


class EngineStoppedError(RuntimeError):
    """The engine was closed, or failed, before the request had ended."""


class _Stream:
    """The unread events of one request."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.paused = False


#: Gets the id and stream of a request once it is added to the engine.
_Taken: TypeAlias = "asyncio.Future[tuple[str, _Stream]]"


class AsyncEngine:
    """Runs an engine in the background, within ``async with``.

    Args:
        engine: the engine; nothing else may step it or add to it meanwhile.
        stream_buffer: events of one request that may wait for their reader; 1 or more, else ValueError.
    """

    def __init__(self, engine: Engine, *, stream_buffer: int = 64) -> None:
        if stream_buffer < 1:
            raise ValueError(f"stream_buffer is {stream_buffer}; 1 or more is allowed")
        self.engine, self.stream_buffer = engine, stream_buffer
        self._streams: dict[str, _Stream] = {}
        #: Requests that wait to be added, in order of arrival.
        self._waiting: dict[_Taken, Prepared] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Starts; raises RuntimeError if this or another AsyncEngine runs the engine already."""
        other = self.engine.driver
        if other is not None:
            if other.is_running:
                raise RuntimeError(
                    "the engine runs already; one AsyncEngine at a time may drive it"
                )
            other._end()  # it was interrupted while it ended
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "caramba-fast-engine")
        self._reader = ThreadPoolExecutor(1, "caramba-fast-inputs")
        self._grammars = ThreadPoolExecutor(1, "caramba-fast-grammars")
        self._closing, self._error, self._task = False, None, None
        self.engine.driver = self
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Waits for the current step, cancels the remaining requests, and stops."""
        assert self._task is not None
        self._closing = True
        self._wake.set()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:  # even if it is cancelled itself
            self._end()

    @property
    def is_full(self) -> bool:
        """Whether a new request would have to wait for a place in the engine's queue."""
        return len(self._waiting) >= self.engine.free_places

    def check_text(self, text: str) -> None:
        """Raises ValueError for text too long to be tokenized (`EngineConfig.max_prompt_chars`)."""
        self.engine.inputs.check_text(text)

    async def read(self, call: Callable[[], Result], *, grammar: bool = False) -> Result:
        """Runs a call (of a tokenizer) in the thread for inputs, one at a time; returns its result.

        ``grammar``: in one of their own, since a grammar may take seconds. Raises EngineStoppedError if the engine does
        not run, and whatever the call raises.
        """
        self._check_open()
        thread = self._grammars if grammar else self._reader
        return await asyncio.get_running_loop().run_in_executor(thread, call)

    @property
    def is_running(self) -> bool:
        """Whether the engine takes steps."""
        task = self._task
        return task is not None and not task.done() and not task.get_loop().is_closed()

    def _check_open(self) -> None:
        """Raises unless requests are taken on, in this event loop: the engine's would never wake another."""
        if self._task is None or not self.is_running or self._closing:
            raise self._stopped("the request was not taken on")
        self._check_loop()

    def _check_loop(self) -> None:
        """Raises RuntimeError in another event loop than that of a running engine."""
        if self._task is None or not self.is_running:
            return
        if self._task.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(
                "the engine runs in another event loop; call it there (asyncio.run_coroutine_threadsafe)"
            )

    def _end(self) -> None:
        """Waits for the current step and ends the remaining requests; may be called twice."""
        self._reader.shutdown(wait=False)
        self._grammars.shutdown(wait=False)
        self._thread.shutdown()
        for name in list(self._streams):
            self.engine.withdraw(name)
        self.engine.end_early()
        self._turn_away()
        self.engine.driver = None

    async def stream(
        self, prompt: Any, config: Any = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of one request as they come; leaving the loop cancels it.

        A generator that is left but kept in a variable runs on until it is closed, as by ``contextlib.aclosing``.

        Args:
            prompt, config, options: as in `Engine.add_request`, or a request from `prepared` alone. While
                ``max_waiting`` requests wait, this one waits for a place among them, until its deadline or max_time.

        Raises:
            ValueError, TypeError: as `Engine.add_request`.
            EngineStoppedError: the engine was closed or failed before the request ended.
            RuntimeError: the engine runs in another event loop.
        """
        if not isinstance(prompt, Prepared):
            prompt = await self.prepared(prompt, config, **options)
        elif options or config is not None:
            given = ", ".join(options) or "a config"
            raise TypeError(f"a prepared request has its settings; give {given} to prepared(...)")
        name, stream = await self._add(prompt)
        ended = False
        try:
            while not ended:
                event = await stream.events.get()
                if event is None:
                    raise self._stopped(f"request {name!r} did not end")
                self._go_on(name, stream)
                ended = event.output is not None
                yield event
        finally:
            self._leave(name, stream, ended)

    async def generate(
        self, prompt: Any, config: Any = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Runs one request to its end; arguments and errors as in `stream`."""
        async with aclosing(self.stream(prompt, config, **options)) as events:
            async for event in events:
                if event.output is not None:
                    return event.output
        raise EngineStoppedError("the request's events ended before it did")

    async def cancel(self, request_id: str) -> None:
        """Ends a request, even one waiting for a place; its stream gets the final event.

        Raises:
            KeyError: there is no such request.
            RuntimeError: the engine runs in another event loop.
        """
        self._check_loop()
        named = (x for x in self._waiting.items() if x[1].request_id is not None)
        mine = (x for x in named if x[1].request_id == request_id)
        taken, prepared = next(mine, (None, None))
        if taken is None or prepared is None or self.engine.is_under_way(request_id):
            self.engine.cancel(request_id)
        else:
            self._waiting[taken] = replace(prepared, is_cancelled=True)
        self._wake.set()

    async def prepared(
        self, prompt: Any, config: Any = None, **options: Unpack[RequestOptions]
    ) -> Prepared:
        """A checked request; text is tokenized in a thread, in order of arrival.

        Arguments and errors as in `stream`. The request arrives now, however long it waits for the thread.
        """
        times = RequestTimes()
        usual = self.engine.config if config is None else config
        asked: Any = options.get("structured_outputs", getattr(usual, "structured_outputs", None))
        if asked is not None:
            prompt = await self.read(partial(self.engine.inputs.tokens, prompt))
        work = partial(self.engine.prepared, prompt, config, **options)
        found = await self.read(work, grammar=asked is not None)
        return replace(found, times=times)

    async def _add(self, prepared: Prepared) -> tuple[str, _Stream]:
        """Adds a request between two steps, once there is a place for it, in order of arrival."""
        self._check_open()
        taken: _Taken = asyncio.get_running_loop().create_future()
        self._waiting[taken] = prepared
        self._wake.set()
        try:
            return await taken
        except BaseException:  # if it is cancelled just when it was added, do not leave it running
            if not taken.cancel() and not taken.cancelled() and taken.exception() is None:
                self._leave(*taken.result())
            raise
        finally:
            self._waiting.pop(taken, None)

    def _leave(self, name: str, stream: _Stream, ended: bool = False) -> None:
        """Drops the stream of a request, and cancels the request unless it has ended."""
        if self._streams.get(name) is not stream:
            return  # it has ended, and another request has its id by now
        del self._streams[name]
        if not ended:
            self.engine.withdraw(name)
            self._wake.set()

    def _stopped(self, what: str) -> EngineStoppedError:
        why = "the engine was closed" if self._closing else "use the engine within 'async with'"
        found = EngineStoppedError(f"{what}: {why if self._error is None else repr(self._error)}")
        found.__cause__ = self._error
        return found

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._closing:
                self._wake.clear()
                self._take_on()
                if self.engine.can_step:
                    self._hand_out(await loop.run_in_executor(self._thread, self.engine.step))
                else:
                    await self._something_to_do()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._closing = self._closing or self._error is None
            self._turn_away()

    async def _something_to_do(self) -> None:
        """Waits until a request is added, resumed, cancelled, or late."""
        due = min((prepared.due for prepared in self._waiting.values()), default=math.inf)
        if self.engine.next_due is not None:
            due = min(due, self.engine.next_due)
        limit = None if due == math.inf else max(0.0, due - time.monotonic())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), limit)

    def _take_on(self) -> None:
        """Adds waiting requests, as many as there are places, and late ones; called between steps."""
        for taken, prepared in list(self._waiting.items()):
            if taken.done() or not (self.engine.free_places or prepared.is_late):
                continue
            del self._waiting[taken]
            try:
                name = self.engine.take_on(prepared)
            except Exception as error:
                taken.set_exception(error)  # of this request alone
            except BaseException:
                taken.set_exception(self._stopped("the request was not taken on"))
                raise
            else:
                stream = self._streams[name] = _Stream()
                taken.set_result((name, stream))

    def _hand_out(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.events.put_nowait(event)
            if stream.events.qsize() >= self.stream_buffer and not stream.paused:
                stream.paused = True
                self.engine.set_paused(event.request_id, True)

    def _go_on(self, name: str, stream: _Stream) -> None:
        """Resumes a paused request once half of its buffer is read."""
        mine = self._streams.get(name) is stream
        if mine and stream.paused and stream.events.qsize() <= self.stream_buffer // 2:
            stream.paused = False
            self.engine.set_paused(name, False)
            self._wake.set()

    def _turn_away(self) -> None:
        """Fails the waiting requests and ends all streams."""
        for taken in self._waiting:
            if not taken.done():
                taken.set_exception(self._stopped("the request was not taken on"))
        self._waiting.clear()
        for stream in self._streams.values():
            stream.events.put_nowait(None)
