"""ggml's flash attention as llama.cpp calls it: ``ggml_set_rows`` into the cache, then ``ggml_flash_attn_ext``.

One graph, planned once. The tokens of a kv head are contiguous, the more favourable of the layouts llama.cpp has had.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from caramba_fast.bench.peers import ggml_library
from caramba_fast.bench.peers.ggml_library import F16, F32, I64, Q4_0, Q8_0, ggml
from caramba_fast.bench.peers.problem import Problem
from caramba_fast.bench.peers.session import Session

TYPES = {"f16": F16, "q8_0": Q8_0, "q4_0": Q4_0}
#: Bytes for the graph and the tensors' metadata.
FIELDS = 2**21


class GgmlAttention(Session):
    """A graph over a cache whose keys and values are of ``kind``, a name of `TYPES`."""

    def __init__(self, problem: Problem, kind: str) -> None:
        super().__init__(problem)
        ggml_library.check_types()
        shape, self.type = problem.shape, TYPES[kind]
        rows = shape.batch * shape.kv_heads
        row = ggml().row_size(self.type, shape.dim)
        inputs = 4 * shape.batch * shape.tokens * shape.dim * (2 * shape.heads + 2 * shape.kv_heads)
        mask = 2 * shape.kv * shape.tokens
        size = 2 * rows * shape.kv * row + inputs + mask + FIELDS
        self.context = ggml().init(ggml_library.InitParams(size, None, False))
        if not self.context:
            raise MemoryError(f"ggml has no {size} bytes")
        self.caches = [self._cache(x) for x in (problem.k, problem.v)]
        self.graph, self.out = self._graph()
        parameters = ggml().threadpool_params_default(shape.threads)
        self.pool = ggml().threadpool_new(ctypes.byref(parameters))
        self.plan = ggml().graph_plan(self.graph, shape.threads, self.pool)
        self.work = ctypes.create_string_buffer(max(1, self.plan.work_size))
        self.plan.work_data = ctypes.addressof(self.work)
        self.note = "adds values up in fp16" if kind == "f16" else ""

    def _new(self, kind: int, *sizes: int) -> Any:
        """A tensor; sizes from the innermost."""
        padded = (*sizes, 1, 1, 1)[:4]
        return ggml().new_tensor_4d(self.context, kind, *padded)

    def _holding(self, kind: int, x: Tensor) -> Any:
        """A tensor with the bytes of x, which has the same dtype."""
        made = self._new(kind, *reversed(x.shape))
        ctypes.memmove(ggml().get_data(made), x.contiguous().data_ptr(), x.nbytes)
        return made

    def _cache(self, x: Tensor) -> Any:
        """x (B, H_kv, S, D) encoded by ggml's own function; the new tokens are left zero."""
        batch, heads, tokens, dim = x.shape
        made = self._new(self.type, dim, tokens, heads, batch)
        start = ggml().get_data(made)
        ctypes.memset(start, 0, ggml().nbytes(made))
        stride = tokens * ggml().row_size(self.type, dim)
        for number, head in enumerate(x.flatten(0, 1)):
            past = head[: self.problem.past].contiguous()
            target = start + number * stride
            ggml().quantize_chunk(
                self.type, past.data_ptr(), target, 0, self.problem.past, dim, None
            )
        return made

    def _graph(self) -> tuple[Any, Any]:
        """(graph, its last tensor)."""
        problem, shape = self.problem, self.problem.shape
        place = self._holding(I64, torch.arange(problem.past, shape.kv))
        graph = ggml().new_graph(self.context)
        held = []
        for cache, x in zip(self.caches, problem.new, strict=True):
            held.append(ggml().set_rows(self.context, cache, self._holding(F32, x), place))
            ggml().build_forward_expand(graph, held[-1])
        mask = None
        if problem.mask is not None:
            hidden = torch.zeros(problem.mask.shape, dtype=torch.float16)
            mask = self._holding(F16, hidden.masked_fill_(~problem.mask, -torch.inf))
        out = ggml().flash_attn_ext(
            self.context, self._holding(F32, problem.q), *held, mask, shape.dim**-0.5, 0.0, 0.0
        )
        ggml().build_forward_expand(graph, out)
        return graph, out

    def step(self) -> None:
        """Computes the graph; RuntimeError if that fails."""
        status = ggml().graph_compute(self.graph, ctypes.byref(self.plan))
        if status:
            raise RuntimeError(f"ggml_graph_compute returned {status}")

    def output(self) -> Tensor:
        """As `Session.output`."""
        shape = self.problem.shape
        found = torch.empty(shape.batch, shape.tokens, shape.heads, shape.dim)
        ctypes.memmove(found.data_ptr(), ggml().get_data(self.out), found.nbytes)
        return found.transpose(1, 2)

    @property
    def stored(self) -> int:
        """As `Session.stored`."""
        return sum(ggml().nbytes(cache) for cache in self.caches)

    def rest(self) -> None:
        """Stops the threads; the next step wakes them."""
        if self.problem.shape.threads > 1:
            ggml().threadpool_pause(self.pool)

    def close(self) -> None:
        """As `Session.close`."""
        ggml().threadpool_free(self.pool)
        ggml().free(self.context)
