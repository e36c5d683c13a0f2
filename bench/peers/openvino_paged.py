"""OpenVINO's PagedAttention, the op of OpenVINO GenAI's continuous batching, over blocks of 32 tokens.

Its further features (windows, ALiBi, rotated blocks, sparse attention, eviction) are off, as in GenAI's default
pipeline. The plugin chooses the caches' element type and width; quantized blocks hold their scales.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.bench.peers.problem import Problem, Shape
from caramba_fast.bench.peers.session import Session

NODE = "PagedAttentionExtension"
CACHES = ("key_cache.0", "value_cache.0")
#: Blocks written at once while a cache is filled.
FILLED = 256


def model(shape: Shape) -> Any:
    """The graph of one layer: one PagedAttention, whose scale is that of the shape."""
    ov, ops, op = (import_module(f"openvino{part}") for part in ("", ".opset13", ".op"))
    given = []

    def parameter(name: str, size: list[int], dtype: Any) -> Any:
        made = op.Parameter(dtype, ov.PartialShape(size))
        made.set_friendly_name(name)
        made.output(0).get_tensor().set_names({name})
        given.append(made)
        return made

    def none(dtype: type) -> Any:
        return ops.constant(np.zeros(0, dtype))

    def number(value: float, dtype: type) -> Any:
        return ops.constant(np.array(value, dtype))

    f32, i32 = ov.Type.f32, ov.Type.i32
    wide, narrow = shape.heads * shape.dim, shape.kv_heads * shape.dim
    tokens = [
        parameter(*x, f32) for x in (("q", [-1, wide]), ("k", [-1, narrow]), ("v", [-1, narrow]))
    ]
    caches = [parameter(name, [-1, shape.kv_heads, -1, -1], ov.Type.dynamic) for name in CACHES]
    names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    where = [parameter(name, [-1], i32) for name in names]
    longest = parameter("max_context_len", [], i32)
    inputs = [
        *tokens, *caches, *where,
        number(shape.dim**-0.5, np.float32), number(0, np.int32),  # scale, sliding window
        none(np.float32), longest, none(np.int32),  # ALiBi slopes, score aggregation window
        none(np.int32), none(np.int32), none(np.float32),  # rotated blocks
        none(np.float32), number(64, np.int32), number(8, np.int32),  # sparse attention: threshold, block, stride
        none(np.float32),  # sinks
        number(0, np.int32), none(np.int32), none(np.int32), none(np.int32),  # eviction
        none(np.int32), none(np.uint8), none(np.int32),  # token types, bias between new tokens
    ]  # fmt: skip
    node = getattr(op, f"_{NODE}")([x.output(0) for x in inputs])
    facts = node.get_rt_info()
    facts["num_k_heads"] = facts["num_v_heads"] = shape.kv_heads
    facts["k_head_size"] = facts["v_head_size"] = shape.dim
    return ov.Model([ops.result(node.output(0))], given, "step")


class PagedOpenVINO(Session):
    """An infer request with its two caches.

    ``precision`` is KV_CACHE_PRECISION, ``compute`` INFERENCE_PRECISION_HINT.
    """

    grows = True

    def __init__(self, problem: Problem, precision: str, compute: str) -> None:
        super().__init__(problem)
        self.ov, shape = import_module("openvino"), problem.shape
        settings = {
            "KV_CACHE_PRECISION": precision, "INFERENCE_PRECISION_HINT": compute, "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": shape.threads,
        }  # fmt: skip
        made = self.ov.Core().compile_model(model(shape), "CPU", settings)
        self.request = made.create_infer_request()
        self.given: dict[str, np.ndarray] = {}
        ports = [made.input(name) for name in CACHES]
        held = " and ".join(sorted({port.element_type.to_string() for port in ports}))
        self.note = f"paged, {compute} compute" + ("" if held == precision else f"; holds {held}")
        #: Tokens of a block. Keys' blocks have further rows for scales, values' blocks wider ones.
        self.block = int(ports[1].partial_shape[2].get_length())
        self.row_blocks = -(-(shape.kv + shape.slack) // self.block)
        self.block_bytes = 0
        for port in ports:
            sizes = [dimension.get_length() for dimension in list(port.partial_shape)[1:]]
            cache = self.ov.Tensor(
                port.element_type, self.ov.Shape([shape.batch * self.row_blocks, *sizes])
            )
            self.request.set_tensor(port, cache)
            self.block_bytes += cache.byte_size // (shape.batch * self.row_blocks)
        self.new = self._flat(problem.q, *problem.new)
        self.rewind(0)

    @staticmethod
    def _flat(*tensors: Tensor) -> list[np.ndarray]:
        """(B, H, T, D) as (B · T, H · D) each."""
        return [x.transpose(1, 2).flatten(2).flatten(0, 1).contiguous().numpy() for x in tensors]

    def _give(self, **inputs: np.ndarray) -> None:
        """Sets inputs of later calls, without a copy."""
        for name, array in inputs.items():
            self.given[name] = array
            self.request.set_tensor(name, self.ov.Tensor(array, shared_memory=True))

    def _give_all(self, tokens: list[np.ndarray], past: int, blocks: np.ndarray) -> None:
        """Sets every input of sequences of equal length; ``blocks`` is (sequences, blocks of each)."""
        count = len(blocks)
        new = len(tokens[0]) // count
        self._give(
            **dict(zip("qkv", tokens, strict=True)),
            past_lens=np.full(count, past, np.int32),
            subsequence_begins=np.arange(count + 1, dtype=np.int32) * np.int32(new),
            max_context_len=np.array(past + new, np.int32),
        )
        self._give_blocks(blocks)

    def _give_blocks(self, blocks: np.ndarray) -> None:
        ends = np.arange(len(blocks) + 1, dtype=np.int32) * np.int32(blocks.shape[1])
        self._give(block_indices=np.ascontiguousarray(blocks.ravel()), block_indices_begins=ends)

    def _fill(self, start: int) -> None:
        """Writes the past tokens from ``start``, a multiple of a block, on.

        Every block is a sequence of its own: the op writes the same blocks, without attending over a whole prompt.
        """
        shape, past = self.problem.shape, self.problem.past
        for row in range(shape.batch):
            k, v = (x[row : row + 1, :, :past] for x in (self.problem.k, self.problem.v))
            whole = past - past % self.block
            step = FILLED * self.block
            spans = [(first, min(first + step, whole)) for first in range(start, whole, step)]
            if whole < past:
                spans.append((whole, past))
            for first, last in spans:
                part = [x[:, :, first:last] for x in (k, v)]
                q = torch.zeros(1, shape.heads, last - first, shape.dim)
                blocks = np.arange(first // self.block, -(-last // self.block), dtype=np.int32)
                blocks = blocks[:, None] + np.int32(row * self.row_blocks)
                self._give_all(self._flat(q, *part), 0, blocks)
                self.request.infer(share_outputs=True)

    def _table(self, tokens: int) -> np.ndarray:
        """(B, blocks) of so many tokens a row."""
        rows = np.arange(self.problem.shape.batch, dtype=np.int32)[:, None] * np.int32(
            self.row_blocks
        )
        return rows + np.arange(-(-tokens // self.block), dtype=np.int32)

    def step(self) -> None:
        """Runs one inference; a table of blocks is only made when there is another block."""
        self.request.infer(share_outputs=True)
        past, longest = self.given["past_lens"], self.given["max_context_len"]
        past += self.problem.shape.tokens
        longest += self.problem.shape.tokens
        if len(self.given["block_indices"]) * self.block < int(longest) * len(past):
            self._give_blocks(self._table(int(longest)))

    def output(self) -> Tensor:
        """As `Session.output`."""
        shape = self.problem.shape
        out = torch.from_numpy(self.request.get_output_tensor(0).data.copy())
        return out.view(shape.batch, shape.tokens, shape.heads, shape.dim).transpose(1, 2)

    def rewind(self, start: int | None = None) -> None:
        """Writes the block again that steps have added to: adding to a quantized block changes its scales."""
        past = self.problem.past
        self._fill(past - past % self.block if start is None else start)
        self._give_all(self.new, past, self._table(self.problem.shape.kv))

    @property
    def stored(self) -> int:
        """The blocks that hold the problem's tokens."""
        shape = self.problem.shape
        return self.block_bytes * shape.batch * -(-shape.kv // self.block)
