"""Who is let in, and what a request that cannot be served costs the others."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

import httpx
from support.http_server import new_engine, serving

from caramba_fast.serve import AsyncEngine

PROMPT = "def read_lines(path):\n"
KEYS = ("one", "schlüssel")


def test_a_key_is_asked_for_before_anything_is_read() -> None:
    with serving(new_engine(), api_keys=KEYS) as address:
        for path, body in (("v1/completions", b"{"), ("tokenize", b"x" * 2**20), ("nowhere", b"")):
            found = httpx.post(f"{address}/{path}", content=body)
            assert found.status_code == 401 and found.json()["error"]["code"] == 401
        for path in ("openapi.json", "docs", "metrics", "v1/models", "health/"):
            assert httpx.get(f"{address}/{path}").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        for key in KEYS:
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200
            assert httpx.get(f"{address}/openapi.json", headers=headers).status_code == 404
            found = httpx.post(f"{address}/v1/completions", headers=headers, content=b"{")
            assert found.status_code == 400


def test_a_full_server_reads_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = new_engine(), list[str]()
    assert engine.tokenizer is not None
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: read.append(text) or [1])
    monkeypatch.setattr(AsyncEngine, "is_full", property(lambda _: True))
    with serving(engine) as address:
        read.clear()
        found = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT})
        assert found.status_code == 429 and read == []
        said = [{"role": "user", "content": PROMPT}]
        found = httpx.post(f"{address}/v1/chat/completions", json={"messages": said})
        assert found.status_code == 429 and read == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_the_requests_fault(stream: bool) -> None:
    pytest.importorskip("llguidance", reason="the extra structured")
    properties = {f"k{i}": {"type": "integer"} for i in range(700)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with serving(new_engine()) as address:
        found = httpx.post(
            f"{address}/v1/completions", timeout=60,
            json={"prompt": "a", "max_tokens": 9, "response_format": asked, "stream": stream},
        )  # fmt: skip
    if stream:
        lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        error = json.loads(lines[-2])["error"]
    else:
        assert found.status_code == 400
        error = found.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert "structured_outputs: " in error["message"]


def test_a_stream_that_fails_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()

    def failed(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(engine, "take_on", failed)
    asked = {"prompt": PROMPT, "max_tokens": 4}
    with serving(engine) as address:
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 500
        found = httpx.post(f"{address}/v1/completions", json={**asked, "stream": True})
    first, last = (line.removeprefix("data: ") for line in found.text.splitlines() if line)
    assert json.loads(first)["error"]["code"] == 500 and last == "[DONE]"


def test_a_slow_grammar_holds_up_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="the extra structured")
    engine, compiling, done = new_engine(), threading.Event(), threading.Event()
    prepared = engine.inputs.prepared

    def slow(prompt: Any, *given: Any, **options: Any) -> Any:
        if "structured_outputs" in options:
            assert isinstance(prompt, list), "read by the thread that reads the others"
            compiling.set()
            assert done.wait(60)
        return prepared(prompt, *given, **options)

    monkeypatch.setattr(engine.inputs, "prepared", slow)

    async def go() -> list[int]:
        async with AsyncEngine(engine) as running:
            wanted = {"regex": "[ab]{1,4}"}
            behind = asyncio.create_task(running.prepared(PROMPT, structured_outputs=wanted))
            assert await asyncio.to_thread(compiling.wait, 60)
            first = await running.prepared(PROMPT)
            assert not behind.done()
            done.set()
            return [len(found.tokens) for found in (first, await behind)]

    short, long = asyncio.run(go())
    assert short == long > 0
