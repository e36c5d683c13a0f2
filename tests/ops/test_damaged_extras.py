"""A NaN in a null key, a null value or s_aux shows in every head that meets it, on every backend, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import cases

from caramba_fast.ops import (
    append_,
    decode_attention,
    extend_attention,
    merge_state,
    registry,
    use_backend,
)
from caramba_fast.ops.decode_attention import decode_op

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, under the interpreter
BACKENDS = ("reference", "cpp", "triton")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if registry.why_not("decode_attention", request.param, "cpu") is not None:
        assert request.param == "triton"
        pytest.skip("there is no Triton here")
    yield request.param


@pytest.mark.parametrize("lengths", [(9, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("damaged", ["null_k", "null_v", "s_aux"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_damaged_extra_shows_in_its_heads_and_only_there(backend, damaged, softcap, lengths):
    """Also in a row that holds nothing, whose other heads give what the extras alone give."""
    with use_backend("reference"):
        case = cases.build(["null", "s_aux"], lengths=(9, 5), slots=32).append(append_)
    case.options["softcap"] = softcap
    extras = {"null_k": case.null["k"], "null_v": case.null["v"], "s_aux": case.options["s_aux"]}
    extras[damaged].view(extras[damaged].shape[0], -1)[1, 0] = torch.nan
    heads = [1] if damaged == "s_aux" else [2, 3]  # two query heads a kv head
    for op in (decode_attention, extend_attention):
        with use_backend(backend):
            out, lse = case.attend(op, cache_seqlens=cases.rows(*lengths))
        for head in range(4):
            wrong = out[:, head, 0].isnan()
            if head not in heads:
                assert not wrong.any() and lse[:, head].isfinite().all()
            elif damaged == "null_v":
                assert wrong[:, 0].all() and not wrong[:, 1:].any()
            else:
                assert wrong.all() and lse[:, head].isnan().all()


@pytest.mark.parametrize("extras", [(), ("null", "s_aux")])
def test_an_empty_range_gives_zero_and_no_lse(backend, extras):
    with use_backend("reference"):
        kinds = ("fp16", "fp32")
        case = cases.build(extras, kinds=kinds, lengths=(9, 5), slots=32).append(append_)
    case.lengths = [0, 5]
    with use_backend(backend):
        out, lse = case.attend(decode_attention)
    cases.check((out, lse), case.expected())
    assert extras or (not out[0].any() and (lse[0] == -torch.inf).all())


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("sides", [("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("other", [0.5, -torch.inf, torch.inf])
def test_merging_keeps_a_nan_in_sight(backend, sides, other):
    """Whichever side it is on; sides whose keys weigh infinitely much give no number either."""
    out = {name: torch.randn(2, 3, 8) for name in "ab"}
    lse = {name: torch.full((2, 3), other) for name in "ab"}
    for name in sides:
        lse[name][1, 2] = torch.nan
    with use_backend(backend):
        merged, total = merge_state(out["a"], lse["a"], out["b"], lse["b"])
    assert merged[1, 2].isnan().all() and total[1, 2].isnan()
    if other == torch.inf:
        assert merged.isnan().all()
    elif other == -torch.inf:
        assert not merged[0].any() and (total[0] == -torch.inf).all()
    else:
        assert merged[0].isfinite().all() and total[0].isfinite().all()


@pytest.mark.parametrize("kinds", [("q4_0", "q4_0"), ("q8_channel", "q8_0"), ("fp16", "fp16")])
def test_a_scale_of_scores_that_is_nan_shows_where_nothing_checks_it(backend, kinds):
    """The ops themselves take what the checks of `decode_attention` refuse."""
    with use_backend("reference"):
        case = cases.build(kinds=kinds, lengths=(9, 5), slots=64).append(append_)
    args, options = case.flat()
    with use_backend(backend):
        out, lse = decode_op.call(*args, **{**options, "softmax_scale": torch.nan})
    assert out.isnan().all() and lse.isnan().all()
