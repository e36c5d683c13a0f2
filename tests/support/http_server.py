"""A server with the demo model in a thread, on its own port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from caramba_fast.models import demo_tokenizer, load_demo
from caramba_fast.serve import Engine
from caramba_fast.serve.http.server import ServerConfig, create_app

NAME = "demo"


class ChattyTokenizer:
    """The demo tokenizer with a chat template: a line for each message."""

    chat_template = "a line for each message"

    def __init__(self) -> None:
        self._inner = self.backend_tokenizer = demo_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._inner.get_vocab()

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool, tools: Any = ()
    ) -> str:
        assert not tokenize and add_generation_prompt
        named = "".join(f"# tool {tool['function']['name']}\n" for tool in tools)
        return named + "".join(f"# {m['role']}: {m['content']}\n" for m in messages) + "def "


def new_engine(**options: Any) -> Engine:
    settings = {"cache_kind": "q4", "max_seq_len": 512, "max_batch_size": 4, **options}
    return Engine(load_demo(), **{"tokenizer": ChattyTokenizer(), **settings})


@contextmanager
def serving(engine: Engine, grace_s: int = 5, **config: Any) -> Iterator[str]:
    """The address of a running server, which is shut down at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_app(engine, ServerConfig(**{"name": NAME, **config}))
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=grace_s)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the server is up")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server has stopped"


def until(holds: Any, what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)
