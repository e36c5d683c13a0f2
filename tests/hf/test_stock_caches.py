"""transformers' own caches under our attention: every family says what it says with its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hf_matrix import IS_OLD, PACKED, PAD, exists, served, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from caramba_fast.hf import accelerate, restore

FAMILIES = sorted({*PACKED.values(), "falcon", "gptj"})
#: A prompt, a chunk behind it, and single tokens: numbers of columns.
PASSES = (6, 3, 1, 1)
LEFT = 2
NO_CONFIG = "dynamic, no windows"
#: Layers of linear attention are not in a cache made without the config.
STOCK_CANNOT = {("qwen3_next", NO_CONFIG), ("falcon_h1", NO_CONFIG)}

Make = Callable[[PreTrainedModel], Any]
CACHES: dict[str, Make] = {
    "made by the model": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    NO_CONFIG: lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
}


def logits_of(model: PreTrainedModel, cache: Any, padded: bool) -> Tensor:
    """Logits (2, 11, V) of rows that go through the model a few columns at a time, as a plain loop does it."""
    total = sum(PASSES)
    ids = (torch.arange(2 * total).view(2, total) * 7 + 3) % 90
    lead = torch.tensor([[0], [LEFT if padded else 0]])
    mask = (torch.arange(total) >= lead).long()
    ids = torch.where(mask.bool(), ids, PAD)
    found, first = [], 0
    for count in PASSES:
        given: dict[str, Any] = dict(
            input_ids=ids[:, first : first + count], past_key_values=cache, use_cache=True
        )
        if padded:
            places = (torch.arange(first, first + count) - lead).clamp(min=0)
            given |= dict(attention_mask=mask[:, : first + count], position_ids=places)
        if padded and "position_ids" not in model.forward.__code__.co_varnames:
            given.pop("position_ids")
        out = model(**given)
        cache, first = out.past_key_values, first + count
        found.append(out.logits)
    logits = torch.cat(found, dim=1)
    return torch.where(mask[..., None].bool(), logits, 0.0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_plain_loop_gives_the_models_own_logits(family: str, name: str, padded: bool) -> None:
    if not exists(family) or served(family) == "refused":
        pytest.skip(f"this transformers has no {family} with a cache of keys and values")
    if (family, name) in STOCK_CANNOT or (IS_OLD and family == "stablelm"):
        pytest.skip("its own attention cannot do it either")
    model = tiny(family)
    expected = logits_of(model, CACHES[name](model), padded)
    accelerate(model, "fp32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = logits_of(model, CACHES[name](model), padded)
    restore(model)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
