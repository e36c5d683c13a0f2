"""Models whose forward pass depends on lengths the host knows must not be recorded."""

from __future__ import annotations

import torch


def refuse_recording(device: torch.device, reason: str) -> None:
    """Raises RuntimeError with ``reason`` while a CUDA graph is recorded on this thread's stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(reason)
