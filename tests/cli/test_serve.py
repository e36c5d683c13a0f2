"""``caramba-fast serve``: what it refuses before a model is loaded, and that it answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
httpx = pytest.importorskip("httpx")

from support.http_server import until  # noqa: E402
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
        (["--cache", "q3"], "q3"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(options, said):
    model = [] if options[0].startswith("/") else ["demo"]
    found = CliRunner().invoke(app, ["serve", *model, *options])
    assert found.exit_code == 1
    assert said in found.output and "Traceback" not in found.output


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    address = serve.Address("127.0.0.1", 1, (), False)
    with pytest.raises(ModuleNotFoundError, match=r"uvicorn is missing.*caramba-fast\[serve\]"):
        serve.run_server(None, "demo", address, False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_needs_no_key(host):
    serve.check_address(serve.Address(host, 8000, (), False))
    serve.check_address(serve.Address("0.0.0.0", 8000, ("key",), False))
    serve.check_address(serve.Address("0.0.0.0", 8000, (), True))


def test_it_answers_until_it_is_terminated(tmp_path):
    port = str(20_000 + os.getpid() % 20_000)
    command = [sys.executable, "-m", "caramba_fast.cli", "serve", "demo", "--port", port]
    options = ["--cache", "q4", "--cache-memory", "8MiB", "--name", "mine"]
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], stderr=log)
    try:

        def is_up() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"{address}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(is_up, "the server is up", 60)
        body = {"model": "mine", "prompt": "def main():", "max_tokens": 4}
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
        assert found.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
    assert "mine: cache q4" in (tmp_path / "log").read_text()
