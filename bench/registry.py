"""What is measured: one row a case (op, kind, dtype, shape, block).

An op's entry says how to make its inputs, how to call it, and what is compared: its backends, what users
would do without it, and a plain torch copy that moves the same number of bytes, the bandwidth to reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba_fast.cache import CacheTensor, LayerKVCache
from caramba_fast.config import KVCacheKind, KVCacheTensorConfig
from caramba_fast.formats import QUANTIZED_KINDS
from caramba_fast.ops.dequantize import dequantize
from caramba_fast.ops.quantize import quantize
from caramba_fast.ops.registry import use_backend

from .parity import same_bits

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
#: (batch, kv heads, tokens, head_dim) by op, device and whether the run is quick; the full sizes do not
#: fit into any cache.
_CONVERSION_SHAPES = {
    ("cpu", False): ((1, 8, 4096, 128),),
    ("cpu", True): ((1, 8, 256, 128),),
    ("cuda", False): ((8, 8, 32768, 128), (1, 8, 4096, 128)),
    ("cuda", True): ((1, 8, 32768, 128),),
}
_ATTENTION_SHAPES = {
    ("cpu", False): ((1, 8, 1024, 128), (1, 8, 8192, 128), (1, 8, 32768, 128)),
    ("cpu", True): ((1, 8, 256, 128),),
    ("cuda", False): ((1, 8, 4096, 128), (1, 8, 32768, 128)),
    ("cuda", True): ((1, 8, 4096, 128),),
}
QUERY_HEADS_PER_KV_HEAD = 4
COPY = "copy"


@dataclass(frozen=True)
class Case:
    """One row: an op on one kind, dtype (of the unquantized side), shape and block."""

    op: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    block: int


@dataclass(frozen=True)
class Implementation:
    """One thing that is timed; ``graph``: whether a CUDA graph can record it."""

    name: str
    call: Callable[[], Any]
    graph: bool = True
    backend: str = "auto"


@dataclass(frozen=True)
class Workload:
    """A case with its inputs made.

    Attributes:
        call: runs the op on the backend in force.
        moved_bytes: bytes read and written at least, scales included.
        tolerance: relative L2 error allowed against the reference; None asks for equal bits.
        peers: what users would call instead, by name.
    """

    call: Callable[[], tuple[Tensor, ...]]
    moved_bytes: int
    tolerance: float | None = None
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)


def _quantize(case: Case, device: torch.device) -> Workload:
    x = torch.randn(case.shape, device=device).to(DTYPES[case.dtype])
    codes, scales = quantize(x, case.kind, case.block)
    moved = x.nbytes + codes.nbytes + scales.nbytes
    return Workload(lambda: quantize(x, case.kind, case.block), moved)


def _dequantize(case: Case, device: torch.device) -> Workload:
    x = torch.randn(case.shape, device=device)
    codes, scales = quantize(x, case.kind, case.block)
    dtype, dim = DTYPES[case.dtype], case.shape[-1]
    moved = codes.nbytes + scales.nbytes + x.numel() * dtype.itemsize
    return Workload(lambda: (dequantize(codes, scales, case.kind, dim, dtype),), moved)


def _decode_attention(case: Case, device: torch.device) -> Workload:
    """One query token, four query heads a kv head; dtype is that of the queries."""
    batch, heads, tokens, dim = case.shape
    config = KVCacheTensorConfig(kind=KVCacheKind(case.kind), qblock=case.block)
    cache = LayerKVCache(
        batch, tokens, heads * dim, heads * dim, config, config, device, n_kv_heads=heads
    )
    cache.append(torch.randn(case.shape, device=device), torch.randn(case.shape, device=device))
    shape = (batch, heads * QUERY_HEADS_PER_KV_HEAD, 1, dim)
    q = torch.randn(shape, device=device).to(DTYPES[case.dtype])

    def restored(stream: CacheTensor) -> Tensor:
        if stream.scales is None:
            return stream.codes[:, :, :tokens].to(q.dtype)
        return dequantize(stream.codes, stream.scales, case.kind, dim, q.dtype)[:, :, :tokens]

    def dequantize_and_sdpa() -> Tensor:
        k, v = restored(cache.k), restored(cache.v)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    k, v = restored(cache.k), restored(cache.v)
    peers = {
        "dequantize+sdpa": dequantize_and_sdpa,
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    return Workload(lambda: (cache.attend(q),), cache.nbytes, tolerance=1e-3, peers=peers)


WORKLOADS: dict[str, Callable[[Case, torch.device], Workload]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "decode_attention": _decode_attention,
}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The rows for a device; ``quick`` takes small shapes."""
    for op in ("quantize", "dequantize"):
        for shape in _CONVERSION_SHAPES[device.type, quick]:
            for dtype in DTYPES:
                for kind in QUANTIZED_KINDS:
                    yield Case(op, kind, dtype, shape, block=32)
    for shape in _ATTENTION_SHAPES[device.type, quick]:
        for kind in ("fp16", *QUANTIZED_KINDS):
            yield Case("decode_attention", kind, "fp32", shape, block=32)


def differences(work: Workload, backends: list[str]) -> list[str]:
    """Backends whose results are not the reference's, within the tolerance of the workload."""
    with use_backend("reference"):
        wanted = work.call()
    found = []
    for name in backends:
        with use_backend(name):
            results = work.call()
        if not all(_agree(*pair, work.tolerance) for pair in zip(results, wanted, strict=True)):
            found.append(name)
    return found


def _agree(got: Tensor, wanted: Tensor, tolerance: float | None) -> bool:
    if tolerance is None:
        return bool(same_bits(got, wanted).all())
    return bool((got - wanted).double().norm() <= tolerance * wanted.double().norm())


def implementations(
    work: Workload, backends: list[str], device: torch.device
) -> list[Implementation]:
    """The backends, the peers, and the copy that moves as many bytes (half read, half written)."""
    source = torch.randint(0, 256, (work.moved_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # The reference makes its tables on the host when called, which a graph cannot record.
    listed = [
        Implementation(name, work.call, graph=name != "reference", backend=name)
        for name in backends
    ]
    if work.tolerance is not None:  # what users get: it may use faster ops than its own reference
        listed.append(Implementation("dispatched", work.call))
    listed += [Implementation(name, call) for name, call in work.peers.items()]
    return [*listed, Implementation(COPY, lambda: target.copy_(source))]
