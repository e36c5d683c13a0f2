"""decoupled_extend_attention in Triton: the kernels of extend_attention with a second key stream."""

from __future__ import annotations

from functools import partial

from .decoupled_decode_attention import decoupled_decode_attention
from .extend_launch import launch_extend

decoupled_extend_attention = partial(decoupled_decode_attention, run=launch_extend)
