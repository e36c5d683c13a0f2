"""``caramba-fast serve``: what it refuses before a model is loaded, and that it answers."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
httpx = pytest.importorskip("httpx")

from support.http_server import until  # noqa: E402
from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from caramba_fast.cli import serve  # noqa: E402
from caramba_fast.cli.app import app  # noqa: E402


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, which others can reach"),
        (["--host", "example.org"], "--allow-no-key"),
        (["--api-key", " "], "--api-key is empty"),
        (["--cache-memory", "lots"], "2GiB"),
        (["--cache-memory", "0"], "1 byte or more"),
        (["--cache-memory", "1kB"], "cache_bytes is 1000"),
        (["--cache-memory", "1000000TiB"], "not enough memory"),
        (["--cache", "q3"], "q3"),
        (["--prefix-store", "x", "--prefix-store-size", "big"], "--prefix-store-size is 'big'"),
        (["--prefix-store-size", "2MiB"], "there is no --prefix-store"),
        (["--prefix-store", "/no/such/folder"], "/no/such/folder"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(options, said):
    model = [] if options[0].startswith("/") else ["demo"]
    found = CliRunner().invoke(app, ["serve", *model, *options])
    assert found.exit_code == 1
    assert said in found.output and "Traceback" not in found.output


def test_help_offers_no_cache_that_is_refused():
    commands = get_command(app).commands
    said = {
        name: next(p.help for p in commands[name].params if p.name == "cache")
        for name in ("serve", "generate")
    }
    assert "auto measures" in said["generate"] and "auto measures" not in said["serve"]
    found = CliRunner().invoke(app, ["serve", "demo", "--cache", "auto"])
    assert found.exit_code == 1 and "cache is 'auto'" in found.output


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    address = serve.Address("127.0.0.1", 1, (), False)
    with pytest.raises(ModuleNotFoundError, match=r"uvicorn is missing.*pip install uvicorn"):
        serve.run_server(None, "demo", address, False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_needs_no_key(host):
    serve.check_address(serve.Address(host, 8000, (), False))
    serve.check_address(serve.Address("0.0.0.0", 8000, ("key",), False))
    serve.check_address(serve.Address("0.0.0.0", 8000, (), True))


@contextmanager
def serving(log_file, *options):
    """A server in a process of its own: its address, and the process."""
    port = str(20_000 + os.getpid() % 20_000)
    command = [sys.executable, "-m", "caramba_fast", "serve", "demo", "--port", port]
    address = f"http://127.0.0.1:{port}"
    with log_file.open("w") as log:
        process = subprocess.Popen([*command, *options], stderr=log)
    try:

        def is_up() -> bool:
            assert process.poll() is None, log_file.read_text()
            try:
                return httpx.get(f"{address}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(is_up, "the server is up", 60)
        yield address, process
    finally:
        process.kill()
        process.wait()


def test_it_answers_until_it_is_terminated(tmp_path):
    options = ["--cache", "q4", "--cache-memory", "8MiB", "--name", "mine"]
    with serving(tmp_path / "log", *options) as (address, process):
        body = {"model": "mine", "prompt": "def main():", "max_tokens": 4}
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
        assert found.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    assert "mine: cache q4" in (tmp_path / "log").read_text()


def test_prefixes_outlive_a_server_that_is_killed(tmp_path):
    """Killed while clients load it: what the next one says is what it said before."""
    dice, store = random.Random(0), tmp_path / "store"
    options = ["--cache", "q4", "--prefix-store", str(store), "--prefix-store-size", "2MiB"]
    heads = [f"# {word} " * 60 for word in ("read", "write", "open")]
    bodies = [
        {"prompt": head + f"def f{i}():", "max_tokens": 6, "temperature": 0}
        for i, head in enumerate(heads)
    ]

    def said(address):
        return [
            httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for body in bodies
        ]  # fmt: skip

    def load(address, over):
        number = 0
        while not over.is_set():
            number += 1
            head = heads[number % 3] + f"class C{number}: " * (number % 7)
            with suppress(httpx.HTTPError):
                httpx.post(f"{address}/v1/completions", json={**bodies[0], "prompt": head})

    def came_back(address):
        figures = httpx.get(f"{address}/metrics").text
        return float(re.search(r"^caramba_fast_prefix_store_tokens_total (\S+)$", figures, re.M)[1])

    wanted = None
    for round_ in range(2):
        with serving(tmp_path / "log", *options) as (address, process):
            found = said(address)
            wanted = wanted or found
            assert found == wanted
            assert (came_back(address) > 0) == (round_ > 0)
            if round_ == 1:
                break
            over = threading.Event()
            clients = [threading.Thread(target=load, args=(address, over)) for _ in range(3)]
            for client in clients:
                client.start()
            time.sleep(0.5 + dice.random())
            process.kill()
            over.set()
            for client in clients:
                client.join()
    text = (tmp_path / "log").read_text()
    assert "prefix store" in text and " pages; " in text
    assert sum(file.stat().st_size for file in store.glob("*.page")) <= 2 * 2**20
