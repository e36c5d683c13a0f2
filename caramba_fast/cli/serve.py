"""``caramba-fast serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import ipaddress
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from caramba_fast.cli.models import load_to_decode, settings_of
from caramba_fast.infer import GenerateConfig
from caramba_fast.infer.tokenizer import find_tokenizer
from caramba_fast.models.registry import check_device, model_folder
from caramba_fast.serve import Engine, EngineConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class Address:
    """Where a server listens (``host``, ``port``), and who may use it.

    Attributes:
        api_keys: accepted keys; empty for no authentication.
        open_to_all: allow listening beyond this machine without a key.
    """

    host: str
    port: int
    api_keys: Sequence[str]
    open_to_all: bool


def check_address(address: Address) -> None:
    """Raises ValueError for a host beyond this machine without a key, or an empty key."""
    if any(not key.strip() for key in address.api_keys):
        raise ValueError("--api-key is empty; a key of one or more characters is needed")
    if address.api_keys or address.open_to_all or _is_here(address.host):
        return
    raise ValueError(
        f"--host is {address.host}, which others can reach, and there is no --api-key; give one, or "
        "--allow-no-key to let everybody in"
    )


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def memory(text: str, option: str = "--cache-memory") -> int:
    """Bytes of an option such as "2GiB", "512MB" or a number; raises ValueError if it is no size."""
    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ValueError(
            f"{option} is {text!r}; a size such as 2GiB, 512MiB or 1000000 is needed"
        ) from error
    if found < 1:
        raise ValueError(f"{option} is {text!r}; 1 byte or more is needed")
    return found


def open_engine(
    model: str, device: str, dtype: str, settings: dict[str, Any], revision: str | None = None
) -> Engine:
    """The engine of a model with its tokenizer.

    ``settings`` are fields of GenerateConfig and EngineConfig; None leaves a default. Raises ValueError,
    FileNotFoundError or CheckpointError if the model or the settings cannot be used.
    """
    own = {name: settings.pop(name) for name in EngineConfig.model_fields if name in settings}
    config, limits = settings_of(GenerateConfig, settings), settings_of(EngineConfig, own)
    check_device(device)
    folder = model_folder(model, revision=revision)
    tokenizer = find_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist")
    return Engine(load_to_decode(folder, device, dtype), config, limits, tokenizer=tokenizer)


def run_server(engine: Engine, name: str, address: Address, share_prefixes: bool) -> None:
    """Serves until interrupted or terminated; running requests then get `GRACE_S` seconds to finish.

    Raises ModuleNotFoundError if the extra is not installed, ValueError as `check_address`.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{', '.join(missing)} is missing, which a server needs: pip install "
            + " ".join(missing).replace("_", "-")
        )
    check_address(address)
    import uvicorn  # noqa: PLC0415 - an extra

    from caramba_fast.serve.http.server import ServerConfig, create_app  # noqa: PLC0415

    app = create_app(engine, ServerConfig(name, tuple(address.api_keys), share_prefixes))
    report = engine.report
    typer.secho(
        f"{name}: cache {report['cache_kind']}, {report['cache_tokens']:,} tokens in "
        f"{report['cache_bytes'] / 2**20:,.0f} MiB; http://{address.host}:{address.port}/v1",
        err=True,
    )
    if engine.store is not None:
        typer.secho(engine.store.describe(), err=True)
    # uvicorn re-raises the signal that ended it when it is done, so cleanup must happen before that.
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: None) if in_main else None
    try:
        uvicorn.run(
            app, host=address.host, port=address.port, log_level="warning", timeout_graceful_shutdown=GRACE_S
        )  # fmt: skip
    finally:
        if engine.store is not None:
            engine.store.close()
        if in_main:
            signal.signal(signal.SIGTERM, before)


#: Seconds that running requests get to finish at shutdown.
GRACE_S = 10
