"""Decoding over several devices: context parallelism (cached tokens over ranks) and tensor parallelism (heads).

Uses `torch.distributed` only: NCCL between GPUs, gloo between CPUs. docs/scaling.md counts the bytes moved.
"""

from caramba_fast.distributed.cache import Context, ContextParallelKVCache, spread_layout
from caramba_fast.distributed.group import RankGroup, Traffic
from caramba_fast.distributed.heartbeat import RankLostError
from caramba_fast.distributed.model import ParallelModel, context_parallel, tensor_parallel
from caramba_fast.distributed.placement import PageSpread

__all__ = [
    "Context",
    "ContextParallelKVCache",
    "PageSpread",
    "ParallelModel",
    "RankGroup",
    "RankLostError",
    "Traffic",
    "context_parallel",
    "spread_layout",
    "tensor_parallel",
]
