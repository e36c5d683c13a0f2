"""What decode steps on a GPU need: a model that a graph can record, and no more caches than there is memory for."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from caramba_fast.bench.real import decode, fitting, shapes
from caramba_fast.bench.real.fitting import Attempt, Running
from caramba_fast.models import Transformer

CPU = torch.device("cpu")


class Memory:
    """So many caches fit; each takes one place, and a second one as it takes steps where ``hungry`` names it."""

    def __init__(self, places: int, hungry: str = "") -> None:
        self.places, self.hungry = places, hungry
        self.held: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def attempt(self, name: str, size: int = 1) -> Attempt:
        class Cache:
            taken = size

        def take(count: int, cache: Any) -> list[float]:
            if name == self.hungry:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return [1.0] * count

        def make() -> Running:
            gc.collect()
            if sum(x.taken for x in self.held) + size > self.places:
                raise torch.OutOfMemoryError("CUDA out of memory")
            cache = Cache()
            self.held.add(cache)
            self.most = max(self.most, len(self.held))
            return Running("p", name, "", lambda count: take(count, cache), lambda: 0, "")

        return Attempt(name, make)


def groups(memory: Memory, *attempts: Attempt) -> list[list[str]]:
    found = []
    for entries in fitting.in_groups(attempts, CPU):
        decode.measure(entries, 2, 60.0)
        assert all(len(x.rounds) == 2 and len(x.steps) == 2 * decode.STEPS for x in entries)
        found.append([x.cache for x in entries])
    gc.collect()
    assert not memory.held  # `entries` is still there: the next context finds the memory free
    return found


def test_what_fits_is_measured_together_and_the_rest_beside_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = Memory(3)
    listed = [memory.attempt(name) for name in ("dynamic", "bf16", "q8", "q4", "nf4", "more")]
    found = groups(memory, *listed)
    assert found == [["dynamic", "bf16", "q8"], ["dynamic", "q4", "nf4"], ["dynamic", "more"]]
    assert memory.most == 3 and capsys.readouterr().out == ""


def test_what_does_not_fit_at_all_is_left_out_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = Memory(3)
    listed = [memory.attempt("dynamic"), memory.attempt("huge", 3), memory.attempt("q4")]
    assert groups(memory, *listed) == [["dynamic", "q4"]]
    assert capsys.readouterr().out == "huge: left out: no memory\n"
    assert groups(memory, memory.attempt("dynamic", 4), memory.attempt("q4")) == [["q4"]]
    capsys.readouterr()

    def missing() -> Running:
        raise ImportError("no package named hqq")

    listed = [memory.attempt("dynamic"), Attempt("hqq", missing), memory.attempt("q4")]
    assert groups(memory, *listed) == [["dynamic", "q4"]]
    assert capsys.readouterr().out == "hqq: does not run here: no package named hqq\n"


def test_steps_without_memory_take_their_cache_out(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Memory(9, hungry="bf16")
    listed = [memory.attempt(name) for name in ("dynamic", "bf16", "q4")]
    assert groups(memory, *listed) == [["dynamic", "q4"]]
    assert "p bf16: left out: no memory for its steps" in capsys.readouterr().out


def test_ratios_are_against_dynamic_cache_alone() -> None:
    memory = Memory(9)
    for name, expected in (("dynamic", ["1.000", "1.000"]), ("bf16", ["", ""])):
        entries = [memory.attempt(x).make() for x in (name, "q4")]
        decode.measure(entries, 3, 60.0)
        rows = list(decode.rows_of("tiny", "float32", 64, entries, CPU))
        assert [row["vs_dynamic"] for row in rows] == expected


def test_generator_has_the_native_model_with_the_same_weights() -> None:
    torch.manual_seed(0)
    hf, native = shapes.models_of("tiny", torch.float32, CPU)
    assert isinstance(native, Transformer) and not hasattr(native, "why_not_recorded")
    ids = torch.randint(512, (1, 9))
    with torch.no_grad():
        expected = hf.eval()(input_ids=ids).logits
        torch.testing.assert_close(native(ids), expected, rtol=1e-4, atol=1e-5)
    shared = [native.lm_head.weight, native.model.layers[1].mlp.down_proj.weight]
    theirs = [hf.lm_head.weight, hf.model.layers[1].mlp.down_proj.weight]
    assert [x.data_ptr() for x in shared] == [x.data_ptr() for x in theirs]


def test_steps_on_a_gpu_that_are_not_replayed_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"bf16": "replayed", "q4": "not used: recording failed"}
    entries = [
        Running("Generator", kind, "", lambda n: [1.0] * n, lambda: 0, "", graph=lambda s=state: s)
        for kind, state in states.items()
    ]
    other = Running("transformers", "dynamic", "", lambda n: [1.0] * n, lambda: 0, "")
    listed = [other, *entries]
    assert decode.not_replayed(listed, torch.device("cuda")) == ["Generator q4"]
    assert "Generator q4: decode_graph not used: recording failed" in capsys.readouterr().out
    assert decode.not_replayed(listed, CPU) == []
    monkeypatch.setattr(decode, "not_replayed", lambda *_: ["Generator q4"])
    found = decode.decode("tiny", [64], torch.float32, 1, 1.0)
    rows = next(found)
    programs = {"transformers", "accelerate", "Generator"}
    packed = {f"{program} packed weights" for program in (*programs, "Generator compiled")}
    assert {row["program"] for row in rows} == programs | packed
    with pytest.raises(decode.NotReplayedError, match="not replayed: Generator q4"):
        next(found)


def test_a_graph_of_the_shape_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that shows here: a recorder that runs steps in place of a GPU's graphs."""
    from caramba_fast.bench.serving.graphs import Steps
    from caramba_fast.infer import cuda_graph

    monkeypatch.setattr(cuda_graph, "why_no_graph", lambda _: None)
    monkeypatch.setattr(cuda_graph, "CudaRecorder", lambda _: Steps())
    _, native = shapes.models_of("tiny", torch.float32, CPU)
    (attempt,) = decode.in_generator(native, torch.randint(512, (1, 32)), 64, "float32", ("q4",))
    entry = attempt.make()
    entry.take(3)
    assert entry.graph is not None and entry.graph() == "replayed"


def test_kernels_of_a_model_are_compiled_by_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each cache by one of them, in one layer; what does not run is said and does not stop the others."""
    taken: list[str] = []
    empty: list[Running] = []
    lists = decode.in_generator

    def noted(model: Transformer, *args: Any) -> Any:
        assert model.config.num_hidden_layers == 1
        for attempt in lists(model, *args):
            taken.append(attempt.name)
            yield attempt
        yield Attempt("broken", lambda: empty[0])

    monkeypatch.setattr(decode, "in_generator", noted)
    monkeypatch.setattr(decode, "in_transformers", lambda *_: ())
    for index in range(2):
        decode.compile_kernels("tiny", [64], torch.float32, decode.Shard(index, 2), "cpu")
    assert taken == 2 * [f"Generator {kind}" for kind in decode.GENERATOR]
    said = capsys.readouterr().out
    assert said.startswith("compile broken: IndexError at test_real_decode_gpu.py")
    assert said.count("compile ") == 1
