"""Adapters as peft puts them into a model: which of them is used changes answers, and no tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_models import generator, new_model, prompt
from support.recorder import Recorder
from torch import Tensor, nn

from caramba_fast.infer import Generator
from caramba_fast.infer.cuda_graph import ModelTensors
from caramba_fast.models.identity import adapter_state, model_digest
from caramba_fast.policy.plan import config_digest
from caramba_fast.quality import cached_forward
from caramba_fast.serve import Engine


class Adapted(nn.Module):
    """A stand-in for a layer of peft: a linear one, and what each adapter adds to it."""

    _disable_adapters = False
    _active_adapter: Any = "one"

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        shape, rng = base.weight.shape, torch.Generator().manual_seed(3)
        self.added = nn.ParameterDict({
            name: nn.Parameter(torch.randn(shape, generator=rng), requires_grad=False)
            for name in ("one", "two")
        })  # fmt: skip
        self.merged_adapters: list[str] = []
        self.scaling = {"one": 1.0, "two": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        found = self.base_layer(x)
        active = self._active_adapter
        for name in [active] if isinstance(active, str) else active:
            if not self._disable_adapters and name not in self.merged_adapters:
                found = found + self.scaling[name] * nn.functional.linear(x, self.added[name])
        return found


def adapted() -> tuple[Any, Adapted]:
    model = new_model()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Adapted(mlp.up_proj)
    return model, mlp.up_proj


def other(layer: Adapted) -> None:
    layer._active_adapter = "two"


def both(layer: Adapted) -> None:
    layer._active_adapter = ["one", "two"]


def off(layer: Adapted) -> None:
    layer._disable_adapters = True


def merged(layer: Adapted) -> None:
    layer.merged_adapters.append("one")


def stronger(layer: Adapted) -> None:
    layer.scaling["one"] = 3.0


CHANGES = [other, both, off, merged, stronger]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_sees_which_adapter_is_used(change: Callable[[Adapted], None]) -> None:
    model, layer = adapted()
    tensors, digest, settings = ModelTensors(model), model_digest(model), config_digest(model)
    assert tensors.unchanged() and model_digest(model) == digest
    assert cached_forward(model).config_digest == config_digest(model) == settings
    change(layer)
    assert not tensors.unchanged() and ModelTensors(model).unchanged()
    assert model_digest(model) != digest
    # What plans and kept measurements are known by.
    assert cached_forward(model).config_digest == config_digest(model) != settings


def test_one_adapter_may_be_named_by_itself_or_in_a_list() -> None:
    model, layer = adapted()
    tensors, digest = ModelTensors(model), model_digest(model)
    layer._active_adapter = ["one"]
    assert tensors.unchanged() and model_digest(model) == digest


def test_a_model_without_adapters_keeps_its_digest_and_is_asked_nothing() -> None:
    model = new_model()
    assert all(adapter_state(module) is None for module in model.modules())
    assert ModelTensors(model)._adapted == []


def test_a_recorded_step_is_recorded_anew_for_another_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Recorder()
    monkeypatch.setattr("caramba_fast.infer.cuda_graph.why_no_graph", lambda model: None)
    monkeypatch.setattr("caramba_fast.infer.cuda_graph.DecodeGraphs._recorder", lambda self: made)

    def said(cuda_graph: bool | None) -> list[Tensor]:
        model, layer = adapted()
        found = generator(model, cache_kind="fp32", cuda_graph=cuda_graph)
        found.generate(prompt(20, 1), max_new_tokens=6)
        other(layer)
        return [found.decode_step([token]) for token in (5, 6, 7, 8)]

    for ours, wanted in zip(said(None), said(False), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert made.recorded == 2


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [True, False])
def test_tokens_that_another_adapter_has_read_are_told_of_once(
    change: Callable[[Adapted], None], step: bool
) -> None:
    model, layer = adapted()
    made = generator(model, cache_kind="fp32", max_new_tokens=2)

    def go_on() -> None:
        if step:
            made.decode_step([7])
        else:
            made.generate([[7, 8]])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.generate(prompt(20, 1))
        go_on()
    change(layer)
    with pytest.warns(UserWarning, match="uses other adapters than those that the tokens"):
        go_on()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on()  # once a change
        layer.scaling["one"] = 5.0
        made.reset()
        made.generate(prompt(20, 1))  # which this adapter has read


def test_adapters_that_are_added_within_a_conversation_are_noticed() -> None:
    model = new_model()
    made = generator(model, cache_kind="fp32", max_new_tokens=2)
    made.generate(prompt(20, 1))
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Adapted(mlp.up_proj)
    with pytest.warns(UserWarning, match="uses other adapters"):
        made.generate([[7, 8]])


def test_who_goes_on_from_a_file_is_told_of_other_adapters(tmp_path: Path) -> None:
    model, layer = adapted()
    made = generator(model, cache_kind="fp32", max_new_tokens=2)
    made.generate(prompt(20, 1))
    made.save(tmp_path / "session")
    again = Generator.load(tmp_path / "session", model, temperature=0.0)
    other(layer)
    with pytest.warns(UserWarning, match="uses other adapters"):
        again.generate([[7, 8]], max_new_tokens=2)


@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_shares_no_pages_that_another_adapter_has_read(
    change: Callable[[Adapted], None],
) -> None:
    model, layer = adapted()
    settings: dict[str, Any] = dict(cache_kind="fp32", page_size=32, max_seq_len=128)
    serving = Engine(model, **settings, cache_salt="all", ignore_eos=True, temperature=0.0)
    text = prompt(70, 1)[0].tolist()
    before = serving.generate_batch([text], max_new_tokens=9)[0].generated_tokens
    serving.generate_batch([text], max_new_tokens=2)
    hits = serving.metrics.prefix_hit_tokens
    running = serving.add_request(text[:40], max_new_tokens=9)
    serving.step()
    change(layer)
    with pytest.warns(UserWarning, match="uses other adapters than those that requests under way"):
        found = {event.request_id for event in serving if event.output is not None}
    assert found == {running} and hits and serving.problems() == []
    hits = serving.metrics.prefix_hit_tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (output,) = serving.generate_batch([text], max_new_tokens=9)
    fresh = Engine(model, **settings, ignore_eos=True, temperature=0.0)
    (expected,) = fresh.generate_batch([text], max_new_tokens=9)
    assert output.generated_tokens == expected.generated_tokens != before
    assert serving.metrics.prefix_hit_tokens == hits
