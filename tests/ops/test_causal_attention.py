"""causal_attention: a prompt's tokens to themselves, in every instruction set."""

import pytest
import torch
from torch.autograd import forward_ad

from caramba_fast.ops import use_backend
from caramba_fast.ops.extend_attention import causal_attention, serves_prompts


@pytest.fixture(autouse=True, params=["reference", "cpp"])
def backend(request):
    with use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (16, 16), (80, 80), (256, 256), (96, 40)])
@pytest.mark.parametrize(
    ("heads", "tokens", "options"),
    [
        ((4, 2), 33, {}),
        ((3, 1), 130, {}),
        ((2, 2), 200, {"local_window": 7}),
        ((6, 2), 77, {"softcap": 3.0, "softmax_scale": 0.4}),
        ((4, 2), 65, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        ((4, 2), 65, {"cache_leftpad": torch.tensor([0, 40], dtype=torch.int32)}),
    ],
)
def test_causal_attention_is_that_of_float64(heads, tokens, options, dims, dtype, backend):
    if backend == "reference" and dtype != torch.float32:
        return  # it computes in float32
    torch.manual_seed(tokens)
    made = [
        torch.randn(2, tokens, h, d).to(dtype).transpose(1, 2)  # as projections leave them
        for h, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    ]
    q, k, v = (x.double() for x in made)
    k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * options.get("softmax_scale", dims[0] ** -0.5)
    if "softcap" in options:
        logits = options["softcap"] * (logits / options["softcap"]).tanh()
    place = torch.arange(tokens)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < options.get("local_window", tokens))
    pads = options.get("cache_leftpad", torch.zeros(2)).view(2, 1, 1, 1)
    seen = seen & (place >= pads)
    logits = logits.masked_fill(~seen, -torch.inf)
    sinks = options.get("s_aux", torch.tensor(-torch.inf)).double().reshape(-1, 1, 1)
    whole = torch.cat((logits, sinks.expand(*logits.shape[:3], 1)), -1)
    real = (place >= pads).expand(*logits.shape[:2], -1, tokens)[:, :, 0, :, None]
    expected = torch.where(real, whole.softmax(-1)[..., :-1].nan_to_num() @ v, 0)
    found = causal_attention(*made, **options)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol={torch.float32: 5e-6}.get(dtype, 2e-2)
    )
    error = (found.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 4e-3}[dtype]


def test_prompts_are_served_where_that_is_faster_and_no_gradient_is_asked_for(backend):
    x = torch.randn(1, 2, 40, 32)
    with torch.no_grad():
        assert serves_prompts(x, x) == (backend == "cpp")
        assert not serves_prompts(x, x.double())
    learned = x.clone().requires_grad_()
    assert not serves_prompts(x, learned)
    with torch.no_grad():
        assert serves_prompts(x, learned) == (backend == "cpp")
        with forward_ad.dual_level():
            assert not serves_prompts(x, forward_ad.make_dual(x, x))
