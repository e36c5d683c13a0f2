"""OpenVINO's stateful attention, as in its models: ReadValue, Gather, Concat, ScaledDotProductAttention, Assign.

Its CPU plugin fuses them into one node with a cache of its own (``StatefulSDPAFusion``), if kv heads are expanded to
query heads as in exported models: Unsqueeze, Multiply by ones, Reshape. Its counters tell whether it did.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.bench.peers.problem import Problem, Shape
from caramba_fast.bench.peers.session import Session

FUSED = "ScaledDotProductAttentionWithKVCache"
#: Tokens of a prompt read at once; most products of a key with a query value, three minutes on a core.
CHUNK, MOST_PRODUCTS = 128, 1.2e12
STATES = ("past_k", "past_v")


def model(shape: Shape) -> Any:
    """The graph of one layer for any number of tokens; prompts may have a single query head per kv head."""
    ov, ops = import_module("openvino"), import_module("openvino.opset13")
    kv = [-1, shape.kv_heads, -1, shape.dim]

    def given(name: str, size: list[int], dtype: type) -> Any:
        parameter = ops.parameter(size, dtype, name=name)
        parameter.output(0).get_tensor().set_names({name})
        return parameter

    q = given("q", [-1, -1, -1, shape.dim], np.float32)
    new = [given(name, kv, np.float32) for name in ("k", "v")]
    order = given("order", [-1], np.int32)
    group = shape.heads // shape.kv_heads
    ones = np.ones((1, 1, group, 1, 1), np.float32)
    sinks, wide = [], []
    for name, tokens in zip(STATES, new, strict=True):
        empty = np.zeros((shape.batch, shape.kv_heads, 0, shape.dim), np.float32)
        read = ops.read_value(ops.constant(empty), name, ov.Type.f32, ov.PartialShape(kv))
        past = ops.gather(read, order, ops.constant(np.int64(0)))
        whole = ops.concat([past, tokens], 2)
        sinks.append(ops.assign(whole, name))
        if group > 1:
            each = ops.multiply(ops.unsqueeze(whole, ops.constant(np.int64(2))), ops.constant(ones))
            target = np.array([0, shape.heads, -1, shape.dim], np.int64)
            whole = ops.reshape(each, ops.constant(target), special_zero=True)
        wide.append(whole)
    out = ops.scaled_dot_product_attention(q, *wide, causal=shape.tokens > 1)
    return ov.Model([ops.result(out)], sinks, [q, *new, order], "step")


def compiled(shape: Shape, precision: str, compute: str, counted: bool = False) -> Any:
    """The model compiled for the CPU; ``counted`` enables performance counters of its nodes."""
    settings = {
        "KV_CACHE_PRECISION": precision, "INFERENCE_PRECISION_HINT": compute, "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": shape.threads, "PERF_COUNT": counted,
    }  # fmt: skip
    return import_module("openvino").Core().compile_model(model(shape), "CPU", settings)


@functools.lru_cache(maxsize=64)
def how_it_runs(shape: Shape, precision: str, compute: str) -> str:
    """The node and kernel of a step, from the performance counters; a note unless it is the fused one."""
    request = compiled(shape, precision, compute, counted=True).create_infer_request()
    kv = np.zeros((shape.batch, shape.kv_heads, shape.tokens, shape.dim), np.float32)
    q = np.zeros((shape.batch, shape.heads, shape.tokens, shape.dim), np.float32)
    order = np.arange(shape.batch, dtype=np.int32)
    for _ in range(2):
        request.infer({"q": q, "k": kv, "v": kv, "order": order})
    ran = {node.node_type: node.exec_type for node in request.get_profiling_info()}
    if FUSED in ran:
        return f"fused, {ran[FUSED]}, {compute} compute"
    return f"not fused: {', '.join(sorted(ran))}"[:160]


class OpenVINO(Session):
    """An infer request with its state.

    ``precision`` is KV_CACHE_PRECISION, ``compute`` INFERENCE_PRECISION_HINT.
    """

    grows = True

    def __init__(self, problem: Problem, precision: str, compute: str) -> None:
        super().__init__(problem)
        shape = problem.shape
        self.ov, self.precision = import_module("openvino"), precision
        self.note = how_it_runs(Shape(**{**vars(shape), "kv": shape.tokens}), precision, compute)
        made = compiled(shape, precision, compute)
        held = made.get_property("KV_CACHE_PRECISION").to_string()
        if held != precision:
            self.note += f"; holds {held}"
        self.request = made.create_infer_request()
        self.given: dict[str, np.ndarray] = {}
        self.order = np.arange(shape.batch, dtype=np.int32)
        self._give(q=problem.q, order=torch.from_numpy(self.order))
        self.rewind()

    def _give(self, **inputs: Tensor) -> None:
        """Sets inputs of later calls, without a copy."""
        for name, x in inputs.items():
            self.given[name] = np.ascontiguousarray(x.numpy())
            self.request.set_tensor(name, self.ov.Tensor(self.given[name], shared_memory=True))

    def step(self) -> None:
        """Runs one inference."""
        self.request.infer(share_outputs=True)

    def output(self) -> Tensor:
        """As `Session.output`."""
        return torch.from_numpy(self.request.get_output_tensor(0).data.copy())

    def rewind(self) -> None:
        """Sets the state and takes a step, since the first after setting a state moves the cache."""
        problem, tokens = self.problem, self.problem.shape.tokens
        self.request.reset_state()
        if self.precision == "u4":
            self._read(problem.past - tokens)
        else:
            for state in self.request.query_state():
                x = (problem.k, problem.v)[STATES.index(state.name)]
                part = x[:, :, : problem.past - tokens].contiguous().numpy()
                state.state = self.ov.Tensor(part, shared_memory=True)
        before = problem.tokens(problem.past - tokens, problem.past)
        self._give(q=problem.q, k=before[0], v=before[1])
        self.step()
        self._give(k=problem.new[0], v=problem.new[1])

    def _read(self, length: int) -> None:
        """Fills the cache by inference, with as few query heads as possible.

        Setting the state of a 4-bit cache, as `rewind` does with others, kills the process.
        """
        for start in range(0, length, CHUNK):
            k, v = self.problem.tokens(start, min(start + CHUNK, length))
            q = self.problem.q[:, : k.shape[1], :1].expand(-1, -1, k.shape[2], -1)
            self._give(q=q, k=k, v=v)
            self.step()

    @property
    def stored(self) -> int:
        """Computed, since OpenVINO does not report it: the codes, and an fp32 scale and zero per token and head."""
        shape = self.problem.shape
        bits = {"f16": 16, "bf16": 16, "f32": 32, "u8": 8, "u4": 4}[self.precision]
        scales = 8 * shape.values // shape.dim if bits < 16 else 0
        return shape.values * bits // 8 + scales


def long_prompt(shape: Shape) -> str:
    """Why a 4-bit cache of this shape cannot be filled in time, or ""."""
    products = shape.batch * shape.kv_heads * shape.dim * shape.kv**2
    if products <= MOST_PRODUCTS:
        return ""
    return "left out: a u4 cache is filled only by attending over the prompt, which takes too long here"
