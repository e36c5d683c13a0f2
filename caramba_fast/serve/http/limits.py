"""ASGI middleware: limits request bodies, and answers requests that a stopping server cuts off."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse


def error_body(status: int, message: str) -> dict[str, Any]:
    """Body of an error response, as OpenAI's clients expect it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


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
