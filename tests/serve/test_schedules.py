"""Whatever the schedule, every request gets the tokens it would get alone, and every page is accounted for."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from support.engines import alone, small_model, text

from caramba_fast.serve import Engine, EngineConfig, RequestOutput

KINDS = ("fp32", "q8", "q4", "nf4")
PAGE = 64
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
#: Prompts of which some begin alike, by whole pages and in the middle of one.
BASE = text(1, 300)
PROMPTS = [BASE[:1], BASE[:5], BASE[:64], BASE[:128], BASE[:130], BASE[:200]]
PROMPTS += [BASE[:70] + text(2, 40), text(3, 90)]

lengths = st.one_of(st.integers(1, 24), st.integers(60, 90))
greedy = st.builds(
    lambda new, penalty: (("max_new_tokens", new), ("temperature", 0.0), ("repetition_penalty", penalty)),
    lengths, st.sampled_from([1.0, 1.3]),
)  # fmt: skip
sampled = st.builds(
    lambda new, seed, top_p, top_k: (
        ("max_new_tokens", new), ("temperature", 0.9), ("seed", seed), ("top_p", top_p), ("top_k", top_k)
    ),
    lengths, st.integers(0, 3), st.sampled_from([None, 0.8]), st.sampled_from([None, 10]),
)  # fmt: skip
request = st.tuples(st.integers(0, len(PROMPTS) - 1), st.one_of(greedy, sampled))
action = st.one_of(
    st.tuples(st.just("add"), request),
    st.tuples(st.just("add"), request),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.integers(0, 30)),
    st.tuples(st.just("fork"), st.tuples(request, st.integers(2, 3))),
)
engines = st.builds(
    EngineConfig, page_size=st.just(PAGE), num_pages=st.integers(5, 9), max_batch_size=st.integers(3, 6),
    max_batch_tokens=st.sampled_from([32, 50, 128, 512]), prefix_caching=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]), swap_bytes=st.sampled_from([0, 20_000, 2**30]),
    lookup_tokens=st.sampled_from([0, 0, 4]), fair_tokens=st.sampled_from([8, 256]),
    cache_salt=st.sampled_from(["everybody", "everybody", None]),
)  # fmt: skip


@dataclass
class Seen:
    """What was asked for and told."""

    prompts: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def step(self, engine: Engine) -> None:
        for told in engine.step():
            self.tokens.setdefault((told.request_id, told.answer), []).extend(told.tokens)
            if told.output is not None:
                assert told.request_id not in self.outputs, "answered twice"
                self.outputs[told.request_id] = told.output
        assert engine.problems() == []


def expected(kind: str, prompt: list[int], given: dict[str, Any], answer: int) -> list[int]:
    """What a run of its own gives; answer i is that of seed + i."""
    given = {k: v for k, v in given.items() if k != "num_return_sequences"}
    if "seed" in given:
        given["seed"] += answer
    return alone(kind, tuple(prompt), tuple(sorted(given.items())))


def act(engine: Engine, seen: Seen, name: str, what: Any) -> None:
    """One action of a schedule."""
    under_way = [name for name in seen.prompts if engine.is_under_way(name)]
    if name in ("add", "fork"):
        (place, chosen), answers = (what, 1) if name == "add" else what
        given = dict(chosen)
        if answers > 1 and "seed" in given:
            given["num_return_sequences"] = answers
        seen.prompts[engine.add_request(PROMPTS[place], **given)] = (PROMPTS[place], given)
    elif name == "step":
        for _ in range(what):
            seen.step(engine)
    elif name == "cancel" and under_way:
        engine.cancel(under_way[what % len(under_way)])
    elif name == "pause" and under_way:
        engine.pause(under_way[what % len(under_way)])


@given(st.sampled_from(KINDS), engines, st.lists(action, min_size=3, max_size=24))
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    kind: str, limits: EngineConfig, schedule: list[tuple[str, Any]]
) -> None:
    engine, seen = Engine(small_model(), settings=limits, cache_kind=kind, max_seq_len=300), Seen()
    for name, what in schedule:
        act(engine, seen, name, what)
    for name in seen.prompts:
        if engine.is_under_way(name):
            engine.resume(name)
    while engine.has_unfinished:
        seen.step(engine)
    assert set(seen.outputs) == set(seen.prompts), "lost"
    assert engine.metrics.pages_held == 0
    for name, output in seen.outputs.items():
        prompt, given = seen.prompts[name]
        for answer, tokens in enumerate(output.answers):
            wanted = expected(kind, prompt, given, answer)
            assert output.finish_reasons[answer] in ("eos", "length", "cancelled")
            if output.finish_reasons[answer] == "cancelled":
                wanted = wanted[: len(tokens)]
            assert tokens == wanted
            assert seen.tokens.get((name, answer), []) == tokens
    figures = engine.metrics
    for what in ("preemptions", "swaps", "prefix_hit_tokens", "accepted"):
        if getattr(figures, what):
            event(what)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_go_on_where_they_were(kind: str, preemption: str) -> None:
    """More than the pool holds at once: the newest give way, and nothing shows of it."""
    engine = Engine(
        small_model(), cache_kind=kind, max_seq_len=300, page_size=PAGE, num_pages=6, max_batch_size=4,
        preemption=preemption, prefix_caching=False,
    )  # fmt: skip
    prompts = [text(seed, 60) for seed in range(4)]
    given = {"max_new_tokens": 80, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    outputs = engine.generate_batch(prompts, **given)
    assert [o.generated_tokens for o in outputs] == [
        alone(kind, tuple(prompt), tuple(sorted(given.items()))) for prompt in prompts
    ]
    figures = engine.metrics
    assert figures.preemptions > 0
    assert (figures.swaps > 0) == (preemption == "swap")
    assert figures.swapped_bytes == 0
    assert outputs[0].metrics.preemptions == 0, "the oldest never gives way"


def test_parts_of_a_prompt_end_with_groups_of_keys_by_channel() -> None:
    """A part that ended within a group would leave the next one the rest of that group alone."""
    model = copy.copy(small_model())  # its own attributes, for others share the model
    engine = Engine(model, cache_kind="q8", max_batch_tokens=128, max_seq_len=512)
    sizes: list[int] = []
    forward: Any = engine.model.forward_ragged

    def noted(ids: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(ids))
        return forward(ids, *args, **options)

    engine.model.forward_ragged = noted  # type: ignore[method-assign, assignment]
    greedy: dict[str, Any] = dict(temperature=0.0, ignore_eos=True)
    engine.add_request(text(1, 5), max_new_tokens=30, **greedy)
    engine.step()
    sizes.clear()
    engine.add_request(text(2, 400), max_new_tokens=1, **greedy)
    for _ in range(4):
        engine.step()
    assert [size - 1 for size in sizes] == [96, 96, 96, 112]
