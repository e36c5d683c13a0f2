"""Allowed difference from float64 on the same stored bytes, by dtype of the query."""

from __future__ import annotations

import torch
from torch import Tensor

#: dtype of the queries and the output -> relative L2 error
RELATIVE_L2 = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
