"""An engine's decode steps as graphs: the tokens of steps that are run, whoever comes and goes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.engines import engine, small_model, text
from support.recorder import Recorder, Rerun

from caramba_fast.cache import DecodeBatch, Stretch
from caramba_fast.infer import cuda_graph
from caramba_fast.infer.cuda_graph import BatchGraph
from caramba_fast.ops import use_backend
from caramba_fast.serve import Engine

KINDS = ("fp16", "q8", "q4", "nf4", "q4:plain")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands in for CUDA: engines record with it on any device."""
    return _with(monkeypatch, Recorder())


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    """As ``recorder``; a replay is the step's own Python."""
    return _with(monkeypatch, Rerun())


def _with(monkeypatch: pytest.MonkeyPatch, made: Any) -> Any:
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


def followed(made: Any) -> tuple[list[Any], list[Any]]:
    """What requests get that join, leave, share prefixes and run out of pages, and of every step what it was given and
    its logits.
    """
    steps: list[Any] = []
    runner = made._core.runner
    logits = runner._logits

    def follow(tokens: Any, stretches: Any, rows: Any) -> torch.Tensor:
        found = logits(tokens, stretches, rows)
        steps.append((list(tokens), [s[:2] for s in stretches], found.clone()))
        return found

    runner._logits = follow
    common, done, waiting = text(9, 64), {}, []
    for seed, length in enumerate((70, 9, 64, 90, 33, 64, 5)):
        shared = common[:64] if length > 60 else []
        waiting.append([*shared, *text(seed, length - len(shared) + 3)])
    while made.has_unfinished or waiting:
        if waiting and len(steps) % 3 == 0:
            prompt = waiting.pop()
            made.add_request(
                prompt, max_new_tokens=45, ignore_eos=True, temperature=0, cache_salt="one"
            )
        for event in made.step():
            if event.output is not None:
                assert event.output.error is None
                done[event.request_id] = event.output.answers
    assert made.problems() == []
    return [done[name] for name in sorted(done)], steps


@pytest.mark.parametrize("kind", KINDS[:4])
def test_the_step_that_is_recorded_gives_the_logits_of_steps_that_are_run(
    kind: str, rerun: Rerun
) -> None:
    """Its Python runs with every replay: nothing in it depends on what changes from step to step."""
    options: dict[str, Any] = dict(
        cache_kind=kind, page_size=32, num_pages=12, max_batch_size=6, max_batch_tokens=64
    )
    eager, made = engine(cuda_graph=False, **options), engine(**options)
    wanted, found = followed(eager), followed(made)
    assert made.metrics.preemptions and made.metrics.prefix_hit_tokens
    assert made.metrics.steps == eager.metrics.steps and rerun.replayed > 30
    assert found[0] == wanted[0]
    for (tokens, stretches, logits), step in zip(found[1], wanted[1], strict=True):
        assert (tokens, stretches) == step[:2]
        assert torch.equal(logits, step[2])


def test_a_step_that_differs_from_what_was_recorded_is_refused(rerun: Rerun) -> None:
    """So that the test above can fail: how attention is cut follows the sequences here."""
    made = engine()
    fill = DecodeBatch.fill

    def follows(batch: DecodeBatch, tokens: Any, stretches: Any) -> None:
        fill(batch, tokens, stretches)
        made.pool.num_splits = 1 + stretches[0].start % 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "fill", follows)
        made.add_request(text(1, 20), max_new_tokens=9, ignore_eos=True)
        errors = [event.output.error for event in _events(made) if event.output is not None]
    assert "decode_attention" in str(errors[0]) and "when recorded, and is" in str(errors[0])


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_recorded_step_is_on_the_device(kind: str, rerun: Rerun) -> None:
    """On a device of shapes alone, which is not the host: nothing comes from there but what `fill` copies."""
    model = copy.deepcopy(small_model()).to("meta")
    pool = Engine(model, cache_kind=kind, max_seq_len=256, max_batch_size=6).pool
    for rows in (1, 5):
        graph = BatchGraph(model, rows, pool, rerun)
        for step in range(4):
            stretches = [Stretch(40 + step, 1, [row], row) for row in range(rows)]
            with torch.no_grad():
                logits = graph.step([7] * rows, stretches)
            assert logits.shape == (rows, model.vocab_size) and logits.device.type == "meta"
    assert rerun.replayed == 6


def test_pages_that_run_out_are_taken_and_brought_back(recorder: Recorder) -> None:
    for preemption in ("recompute", "swap"):
        options: dict[str, Any] = dict(
            num_pages=4, page_size=32, max_batch_size=4, preemption=preemption
        )
        without, made = engine(cuda_graph=False, **options), engine(**options)
        assert answers(made) == answers(without)
        assert without.metrics.preemptions and made.metrics.preemptions
    assert recorder.replayed > 20


def test_prompts_that_are_read_token_by_token_are_rows_too(recorder: Recorder) -> None:
    """Of two tokens a step one is the answer's, and one of a prompt behind which nothing is chosen yet."""
    options: dict[str, Any] = dict(max_batch_size=2, max_batch_tokens=2)
    eager, made = engine(cuda_graph=False, **options), engine(**options)
    assert answers(made, (9, 20), later=1) == answers(eager, (9, 20), later=1)
    assert eager.metrics.graph_steps == 0
    assert eager.report["eager_steps"] == {"cuda_graph is False": eager.metrics.steps}
    told = made.report["eager_steps"]
    assert {*told} == {
        "a sequence has more than one new token",
        "a sequence still writes its sinks",
    }
    assert made.metrics.graph_steps == made.metrics.steps - sum(told.values())
    assert made.metrics.graph_steps > 15 and recorder.replayed == made.metrics.graph_steps - 2


def test_drawn_tokens_and_prefixes_that_are_shared(recorder: Recorder) -> None:
    def drawn(made: Any) -> list[list[int]]:
        prompt = text(3, 90)
        several = [[*prompt, 5 + i] for i in range(3)]
        settings = dict(temperature=0.9, top_k=20, seed=5, max_new_tokens=25, ignore_eos=True)
        return [x.answers for x in made.generate_batch(several, **settings)]

    wanted, made = drawn(engine(cuda_graph=False)), engine(max_batch_size=2)
    assert drawn(made) == wanted
    assert made.metrics.prefix_hit_tokens > 0 and recorder.replayed > 10


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("kind", ["fp16", "q8", "q4", "nf4"])
def test_rows_without_a_sequence_read_and_write_nothing(
    kind: str, backend: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences in four rows: of others there is NaN, which nobody gets, and every byte stays as it was."""
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(recorder, "record", lambda step: step)  # the step as it is
    made = engine(
        cache_kind=kind, max_batch_size=8, page_size=32, num_pages=8, max_seq_len=96,
        max_batch_tokens=32,
    )  # fmt: skip
    pool, graphs, steps = made.pool, made._core.runner.graphs, 1 if backend == "triton" else 4
    graphs.sizes = [4]
    pages, rings = [2, 5, 3, 6], [1, 4]
    first = 64 - steps  # the last step fills a group
    buffers = [*((x, pages) for x in pool.page_buffers), *((x, rings) for x in pool._sides)]
    for buffer, held in buffers:
        others = [row for row in range(len(buffer)) if row not in held]
        buffer.copy_(torch.randint(0, 100, buffer.shape))
        buffer[others] = torch.nan if buffer.is_floating_point() else 111
    before = [x.clone().view(torch.uint8) for x, _ in buffers]
    with use_backend(backend), torch.no_grad():
        for step in range(steps):
            now = [Stretch(first + step, 1, pages[:2], 1), Stretch(37 + step, 1, pages[2:], 4)]
            assert graphs.logits([7, 9], now) is not None
    logits = graphs._made[4]._logits
    assert logits is not None and logits.isfinite().all()
    for was, (buffer, held) in zip(before, buffers, strict=True):
        same = (buffer.view(torch.uint8) == was).flatten(1).all(1)
        assert same[[row for row in range(len(buffer)) if row not in held]].all()
    assert not torch.equal(before[0], buffers[0][0].view(torch.uint8))


def test_what_cannot_be_rows_of_one_token_is_run(recorder: Recorder) -> None:
    made = engine()
    graphs, pool = made._core.runner.graphs, made.pool
    assert graphs.logits([1, 2], [Stretch(40, 2, [0], 0)]) is None
    assert graphs.logits([1], [Stretch(2, 1, [0], 0)]) is None  # within its sinks
    assert graphs.logits([1] * 17, [Stretch(40, 1, [0], 0)] * 17) is None
    assert "more than 16 sequences" in made.report["eager_steps"]
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
    assert any(reason.startswith("recording failed") for reason in made.report["eager_steps"])
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
