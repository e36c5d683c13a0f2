"""What a plan holds for, in words: the model, the device, the versions."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import AnyLayerShape, Calibration
from caramba_fast.models import LanguageModel
from caramba_fast.ops.registry import serving

#: Values of each tensor that go into a model's digest, evenly spread.
VALUES = 1024


def model_identity(model: LanguageModel, calibration: Calibration | None = None) -> str:
    """Text that differs between models whose caches may differ.

    Architecture, what the layers cache, vocabulary, and a digest of evenly spread values of all weights: enough
    to tell a fine-tune from its base, at a fraction of the cost of reading everything.
    """
    digest = hashlib.sha256()
    for module in _modules(model):
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                _add(digest, name, value)
    if calibration is not None:
        for index, layer in enumerate(calibration.layers):
            for name, stream in layer.items():
                for part, value in vars(stream).items():
                    if isinstance(value, Tensor):
                        _add(digest, f"{index}.{name}.{part}", value)
    layers = [_shape(layer) for layer in model.cache_layout]
    digest.update(repr(layers).encode())
    return (
        f"{type(model).__name__}, {len(layers)} layers, first {layers[0]}, vocabulary {model.vocab_size}, "
        f"weights {digest.hexdigest()[:16]}"
    )


def _modules(model: object) -> Iterable[nn.Module]:
    """The model, or, for an adapter that is no module itself, the modules it holds."""
    if isinstance(model, nn.Module):
        return [model]
    return [
        value for value in getattr(model, "__dict__", {}).values() if isinstance(value, nn.Module)
    ]


def _shape(layer: AnyLayerShape) -> str:
    sizes = {name: value for name, value in vars(layer).items() if isinstance(value, int)}
    inner = ", ".join(f"{name}={value}" for name, value in sizes.items())
    rope = "" if layer.rope is None else ", rope"
    return f"{type(layer).__name__}({inner}{rope})"


def _add(digest: Any, name: str, value: Tensor) -> None:
    flat = value.detach().reshape(-1)
    step = max(1, flat.numel() // VALUES)
    digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
    if value.device.type != "meta":
        digest.update(flat[::step].to("cpu", torch.float32).contiguous().numpy().tobytes())


def device_identity(device: torch.device) -> str:
    """The GPU's name, or the processor's with the threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {device.type}, {torch.get_num_threads()} threads"


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, as the system has it."""
    import platform  # noqa: PLC0415 - may start a process on some systems

    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(device: torch.device, decoupled: bool) -> dict[str, str]:
    """Of what a figure depends on."""
    op = "decoupled_decode_attention" if decoupled else "decode_attention"
    return {
        "caramba_fast": _package_version(),
        "torch": torch.__version__,
        "backend": serving(op, device.type),
    }


def _package_version() -> str:
    try:
        return metadata.version("caramba-fast")
    except metadata.PackageNotFoundError:  # run from a folder that was not installed
        return ""
