"""Steps of transformers that are cut off: what a cache holds is as before, or as after."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support.hf_matrix import tiny
from support.interrupts import interrupted_at, places_of

from caramba_fast.hf import CarambaCache, accelerate

IDS = torch.randint(3, 97, (1, 270), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["fp32", "q8"])
@torch.no_grad()
def test_a_sliding_layer_that_is_interrupted_while_it_drops_tokens_loses_none_that_are_seen(kind):
    """At a step the layers drop what lies before their windows; the next step gives the logits of one without that."""
    model = accelerate(tiny("mistral"), kind)
    whole = CarambaCache(model, kind)
    for start, end in ((0, 20), *((t, t + 1) for t in range(20, 268))):
        model(IDS[:, start:end], past_key_values=whole)
    done = copy.deepcopy(whole)
    wanted = model(IDS[:, 268:269], past_key_values=done).logits
    assert done.layers[0].dropped > whole.layers[0].dropped
    places = places_of(partial(copy.deepcopy(whole).layers[0]._leave_behind, 1))
    for position in [*{place: i for i, place in enumerate(places)}.values()][::3]:
        cache = copy.deepcopy(whole)
        if interrupted_at(position, partial(cache.layers[0]._leave_behind, 1)):
            assert [layer.length for layer in cache.layers] == [268, 268]
            found = model(IDS[:, 268:269], past_key_values=cache).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
