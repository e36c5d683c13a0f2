"""An engine's decode steps as graphs: the tokens of steps that are run, whoever comes and goes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.engines import engine, small_model, text
from support.recorder import Recorder

from caramba_fast.cache import DecodeBatch, Stretch
from caramba_fast.infer import cuda_graph
from caramba_fast.serve import Engine

KINDS = ("fp16", "q8", "q4", "nf4", "q4:plain")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands in for CUDA: engines record with it on any device."""
    made = Recorder()
    monkeypatch.setattr(cuda_graph, "why_no_graph", lambda _: None)
    monkeypatch.setattr(cuda_graph.DecodeGraphs, "_recorder", lambda _: made)
    return made


def answers(made: Any, lengths: tuple[int, ...] = (9, 33, 70, 5, 50), later: int = 2) -> list[Any]:
    """The tokens of requests of which some come while others run, and all that the pool holds then."""
    found: dict[str, Any] = {}
    waiting = [(text(seed, length), 6 + 9 * seed) for seed, length in enumerate(lengths)]
    for prompt, new in waiting[later:]:
        made.add_request(prompt, max_new_tokens=new, ignore_eos=True, temperature=0)
    step = 0
    while made.has_unfinished or later:
        if step in (3, 8) and later:
            later -= 1
            prompt, new = waiting[later]
            made.add_request(
                prompt, max_new_tokens=new, ignore_eos=True, temperature=0, cache_salt="one"
            )
        for event in made.step():
            if event.output is not None:
                assert event.output.error is None
                found[event.request_id] = event.output.answers
        step += 1
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [32, 64])
def test_tokens_are_those_of_steps_that_are_run(
    kind: str, page_size: int, recorder: Recorder
) -> None:
    options = dict(cache_kind=kind, page_size=page_size, max_batch_size=6)
    wanted = answers(engine(cuda_graph=False, **options))
    assert recorder.warmed == 0
    made = engine(**options)
    assert answers(made) == wanted
    # 1, 2, 4 and 6 rows; five sequences at once leave a row of six without one.
    assert recorder.warmed == 4 and recorder.recorded >= 3 and recorder.replayed > 20
    assert "up to" in made.report["decode_graph"]


def test_pages_that_run_out_are_taken_and_brought_back(recorder: Recorder) -> None:
    for preemption in ("recompute", "swap"):
        options: dict[str, Any] = dict(
            num_pages=4, page_size=32, max_batch_size=4, preemption=preemption
        )
        without, made = engine(cuda_graph=False, **options), engine(**options)
        assert answers(made) == answers(without)
        assert without.metrics.preemptions and made.metrics.preemptions
    assert recorder.replayed > 20


def test_drawn_tokens_and_prefixes_that_are_shared(recorder: Recorder) -> None:
    def drawn(made: Any) -> list[list[int]]:
        prompt = text(3, 90)
        several = [[*prompt, 5 + i] for i in range(3)]
        settings = dict(temperature=0.9, top_k=20, seed=5, max_new_tokens=25, ignore_eos=True)
        return [x.answers for x in made.generate_batch(several, **settings)]

    wanted, made = drawn(engine(cuda_graph=False)), engine(max_batch_size=2)
    assert drawn(made) == wanted
    assert made.metrics.prefix_hit_tokens > 0 and recorder.replayed > 10


def test_rows_without_a_sequence_write_nothing(recorder: Recorder) -> None:
    """Two sequences in eight rows leave every byte of the others' pages, rings and sinks as it was."""
    made = engine(max_batch_size=8, page_size=32, num_pages=8)
    pool = made.pool
    graphs = made._core.runner.graphs
    for buffer in (*pool.page_buffers, *pool._sides):
        buffer.copy_(torch.randint(0, 100, buffer.shape))
    graphs.sizes = [8]
    stretches = [Stretch(40, 1, [2, 5], 1), Stretch(37, 1, [3, 6], 4)]
    before = [x.clone() for x in (*pool.page_buffers, *pool._sides)]
    for step in range(4):
        now = [Stretch(s.start + step, 1, s.pages, s.ring) for s in stretches]
        assert graphs.logits([7, 9], now) is not None
    assert recorder.replayed == 3
    sides = len(pool.page_buffers)
    for index, (was, buffer) in enumerate(
        zip(before, (*pool.page_buffers, *pool._sides), strict=True)
    ):
        mine = [5, 6] if index < sides else [1, 4]
        others = [row for row in range(len(buffer)) if row not in mine]
        assert torch.equal(buffer[others], was[others])


def test_what_cannot_be_rows_of_one_token_is_run(recorder: Recorder) -> None:
    made = engine()
    graphs, pool = made._core.runner.graphs, made.pool
    assert graphs.logits([1, 2], [Stretch(40, 2, [0], 0)]) is None
    assert graphs.logits([1], [Stretch(2, 1, [0], 0)]) is None  # within its sinks
    assert graphs.logits([1] * 17, [Stretch(40, 1, [0], 0)] * 17) is None
    batch = DecodeBatch(2, pool)
    for tokens, stretches, message in (
        ([1, 2], [Stretch(40, 1, [0], 0)], "2 tokens of 1 sequences; 1 to 2"),
        ([], [], "0 tokens of 0"),
        ([1], [Stretch(40, 3, [0], 0)], "more than one new token"),
        ([1], [Stretch(1, 1, [0], 0)], "still writes its sinks"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.fill(tokens, stretches)


def test_a_model_that_waits_for_the_device_is_run_step_by_step(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine()
    ragged = made.model.forward_ragged

    def waits(ids: torch.Tensor, batch: Any, rows: torch.Tensor) -> torch.Tensor:
        ids.sum().item()
        return ragged(ids, batch, rows)

    wanted = answers(engine(cuda_graph=False))
    monkeypatch.setattr(made.model, "forward_ragged", waits)
    with pytest.warns(UserWarning, match="not replayed as a CUDA graph: _local_scalar_dense"):
        assert answers(made) == wanted
    assert made.report["decode_graph"].startswith("not used: recording failed")
    must = engine(cuda_graph=True)
    must.add_request(text(1, 20), max_new_tokens=9)
    errors = [event.output.error for event in _events(must) if event.output is not None]
    assert len(errors) == 1 and "recording failed: _local_scalar_dense" in str(errors[0])


def _events(made: Any) -> Any:
    while made.has_unfinished:
        yield from made.step()


def test_on_a_cpu_it_says_why_not() -> None:
    assert "need a model on cuda" in engine().report["decode_graph"]
    with pytest.raises(ValueError, match="cuda_graph is True and cannot be: CUDA graphs need"):
        engine(cuda_graph=True)


@pytest.mark.device
def test_replays_give_the_tokens_of_steps_on_this_device(device: torch.device) -> None:
    model = copy.deepcopy(small_model()).to(device)
    for kind in ("q4", "fp16"):
        options: dict[str, Any] = dict(cache_kind=kind, max_seq_len=256, max_batch_size=6)
        made = Engine(model, **options)
        assert answers(made) == answers(Engine(model, cuda_graph=False, **options))
        if device.type == "cuda":
            assert made.report["decode_graph"] == "replayed for steps of up to 1, 2, 4, 6 sequences"
