"""The keyword options append_ and the attention ops share, and which of them are not built yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Option -> the value that means "not used". Their schemas are final; the code is to follow.
UNBUILT: dict[str, object] = {
    "block_table": None,
    "k_tail": None,
    "v_tail": None,
    "residual_len": 0,
    "k_sink": None,
    "v_sink": None,
    "k_bias": None,
    "k_pairs": None,
    "theta": None,
    "k_scale": None,
    "v_scale": None,
    "rotate_k": False,
    "rotate_v": False,
    "null_k": None,
    "null_v": None,
    "s_aux": None,
    "num_sink_tokens": 0,
}


def refuse_unbuilt(op: str, options: Mapping[str, Any]) -> None:
    """Raises NotImplementedError listing every option in use that has no implementation."""
    used = [
        name
        for name, unused in UNBUILT.items()
        if name in options and options[name] is not unused and options[name] != unused
    ]
    if used:
        raise NotImplementedError(f"{op}: not available in this version: {', '.join(used)}")
