"""Digests of what figures depend on: tensors, texts and the package version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.models.identity import parts_of


def token_tensor(ids: Tensor | np.ndarray | Sequence[int]) -> Tensor:
    """Token ids as int64 on the CPU, in their given shape."""
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu")


def digest_of(parts: Iterable[str | np.ndarray], length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of strings and integer arrays, concatenated."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
        else:
            digest.update(np.ascontiguousarray(part, dtype=np.int64).tobytes())
    return digest.hexdigest()[:length]


def text_digest(ids: Tensor | Sequence[int] | None, bos_token_id: int | None = None) -> str:
    """A digest of a text and the token its windows start with; "" for no text."""
    if ids is None:
        return ""
    tokens = token_tensor(ids)
    return digest_of((f"{tuple(tokens.shape)}{bos_token_id}", tokens.numpy()))


def add_tensor(digest: Any, name: str, value: Tensor, most: int) -> None:
    """Hashes name, shape, dtype and evenly spread values; all values if there are fewer than 2 × ``most``."""
    said, parts = parts_of(value)
    if said:
        digest.update(said.encode())
        for index, part in enumerate(parts):
            add_tensor(digest, f"{name}.{index}", part, most)
        return
    flat = value.detach().reshape(-1)
    step = max(1, flat.numel() // most)
    digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
    if value.device.type != "meta":
        digest.update(flat[::step].to("cpu", torch.float32).contiguous().numpy().tobytes())


def package_version(unknown: str) -> str:
    """The installed version of this package, or ``unknown`` if it is not installed."""
    try:
        return metadata.version("caramba-fast")
    except metadata.PackageNotFoundError:
        return unknown
