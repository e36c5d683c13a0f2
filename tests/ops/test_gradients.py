"""What has no derivative says so in a backward pass, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from caramba_fast import ops
from caramba_fast.cache import LayerKVCache, ModelKVCache
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.ops import KVView, use_backend

X = torch.randn(1, 1, 1, 32)
ONE = torch.ones(1, dtype=torch.int32)
SINKS = " of trained sinks"


def view() -> KVView:
    codes = torch.ones(1, 1, 32, 32, dtype=torch.int8)
    return KVView(codes, torch.ones(1, 1, 32, 1, dtype=torch.float16), "q8_0")


def stored(x: Tensor) -> Any:
    layer = LayerKVCache(1, 64, 32, 32)
    layer.append(X, X)
    return layer.attend(x, return_softmax_lse=True)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "decode_attention": lambda x: ops.decode_attention(
        x, view(), view(), ONE, n_kv_heads=1, return_softmax_lse=True
    ),
    "extend_attention": lambda x: ops.extend_attention(
        x, view(), view(), ONE, n_kv_heads=1, return_softmax_lse=True
    ),
    f"decode_attention{SINKS}": lambda x: ops.decode_attention(
        X, view(), view(), ONE, n_kv_heads=1, return_softmax_lse=True, s_aux=x[0, 0, 0, :1]
    ),
    "merge_state": lambda x: ops.merge_state(x, x[..., 0], X, X[..., 0]),
    "apply_rotary_emb": lambda x: ops.apply_rotary_emb(x, x, X[0], X[0]),
    "quantize": lambda x: ops.quantize(x, "q8")[1:] * 2,
    "dequantize": lambda x: (
        (ops.dequantize(torch.ones(1, 1, 1, 32, dtype=torch.int8), x[..., :1].half(), "q8", 32),)
        * 2
    ),
    "attention over a packed cache": stored,
}


@pytest.mark.parametrize("backend", ["auto", "reference", "cpp"])
@pytest.mark.parametrize("name", CALLS)
def test_a_backward_pass_raises(name: str, backend: str) -> None:
    with use_backend(backend):
        for result in (0, 1):
            found = CALLS[name](X.clone().requires_grad_())[result]
            with pytest.raises(RuntimeError, match=f"{name.removesuffix(SINKS)} has no derivative"):
                found.sum().backward()
        with torch.no_grad():
            assert not CALLS[name](X.clone().requires_grad_())[0].requires_grad
        assert not CALLS[name](X)[0].requires_grad


@pytest.mark.parametrize("backend", ["auto", "reference", "cpp"])
@pytest.mark.parametrize("name", CALLS)
def test_a_forward_derivative_raises_even_under_no_grad(name: str, backend: str) -> None:
    said = pytest.raises(RuntimeError, match=f"{name.removesuffix(SINKS)} has no derivative")
    with use_backend(backend), torch.no_grad():
        with said:
            torch.func.jvp(CALLS[name], (X,), (X,))
        with forward_ad.dual_level():
            with said:
                CALLS[name](forward_ad.make_dual(X, X))
            CALLS[name](X)  # nothing goes through this one


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_of_functions_says_so_too(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name.removesuffix(SINKS)} has no derivative"):
        torch.func.grad(lambda x: CALLS[name](x)[0].sum())(X)


@pytest.mark.parametrize(
    "attention",
    [{}, {"model_type": "caramba_dba", "decoupled": {"sem_dim": 32, "geo_dim": 32, "v_dim": 64}}],
)
@pytest.mark.parametrize("trained", ["k_", "v_proj", "q_"])
def test_a_step_of_the_native_model_has_none(attention: dict[str, Any], trained: str) -> None:
    model = Transformer(
        ModelConfig(
            vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, **attention,
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids = torch.tensor([[3, 14, 15, 9]])
    cache = ModelKVCache(model.cache_layout, 1, 64)
    model(ids, cache).sum().backward()  # a prompt attends to its own keys and values
    with pytest.raises(RuntimeError, match="no gradient flows"):
        model(ids[:, :1], cache).sum().backward()
