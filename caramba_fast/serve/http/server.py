"""The HTTP server: an `AsyncEngine` behind the routes of the OpenAI API.

A client that disconnects cancels its request. If the queue is full, a request gets 429 with a Retry-After header.
Errors have the body OpenAI's clients expect: ``{"error": {"message", "type", "code"}}``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from caramba_fast.config.files import explain
from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.fields import GREEDY_BELOW
from caramba_fast.infer.tokenizer import TextTokenizer, TokenizerError
from caramba_fast.serve.async_engine import AsyncEngine, EngineStoppedError
from caramba_fast.serve.engine import Engine
from caramba_fast.serve.http.limits import BodyLimit, CutOff, KeyCheck, bearer, error_body
from caramba_fast.serve.http.logprobs import LogprobsWriter, TokenTexts
from caramba_fast.serve.http.metrics import exposition
from caramba_fast.serve.http.protocol import (
    COMPLETION_TOKENS,
    Answer,
    ChatRequest,
    CompletionRequest,
    Message,
    Sampling,
    StopTrimmer,
    TokenizeRequest,
)
from caramba_fast.serve.metrics import RequestTimes
from caramba_fast.serve.request import ENDED_BADLY, RequestOutput

LOG = logging.getLogger("caramba_fast.serve")
#: How the error of a request begins whose grammar or schema cannot be followed.
TOO_COMPLEX = "ValueError: structured_outputs"
Found = TypeVar("Found")
#: Retry-After of a rejected request, in seconds.
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        name: name of the model for clients.
        api_keys: one of them is needed for every route but ``/health``; none is needed if there are none.
        share_prefixes: let requests of different keys share cached prefixes; timing then reveals what others have
            cached. Requests of one key, or without keys, always share.
        max_body_bytes: most bytes of a request body.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    max_body_bytes: int = 8 * 2**20


class ClientGoneError(Exception):
    """The client has disconnected."""


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application; it runs the engine while it is up.

    Args:
        engine: with a tokenizer; nothing else may step it meanwhile.
        config: names, keys and limits.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("the engine has no tokenizer; a server needs Engine(tokenizer=...)")
    served = _Served(engine, config)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncEngine(engine) as served.engine:
            yield

    app = FastAPI(
        title="caramba-fast", lifespan=running, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(BodyLimit, most=config.max_body_bytes)
    app.add_middleware(KeyCheck, keys=config.api_keys, free=("/health",))
    app.add_middleware(CutOff)
    known = (RequestValidationError, AnyHTTPException, EngineStoppedError, ClientGoneError)
    for wrong in (*known, Exception):
        app.add_exception_handler(wrong, _explained)
    app.get("/health")(served.health)
    app.get("/v1/models")(served.models)
    app.get("/v1/models/{name:path}")(served.model)
    app.get("/metrics")(served.metrics)
    app.post("/tokenize")(served.tokenize)
    noted = [Depends(served.arrived)]
    app.post("/v1/completions", dependencies=noted, response_model=None)(served.completions)
    app.post("/v1/chat/completions", dependencies=noted, response_model=None)(served.chat)
    return app


class _Served:
    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config, self.created = config, int(time.time())
        self.engine = AsyncEngine(engine)
        assert engine.tokenizer is not None
        self.tokenizer: TextTokenizer = engine.tokenizer
        self.token_texts = TokenTexts(engine.tokenizer)

    async def arrived(self, request: Request) -> None:
        """Adds the arrival time and the salt for prefixes to a request."""
        request.state.times = RequestTimes()
        apart = self.config.api_keys and not self.config.share_prefixes
        given = bearer(request.headers.raw)
        request.state.salt = hashlib.sha256(given).hexdigest() if apart else "all"

    async def health(self) -> Response:
        """200 while the engine runs, else 503."""
        return Response(status_code=200 if self.engine.is_running else 503)

    async def metrics(self) -> Response:
        """The engine's metrics for Prometheus."""
        return Response(exposition(self.engine.engine.metrics), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """The one model, in a list."""
        return {"object": "list", "data": [self._card]}

    async def model(self, name: str) -> dict[str, Any]:
        """The one model, by its name."""
        self._check_model(name)
        return self._card

    @property
    def _card(self) -> dict[str, Any]:
        return {
            "id": self.config.name, "object": "model", "created": self.created, "owned_by": "caramba-fast",
            "max_model_len": self._room,
        }  # fmt: skip

    @property
    def _room(self) -> int:
        return self.engine.engine.inputs.room

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.config.name):
            raise HTTPException(404, f"model is {name!r}; {self.config.name!r} is served")

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of text, or of a chat after its template."""
        self._check_model(body.model)
        if body.messages is not None:
            ids = await self._laid_out(body.messages, None)
        else:
            text = body.prompt or ""
            ids = await self._read(text, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._room}

    async def _read(self, text: str, special: bool) -> list[int]:
        with _refused():
            self.engine.check_text(text)
            return await self.engine.read(lambda: self.tokenizer.encode(text, special=special))

    async def _laid_out(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        def chat() -> list[int]:
            try:
                return self.tokenizer.chat([m.laid_out() for m in messages], tools=tools)
            except TypeError:  # a template that joins arguments to text, as DeepSeek's does
                return self.tokenizer.chat([m.laid_out(False) for m in messages], tools=tools)

        with _refused():
            laid_out = (message.laid_out(False) for message in messages)
            self.engine.check_text("".join(map(str, (*laid_out, *(tools or ())))))
            return await self.engine.read(chat)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Completes a prompt."""
        self._check_model(body.model)
        self._check_room()  # before a prompt is read for nothing
        ids = body.prompt if isinstance(body.prompt, list) else await self._read(body.prompt, True)
        return await self._answer(body, request, ids, body.max_tokens or COMPLETION_TOKENS, False)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The next message of a chat."""
        self._check_model(body.model)
        self._check_room()
        ids = await self._laid_out(body.messages, body.given_tools)
        most = body.max_completion_tokens or body.max_tokens or max(1, self._room - len(ids))
        return await self._answer(body, request, ids, most, True)

    def _check_room(self) -> None:
        if self.engine.is_full:
            raise HTTPException(
                429, "too many requests wait; try again later", {"Retry-After": str(RETRY_AFTER_S)}
            )

    async def _answer(
        self, body: Sampling, request: Request, ids: list[int], most: int, chat: bool
    ) -> Response:
        answers = self.engine.engine.config.num_return_sequences
        said = body.model_fields_set
        if (
            answers > 1
            and "n" not in said
            and "temperature" in said
            and body.temperature < GREEDY_BELOW
        ):
            raise HTTPException(
                400,
                f"temperature is {body.temperature:g} and n, which is not given, is {answers} on this server: all "
                "would be alike; n: 1 is allowed",
            )
        salt = request.state.salt + (f" {body.cache_salt}" if body.cache_salt else "")
        with _refused():
            prepared = await self.engine.prepared(ids, cache_salt=salt, **body.settings(most))
        prepared = replace(prepared, times=request.state.times)  # when its body arrived
        self._check_room()  # requests at the same time may have taken it meanwhile
        events = self.engine.stream(prepared)
        answer = Answer(self.config.name, chat, LogprobsWriter(self.token_texts, chat))
        if body.stream:
            lines = _lines(events, answer, body, prepared.config)
            return _Events(
                lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        texts, output = await _unless_gone(request, _collected(events, prepared.config))
        # In a thread: the log-probabilities of a long answer take as long as many steps of the engine.
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole(texts, output)))


class _Events(StreamingResponse):
    """A response that closes its events when it ends, even in the middle of sending one to a client that is gone."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        events: Any = self.body_iterator
        async with aclosing(events):
            await super().__call__(scope, receive, send)


def _trimmers(config: GenerateConfig) -> list[StopTrimmer]:
    """One for each answer of a request."""
    return [StopTrimmer(config.stop_strings) for _ in range(config.num_return_sequences)]


async def _collected(
    events: AsyncGenerator[Any, None], config: GenerateConfig
) -> tuple[list[str], RequestOutput]:
    """The texts of all answers, and the output; raises HTTPException if the request failed."""
    trimmers = _trimmers(config)
    texts = [""] * len(trimmers)
    async with aclosing(events):
        async for event in events:
            texts[event.answer] += trimmers[event.answer].take(event)
            if event.output is not None:
                _check_ended_well(event.output)
                return texts, event.output
    raise EngineStoppedError("the request's events ended before it did")


def _check_ended_well(output: RequestOutput) -> None:
    bad = [reason for reason in output.finish_reasons if reason in ENDED_BADLY]
    if bad:
        if (output.error or "").startswith(TOO_COMPLEX):
            raise HTTPException(400, output.error)
        LOG.error("request %s ended with %s: %s", output.request_id, bad[0], output.error)
        raise HTTPException(
            500, f"the request ended with {bad[0]}: {output.error or 'see the log'}"
        )


async def _lines(
    events: AsyncGenerator[Any, None], answer: Answer, body: Sampling, config: GenerateConfig
) -> AsyncIterator[str]:
    """Server-sent events; leaving them cancels the request."""
    trimmers = _trimmers(config)
    no_usage = {"usage": None} if body.usage_in_stream else {}
    try:
        async with aclosing(events):
            async for event in events:
                if event.finish_reason in ENDED_BADLY:
                    if event.output is not None:
                        _check_ended_well(event.output)
                    continue
                answer.logprobs.put(event.answer, event.logprobs)
                text = trimmers[event.answer].take(event)
                if text or event.finish_reason is not None:
                    chunk = answer.chunk(event.answer, text, event.finish_reason)
                    yield _event(chunk | no_usage)
                if event.output is not None:
                    _check_ended_well(event.output)
                    for index in range(len(event.output.finish_reasons), len(trimmers)):
                        # Its time was over before the prompt was processed, and this answer never began.
                        yield _event(answer.chunk(index, "", event.finish_reason) | no_usage)
                    if body.usage_in_stream:
                        yield _event(answer.usage_chunk(event.output))
    except (HTTPException, EngineStoppedError) as error:
        status = getattr(error, "status_code", 503)
        yield _event(error_body(status, getattr(error, "detail", str(error))))
    except Exception as error:  # the status has been sent: say in the stream what an answer would
        LOG.error("a stream failed", exc_info=error)
        yield _event(error_body(500, f"{type(error).__name__}; see the log"))
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    """A server-sent event in ASCII: clients may split lines at any character that ends one in Unicode (U+2028)."""
    return f"data: {json.dumps(content)}\n\n"


async def _unless_gone(request: Request, work: Awaitable[Found]) -> Found:
    """The result of ``work``; cancels it and raises ClientGoneError if the client disconnects."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _refused:  # noqa: N801 - reads as what it does
    """Turns errors about a request into 400 responses with their message."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ValidationError):
            raise HTTPException(400, explain(error)) from error
        if isinstance(error, (ValueError, TypeError, TokenizerError, ImportError)):
            raise HTTPException(400, str(error)) from error


def _said(wrong: Any) -> str:
    """One pydantic error of a body, as text for the client."""
    if wrong["type"] == "json_invalid":
        return f"body: no valid JSON at character {wrong['loc'][-1]}: {wrong['ctx']['error']}"
    name = ".".join(map(str, wrong["loc"][1:])) or "body"
    if name == "body" and wrong["type"].startswith("model_"):
        return "body: a JSON object is needed, with Content-Type: application/json"
    if wrong["type"] in ("extra_forbidden", "none_required"):
        return f"{name} is not served"
    return f"{name}: {wrong['msg'].removeprefix('Value error, ')}"


async def _explained(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        said = "; ".join(map(_said, error.errors()[:5]))
        return JSONResponse(error_body(400, said), 400)
    if isinstance(error, AnyHTTPException):
        return JSONResponse(
            error_body(error.status_code, error.detail), error.status_code, error.headers
        )
    if isinstance(error, EngineStoppedError):
        LOG.error("%s", error)
        return JSONResponse(error_body(503, str(error)), 503)
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)  # nobody reads it
    LOG.error("a request failed", exc_info=error)
    return JSONResponse(error_body(500, f"{type(error).__name__}; see the log"), 500)
