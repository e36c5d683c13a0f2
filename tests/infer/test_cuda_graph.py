"""DecodeGraph: a step recorded once gives what steps run one by one give, while lengths grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recorded_models import MODELS, generator, new_model, prompt
from support.recorder import Recorder
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.cache.pages import OutOfPagesError
from caramba_fast.config import cache_configs
from caramba_fast.infer import Generator
from caramba_fast.infer.cuda_graph import DecodeGraph, RecordingError
from caramba_fast.models import Transformer


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every generator records with this one, whatever its model is on."""
    made = Recorder()
    monkeypatch.setattr("caramba_fast.infer.cuda_graph.why_no_graph", lambda model: None)
    monkeypatch.setattr("caramba_fast.infer.cuda_graph.DecodeGraphs._recorder", lambda self: made)
    return made


@pytest.mark.parametrize("cache", ["fp32", "q8", "q4", "nf4:rotate,sink_len=4,residual_len=9"])
@pytest.mark.parametrize("name", MODELS)
def test_replays_equal_single_steps_past_the_capacity_of_the_first(name, cache, recorder):
    """70 steps from 70 tokens: past 128 slots, where a recorded slice of the cache would end."""
    model = new_model(name)
    ids = prompt(70, 2)
    wanted = generator(model, cache_kind=cache, cuda_graph=False).generate(ids)
    assert recorder.recorded == 0
    recording = generator(model, cache_kind=cache)
    assert torch.equal(recording.generate(ids), wanted)
    assert (recorder.warmed, recorder.recorded, recorder.replayed) == (1, 1, 68)
    assert recording.decode_graph == "replayed"


def test_turns_rollbacks_and_ragged_rows_keep_the_graph(recorder):
    model = new_model()

    def talk(cuda_graph: bool | None) -> list[list[int]]:
        made = generator(model, cache_kind="q4", cuda_graph=cuda_graph, max_new_tokens=8)
        said = made.generate([[3, 14, 15] * 30, [9, 2] * 40]).tolist()
        made.rollback([5, 2])
        said += made.generate([[7], [8, 3, 1]]).tolist()
        made.rollback(3)
        logits = made.decode_step([4, 5])
        return [*said, logits.argmax(-1).tolist()]

    assert talk(None) == talk(False)
    assert recorder.recorded == 1


def test_the_bucket_of_a_plan_does_not_follow_the_padding_of_rows_that_ended(recorder):
    model, prompts = new_model(), [list(range(1, 18)), [5, 6, 7]]
    plan = {"decode_bucket_short": 20, "decode_bucket_mid": 400, "decode_local_window_mid": 2}

    def rest(cuda_graph: bool | None) -> list[int]:
        made = generator(
            model, cache_kind="fp32", cuda_graph=cuda_graph, decode_plan="auto", **plan
        )
        ended = lambda *_: torch.tensor([True, False])  # noqa: E731
        return made.generate(prompts, max_new_tokens=12, stopping_criteria=ended)[1, -12:].tolist()

    assert rest(None) == rest(False)
    assert recorder.recorded == 1


def test_a_cache_that_is_cropped_to_nothing_keeps_the_graph(recorder):
    model = new_model()

    def talk(cuda_graph: bool | None) -> list[list[int]]:
        made = generator(model, cache_kind="q4", cuda_graph=cuda_graph, max_new_tokens=6)
        said = made.generate(prompt(80)).tolist()
        made.rollback(86)
        return said + made.generate(prompt(90)).tolist()

    assert talk(None) == talk(False)
    assert (recorder.warmed, recorder.recorded) == (1, 1)


def test_a_conversation_of_its_own_is_recorded_anew(recorder):
    made = generator(new_model(), cache_kind="q8", max_new_tokens=4)
    first = made.generate(prompt(20))
    made.reset()
    assert made.decode_graph.startswith("will be recorded")
    assert torch.equal(made.generate(prompt(20)), first)
    assert recorder.recorded == 2


class Waiting(Transformer):
    """A model whose step makes the host wait."""

    def forward(self, query_token_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        int(query_token_ids[0, 0])
        return super().forward(query_token_ids, *args, **options)


def test_a_model_that_cannot_be_recorded_goes_on_and_says_why(recorder):
    wanted = generator(new_model(), cache_kind="q4", cuda_graph=False).generate(prompt(20))
    made = generator(new_model(kind=Waiting), cache_kind="q4")
    with pytest.warns(UserWarning, match="not replayed as a CUDA graph: _local_scalar_dense"):
        assert torch.equal(made.generate(prompt(20)), wanted)
    assert "recording failed: _local_scalar_dense" in made.decode_graph
    assert recorder.recorded == 1


def test_a_graph_that_is_a_must_raises_and_changes_nothing():
    made = generator(new_model(kind=Waiting), cache_kind="q4", cuda_graph=True)
    with pytest.raises(RecordingError, match="_local_scalar_dense"):
        made.generate(prompt(20))
    assert made.cache is None


def test_a_full_cache_is_refused_before_a_replay(recorder):
    made = generator(new_model(), cache_kind="q8", max_new_tokens=1, max_seq_len=24)
    made.generate(prompt(20))
    for token in (3, 4, 5):
        made.decode_step([token])
    assert made.cache is not None and made.cache.pos == 24
    with pytest.raises(ValueError, match="max_seq_len=24"):
        made.decode_step([6])
    assert made.cache.pos == 24 and recorder.replayed == 1


@pytest.mark.usefixtures("on_reference")
def test_pages_are_taken_by_the_host_while_the_table_stays(recorder):
    """Replays cross pages; a pool that runs out raises and leaves the lengths."""
    model, configs = new_model(), cache_configs("q4:plain")
    paged, whole = (
        ModelKVCache(model.cache_layout, 1, 256, page_size=size, num_pages=pages, **configs)
        for size, pages in ((32, 3), (None, None))
    )
    with torch.no_grad():
        for cache in (paged, whole):
            model.forward(prompt(30), cache)
        graph = DecodeGraph(model, paged, recorder)
        for token in range(66):
            ids = torch.tensor([[token % 61]])
            torch.testing.assert_close(graph.step(ids), model.forward(ids, whole)[:, -1])
        held = paged.row_lengths
        assert held == [96]
        with pytest.raises(OutOfPagesError):
            graph.step(torch.tensor([[1]]))
        paged.restore(held)
        assert paged.row_lengths == held and int(paged.seq_lens[0]) == 96
    assert (recorder.recorded, recorder.replayed) == (1, 65)


FULL: dict[str, Any] = dict(cache_kind="fp32", temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("seed", range(4))
def test_beams_beside_a_prompt_that_is_full_keep_every_token(seed):
    """Its rows are fed padding in replays, and nothing once they are full: what others are fed is theirs then, too."""
    model = new_model()
    source = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 61, (n,), generator=source).tolist() for n in (63, 5)]
    found, wanted = (
        Generator(
            model, **FULL, cuda_graph=graph, num_beams=2, max_length=64, max_seq_len=64
        ).generate(ids)
        for graph in (None, False)
    )
    assert torch.equal(found, wanted)


def test_a_row_goes_on_beside_one_that_is_full(recorder):
    """What it was fed without a replay stays cached: the next turn reads its own tokens alone."""
    made = Generator(new_model(), **FULL, max_length=40, max_seq_len=40)
    made.generate([prompt(36)[0].tolist(), prompt(5)[0].tolist()])
    assert recorder.replayed > 0
    assert made.cache.row_lengths == [39, 39]


@pytest.mark.parametrize("cache", ["q8", "q4", "nf4:residual_len=9,sink_len=4"])
@pytest.mark.parametrize("taken_back", [0, 2])
def test_a_row_that_ended_keeps_what_it_read_in_fp16(cache, taken_back, recorder):
    """Others go on for 60 steps, and replays feed it padding: more than its ring has room for."""
    ids, model = [prompt(40)[0].tolist(), prompt(60)[0].tolist()], new_model()

    def first_row_ends(seen: Tensor, scores: Any) -> Tensor:
        return torch.tensor([seen.shape[1] >= 63, False])

    def talk(cuda_graph: bool | None) -> Tensor:
        made = generator(model, cache_kind=cache, cuda_graph=cuda_graph, max_new_tokens=64)
        made.generate(ids, stopping_criteria=first_row_ends)
        assert len(made.tokens[0]) == 43 and len(made.tokens[1]) == 124
        made.rollback(taken_back)
        made.prefill([[5, 6, 7, 8], [9, 10, 11]])
        return torch.stack([made.decode_step([token, token]) for token in (1, 2, 3)])

    wanted = talk(False)
    assert recorder.replayed == 0
    assert torch.equal(talk(None), wanted) and recorder.replayed > 50
