"""Serving: many requests at once, over pages of one quantized cache."""

from caramba_fast.serve.async_engine import AsyncEngine, EngineStoppedError
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.engine import Engine, EngineFullError
from caramba_fast.serve.metrics import EngineMetrics
from caramba_fast.serve.request import Event, RequestMetrics, RequestOutput, RequestStatus

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
