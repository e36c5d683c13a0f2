"""`torch.autocast` changes nothing about what our ops and caches compute, on any backend."""

from __future__ import annotations

import pytest
import torch

from caramba_fast.cache import LayerKVCache
from caramba_fast.config import cache_configs
from caramba_fast.ops import quantize, use_backend

X = torch.randn(1, 2, 60, 64, generator=torch.Generator().manual_seed(0))


def results(spec: str) -> list[torch.Tensor]:
    """What a cache computes: attention of one token and several, and what it holds."""
    layer = LayerKVCache(1, 128, 128, 128, **cache_configs(spec), n_kv_heads=2)
    found = []
    for k, v in (
        (X[:, :, :50], X[:, :, 10:]),
        (X[:, :, 50:51], X[:, :, :1]),
        (X[:, :, 51:], X[:, :, :9]),
    ):
        layer.append(k, v)
        found.append(layer.attend(k.repeat(1, 2, 1, 1)))
    return [*found, *layer.get(), *layer.get(as_read=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "spec", ["fp32", "fp32:rotate", "fp16", "q8", "q4", "q4:plain,rotate", "nf4"]
)
@torch.no_grad()
def test_a_cache_computes_the_same_under_autocast(
    spec: str, backend: str, dtype: torch.dtype
) -> None:
    with use_backend(backend):
        wanted = results(spec)
        with torch.autocast("cpu", dtype=dtype):
            found = results(spec)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["q8", "q4", "nf4", "q8_channel", "q4_channel"])
def test_codes_are_the_same_under_autocast(kind: str) -> None:
    with use_backend("reference"):
        wanted = quantize(X[:, :, :32], kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = quantize(X[:, :, :32], kind)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
