"""The op registry: which backend serves which op on which device, and why the others do not.

Every op is defined once with ``torch.library``. The reference is its CompositeExplicitAutograd kernel, so it serves any
device; the C++ extension registers for CPU and the Triton launchers for CUDA where they exist. A forced backend
(`use_backend`, ``CARAMBA_FAST_BACKEND``) is called without the dispatcher, because one CPU dispatch key cannot hold
both C++ and interpreted Triton. Options of a stream contain its name, so the schemas of standard (k, v) and decoupled
(k_sem, k_geo, v) caches have the same form.

``CARAMBA_FAST_EXTENSION`` names another build of the extension, as in ``make sanitize``. Any library it names is loaded
and its code runs: set it only to a file you would run, and let no user of a service set it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STEM = "_C"
VARIABLE = "CARAMBA_FAST_EXTENSION"
FOLDER = Path(__file__).resolve().parent.parent


def library() -> Path | None:
    """The file to load: the one named by the environment variable, else that of this install."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    endings = ("so", "pyd", "dylib")
    return next((p for end in endings for p in sorted(FOLDER.glob(f"{STEM}*.{end}"))), None)


@functools.cache
def load_error() -> str | None:
    """Loads the extension; None if that worked, else the reason (not built, not found, not loadable)."""
    file = library()
    if file is None:
        return f"the C++ extension is not built: no {STEM}.*.so in {FOLDER.name}/ of this install"
    try:
        torch.ops.load_library(str(file))
    except (OSError, RuntimeError) as error:
        return f"the C++ extension {file.name} cannot be loaded: {error.__cause__ or error}"
    return None


NAMESPACE = "caramba_fast"
BACKENDS = ("auto", "reference", "cpp", "triton")
ENVIRONMENT_VARIABLE = "CARAMBA_FAST_BACKEND"

_library = torch.library.Library(NAMESPACE, "DEF")
_ops: dict[str, Op] = {}
#: The forced backend; None lets the dispatcher choose. A plain global, on which ``torch.compile`` can guard.
_forced: str | None = None
#: With a forced backend: op -> device type -> function. Filled when the backend is chosen.
_routes: dict[str, dict[str, Callable[..., Any]]] = {}


class BackendError(RuntimeError):
    """A requested backend that cannot run, with the reason."""


@dataclass
class Op:
    """One op: calling it dispatches to the forced backend or to torch's dispatcher.

    Attributes:
        name: as in ``torch.ops.caramba_fast``.
        overload: calls torch's dispatcher.
        reference: pure torch.
        keywords: names of its options.
        call: same as calling the op, but without the detour through `__call__` while no backend is forced.
    """

    name: str
    overload: Callable[..., Any]
    reference: Callable[..., Any]
    keywords: frozenset[str] = frozenset()
    _launcher: Callable[..., Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.call: Callable[..., Any] = self.overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the op."""
        if _forced is None:
            return self.overload(*args, **kwargs)
        if _forced == "reference":
            return self.reference(*args, **kwargs)
        device = next(arg.device.type for arg in args if isinstance(arg, torch.Tensor))
        if device in _routes[self.name]:
            return _routes[self.name][device](*args, **kwargs)
        reason = self.why_not(_forced, device)
        raise BackendError(f"{self.name} cannot run on backend {_forced!r}: {reason}")

    @property
    def launcher(self) -> Callable[..., Any]:
        """The Triton launcher; triton is imported on first use."""
        if self._launcher is None:
            module = importlib.import_module(self._module)
            self._launcher = getattr(module, self.name)
        return self._launcher

    def keeper(self, device: torch.device) -> Any:
        """The module whose ``recording`` keeps calls for replay on this device; None if there is none."""
        if _forced in (None, "cpp") and device.type == "cpu":
            if self.why_not("cpp", "cpu") is not None:
                return None
            module = importlib.import_module(f"{NAMESPACE}.ops.planned")
            return module if module.is_there() else None
        if _forced != "triton" and (_forced is not None or device.type != "cuda"):
            return None
        if self.why_not("triton", "cuda", suppose=True) is not None:
            return None
        return importlib.import_module(f"{NAMESPACE}.kernels.launch")

    @property
    def _module(self) -> str:
        return f"{NAMESPACE}.kernels.{self.name.rstrip('_')}"

    def why_not(self, backend: str, device: str, *, suppose: bool = False) -> str | None:
        """Why ``backend`` cannot serve this op on ``device``, or None; ``suppose``: as if there were a CUDA device."""
        if backend == "reference":
            return None
        if backend == "cpp":
            return self._why_not_cpp(device)
        return self._why_not_triton(device, suppose)

    def _why_not_cpp(self, device: str) -> str | None:
        if device != "cpu":
            return f"the C++ extension serves cpu tensors, not {device}"
        if load_error() is not None:
            return load_error()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{self.name}", "CPU"):
            return "the C++ extension has no kernel for this op"
        return None

    def _why_not_triton(self, device: str, suppose: bool) -> str | None:
        reason = triton_missing()
        if reason is not None:
            return reason
        if importlib.util.find_spec(self._module) is None:
            return "there is no Triton kernel for this op"
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton runs cpu tensors only interpreted: set TRITON_INTERPRET=1 before import"
        if device == "cuda" and not (suppose or torch.cuda.is_available()):
            return "torch finds no CUDA device"
        if device not in ("cpu", "cuda"):
            return f"the Triton kernels serve cuda tensors, not {device}"
        return None


def why_not(op: str, backend: str, device: str) -> str | None:
    """Why ``backend`` cannot serve ``op`` on a device type, or None."""
    return _ops[op].why_not(backend, device)


def triton_missing() -> str | None:
    """The reason Triton kernels cannot run anywhere in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if importlib.util.find_spec(f"{NAMESPACE}.kernels") is None:
        return "caramba_fast.kernels is not installed (run from a source tree: pip install -e .)"
    return None


def define(name: str, schema: str) -> Callable[..., Any]:
    """Defines ``caramba_fast::name`` without implementations; returns its overload."""
    _library.define(name + schema)
    found: Callable[..., Any] = getattr(torch.ops.caramba_fast, name).default
    return found


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which `torch.autocast` does not change the dtypes of torch's own ops on ``device``."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _without_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """``reference`` in the dtypes of its arguments, as the other backends are."""

    @functools.wraps(reference)
    def exact(*args: Any, **kwargs: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        with autocast_off(device):
            return reference(*args, **kwargs)

    return exact


def register(
    name: str, schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]
) -> Op:
    """Defines ``caramba_fast::name``; ``schema`` is the part after the name.

    ``fake`` maps fake inputs to fake outputs (shapes, strides and dtypes) for tracing.
    """
    overload: Any = define(name, schema)
    reference = _without_autocast(reference)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    keywords = frozenset(arg.name for arg in overload._schema.arguments if arg.kwarg_only)
    op = Op(name, overload, reference, keywords)
    _ops[name] = op
    # No query for a CUDA device: it would initialize CUDA, or cache that there is none, in a process that may fork.
    if op.why_not("triton", "cuda", suppose=True) is None:
        # The launcher is looked up at the first call: triton is not imported before.
        _library.impl(name, lambda *args, **kwargs: op.launcher(*args, **kwargs), "CUDA")  # noqa: PLW0108
    return op


def forced_backend() -> str | None:
    """The forced backend; None if the dispatcher chooses."""
    return _forced


class use_backend:  # noqa: N801 - reads as a verb: use_backend("cpp"), with use_backend("cpp"):
    """Forces one backend for every op, in all threads, until changed or, as a context manager, for a block.

    Args:
        name: "auto" (the dispatcher chooses), "reference", "cpp" or "triton".

    Raises:
        BackendError: an unknown name, or a backend that no op can use here, with the reason. If only some ops lack the
            backend, these raise when they are called.
    """

    def __init__(self, name: str) -> None:
        _check_choice(name)
        self._previous = _forced or "auto"
        _force(name)

    def __enter__(self) -> use_backend:
        return self

    def __exit__(self, *_: object) -> None:
        _force(self._previous)


def _force(name: str) -> None:
    global _forced, _routes
    _forced = None if name == "auto" else name
    _routes = {op.name: {} for op in _ops.values()}
    for op in _ops.values():
        op.call = op.overload if _forced is None else op.__call__
    if name in ("auto", "reference"):
        return
    for op in _ops.values():
        for device in ("cpu", "cuda"):
            if op.why_not(name, device) is None:
                _routes[op.name][device] = op.overload if name == "cpp" else op.launcher


def _check_choice(name: str) -> None:
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; known are {', '.join(BACKENDS)}")
    if name == "cpp" and load_error() is not None:
        raise BackendError(f"backend 'cpp' is not available: {load_error()}")
    if name == "triton":
        reason = triton_missing()
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if reason is None and not torch.cuda.is_available() and not interpreted:
            reason = "torch finds no CUDA device, and TRITON_INTERPRET=1 is not set"
        if reason is not None:
            raise BackendError(f"backend 'triton' is not available: {reason}")


def start() -> None:
    """Loads the C++ kernels and applies ``CARAMBA_FAST_BACKEND``; raises as `use_backend`."""
    load_error()
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        use_backend(chosen)


@dataclass(frozen=True)
class BackendStatus:
    """The backend that serves one op on one device; ``reasons`` says why each other backend does not."""

    op: str
    device: str
    runs: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.op:<37} {self.device:<5} {self.runs:<10} {why}"


def backends() -> list[BackendStatus]:
    """The backend that runs each op on cpu and the devices torch can use here (cuda, mps), and why others do not."""
    devices = ["cpu"]
    devices += ["cuda"] if torch.cuda.is_available() else []
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return [_status(op, device) for op in _ops.values() for device in devices]


def on_cuda() -> list[BackendStatus]:
    """`backends` for CUDA, as if this machine had a supported CUDA device."""
    return [_status(op, "cuda", suppose=True) for op in _ops.values()]


def serving(op: str, device: str) -> str:
    """The backend that runs ``op`` on a device type: triton, cpp, reference or none."""
    return _status(_ops[op], device).runs


def _status(op: Op, device: str, *, suppose: bool = False) -> BackendStatus:
    preferred = (
        ["triton", "cpp", "reference"] if device == "cuda" else ["cpp", "triton", "reference"]
    )
    reasons: dict[str, str] = {}
    runs = ""
    for backend in preferred:
        reason = op.why_not(backend, device, suppose=suppose)
        if reason is None and _forced not in (None, backend):
            reason = f"backend {_forced!r} is forced"
        elif reason is None and _forced is None and backend == "triton" and device == "cpu":
            reason = "interpreted Triton runs only when asked for: use_backend('triton')"
        if reason is None and not runs:
            runs = backend
        else:
            reasons[backend] = reason or f"{runs} is faster"
    return BackendStatus(op.name, device, runs or "none", reasons)


STANDARD = ("k", "v")
DECOUPLED = ("k_sem", "k_geo", "v")


def append_schema(streams: Sequence[str]) -> str:
    """Schema of an append op: mutates buffers and ``rotary_out`` in place and returns nothing."""
    alias = iter("abcdefghijklmnopqrstuvwxyz")
    parts: list[str] = []
    for stream in streams:
        parts += [
            f"Tensor({next(alias)}!) {stream}_codes",
            f"Tensor({next(alias)}!)? {stream}_scales",
        ]
    parts += [f"Tensor {stream}_new" for stream in streams]
    parts += ["Tensor start", *[f"str {stream}_kind" for stream in streams], "*"]
    parts += ["Tensor? block_table=None", "Tensor? cache_leftpad=None", "Tensor? query_lens=None"]
    for stream in streams:
        parts += [
            f"Tensor({next(alias)}!)? {stream}_tail=None",
            f"Tensor({next(alias)}!)? {stream}_sink=None",
        ]
        parts += [f"bool rotate_{stream}=False", f'str fit_{stream}="amax"']
        parts += [f"Tensor? {stream}_query_rms=None"]
    parts += [f"Tensor? rotary_{name}=None" for name in ("q", "cos", "sin")]
    parts += [f"Tensor({next(alias)}!)? rotary_out=None"]
    return f"({', '.join(parts)}) -> ()"


def attention_schema(
    streams: Sequence[str], scales: Sequence[str], extra: Sequence[str] = ()
) -> str:
    """Schema of an attention op; ``scales`` names the factor of each key stream's q·k."""
    keys = streams[:-1]
    parts = (
        ["Tensor q"] if len(keys) == 1 else [f"Tensor q_{key.removeprefix('k_')}" for key in keys]
    )
    for stream in streams:
        parts += [f"Tensor {stream}_codes", f"Tensor? {stream}_scales"]
    parts += ["Tensor cache_seqlens", *[f"str {stream}_kind" for stream in streams], "*"]
    parts += ["int n_kv_heads", "Tensor? block_table=None", "Tensor? cache_leftpad=None"]
    parts += ["Tensor? query_lens=None", "int residual_len=0"]
    for stream in streams:
        parts += [f"Tensor? {stream}_tail=None", f"Tensor? {stream}_sink=None"]
        parts += [f"bool rotate_{stream}=False"]
    parts += [f"Tensor? null_{stream}=None" for stream in streams]
    parts += ["Tensor? s_aux=None", *[f"float? {scale}=None" for scale in scales]]
    parts += ["SymInt[2] window_size=[-1, -1]", "int num_sink_tokens=0", "float softcap=0.0"]
    parts += ["int num_splits=0", *extra]
    return f"({', '.join(parts)}) -> (Tensor out, Tensor lse)"
