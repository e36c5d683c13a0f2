"""Every op on --device, as dispatched there, against the pure-torch reference on the CPU.

``make test-device DEVICE=cuda`` (or mps) runs this file; on the CPU it compares what the dispatcher chooses
with the reference.
"""

from __future__ import annotations

import pytest
import torch
from support.blocks import awkward_blocks, damaged_blocks, same_bits
from torch import Tensor

from caramba_fast.cache import DecoupledLayerKVCache, LayerKVCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.ops import (
    KVView,
    apply_rotary_emb,
    decode_attention,
    dequantize,
    merge_state,
    quantize,
    use_backend,
)
from caramba_fast.ops.attention_call import BALANCED
from caramba_fast.ops.quantize import FITS

pytestmark = pytest.mark.device

QUANTIZED = ("q8_0", "q4_0", "nf4")
HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 50


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_and_dequantize_are_bit_equal(device, kind, dtype, fit):
    x = torch.cat((*awkward_blocks().values(), damaged_blocks())).to(dtype)
    with use_backend("reference"):
        expected = quantize(x, kind, fit=fit)
        values = dequantize(*expected, kind, 64, dtype)
    got = quantize(x.to(device), kind, fit=fit)
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    assert same_bits(dequantize(*got, kind, 64, dtype).cpu(), values)


def test_merge_state(device):
    state = (
        torch.randn(2, 3, 4, 8),
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4, 8),
        torch.randn(2, 3, 4),
    )
    for a, b in zip(merge_state(*on(device, *state)), merge_state(*state), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apply_rotary_emb(device, dtype):
    q, k, cos = (
        torch.randn(*shape).to(dtype) for shape in ((2, 4, 5, 64), (2, 1, 5, 64), (2, 5, 64))
    )
    given = q, k, cos, cos.flip(-1)
    for a, b in zip(apply_rotary_emb(*on(device, *given)), apply_rotary_emb(*given), strict=True):
        assert torch.equal(a.cpu(), b)


#: What 16 bits of query, weight and (nf4) level may add, on transformed keys with large biases; with 4 bits also 8 bits
#: of query and weight, where they add little.
INTEGERS = {"q8_0": 3e-4, "q4_0": 1e-2, "nf4": 1e-2}


def close(got: Tensor, expected: Tensor, *kinds: str) -> None:
    """Equal to rounding on the same bytes, but for the integers of C++ (`INTEGERS`)."""
    allowed = 1e-4
    if got.device.type == "cpu":
        from support.isas import (
            multiplies_integers,
        )  # needs packages that a machine with a GPU may lack

        if multiplies_integers():
            allowed = max(INTEGERS.get(kind, allowed) for kind in kinds)
    torch.testing.assert_close(got.cpu(), expected, rtol=allowed, atol=allowed)


OPTIONS = {
    "plain": {},
    "window": {"window_size": (20, 0), "num_sink_tokens": 2},
    "balanced": {"num_splits": BALANCED},
    "softcap": {"softcap": 5.0, "softmax_scale": 0.3},
    "s_aux": {"s_aux": torch.linspace(-1, 1, HEADS)},
    "null": {"null_k": torch.ones(KV_HEADS, DIM), "null_v": torch.ones(KV_HEADS, DIM)},
}


@pytest.mark.parametrize("page_size", [None, 32])
@pytest.mark.parametrize("tail", [0, 8])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_attention_of_a_cache(device, kind, page_size, tail, rotate, option):
    config = KVCacheTensorConfig(kind=kind, rotate=rotate, residual_len=tail, sink_len=tail // 2)
    width = KV_HEADS * DIM
    k, v = torch.randn(2, 2, KV_HEADS, TOKENS, DIM)
    q = torch.randn(2, HEADS, 5, DIM)
    caches, results = [], []
    for place, backend in ((torch.device("cpu"), "reference"), (device, "auto")):
        cache = LayerKVCache(
            2, 100, width, width, config, config, place, KV_HEADS, page_size=page_size
        )
        caches.append(cache)
        with use_backend(backend):
            cache.append(*on(place, k, v))
            cache.crop([0, 7])
            cache.append(*on(place, k[:, :, :5], v[:, :, :5]), [5, 3])
            if rotate:
                same_bytes(cache, caches[0])
            chosen = {
                n: x.to(place) if isinstance(x, Tensor) else x for n, x in OPTIONS[option].items()
            }
            results.append(cache.attend(q.to(place), return_softmax_lse=True, **chosen))
    for expected, got in zip(*results, strict=True):
        close(got, expected, kind)


def same_bytes(cache: LayerKVCache, other: LayerKVCache) -> None:
    """A rotation adds up in another order elsewhere, and codes on the edge fall to the other side: takes the others."""
    for name, stream in cache.streams.items():
        for mine, its in zip(stream.buffers, other.streams[name].buffers, strict=True):
            mine.copy_(its)


@pytest.mark.parametrize("tokens", [1, 40])
def test_decoupled_attention(device, kind, tokens):
    configs = [KVCacheTensorConfig(kind=name) for name in (kind, "q8", kind)]
    new = (
        torch.randn(2, 4, TOKENS, 8),
        torch.randn(2, 4, TOKENS, 16),
        torch.randn(2, 4, TOKENS, 32),
    )
    queries = torch.randn(2, 8, tokens, 8), torch.randn(2, 8, tokens, 16)
    results = []
    for place, backend in ((torch.device("cpu"), "reference"), (device, "auto")):
        with use_backend(backend):
            cache = DecoupledLayerKVCache(2, 64, 32, 64, 128, *configs, place, 4)
            cache.append(*on(place, *new))
            results.append(cache.attend(*on(place, *queries)))
    close(results[1], results[0], kind, "q8_0")


def test_rows_of_very_different_lengths_under_a_balanced_schedule(device):
    """More lines than programs run at once, one of them long: a program walks over several, and the long one is cut."""
    batch, slots, heads = 80, 1024, 8
    stored = [quantize(torch.randn(batch, heads, slots, DIM), kind) for kind in ("q8_0", "q4_0")]
    q = torch.randn(batch, heads, 1, DIM)
    lengths = torch.tensor([slots, 0, 1, *(17 * b % 190 for b in range(batch - 3))])
    results = []
    for place, backend in ((torch.device("cpu"), "reference"), (device, "auto")):
        k, v = (
            KVView(*on(place, *parts), kind)
            for parts, kind in zip(stored, ("q8_0", "q4_0"), strict=True)
        )
        given = on(place, lengths.to(torch.int32), q)
        with use_backend(backend):
            results.append(
                decode_attention(given[1], k, v, given[0], n_kv_heads=heads, num_splits=BALANCED)
            )
    close(results[1], results[0], "q8_0", "q4_0")
