"""The decode plan: which reach a length gets, and that caches honour it exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from caramba_fast.cache import AttentionLimits, DecoupledLayerKVCache, LayerKVCache, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.ops.attention import QUERIES_PER_PIECE
from caramba_fast.ops.extend_attention import extend_op
from caramba_fast.policy import DecodePlan, DecodePlanFields, plan_for

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, initializer_range=0.3,
)  # fmt: skip


def make(**changes: Any) -> Transformer:
    torch.manual_seed(3)
    return Transformer(ModelConfig(**{**SIZES, **changes})).requires_grad_(False).eval()


def ids(length: int, rows: int = 2) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def run(
    model: Transformer,
    tokens: Tensor,
    reach: AttentionLimits,
    pieces: list[int],
    kind: str,
    **options: Any,
) -> Tensor:
    """Logits of all positions, through a cache with a reach."""
    options = {"prefill": "stored", **options}
    cache = ModelKVCache(model.cache_layout, len(tokens), 256, **options, **cache_configs(kind))
    cache.reach = reach
    return torch.cat([model.forward(part, cache) for part in tokens.split(pieces, dim=1)], dim=1)


# -- which reach ----------------------------------------------------------------------------


def test_auto_goes_by_buckets_and_narrows_nothing_by_itself() -> None:
    plan = DecodePlan(DecodePlanFields(decode_plan="auto"))
    lengths = {0: "short", 512: "short", 513: "mid", 2048: "mid", 2049: "long", 10**6: "long"}
    assert {length: plan.plan_for(length).bucket for length in lengths} == lengths
    assert all(plan.plan_for(length).local_window is None for length in lengths)
    assert all((plan.plan_for(length).q_chunk or 0) <= QUERIES_PER_PIECE for length in lengths)
    assert plan.plan_for(3) is plan.plan_for(4)


def test_auto_takes_what_is_set_for_a_bucket() -> None:
    settings = DecodePlanFields(
        decode_plan="auto", decode_bucket_short=8, decode_bucket_mid=16, decode_q_chunk=3,
        decode_q_chunk_long=5, decode_local_window_mid=7,
    )  # fmt: skip
    assert plan_for(settings, 8) == AttentionLimits(3, None, "short")
    assert plan_for(settings, 9) == AttentionLimits(256, 7, "mid")
    assert plan_for(settings, 17) == AttentionLimits(5, None, "long")
    with pytest.raises(ValueError, match="length is -1; 0 or more"):
        plan_for(settings, -1)


def test_fixed_and_none() -> None:
    fixed = DecodePlanFields(decode_plan="fixed", decode_q_chunk=128, decode_local_window=512)
    assert {plan_for(fixed, length) for length in (1, 600, 9999)} == {
        AttentionLimits(128, 512, "fixed")
    }
    assert plan_for(DecodePlanFields(), 9999) == AttentionLimits()


def test_the_plan_in_force_can_be_told() -> None:
    plan = DecodePlan(DecodePlanFields(decode_plan="auto", decode_local_window_long=1024))
    told = plan.describe()
    assert told["decode_plan"] == "auto" and told["decode_bucket_mid"] == 2048
    reach: Any = told["reach"]
    assert reach["long"] == {"q_chunk": 128, "local_window": 1024}
    assert reach["short"]["local_window"] is None
    assert "long: window 1024, q_chunk 128" in str(plan) and "short: whole cache" in str(plan)
    assert DecodePlan(DecodePlanFields()).describe() == {"decode_plan": "none"}
    assert "layers' defaults" in str(DecodePlan(DecodePlanFields()))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"decode_plan": "sometimes"}, ["'auto', 'fixed' or 'none'"]),
        ({"decode_plan": "auto", "decode_bucket_mid": 100}, ["=100", "decode_bucket_short=512"]),
        ({"decode_plan": "auto", "decode_q_chunk": 0}, ["decode_q_chunk", "greater than or equal"]),
        ({"decode_plan": "auto", "decode_local_window_mid": -4}, ["decode_local_window_mid", "-4"]),
        ({"decode_q_chunk": 4}, ["decode_q_chunk=4", "'none'"]),
        ({"decode_bucket_short": 4}, ["decode_bucket_short=4", "'none'"]),
        ({"decode_plan": "fixed"}, ["decode_q_chunk or decode_local_window"]),
        (
            {"decode_plan": "fixed", "decode_q_chunk": 4, "decode_q_chunk_mid": 4},
            ["decode_q_chunk_mid=4", "'auto'"],
        ),
        ({"decode_plan": "auto", "decode_chunk": 4}, ["decode_chunk"]),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        DecodePlanFields(**settings)
    for part in parts:
        assert part in str(caught.value)


# -- caches honour it -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "q8:plain", "q4:plain,residual_len=8,sink_len=4"])
def test_a_window_is_a_model_with_a_sliding_window(kind: str) -> None:
    tokens, pieces = ids(60), [1, 20, *[1] * 39]
    wanted = run(make(sliding_window=9), tokens, AttentionLimits(), pieces, kind)
    found = run(make(), tokens, AttentionLimits(local_window=9), pieces, kind)
    torch.testing.assert_close(found, wanted)
    whole = run(make(), tokens, AttentionLimits(), pieces, kind)
    assert (found - whole)[:, :9].abs().max() < 1e-5
    assert (found - whole)[:, 20:].abs().max() > 1e-2


@pytest.mark.parametrize(("own", "given"), [(9, 30), (30, 9)])
def test_the_narrower_of_both_windows_counts(own: int, given: int) -> None:
    tokens = ids(60)
    wanted = run(make(sliding_window=9), tokens, AttentionLimits(), [20, 40], "fp32")
    found = run(make(sliding_window=own), tokens, AttentionLimits(None, given), [20, 40], "fp32")
    torch.testing.assert_close(found, wanted)


def test_a_wide_window_changes_nothing() -> None:
    tokens = ids(60)
    wanted = run(make(), tokens, AttentionLimits(), [20, 40], "q4")
    assert torch.equal(run(make(), tokens, AttentionLimits(None, 60), [20, 40], "q4"), wanted)


@pytest.mark.parametrize("q_chunk", [1, 33, 500])
def test_a_chunk_changes_no_logits(q_chunk: int) -> None:
    tokens = ids(140)
    wanted = run(make(), tokens, AttentionLimits(), [70, 70], "fp32")
    found = run(make(), tokens, AttentionLimits(q_chunk), [70, 70], "fp32")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", ["fp16", "q8:plain", "q4:plain"])
@pytest.mark.parametrize("paged", [{}, {"page_size": 32}], ids=["contiguous", "paged"])
def test_a_chunk_changes_no_number_of_a_read(decoupled: bool, kind: str, paged: Any) -> None:
    """On the same bytes: between layers, a code may fall on the other side of a rounding."""
    dims = {"k_sem_dim": 32, "k_geo_dim": 64} if decoupled else {"k_dim": 64}
    make_cache = DecoupledLayerKVCache if decoupled else LayerKVCache
    configs: Any = cache_configs(f"{kind}/{kind}/{kind}" if decoupled else f"{kind}/{kind}")
    cache: Any = make_cache(2, 128, **dims, v_dim=64, **configs, n_kv_heads=2, **paged)
    new = [torch.randn(2, 2, 100, dim // 2) for dim in (*dims.values(), 64)]
    cache.append(*new)
    queries = [torch.randn(2, 4, 100, dim // 2) for dim in dims.values()]
    wanted = cache.attend(*queries)
    for q_chunk in (1, 33, 500):
        cache.reach = AttentionLimits(q_chunk)
        torch.testing.assert_close(cache.attend(*queries), wanted, rtol=1e-5, atol=1e-5)


def test_the_chunk_reaches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    extend = extend_op.overload

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(options.get("q_chunk"))
        return extend(*args, **options)

    monkeypatch.setattr(type(extend_op), "keeper", lambda *_: None)  # nothing goes by another way
    monkeypatch.setattr(extend_op, "overload", noting)  # calls that are checked
    monkeypatch.setattr(extend_op, "call", noting)  # calls like an earlier one
    run(make(), ids(80), AttentionLimits(q_chunk=16), [40, 40], "fp16")
    run(make(), ids(80), AttentionLimits(), [40, 40], "fp16")
    assert seen == [16] * 4 + [None] * 4


def test_an_exact_prompt_is_not_narrowed_and_what_follows_is() -> None:
    tokens, narrow = ids(41), AttentionLimits(local_window=5)
    whole = run(make(), tokens, AttentionLimits(), [40, 1], "fp32", prefill="exact")
    found = run(make(), tokens, narrow, [40, 1], "fp32", prefill="exact")
    torch.testing.assert_close(found[:, :40], whole[:, :40])
    assert (found - whole)[:, 40].abs().max() > 1e-2


def test_a_model_cache_moves_its_layers_and_says_when_a_recording_is_stale() -> None:
    cache = ModelKVCache(make().cache_layout, 1, 64, KVCacheTensorConfig(), KVCacheTensorConfig())
    first = cache.reach
    cache.reach = AttentionLimits()
    assert cache.reach is first
    cache.reach = AttentionLimits(local_window=4)
    assert [layer.reach.local_window for layer in cache] == [4, 4]
    assert cache.reach is not first
    for wrong in (AttentionLimits(q_chunk=0), AttentionLimits(local_window=-1)):
        with pytest.raises(ValueError, match=r"q_chunk is 0|local_window is -1"):
            cache.reach = wrong
    assert cache.reach.local_window == 4
