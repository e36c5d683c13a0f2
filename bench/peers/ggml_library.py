"""ggml's shared libraries through ctypes: the few functions that a graph of attention needs.

``make bench-peers`` builds them for this processor from the source in the package llama-cpp-python, with ggml's own
threads.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers" / "ggml" / "bin"
BASE, CPU = FOLDER / "libggml-base.so", FOLDER / "libggml-cpu.so"
MAX_THREADS = 512
F32, F16, Q4_0, Q8_0, I64 = 0, 1, 2, 8, 27


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("use_ref", c_bool),
    )  # fmt: skip


class PoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", c_bool * MAX_THREADS), ("n_threads", c_int), ("prio", c_int), ("poll", c_uint32),
        ("strict_cpu", c_bool), ("paused", c_bool),
    )  # fmt: skip


SIGNATURES: dict[str, tuple[Any, ...]] = {
    # result, arguments
    "ggml_version": (c_char_p,),
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_type_name": (c_char_p, c_int),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
    "ggml_set_rows": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_flash_attn_ext": (
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_float,
    ),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_quantize_chunk": (
        c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p,
    ),
}  # fmt: skip
CPU_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_cpu_init": (None,),
    "ggml_graph_plan": (Plan, c_void_p, c_int, c_void_p),
    "ggml_graph_compute": (c_int, c_void_p, POINTER(Plan)),
    "ggml_threadpool_new": (c_void_p, POINTER(PoolParams)),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_threadpool_pause": (None, c_void_p),
}
#: In the base library, though it is about threads.
SIGNATURES["ggml_threadpool_params_default"] = (PoolParams, c_int)


class Ggml:
    """The functions of `SIGNATURES` and `CPU_SIGNATURES` by name.

    Raises OSError if the libraries cannot be loaded, AttributeError if a function is missing.
    """

    def __init__(self) -> None:
        for path, signatures in ((BASE, SIGNATURES), (CPU, CPU_SIGNATURES)):
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            for name, (result, *arguments) in signatures.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
        self.cpu_init()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions that are declared")


@functools.lru_cache(maxsize=1)
def ggml() -> Ggml:
    """The libraries, loaded once."""
    return Ggml()


def missing() -> str:
    """Why ggml cannot run here, or ""."""
    absent = [path.name for path in (BASE, CPU) if not path.exists()]
    return f"not built: {', '.join(absent)} (make bench-peers builds it)" if absent else ""


def check_types() -> None:
    """Raises RuntimeError if ggml has renumbered its types."""
    expected = {F32: "f32", F16: "f16", Q4_0: "q4_0", Q8_0: "q8_0", I64: "i64"}
    for number, name in expected.items():
        found = ggml().type_name(number).decode()
        if found != name:
            raise RuntimeError(f"ggml's type {number} is {found}, not {name}")


def version() -> str:
    """ggml's version and the package its source is from; "" if it is not built."""
    if missing():
        return ""
    sources = [path.name for path in FOLDER.parents[1].glob("llama_cpp_python-*") if path.is_dir()]
    return " of ".join((ggml().version().decode(), *sources))
