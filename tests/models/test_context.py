"""What a model of one's own gets from `InferContext.attend`, with a cache and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.models.context import InferContext

Q, K, V = torch.randn(3, 1, 2, 12, 64, generator=torch.Generator().manual_seed(0)).unbind()
POSITIONS = torch.arange(12)[None]


def contexts(**settings: Any) -> tuple[InferContext, InferContext]:
    layers: Any = ModelKVCache([LayerShape(128, 128, 2)], 1, 32).layers
    return InferContext(layers, POSITIONS, **settings), InferContext(None, POSITIONS, **settings)


@pytest.mark.parametrize(
    ("window", "option"),
    [
        (None, {}), (3, {}), (None, {"window_size": (4, 0)}), (3, {"window_size": (2, 0)}),
        (None, {"window_size": (-1, -1)}), (None, {"softmax_scale": 0.3}), (3, {"softmax_scale": 0.3}),
    ],
)  # fmt: skip
def test_a_pass_without_a_cache_gives_what_one_with_it_gives(
    window: int | None, option: dict[str, Any]
) -> None:
    stored, none = contexts(local_window=window)
    wanted = stored.attend(0, Q, K, V, **option)
    torch.testing.assert_close(none.attend(0, Q, K, V, **option), wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "option",
    [{"softcap": 2.0}, {"s_aux": torch.zeros(2)}, {"null_k": K[0, :, 0]}, {"window_size": (3, 2)}],
)
def test_what_it_cannot_do_is_refused_by_name(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}: attention without a cache"):
        contexts()[1].attend(0, Q, K, V, **option)
