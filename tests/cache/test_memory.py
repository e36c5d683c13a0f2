"""A long prompt in chunks needs the cache and little more, and calls leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caramba_fast.cache import LayerKVCache
from caramba_fast.config import cache_configs
from caramba_fast.ops import extend_attention, quantize

PROBE = """
import resource, torch
from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import ModelConfig, Transformer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

config = ModelConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64,
)
settings = GenerateConfig(
    cache_kind="q4", max_seq_len=TOKENS, prefill="stored", prefill_chunk=512, max_new_tokens=1
)
model = Transformer(config).eval()
Generator(model, settings).prefill(torch.randint(0, 256, (1, 64)))
before = peak()
generator = Generator(model, settings)
generator.prefill(torch.randint(0, 256, (1, TOKENS)))
print(generator.cache.pos, generator.cache.nbytes, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_a_32k_prompt_in_chunks_stays_below_the_cache_and_64_mb():
    probe = PROBE.replace("TOKENS", "32768")
    # Freed blocks go back to the system at once, so that the peak counts what is live: glibc's heap
    # would otherwise keep whatever it has handed out.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    pos, nbytes, grown = map(int, done.stdout.split())
    assert pos == 32768
    assert grown < nbytes + 64 * 2**20
    print(f"grew by {(grown - nbytes) / 2**20:.1f} MB beyond the cache")


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("op", ["quantize", "append", "attend", "extend"])
def test_calls_keep_nothing(op):
    """A generation makes millions of them: torch's own unboxing of a string leaks 50 bytes with each."""
    cache = LayerKVCache(1, 256, 32, 32, n_kv_heads=1, **cache_configs("q4"))
    x, q = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 40, 32)
    cache.append(*2 * [torch.randn(1, 1, 100, 32)])

    def append() -> None:
        cache.append(x, x)
        cache.crop(1)

    view, lens = [stream.view for stream in cache.streams.values()], cache.seq_lens
    calls = {
        "quantize": lambda: quantize(x, "q4"),
        "append": append,
        "attend": lambda: cache.attend(x),
        "extend": lambda: extend_attention(q, *view, lens, n_kv_heads=1),
    }
    for _ in range(1000):
        calls[op]()
    grown = []
    for _ in range(3):  # a leak grows every time; what other tests left behind may move once
        before = resident()
        for _ in range(10_000):
            calls[op]()
        grown.append(resident() - before)
        if grown[-1] < 20 * 10_000:
            return
    raise AssertionError(f"{op}: 10,000 calls keep {grown} bytes")
