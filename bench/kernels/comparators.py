"""What users would call instead: torch's attention, transformers' quantized cache, FlashInfer, flash-attn.

One that cannot run here is reported with the reason. Masks among the new tokens are left out, which gives these
slightly less work, never more. With a window they get the visible part of the cache, as a slice without a copy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba_fast.bench.kernels.registry import DTYPES, Case
from caramba_fast.ops import KVView, dequantize

PAGE = 16


@dataclass(frozen=True)
class Implementation:
    """One function to time.

    Attributes:
        calls: the same call on different copies of the inputs, taken in turn.
        moved: bytes a call has to move.
        kind: format it reads, if any.
        ours: whether it goes through the package's ops.
        graph: whether a CUDA graph can record it.
    """

    name: str
    calls: tuple[Callable[[], Any], ...]
    moved: int
    kind: str = ""
    ours: bool = False
    graph: bool = True


@dataclass
class Peers:
    """Collects the implementations of one case."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    count: int
    listed: list[Implementation] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    made: dict[torch.dtype, Any] = field(default_factory=dict)

    def _inputs(self, dtype: torch.dtype) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """q, and copies of (k, v), in ``dtype``; made once."""
        if dtype not in self.made:
            q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
            copies = ((k.clone(), v.clone()) for _ in range(self.count - 1))
            self.made[dtype] = q, [(k, v), *copies]
        return self.made[dtype]

    def add(
        self,
        name: str,
        call: Callable[..., Any],
        dtype: torch.dtype | None = None,
        graph: bool = True,
    ) -> None:
        """Adds ``call(q, k, v)`` on copies of the inputs in ``dtype``."""
        q, pairs = self._inputs(dtype or self.q.dtype)
        k, v = pairs[0]
        calls = tuple(lambda pair=pair: call(q, *pair) for pair in pairs)
        self.listed.append(Implementation(name, calls, k.nbytes + v.nbytes, graph=graph))

    def try_adding(
        self, name: str, module: str, build: Callable[[Peers], Callable[..., Any]]
    ) -> None:
        """Adds the peer that ``build`` makes with a package that may be missing or not support the case."""
        if importlib.util.find_spec(module) is None:
            self.absent[name] = f"not installed: {module}"
            return
        try:
            call = build(self)
            call(self.q, self.k, self.v)
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            self.absent[name] = f"does not run here: {str(error).splitlines()[0][:120]}"
            return
        self.add(name, call, graph=name != "QuantizedCache q4")


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention with grouped queries; ``mask`` (T, S) is true where a query may look."""
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def _sdpa_by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return call


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """matmul, softmax, matmul with the query heads of a kv head side by side; ``mask`` as of `sdpa`."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    scores = rows * q.shape[3] ** -0.5 @ k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(rows.shape[2] // q.shape[2], 1), -torch.inf)
    return (scores.softmax(-1) @ v).view(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


def attention(
    case: Case,
    queries: Sequence[Tensor],
    given: Sequence[Tensor],
    stored: Mapping[str, Sequence[KVView]],
    count: int,
) -> tuple[list[Implementation], dict[str, str]]:
    """(peers, absent ones with the reason) of an attention case.

    ``queries`` are (B, H_q, T, D) of each key stream; several are concatenated. ``given`` are keys and values before
    they were stored, ``stored`` views by kind. ``count`` copies of fp16 inputs exceed a cache together.
    """
    reach = slice(-case.seen, None)
    keys = [x[:, :, reach] * (x.shape[3] ** -0.5 if len(queries) > 1 else 1) for x in given[:-1]]
    q = queries[0] if len(queries) == 1 else torch.cat(tuple(queries), -1)
    k = keys[0] if len(keys) == 1 else torch.cat(keys, -1)
    # Scores of several streams are scaled separately: undo attention's division of the sum.
    k = k if len(keys) == 1 else k * k.shape[3] ** 0.5
    peers = Peers(case, q, k, given[-1][:, :, reach], count)
    if q.is_cuda:
        _cuda(peers)
    else:
        _cpu(peers)
    _restored(peers, stored)
    peers.try_adding("QuantizedCache q4", "transformers", _quantized_cache)
    return peers.listed, peers.absent


def _among_themselves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def _cpu(peers: Peers) -> None:
    case = peers.case
    many = case.tokens > 32
    for name in dict.fromkeys(("fp32", case.dtype)) if many else DTYPES:
        call = _among_themselves if case.tokens == case.kv else sdpa
        peers.add(f"sdpa {name}", call, DTYPES[name])
    for name in () if many else ("bf16", "fp32"):
        peers.add(f"grouped matmul {name}", grouped, DTYPES[name])


def _cuda(peers: Peers) -> None:
    if peers.case.key_dims:
        peers.add("sdpa", sdpa)  # keys and values differ in width: torch chooses
        return
    peers.add("sdpa flash", _sdpa_by(SDPBackend.FLASH_ATTENTION))
    peers.try_adding("flash-attn", "flash_attn", _flash_attn)
    peers.try_adding("FlashInfer", "flashinfer", _flashinfer)


def _restored(peers: Peers, stored: Mapping[str, Sequence[KVView]]) -> None:
    """Dequantizes the stored bytes at every call, then torch's attention."""
    case = peers.case
    if case.key_dims or case.tokens > 32:
        return

    def call(kind: str) -> Tensor:
        restored = []
        for view in stored[kind]:
            assert view.scales is not None
            lanes = dequantize(view.codes, view.scales, kind, view.lane_dim, peers.q.dtype)
            restored.append(case.lanes.unpack(lanes)[:, :, -case.seen :])
        return sdpa(peers.q, *restored)

    for kind in ("q8_0", "q4_0"):
        if kind in stored:
            calls = (functools.partial(call, kind),)
            peers.listed.append(
                Implementation(f"dequantize+sdpa {kind}", calls, case.moved_bytes(kind))
            )


def _flash_attn(_peers: Peers) -> Callable[..., Any]:
    kernel = importlib.import_module("flash_attn").flash_attn_with_kvcache
    return lambda q, k, v: kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _flashinfer(peers: Peers) -> Callable[..., Any]:
    """FlashInfer's paged decode; the same random bytes, read as pages."""
    if peers.case.tokens > 1 or peers.case.window:
        raise NotImplementedError("its decode takes one token and, here, no window")
    case, slots = peers.case, peers.k.shape[2]
    pages = slots // PAGE
    workspace = torch.empty(2**27, dtype=torch.uint8, device=peers.q.device)
    module = importlib.import_module("flashinfer")
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    rows = torch.arange(case.batch + 1, dtype=torch.int32, device=workspace.device)
    wrapper.plan(
        rows * pages, torch.arange(case.batch * pages, dtype=torch.int32, device=rows.device),
        torch.full_like(rows[1:], PAGE), case.heads, case.kv_heads, case.dim, PAGE,
        q_data_type=peers.q.dtype, kv_data_type=peers.k.dtype,
    )  # fmt: skip

    def paged(x: Tensor) -> Tensor:
        """(pages, H, PAGE, D), a view of the same memory."""
        return x.reshape(-1, x.shape[1], PAGE, x.shape[3])

    return lambda q, k, v: wrapper.run(q[:, :, 0], (paged(k), paged(v)))


def _quantized_cache(peers: Peers) -> Callable[..., Any]:
    """transformers' 4-bit cache of optimum-quanto: a decode step appends, dequantizes all, and attends."""
    if peers.case.key_dims or peers.case.window or peers.case.tokens > 32:
        raise NotImplementedError("one plain stream of keys and few tokens only")
    layer = importlib.import_module("transformers.cache_utils").QuantoQuantizedLayer(nbits=4)
    layer.update(peers.k[:, :, :-1].clone(), peers.v[:, :, :-1].clone())
    new = peers.k[:, :, -1:].clone(), peers.v[:, :, -1:].clone()
    return lambda q, _k, _v: sdpa(q, *layer.update(*new))


def smallest_call(device: torch.device) -> Implementation:
    """The cost of launching anything."""
    one = torch.zeros(1, device=device)
    return Implementation("one small op", (lambda: one.add_(1),), 8)
