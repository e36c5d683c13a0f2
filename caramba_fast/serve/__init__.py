"""Serving: many requests at once, over pages of one quantized cache."""

from caramba_fast.serve.asynchronous import AsyncEngine, EngineStoppedError
from caramba_fast.serve.engine import Engine, EngineFullError
from caramba_fast.serve.metrics import EngineMetrics, RequestMetrics
from caramba_fast.serve.request import Event, RequestOutput, RequestStatus
from caramba_fast.serve.settings import EngineConfig

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineFullError",
    "EngineMetrics",
    "EngineStoppedError",
    "Event",
    "RequestMetrics",
    "RequestOutput",
    "RequestStatus",
]
