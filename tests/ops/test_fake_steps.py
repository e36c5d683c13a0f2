"""A decode step of the native model under FakeTensorMode: shapes only, so no host may read a tensor."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import KVCacheTensorConfig
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.ops import use_backend

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
MODELS = {
    "gqa": dict(head_dim=32),
    "window": dict(model_type="mistral", head_dim=16, sliding_window=6),
    "decoupled": dict(
        model_type="caramba_dba", head_dim=16,
        decoupled={"sem_dim": 32, "geo_dim": 64, "v_dim": 64, "null_kv": True},
    ),
}  # fmt: skip
CACHES = {
    "fp16": dict(kind="fp16"),
    "q4": dict(kind="q4"),
    "nf4 with all": dict(kind="nf4", rotate=True, residual_len=5, tail_slack=8, sink_len=2),
}


#: Every model with every cache on both backends, of which one is paged: in turns, so that all pairs occur.
CALLS = [
    (model, cache, (None, 32)[(i + j + k) % 2], backend)
    for i, model in enumerate(MODELS)
    for j, cache in enumerate(CACHES)
    for k, backend in enumerate(("auto", "reference"))
]


@pytest.mark.parametrize(("model", "cache", "page_size", "backend"), CALLS)
def test_generation_never_reads_a_tensor(model, cache, page_size, backend):
    """Prompt, steps, a draft with padding and a crop per row, in fake memory."""
    config = ModelConfig(**SIZES, **MODELS[model])
    stored = KVCacheTensorConfig(**CACHES[cache])
    with FakeTensorMode(), torch.inference_mode(), use_backend(backend):
        fake = Transformer(config).eval()
        held = ModelKVCache(
            fake.cache_layout, 2, 64, stored, stored, page_size=page_size, prefill="exact"
        )

        def ids(count):
            return torch.zeros(2, count, dtype=torch.int64)

        logits = fake(ids(33), held, query_lens=[33, 30])
        assert logits.shape == (2, 33, 64)
        logits = fake(ids(1), held)
        logits = fake(ids(5), held, query_lens=[5, 2])
        held.crop([4, 1])
        logits = fake(ids(1), held, logits_index=torch.zeros(2, dtype=torch.int64))
        assert logits.shape == (2, 1, 64) and held.row_lengths == [36, 33]
        held.reset()
        assert held.pos == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_decode_step_is_one_graph(model):
    """torch.compile(fullgraph=True) of attention over what a cache holds, tail and pages included."""
    config = ModelConfig(**SIZES, **MODELS[model])
    stored = KVCacheTensorConfig(**CACHES["nf4 with all"])
    held = ModelKVCache(Transformer(config).cache_layout, 2, 64, stored, stored, page_size=32)[0]
    held.append(*(torch.randn(2, 2, 40, s.head_dim) for s in held.streams.values()))
    q = [torch.randn(2, 4, 3, s.head_dim) for n, s in held.streams.items() if n != "v"]
    torch._dynamo.reset()
    compiled = torch.compile(held.attend, fullgraph=True, backend="aot_eager")
    first = compiled(
        *q
    )  # reads the ring of the prompt, which is given up then: sums may go in another order
    torch.testing.assert_close(held.attend(*q), first)
