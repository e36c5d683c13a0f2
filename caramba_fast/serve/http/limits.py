"""ASGI middleware: checks keys, limits request bodies, and answers requests that a stopping server cuts off."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse


def error_body(status: int, message: str) -> dict[str, Any]:
    """Body of an error response, as OpenAI's clients expect it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's headers (``Authorization: Bearer KEY``); empty without one."""
    given = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


class KeyCheck:
    """ASGI middleware: answers 401 without one of ``keys`` (none: all may ask), before a body is read.

    Paths in ``free`` need no key.
    """

    def __init__(self, app: Any, keys: Sequence[str], free: Sequence[str] = ()) -> None:
        self.app, self.keys, self.free = app, [key.encode() for key in keys], free

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        if scope["type"] == "http" and self.keys and scope["path"] not in self.free:
            given = bearer(scope["headers"])
            known = [hmac.compare_digest(given, key) for key in self.keys]
            if not any(known):
                said = "a valid API key is needed: Authorization: Bearer KEY"
                await JSONResponse(error_body(401, said), 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """ASGI middleware: answers 413 to requests with a body of more than ``most`` bytes, announced or not."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = f"the body is larger than {self.most} bytes, which are allowed"
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(value.isdigit() and int(value) > self.most for value in lengths):
            await JSONResponse(error_body(413, said), 413)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(413, said)
            return message

        await self.app(scope, counted, send)


class CutOff:
    """ASGI middleware: answers 503 to requests that are cancelled before their response has begun.

    A stopping server cancels requests that take longer than its grace period.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        begun = False

        async def noted(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not begun:
                said = "the server is stopping; the request was not answered"
                await JSONResponse(error_body(503, said), 503)(scope, receive, send)
            raise
