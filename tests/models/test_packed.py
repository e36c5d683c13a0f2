"""Weights in oneDNN's layout."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import caramba_fast
from caramba_fast.cli import doctor
from caramba_fast.cli.models import Setup, load_to_decode, open_generator
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.models import (
    demo_path,
    pack_weights,
    split_projections,
    unpack_weights,
)
from caramba_fast.models import packed as packed_module
from caramba_fast.models.identity import model_digest
from caramba_fast.models.packed import PackedWeight, why_not_packed
from caramba_fast.serve import Engine

DTYPES = [x for x in (torch.float32, torch.bfloat16, torch.float16) if why_not_packed(x) is None]


def layer(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(72, 96, bias=bias, dtype=dtype).eval()


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(72,), (1, 72), (1, 1, 72), (3, 5, 72), (300, 72), (0, 72), (2, 0, 72)], ids=str
)
@torch.no_grad()
def test_products_are_those_of_the_plain_weights(shape, dtype, bias):
    plain = layer(dtype, bias)
    packed = pack_weights(copy.deepcopy(plain))
    assert isinstance(packed.weight, PackedWeight)
    x = torch.randn(shape).to(dtype)
    found, exact = packed(x), copy.deepcopy(plain).double()(x.double())
    assert found.shape == (*shape[:-1], 96) and found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=8 * eps)


@torch.no_grad()
def test_strided_inputs_are_read_as_they_are():
    packed, plain = pack_weights(layer()), layer()
    for x in (torch.randn(72, 4).T, torch.randn(4, 144)[:, ::2], torch.randn(1, 72).expand(4, 72)):
        torch.testing.assert_close(packed(x), plain(x))


def test_gradients_of_inputs_and_biases_pass_through(monkeypatch):
    """Twice too, and forwards, and under vmap. Only what functorch asks for needs a plain copy."""

    def gradients(module):
        first = torch.autograd.grad(module(x).square().sum(), (x, module.bias), create_graph=True)
        return *first, *torch.autograd.grad(first[0].square().sum(), x)

    packed, plain, x = pack_weights(layer()), layer(), torch.randn(2, 3, 72, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(PackedWeight, "dense", None)
        product = packed(x)
    torch.testing.assert_close(product, plain(x))
    torch.testing.assert_close(gradients(packed), gradients(plain))
    single = torch.autograd.grad(packed(x[0, 0]).sum(), packed.bias)
    torch.testing.assert_close(single, (torch.ones(96),))
    both = (x.detach(),) * 2
    for call in (
        lambda one: torch.func.jvp(one, both[:1], both[1:]),
        lambda one: torch.vmap(one)(both[0]),
        lambda one: torch.func.grad(lambda given: one(given).sum())(both[0]),
    ):
        torch.testing.assert_close(call(packed), call(plain))


@torch.no_grad()
def test_autocast_decides_the_type():
    packed, x = pack_weights(layer()), torch.randn(4, 72)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16


def test_inputs_of_another_type_raise_as_ever():
    with pytest.raises(RuntimeError, match=r"same dtype|mat1 and mat2"):
        pack_weights(layer())(torch.randn(4, 72, dtype=torch.float64))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(RuntimeError, match="shape"):
            pack_weights(layer())(torch.randn(4, 71))


@torch.no_grad()
def test_everything_else_sees_plain_values():
    plain, packed = layer(), pack_weights(layer())
    weight = packed.weight
    assert weight.shape == (96, 72) and weight.nbytes == plain.weight.nbytes
    assert torch.equal(weight + 0, plain.weight) and torch.equal(weight.float().T, plain.weight.T)
    assert torch.equal(F.embedding(torch.tensor([3]), weight), plain.weight[3:4])
    assert torch.equal(F.linear(torch.eye(72), weight), plain.weight.T)
    assert "PackedWeight((96, 72), torch.float32)" in repr(weight)
    wider = packed.to(torch.float64)
    assert type(wider.weight.data) is torch.Tensor
    assert torch.equal(wider.weight, plain.weight.double())


def test_copies_and_saved_states_have_the_values():
    plain, packed = layer(), pack_weights(layer())
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    again = pickle.loads(pickle.dumps(packed))
    assert type(again.weight) is nn.Parameter
    for state in (torch.load(file, weights_only=True), again.state_dict()):
        assert all(type(x) is torch.Tensor for x in state.values())
        assert all(torch.equal(x, plain.state_dict()[name]) for name, x in state.items())
    twin = copy.deepcopy(packed)
    assert isinstance(twin.weight, PackedWeight) and twin.weight is not packed.weight
    assert torch.equal(twin.weight.dense, plain.weight)


def test_a_pickled_model_is_still_tied(llama):
    again = pickle.loads(pickle.dumps(pack_weights(llama)))
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert type(again.lm_head.weight) is nn.Parameter


def test_nothing_writes_to_packed_weights():
    packed = pack_weights(layer())
    with pytest.raises(RuntimeError, match=r"cannot be changed; call .*unpack_weights"):
        packed.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        packed.weight.data = torch.zeros(96, 72)
    with pytest.raises(RuntimeError, match="cannot be changed"), torch.no_grad():
        packed.weight[0] = 1
    with pytest.raises(RuntimeError, match="cannot be changed"), torch.no_grad():
        torch.mul(torch.ones(96, 72), 2, out=packed.weight)
    with pytest.raises(RuntimeError, match="unpack_weights"):
        packed.load_state_dict(layer().state_dict())
    with pytest.raises(RuntimeError, match=r"no plain memory.*unpack_weights"):
        packed.weight.data_ptr()
    with pytest.raises(RuntimeError, match="no plain memory"):
        packed.share_memory()
    for train in (
        packed.requires_grad_,
        lambda: packed.weight.requires_grad_(requires_grad=True),
        lambda: setattr(packed.weight, "requires_grad", True),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be trained; call .*unpack_weights"):
            train()
    packed.requires_grad_(False)
    packed.weight.requires_grad = False
    assert torch.equal(packed.weight.dense, layer().weight)


def test_unpacking_gives_the_weights_back():
    found, plain = unpack_weights(pack_weights(layer())), layer()
    assert type(found.weight) is nn.Parameter and found.weight.requires_grad
    assert torch.equal(found.weight, plain.weight)
    assert unpack_weights(found) is found
    frozen = layer().requires_grad_(False)
    assert not unpack_weights(pack_weights(frozen)).weight.requires_grad


def test_what_cannot_be_packed_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(TypeError, match=r"model is a str; a torch.nn.Module is needed"):
        pack_weights("model")
    with pytest.raises(RuntimeError, match="cannot be trained"):
        pack_weights(layer().train())
    with pytest.raises(ValueError, match="packed already"):
        pack_weights(pack_weights(layer()))
    with pytest.raises(ValueError, match="on meta, not on a CPU"):
        pack_weights(layer().to("meta"))
    with pytest.raises(ValueError, match="only float32, bfloat16 and float16"):
        pack_weights(layer(torch.float64))
    with pytest.raises(ValueError, match="no linear layer"):
        pack_weights(nn.LayerNorm(4).eval())
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match=r"no fast products in torch.bfloat16"):
        pack_weights(layer(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_generator_writes_the_same_text(dtype):
    model = caramba_fast.load(demo_path(), dtype=dtype)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    config = GenerateConfig(cache="q4", temperature=0.0, max_new_tokens=24, seed=0)
    ids = torch.tensor([[5, 9, 40, 7, 12, 3]])
    expected = Generator(model, config).generate(ids)
    before = model_digest(model)
    pack_weights(model)
    assert torch.equal(Generator(model, config).generate(ids), expected) or dtype != torch.float32
    assert model_digest(model) == before
    assert [*model.state_dict()] == [*state]
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    with pytest.raises(TypeError, match="packed"):
        split_projections(model)
    assert model_digest(unpack_weights(model)) == before


def test_the_command_line_packs_what_it_loads(monkeypatch):
    def found():
        model = load_to_decode(demo_path(), "cpu", "float32")
        return isinstance(model.lm_head.weight, PackedWeight)

    assert found()
    setup = Setup("demo", {"cache": "q4", "max_new_tokens": 4})
    assert isinstance(open_generator(setup)[0].model.lm_head.weight, PackedWeight)
    compiled = Setup("demo", {"cache": "q4", "max_new_tokens": 4, "compile": True})
    assert isinstance(open_generator(compiled)[0].model.lm_head.weight, PackedWeight)
    monkeypatch.setattr(packed_module, "why_not_packed", lambda _: "not on this processor")
    assert not found()


def test_doctor_says_which_weights_can_be_packed(monkeypatch):
    monkeypatch.setattr(doctor, "why_not_packed", lambda x: "not here" if x.itemsize == 2 else None)
    assert doctor.packed_line() == "float32; not here"
    monkeypatch.setattr(doctor, "why_not_packed", lambda _: "no oneDNN")
    assert doctor.packed_line() == "none; no oneDNN"


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_compile_takes_packed_weights_whole(dtype):
    """With and without autograd and autocast at work, and where a weight is used otherwise."""
    torch._dynamo.reset()
    products = []

    def inductor(graph, given):
        ops = torch.ops.caramba_fast
        ours = (ops.packed_linear.default, ops.packed_linear_trained.default)
        products.append(sum(node.target in ours for node in graph.graph.nodes))
        return compile_fx(graph, given)

    ids = torch.tensor([[1, 2, 5]])
    plain = nn.Sequential(nn.Embedding(9, 72), layer(dtype), nn.SiLU(), nn.Linear(96, 8)).to(dtype)
    packed = pack_weights(copy.deepcopy(plain.eval()))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected = plain(ids)
            found = torch.compile(packed, fullgraph=True, backend=inductor)(ids)
            torch.testing.assert_close(found, expected)
    assert set(products) == {2}
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    torch.testing.assert_close(packed[0].weight.grad, plain[0].weight.grad)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 96)
        assert torch.compile(packed[3], fullgraph=True)(x).dtype == torch.bfloat16
    total = torch.compile(lambda x: x + packed[1].weight.sum())(torch.zeros((), dtype=dtype))
    torch.testing.assert_close(total, plain[1].weight.sum())


@torch.no_grad()
def test_a_compiled_function_takes_other_sizes_and_other_packed_weights():
    torch._dynamo.reset()
    call = torch.compile(lambda module, x: module(x) * 2, fullgraph=True, dynamic=True)
    for seed in (1, 2):
        plain = layer()
        plain.weight.mul_(seed)
        packed = pack_weights(copy.deepcopy(plain))
        for rows in (2, 3, 5):
            x = torch.randn(rows, 72)
            torch.testing.assert_close(call(packed, x), plain(x) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fakes_of_packed_ops_are_what_they_give(dtype):
    """opcheck does not take tensors without memory."""
    packed, x = pack_weights(layer(dtype)).weight.packed, torch.randn(2, 3, 72).to(dtype)
    ops, mode, given = torch.ops.caramba_fast, FakeTensorMode(), (x, packed, None)
    for op, args in (
        (ops.packed_linear, given), (ops.packed_linear_trained, given), (ops.unpacked, (packed,)),
    ):  # fmt: skip
        fakes, found = tree_map_only(Tensor, mode.from_tensor, args), op(*args)
        with mode:
            fake = op(*fakes)
        assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


def test_accelerated_models_and_their_tied_embeddings(llama):
    ids = torch.arange(3, 40)[None]
    expected = llama.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    embedding = llama.get_input_embeddings().weight
    assert llama.lm_head.weight is embedding
    caramba_fast.accelerate(llama, cache="fp32")
    pack_weights(llama)
    assert (
        isinstance(llama.lm_head.weight, PackedWeight)
        and llama.get_input_embeddings().weight is embedding
    )
    assert torch.equal(
        llama.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0), expected
    )
    caramba_fast.restore(llama)
    assert torch.equal(
        llama.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0), expected
    )
    unpack_weights(llama)
    assert llama.lm_head.weight is embedding and embedding.requires_grad


def test_a_checkpoint_has_the_values(llama, tmp_path):
    plain = {name: x.clone() for name, x in llama.state_dict().items()}
    pack_weights(llama).save_pretrained(tmp_path)
    again = type(llama).from_pretrained(tmp_path).state_dict()
    assert again.keys() == plain.keys()
    assert all(torch.equal(x, plain[name]) for name, x in again.items())


@torch.no_grad()
def test_moving_a_module_keeps_packed_weights_or_makes_plain_ones():
    plain, packed = layer(), pack_weights(layer())
    for same in (packed.to("cpu"), packed.float(), packed.eval(), packed.requires_grad_(False)):
        assert isinstance(same.weight, PackedWeight)
    assert type(packed.double().weight) is nn.Parameter
    assert torch.equal(packed.weight, plain.weight.double())


def test_drafts_and_engines_take_packed_models():
    model = caramba_fast.load(demo_path())
    ids = [[5, 9, 40, 7, 12, 3, 9, 40, 7]]
    wanted = SpeculativeGenerator(
        model, config=SpeculativeConfig(spec_k=4, temperature=0.0, max_new_tokens=16)
    ).generate(ids)
    pack_weights(model)
    fast = SpeculativeGenerator(
        model, config=SpeculativeConfig(spec_k=4, temperature=0.0, max_new_tokens=16)
    )
    assert torch.equal(fast.generate(ids), wanted)
    engine = Engine(model, cache="fp32", cache_bytes=2**22)
    engine.add_request(ids[0], max_new_tokens=16, temperature=0.0)
    (output,) = [event.output for event in engine if event.output is not None]
    assert output.generated_tokens == wanted[0, len(ids[0]) :].tolist()
