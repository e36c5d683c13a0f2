"""Ops: stateless functions of tensors. Each op has a file with its schema, fake, reference and public function."""

from caramba_fast.ops.append import append_, decoupled_append_
from caramba_fast.ops.apply_rotary_emb import apply_rotary_emb
from caramba_fast.ops.decode_attention import decode_attention, decoupled_decode_attention
from caramba_fast.ops.dequantize import dequantize
from caramba_fast.ops.extend_attention import decoupled_extend_attention, extend_attention
from caramba_fast.ops.merge_state import merge_state
from caramba_fast.ops.quantize import quantize
from caramba_fast.ops.registry import (
    BackendError,
    BackendStatus,
    backends,
    start,
    use_backend,
)
from caramba_fast.ops.view import KVView

__all__ = [
    "BackendError",
    "BackendStatus",
    "KVView",
    "append_",
    "apply_rotary_emb",
    "backends",
    "decode_attention",
    "decoupled_append_",
    "decoupled_decode_attention",
    "decoupled_extend_attention",
    "dequantize",
    "extend_attention",
    "merge_state",
    "quantize",
    "use_backend",
]

start()
