"""Serving: many requests at once, over pages of one quantized cache."""

from caramba_fast.serve.async_engine import AsyncEngine, EngineStoppedError
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.engine import Engine
from caramba_fast.serve.metrics import EngineMetrics, RequestMetrics
from caramba_fast.serve.request import Event, RequestOutput, RequestStatus
from caramba_fast.serve.undo import EngineFullError

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
