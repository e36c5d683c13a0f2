"""Decoding over several devices: the tokens of a cache, or the heads of a model, spread over ranks.

On `torch.distributed` alone: NCCL between GPUs, gloo between CPUs. docs/scaling.md counts the bytes.
"""

from caramba_fast.distributed.cache import ContextParallelKVCache, spread_layout
from caramba_fast.distributed.context import Context
from caramba_fast.distributed.group import RankGroup, Traffic
from caramba_fast.distributed.liveness import RankLostError
from caramba_fast.distributed.model import ParallelModel, context_parallel
from caramba_fast.distributed.spread import PageSpread
from caramba_fast.distributed.tensor_parallel import tensor_parallel

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
