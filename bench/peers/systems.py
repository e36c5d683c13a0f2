"""The compared systems in the order of the tables: this package first, then by program."""

from __future__ import annotations

from functools import partial

import torch

from caramba_fast.bench.peers import ggml_library
from caramba_fast.bench.peers.ggml_sessions import GgmlAttention
from caramba_fast.bench.peers.onnx_sessions import OnnxRuntime
from caramba_fast.bench.peers.openvino_paged import PagedOpenVINO
from caramba_fast.bench.peers.openvino_sessions import OpenVINO, long_prompt
from caramba_fast.bench.peers.own import Own
from caramba_fast.bench.peers.session import System, any_shape
from caramba_fast.bench.peers.torch_sessions import CALLS, Torch

OURS = "caramba"
#: Our cache that others of the same bits per value are compared with.
BASELINES = {32: "fp16", 16: "fp16", 8: "q8", 4: "q4"}
#: Error explained by a width, against float64 attention over the original values.
ALLOWED = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2e-2, "8": 0.05, "4": 0.5}
OWN = (("fp16", 16), ("q8", 8), ("q4", 4), ("q4:plain", 4), ("nf4", 4))
#: KV_CACHE_PRECISION and INFERENCE_PRECISION_HINT; the last column is the kind's name here.
PRECISIONS = (
    ("f16", "f32", 16, "f16"), ("bf16", "bf16", 16, "bf16"),
    ("u8", "f32", 8, "u8"), ("u8", "bf16", 8, "u8 (bf16)"),
    ("u4", "f32", 4, "u4"),
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _own() -> list[System]:
    return [
        System(
            OURS, kind, bits, ALLOWED["fp16" if bits == 16 else str(bits)], partial(Own, spec=kind), ours=True
        )
        for kind, bits in OWN
    ]  # fmt: skip


def _openvino() -> list[System]:
    """Just after growing, the cache of its stateful attention has twice the necessary size."""
    return [
        System(
            "OpenVINO", f"{way} {kind}".strip(), bits,
            ALLOWED[{"f16": "fp16", "bf16": "bf16"}.get(precision, str(bits))],
            partial(session, precision=precision, compute=compute), ("openvino",), trial=bits < 16, copies=copies,
            refuses=long_prompt if bits == 4 and not way else any_shape,
        )
        for way, session, copies in (("", OpenVINO, 2.0), ("paged", PagedOpenVINO, 1.1))
        for precision, compute, bits, kind in PRECISIONS
    ]  # fmt: skip


def _onnx() -> list[System]:
    widths = (("fp32", 32), ("fp16", 16), ("int8", 8), ("int4", 4))
    return [
        System(
            "ONNX Runtime", kind, bits, ALLOWED[kind if bits > 8 else str(bits)],
            partial(OnnxRuntime, kind=kind), ("onnxruntime", "onnx"),
        )
        for kind, bits in widths
    ]  # fmt: skip


def _ggml() -> list[System]:
    """ggml aborts the process if an assertion fails, so it is tried in another process first.

    Over an F16 cache it adds up values in fp16: its error grows with the tokens, to that of 8 bits over 32K.
    """
    return [
        System(
            "ggml", kind, bits, ALLOWED["8" if bits == 16 else str(bits)],
            partial(GgmlAttention, kind=kind), trial=True, missing=ggml_library.missing,
        )
        for kind, bits in (("f16", 16), ("q8_0", 8), ("q4_0", 4))
    ]  # fmt: skip


def _torch() -> list[System]:
    return [
        System(
            "torch", f"{call} {name}", 8 * dtype.itemsize, ALLOWED[name],
            partial(Torch, call=call, dtype=dtype),
        )
        for call in CALLS for name, dtype in DTYPES.items()
    ]  # fmt: skip


def systems() -> list[System]:
    """All systems."""
    return [*_own(), *_openvino(), *_onnx(), *_ggml(), *_torch()]
