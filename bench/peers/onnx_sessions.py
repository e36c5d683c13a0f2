"""ONNX Runtime's GroupQueryAttention over a cache that past and present share.

Its quantized caches have constant scales that the caller has to know beforehand. Here they minimise the squared error
of each channel on the very tokens measured, which is better than any calibration on other text.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.bench.peers.problem import Problem, Shape
from caramba_fast.bench.peers.session import Session

#: The operator's domain and opset, and the IR version its CPU kernel reads.
DOMAIN, OPSET, IR = "com.microsoft", 21, 10
#: The search for scales looks at so many tokens, evenly spread, and tries these shares of the largest value; with 8
#: bits clipping loses more than it gains.
CALIBRATED, SHARES = 16384, {8: (1.0,), 4: tuple(x / 20 for x in range(8, 21))}
BITS = {"int8": 8, "int4": 4}
LEAST = {8: -128, 4: -8}
#: Longer than its threads spin after a run (about 30 ms measured), as they do by default.
SPINS_S = 0.1


def onnx_model(shape: Shape, kind: str, scales: list[np.ndarray]) -> bytes:
    """The model of a step, with one node."""
    onnx = import_module("onnx")
    helper, types = onnx.helper, onnx.TensorProto
    active = types.FLOAT16 if kind == "fp16" else types.FLOAT
    bits = BITS.get(kind, 0)
    cached = {0: active, 8: types.INT8, 4: types.UINT8}[bits]
    width = shape.dim // 2 if bits == 4 else shape.dim
    names = ["q", "k", "v", "past_k", "past_v", "seqlens", "total"]
    options: dict[str, Any] = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads}
    if bits:
        names += ["", "", "", "", "", "scale_k", "scale_v"]
        per_channel = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        options |= {**per_channel, "kv_cache_bit_width": bits}
    node = helper.make_node(
        "GroupQueryAttention", names, ["out", "new_k", "new_v"], domain=DOMAIN, **options
    )
    rows = [shape.batch, shape.tokens]
    query, key = [*rows, shape.heads * shape.dim], [*rows, shape.kv_heads * shape.dim]
    cache = [shape.batch, shape.kv_heads, shape.kv, width]
    value = helper.make_tensor_value_info
    inputs = [
        value("q", active, query), value("k", active, key), value("v", active, key),
        value("past_k", cached, cache), value("past_v", cached, cache),
        value("seqlens", types.INT32, [shape.batch]), value("total", types.INT32, [1]),
    ]  # fmt: skip
    outputs = [
        value("out", active, query), value("new_k", cached, cache), value("new_v", cached, cache)
    ]  # fmt: skip
    constants = [
        onnx.numpy_helper.from_array(x, name)
        for x, name in zip(scales, ("scale_k", "scale_v"), strict=False)
    ]
    graph = helper.make_graph([node], "step", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR).SerializeToString())


def channel_scales(x: Tensor, bits: int) -> Tensor:
    """(H_kv, D) scales of least squared error over tokens of x (B, H_kv, S, D)."""
    some = x[:, :, :: max(1, x.shape[0] * x.shape[2] // CALIBRATED)]
    least = LEAST[bits]
    largest = x.abs().amax((0, 2))
    best, error = largest, torch.full_like(largest, torch.inf)
    for share in SHARES[bits]:
        scale = largest * share / -(least + 0.5)
        wide = scale[:, None]
        found = ((some / wide).round().clamp(least, -least - 1) * wide - some).square().mean((0, 2))
        best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
    return best


def cached(x: Tensor, kind: str, scale: Tensor | None) -> np.ndarray:
    """x (B, H_kv, S, D) as the operator stores it."""
    if scale is None:
        return x.to(torch.float16 if kind == "fp16" else torch.float32, copy=True).numpy()
    bits = BITS[kind]
    codes = torch.empty(x.shape, dtype=torch.int8)
    for row in range(x.shape[0]):
        exact = (x[row] / scale[:, None]).round_()
        codes[row] = exact.clamp_(LEAST[bits], -LEAST[bits] - 1)
    if bits == 8:
        return codes.numpy()
    nibbles = (codes + 8).to(torch.uint8)
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).numpy()


class OnnxRuntime(Session):
    """A session with bound inputs and outputs; ``kind`` is fp32, fp16, int8 or int4."""

    def __init__(self, problem: Problem, kind: str) -> None:
        super().__init__(problem)
        runtime, shape = import_module("onnxruntime"), problem.shape
        bits = BITS.get(kind, 0)
        scales: list[Any] = [None, None]
        if bits:
            scales = [channel_scales(x, bits) for x in (problem.k, problem.v)]
            self.note = "constant scales a channel, of least error on these very tokens"
        options = runtime.SessionOptions()
        options.intra_op_num_threads = shape.threads
        options.inter_op_num_threads = 1
        weights = [x.flatten().numpy() for x in scales if x is not None]
        self.session = runtime.InferenceSession(
            onnx_model(shape, kind, weights), options, providers=["CPUExecutionProvider"]
        )
        self.binding = self.session.io_binding()
        self._bind(runtime.OrtValue.ortvalue_from_numpy, kind, scales)
        self.bytes = sum(x.nbytes for x in self.arrays[:2]) + sum(x.nbytes for x in weights)

    def _bind(self, value: Any, kind: str, scales: list[Any]) -> None:
        """Binds one buffer to past and present of K, another to those of V."""
        problem, shape = self.problem, self.problem.shape
        dtype = torch.float16 if kind == "fp16" else torch.float32

        def flat(x: Tensor) -> np.ndarray:
            return x.transpose(1, 2).flatten(2).to(dtype).contiguous().numpy()

        self.arrays = [
            cached(x, kind, scale) for x, scale in zip((problem.k, problem.v), scales, strict=True)
        ]
        for x in self.arrays:
            x[:, :, problem.past :] = 0  # written by a step
        held = [value(x) for x in self.arrays]
        inputs = {
            "q": value(flat(problem.q)), "k": value(flat(problem.new[0])), "v": value(flat(problem.new[1])),
            "past_k": held[0], "past_v": held[1],
            "seqlens": value(np.full(shape.batch, shape.kv - 1, np.int32)),
            "total": value(np.array([shape.kv], np.int32)),
        }  # fmt: skip
        self.out = value(np.zeros_like(flat(problem.q)))
        for name, x in inputs.items():
            self.binding.bind_ortvalue_input(name, x)
        for name, x in zip(("out", "new_k", "new_v"), (self.out, *held), strict=True):
            self.binding.bind_ortvalue_output(name, x)

    def step(self) -> None:
        """Runs the model once."""
        self.session.run_with_iobinding(self.binding)

    def rest(self) -> None:
        """Waits until its threads have stopped spinning."""
        if self.problem.shape.threads > 1:
            time.sleep(SPINS_S)

    def output(self) -> Tensor:
        """As `Session.output`."""
        shape = self.problem.shape
        flat = torch.from_numpy(self.out.numpy()).float()
        return flat.view(shape.batch, shape.tokens, shape.heads, shape.dim).transpose(1, 2)

    @property
    def stored(self) -> int:
        """As `Session.stored`."""
        return int(self.bytes)
