"""The references use only what Metal has: aten overloads with an MPS entry, and never float64.

torch's own table of native functions says what each overload runs on, so no Mac is needed.
"""

from pathlib import Path

import pytest
import torch
import torchgen
from support import cases
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from caramba_fast.ops import (
    append_,
    apply_rotary_emb,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    dequantize,
    extend_attention,
    merge_state,
    quantize,
    use_backend,
)

DECOUPLED = {"k_sem": 8, "k_geo": 16, "v": 32}
EVERYTHING = [option for option in cases.OPTIONS if option != "window"]
ANY_DEVICE = (
    DispatchKey.MPS,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.CompositeImplicitAutograd,
)


@pytest.fixture(scope="module")
def supported():
    """Names of all overloads that run on MPS."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    by_name = {str(f.func.name): f for f in parsed.native_functions}

    def runs(function):
        delegate = function.structured_delegate
        if delegate is not None:
            return runs(by_name[str(delegate)])
        return any(
            parsed.backend_indices[key].has_kernel(function)
            for key in ANY_DEVICE
            if key in parsed.backend_indices
        ) or (function.has_composite_implicit_autograd_kernel)

    return {name for name, function in by_name.items() if runs(function)}


class Used(TorchDispatchMode):
    """Every overload that was called, and every one that met float64."""

    def __init__(self):
        super().__init__()
        self.names, self.double = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split("::")
        assert namespace == "aten", func
        self.names.add(name)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in leaves):
            self.double.add(name)
        return result


def standard(op, tokens, options=EVERYTHING, kind="q4_0", **more):
    case = cases.build(options, tokens=tokens, kinds=(kind, kind))
    return lambda: case.append(append_).attend(op, **more)


def decoupled(op, tokens):
    case = cases.build(EVERYTHING, dims=DECOUPLED, kinds=("q8_0", "q4_0", "nf4"), tokens=tokens)
    return lambda: case.append(decoupled_append_).attend(op)


def both_ways(kind):
    x = torch.randn(3, 64)
    return lambda: dequantize(*quantize(x, kind), kind, 64, torch.float16)


CALLS = {
    "quantize q8_0": lambda: both_ways("q8_0"),
    "quantize q4_0": lambda: both_ways("q4_0"),
    "quantize nf4": lambda: both_ways("nf4"),
    "merge_state": lambda: lambda: merge_state(*[torch.randn(2, 3, 8), torch.randn(2, 3)] * 2),
    "apply_rotary_emb": lambda: (
        lambda: apply_rotary_emb(*[torch.randn(1, 2, 3, 8)] * 2, *[torch.randn(1, 3, 8)] * 2)
    ),
    "plain": lambda: standard(decode_attention, 1, (), "fp16"),
    "decode": lambda: standard(decode_attention, 3),
    "decode nf4": lambda: standard(decode_attention, 1, kind="nf4"),
    "decode q8_0": lambda: standard(decode_attention, 1, kind="q8_0"),
    "extend": lambda: standard(extend_attention, 7, q_chunk=2),
    "decoupled decode": lambda: decoupled(decoupled_decode_attention, 3),
    "decoupled extend": lambda: decoupled(decoupled_extend_attention, 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_overload_a_reference_uses_exists_on_mps(supported, name):
    call = CALLS[name]()
    with use_backend("reference"):
        call()  # matrices of rotations are made on the CPU, in float64, once a process
        with Used() as used:
            call()
    assert len(used.names) > 3
    missing = {n.removesuffix(".default") for n in used.names} - supported
    assert not missing
    assert not used.double
