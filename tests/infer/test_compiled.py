"""compile=True: a step that Inductor has compiled gives what single operations give."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_models import generator, new_model, prompt
from torch import Tensor
from torch._dynamo.utils import counters

from caramba_fast import Engine
from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.infer.compiled import CompiledStep, _inductor
from caramba_fast.infer.cuda_graph import RecordingError
from caramba_fast.models import Transformer, merge_projections, pack_weights


@pytest.mark.parametrize(
    ("name", "cache"), [("tied", "q4"), ("window", "q8"), ("decoupled", "q4:plain")]
)
def test_compiled_steps_are_the_steps_past_128_slots(
    name: str, cache: str, request: pytest.FixtureRequest
) -> None:
    if name != "tied":  # whose calls are compiled too
        request.getfixturevalue("python_wrapper")
    model = merge_projections(new_model(name))
    ids = prompt(70, 2)
    wanted = generator(model, cache_kind=cache).generate(ids)
    made = generator(model, cache_kind=cache, compile=True)
    assert made.decode_graph.startswith("will be compiled")
    assert torch.equal(made.generate(ids), wanted)
    assert made.decode_graph == "compiled"


@pytest.mark.usefixtures("python_wrapper")
def test_conversations_of_the_same_sizes_share_a_program_and_no_memory() -> None:
    model = new_model()

    def talk(made: Generator) -> list[list[int]]:
        said = made.generate([[3, 14, 15] * 30, [9, 2] * 40], max_new_tokens=8).tolist()
        made.rollback([5, 2])
        said += made.generate([[7], [8, 3, 1]], max_new_tokens=8).tolist()
        return [*said, made.decode_step([4, 5]).argmax(-1).tolist()]

    made = generator(model, cache_kind="q4", compile=True)
    wanted = talk(generator(model, cache_kind="q4"))
    assert talk(made) == wanted
    assert made.cache is not None
    first = weakref.ref(made.cache)
    made.reset()
    assert talk(made) == wanted
    assert len(made._graphs._programs) == 1
    gc.collect()
    assert first() is None  # the program does not hold the cache that it was made with


@pytest.mark.parametrize("packed", [False, True])
def test_another_generator_takes_the_program_from_disk(
    packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for seed in (1, 2):  # other weights of the same sizes
        torch.manual_seed(seed)
        model = new_model()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        wanted = generator(model, cache_kind="q4").generate(prompt(20))
        if packed:
            pack_weights(model)
        made = generator(model, cache_kind="q4", compile=True)
        before = dict(counters["inductor"])
        assert torch.equal(made.generate(prompt(20)), wanted)
        new = counters["inductor"] - Counter(before)
        found.append((new["fxgraph_cache_hit"], new["fxgraph_cache_miss"]))
        assert new["fxgraph_cache_bypass"] == 0
    assert found == [(0, 1), (1, 0)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with _inductor():
            assert torch._inductor.config.cpp.threads == threads + 1  # a part of the digest
    finally:
        torch.set_num_threads(threads)


class Reading(Transformer):
    """A model whose step asks the host for a token."""

    def forward(self, query_token_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        int(query_token_ids[0, 0])
        return super().forward(query_token_ids, *args, **options)


class Counting(Transformer):
    """A model whose step depends on how often it ran, which a program does not see."""

    steps = 0

    def forward(self, query_token_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        self.steps += 1
        return super().forward(query_token_ids, *args, **options) * float(self.steps)


def test_a_step_that_waits_for_the_host_is_refused_and_changes_nothing() -> None:
    made = generator(new_model(kind=Reading), cache_kind="q4", compile=True)
    with pytest.raises(RecordingError, match="compile is True and cannot be: RuntimeError"):
        made.generate(prompt(20))
    assert made.cache is None


@pytest.mark.usefixtures("python_wrapper")
def test_a_program_that_gives_other_logits_is_refused() -> None:
    made = generator(new_model(kind=Counting), cache_kind="fp32", compile=True, max_new_tokens=4)
    made.generate(prompt(20))
    made.reset()  # the program has the factor of the second step
    with pytest.raises(RecordingError, match="gives other logits: they differ by"):
        made.generate(prompt(20))


def test_a_compiler_that_fails_is_named_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no C++ compiler found")

    made = generator(new_model(), cache_kind="q4", compile=True, max_new_tokens=3)
    made.prefill(prompt(20))
    made.decode_step([5])
    monkeypatch.setattr(torch._inductor, "compile", fail)
    with pytest.raises(RecordingError, match=r"compile is True.*no C\+\+ compiler found"):
        made.decode_step([6])
    assert made.cache is not None and made.cache.row_lengths == [21]
    assert made.cache[0].seq_lens.tolist() == [21]


def test_a_full_cache_is_refused_before_a_step_is_compiled() -> None:
    made = generator(new_model(), cache_kind="q8", compile=True, max_new_tokens=1, max_seq_len=23)
    made.generate(prompt(20))
    for token in (3, 4):
        made.decode_step([token])
    with pytest.raises(ValueError, match="max_seq_len=23"):
        made.decode_step([5])  # which would be compiled
    assert made.cache is not None and made.cache.pos == 23
    assert not made._graphs._programs


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    model = new_model()
    with pytest.raises(ValueError, match="compile=True is for a Generator"):
        Engine(model, compile=True)
    model.why_not_recorded = "it dreams"
    with pytest.raises(ValueError, match="compile is True and cannot be: it dreams"):
        generator(model, compile=True)
    with pytest.raises(ValueError, match="for models on a CPU; this one is on meta"):
        Generator(new_model().to("meta"), compile=True)


@pytest.mark.usefixtures("python_wrapper")
def test_drafts_are_written_by_compiled_steps() -> None:
    model = new_model()
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "spec_k": 3}
    ids = prompt(20)
    wanted = SpeculativeGenerator(model, model, **options).generate(ids)
    made = SpeculativeGenerator(model, model, **options, compile=True)
    assert torch.equal(made.generate(ids), wanted)
    drafting = made._draft_generator
    assert drafting is not None and isinstance(drafting._graphs._graph, CompiledStep)


def flipped(model: Transformer) -> None:
    """Other weights, in tensors of their own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach().flip(0) * 1.01
            module.weight = torch.nn.Parameter(weight, requires_grad=False)


def halved(model: Transformer) -> None:
    model.to(torch.bfloat16)


def replaced(model: Transformer) -> None:
    """Another module in place of one."""
    old = model.lm_head
    model.lm_head = torch.nn.Linear(old.in_features, old.out_features, bias=False)


@pytest.mark.usefixtures("python_wrapper")
@pytest.mark.parametrize("change", [flipped, halved, replaced, pack_weights])
@pytest.mark.parametrize("anew", [False, True])
def test_other_weights_are_noticed_within_a_conversation_and_before_the_next(
    change: Any, anew: bool
) -> None:
    found = []
    for options in ({}, {"compile": True}):
        model = new_model()
        made = generator(model, cache_kind="q8", max_new_tokens=6, **options)
        made.generate(prompt(20))
        torch.manual_seed(3)
        change(model)
        if anew:
            made.reset()
        made.generate(prompt(9), max_new_tokens=1)
        found.append(torch.stack([made.decode_step([token]) for token in (5, 6, 7, 8)]))
    assert made.decode_graph == "compiled"
    (program,) = made._graphs._programs.values()  # that of the model as it was is gone
    packed = {x.is_mkldnn for x in program.inputs if isinstance(x, Tensor)}
    assert packed == ({True, False} if change is pack_weights else {False})
    off = float((found[0] - found[1]).float().norm() / found[0].float().norm())
    assert off < (0.05 if change is halved else 1e-3)
