"""Speculation changes how many passes a text takes, never the text's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.speculation import model_of, plain, speculative
from torch import Tensor

from caramba_fast.infer import GenerateConfig, Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.drafts import Drafted
from caramba_fast.infer.lookup import LookupDraft, NGramIndex
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.models import Transformer

PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8], [9, 7, 9, 3, 2, 38, 4, 6]]
MORE = [[27, 18], [28], [45, 9, 1]]


@pytest.fixture(scope="module")
def target(device: torch.device) -> Transformer:
    return model_of(11, device)


@pytest.fixture(scope="module")
def drafts(device: torch.device, target: Transformer) -> dict[str, Transformer | None]:
    """Drafts from always right to nearly always wrong."""
    near = model_of(11, device)
    generator = torch.Generator().manual_seed(5)
    for parameter in near.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(device)
    return {
        "the target itself": target,
        "a model near it": near,
        "another model": model_of(12, device, num_hidden_layers=1),
        "lookup": None,
    }


DRAFTS = ("the target itself", "a model near it", "another model", "lookup")


def check_whole(generator: Generator) -> None:
    """The cache holds every token of each row but the newest."""
    assert generator.cache is not None
    held = [len(row) - 1 for row in generator.tokens]
    assert [cache.lengths.host for cache in generator.cache] == [held] * len(generator.cache)
    assert generator.cache.seq_lens.tolist() == held


# -- greedy: identical tokens ----------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", ["fp32", "q8", "q4", "nf4:plain"])
def test_greedy_tokens_are_those_of_plain_decoding(
    target: Transformer, drafts: dict[str, Transformer | None], name: str, kind: str
) -> None:
    """Over two turns of a ragged batch, so that caches are cropped row by row and go on."""
    spec = speculative(target, drafts[name], cache_kind=kind)
    base = plain(target, cache_kind=kind)
    for prompts in (PROMPTS, MORE):
        assert torch.equal(spec.generate(prompts), base.generate(prompts))
        check_whole(spec)
    assert spec.tokens == base.tokens


@pytest.mark.parametrize("spec_k", [12, 16, 20])
@pytest.mark.parametrize("name", ["a model near it", "lookup"])
@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_drafts_longer_than_the_usual_slack(
    target: Transformer,
    drafts: dict[str, Transformer | None],
    kind: str,
    name: str,
    spec_k: int,
) -> None:
    given = {"cache_kind": kind, "max_new_tokens": 24, "max_seq_len": 256}
    spec, base = speculative(target, drafts[name], spec_k=spec_k, **given), plain(target, **given)
    for prompts in (PROMPTS, MORE, MORE):
        assert torch.equal(spec.generate(prompts), base.generate(prompts))
        for each in (spec, base):
            each.rollback(3)


@pytest.mark.parametrize(
    "settings",
    [
        {"spec_k": 1}, {"spec_k": 31, "max_new_tokens": 40}, {"spec_extra_token": False},
        {"spec_k_adaptive": True, "spec_k_interval": 1}, {"spec_disable_below_accept": 1.0},
        {"spec_method": "sample_match"}, {"max_new_tokens": 1}, {"max_new_tokens": 2},
        {"prefill": "stored", "prefill_chunk": 3}, {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 5, "eos_token_id": 7},
        {"suppress_tokens": (3, 4), "logit_bias": {9: 2.0}, "bad_words_ids": ((5,), (8, 9))},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["a model near it", "lookup"])
def test_greedy_tokens_under_every_setting(
    target: Transformer,
    drafts: dict[str, Transformer | None],
    name: str,
    settings: dict[str, Any],
) -> None:
    spec = speculative(target, drafts[name], **settings)
    base = Generator(target, spec.config.plain())
    for prompts in (PROMPTS, MORE):
        assert torch.equal(spec.generate(prompts), base.generate(prompts))
        check_whole(spec)


@pytest.mark.parametrize("name", DRAFTS)
def test_rows_end_at_their_eos_wherever_it_is_in_a_draft(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    texts = plain(target, max_new_tokens=24).generate(PROMPTS)[:, -24:].tolist()
    for eos in sorted({row[place] for row in texts for place in (1, 5, 9)}):
        settings = {"eos_token_id": eos, "max_new_tokens": 24, "return_dict": True}
        spec, base = speculative(target, drafts[name], **settings), plain(target, **settings)
        for prompts in (PROMPTS, MORE):
            ours, theirs = spec.generate(prompts), base.generate(prompts)
            assert torch.equal(ours["sequences"], theirs["sequences"])
            assert ours["finish_reasons"] == theirs["finish_reasons"]
            assert ours["new_tokens"] == theirs["new_tokens"]
            check_whole(spec)


def test_a_sliding_window_is_kept(device: torch.device) -> None:
    windowed = model_of(11, device, sliding_window=6)
    spec, base = speculative(windowed, None, cache_kind="q8"), plain(windowed, cache_kind="q8")
    assert torch.equal(spec.generate(PROMPTS), base.generate(PROMPTS))


def test_a_text_may_fill_the_cache(target: Transformer) -> None:
    settings = {"max_seq_len": 24, "max_new_tokens": 17}
    spec = speculative(target, target, spec_k=8, **settings)
    assert torch.equal(spec.generate(PROMPTS), plain(target, **settings).generate(PROMPTS))
    with pytest.raises(ValueError, match="max_seq_len=24"):
        spec.generate(MORE)


@pytest.mark.parametrize("name", ["a model near it", "lookup"])
def test_steps_come_one_by_one(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    whole = plain(target).generate(PROMPTS)[:, -17:]
    columns = list(speculative(target, drafts[name]).generate_iter(PROMPTS))
    assert torch.equal(torch.stack(columns, dim=1), whole)
    ids = list(speculative(target, drafts[name]).generate_iter(PROMPTS[0]))
    assert all(type(token) is int for token in ids) and ids == whole[0].tolist()


@pytest.mark.parametrize("taken", [1, 2, 5])
@pytest.mark.parametrize("name", ["a model near it", "lookup"])
def test_a_consumer_that_stops_early_leaves_what_it_was_given(
    target: Transformer, drafts: dict[str, Transformer | None], taken: int, name: str
) -> None:
    spec = speculative(target, drafts[name], spec_k=6)
    steps = spec.generate_iter(PROMPTS)
    seen = [next(steps).tolist() for _ in range(taken)]  # type: ignore[union-attr]
    steps.close()  # type: ignore[union-attr]
    assert [row[-taken:] for row in spec.tokens] == [list(row) for row in zip(*seen, strict=True)]
    for cache in spec.cache:
        held = zip(cache.lengths.host, spec.tokens, strict=True)
        assert all(len(row) - 1 <= length <= len(row) for length, row in held)
    so_far = spec.tokens
    joined = [row + more for row, more in zip(so_far, MORE, strict=True)]
    out = spec.generate(MORE)
    assert torch.equal(out[:, -17:], plain(target).generate(joined)[:, -17:])


@pytest.mark.parametrize("name", ["the target itself", "lookup"])
def test_an_iteration_that_is_overtaken_leaves_what_it_gave(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    spec = speculative(target, drafts[name], spec_k=6)
    steps: Any = spec.generate_iter(PROMPTS)
    seen = [next(steps).tolist() for _ in range(2)]
    rows = [[*row, *new] for row, new in zip(PROMPTS, zip(*seen, strict=True), strict=True)]
    joined = [row + more for row, more in zip(rows, MORE, strict=True)]
    out = spec.generate(MORE)
    assert torch.equal(out[:, -17:], plain(target).generate(joined)[:, -17:])
    with pytest.raises(RuntimeError, match="went on without this iteration"):
        next(steps)


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_fails_leaves_the_conversation_as_it_was(
    target: Transformer, device: torch.device, monkeypatch: pytest.MonkeyPatch, who: str, after: int
) -> None:
    draft = model_of(12, device)
    spec, base = speculative(target, draft), plain(target)
    assert torch.equal(spec.generate(PROMPTS), base.generate(PROMPTS))
    before = spec.tokens
    model = target if who == "target" else draft
    forward, calls = model.forward, [0]

    def failing(*args: Any, **options: Any) -> Tensor:
        calls[0] += 1
        out = forward(*args, **options)
        if calls[0] > after:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            spec.generate(MORE)
    assert spec.tokens == before
    check_whole(spec)
    assert torch.equal(spec.generate(MORE), base.generate(MORE))


def test_rollback_and_reset(target: Transformer, drafts: dict[str, Transformer | None]) -> None:
    spec, base = speculative(target, drafts["a model near it"]), plain(target)
    for generator in (spec, base):
        generator.generate(PROMPTS)
        generator.rollback([4, 1, 0])
    assert torch.equal(spec.generate(MORE), base.generate(MORE))
    spec.reset()
    assert spec.tokens == [] and spec.cache is None
    assert torch.equal(spec.generate(MORE), plain(target).generate(MORE))


def test_scores_are_those_of_plain_decoding(target: Transformer) -> None:
    settings = {"return_dict": True, "output_scores": True, "output_logits": True}
    ours = speculative(target, None, **settings).generate(PROMPTS[0])
    theirs = plain(target, **settings).generate(PROMPTS[0])
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) == 17
        torch.testing.assert_close(
            torch.stack(ours[name]), torch.stack(theirs[name]), atol=1e-4, rtol=1e-4
        )


def test_hooks_are_called_as_without_speculation(target: Transformer) -> None:
    def shifted(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(int(ids[0, -1]) % 3, dims=-1)

    def long_enough(ids: Tensor, scores: object) -> bool:
        return ids.shape[1] >= len(PROMPTS[0]) + 9

    hooks = {"logits_processor": [shifted], "stopping_criteria": [long_enough]}
    ours = speculative(target, target).generate(PROMPTS[0], **hooks)
    assert ours.shape[1] == len(PROMPTS[0]) + 9
    assert torch.equal(ours, plain(target).generate(PROMPTS[0], **hooks))


def by_row(ids: Tensor, scores: Tensor) -> Tensor:
    """Depends on the row of the batch, and on how far the batch has come."""
    pushed = scores.clone()
    for row in range(len(scores)):
        pushed[row, (10 * row + ids.shape[1]) % 61] += 4.0
    return pushed


@pytest.mark.parametrize("name", DRAFTS)
def test_processors_and_criteria_see_the_whole_batch(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    width = max(map(len, PROMPTS))

    def ended(ids: Tensor, scores: object) -> Tensor:
        return torch.tensor([ids.shape[1] >= width + 7 + row for row in range(len(ids))])

    def same_width(ids: Tensor, scores: Tensor) -> Tensor:
        assert len(ids) == 3 and ids.shape[1] >= width
        return by_row(ids, scores)

    hooks = {"logits_processor": [same_width], "stopping_criteria": [ended]}
    base = plain(target).generate(PROMPTS, **hooks)
    if name in ("lookup", "the target itself"):
        spec = speculative(target, drafts[name], spec_k=3)
        assert spec.generate(PROMPTS, **hooks).shape == base.shape
    assert base.shape[1] == width + 9


def by_newest(ids: Tensor, scores: Tensor) -> Tensor:
    """Depends on the newest token of each row."""
    return scores.scatter_add(1, (ids[:, -1:] * 7 + 5) % 61, torch.full_like(scores[:, :1], 6.0))


@pytest.mark.parametrize("name", DRAFTS)
def test_processors_and_criteria_see_no_row_further_than_theirs(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    """Rows accept each on their own: what another row has more is not shown, nor padding in its place."""
    width = max(map(len, PROMPTS))

    def long_enough(ids: Tensor, scores: tuple[Tensor, ...]) -> bool:
        assert len(scores) == ids.shape[1] - width
        return ids.shape[1] >= width + 11

    def newest(ids: Tensor, scores: object) -> Tensor:
        return ids[:, -1] % 13 == 6

    for criterion in (long_enough, newest):
        hooks = {"logits_processor": [by_newest], "stopping_criteria": [criterion]}
        options: dict[str, Any] = dict(hooks, return_dict=True, output_scores=True)
        base: Any = plain(target).generate(PROMPTS, **options)
        ours: Any = speculative(target, drafts[name]).generate(PROMPTS, **options)
        assert torch.equal(ours.sequences, base.sequences)
        assert ours.finish_reasons == base.finish_reasons and "criteria" in base.finish_reasons


@pytest.mark.parametrize("name", DRAFTS)
def test_a_grammar_is_never_asked_beyond_what_it_allows(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    """A tree of texts, of which nothing may follow behind the end or off the branches."""
    texts = {0: [4, 5, 6, 2], 1: [7, 8, 2], 2: [4, 9, 4, 9, 2]}

    def allowed(row: int, ids: Tensor) -> list[int]:
        said = ids.tolist()[len(PROMPTS[row]) :]
        assert said == texts[row][: len(said)]
        return texts[row][len(said) : len(said) + 1]

    spec = speculative(target, drafts[name], eos_token_id=2, return_dict=True)
    got = spec.generate(PROMPTS, prefix_allowed_tokens_fn=allowed)
    for row, text in texts.items():
        assert got["sequences"][row, 8 : 8 + len(text)].tolist() == text
    assert got["finish_reasons"] == ["eos"] * 3


@pytest.mark.parametrize("first", [1, 2, 7, 9])
def test_a_draft_knows_every_token_of_earlier_turns(target: Transformer, first: int) -> None:
    spec = speculative(target, target, spec_k=4, ignore_eos=True)
    spec.generate(PROMPTS, max_new_tokens=first)
    spec.generate(MORE, max_new_tokens=16)
    assert spec.acceptance_rate == 1.0
    spec.reset()
    spec.prefill(PROMPTS)
    spec.rollback(1)
    spec.decode_step([1, 2, 3])
    spec.generate(MORE, max_new_tokens=16)
    assert spec.acceptance_rate == 1.0


def test_one_pass_has_one_window(target: Transformer) -> None:
    plan = {
        "decode_plan": "auto", "decode_bucket_short": 16, "decode_bucket_mid": 24,
        "decode_local_window": 6, "decode_local_window_mid": 9, "max_new_tokens": 30,
    }  # fmt: skip
    base = plain(target, **plan).generate(PROMPTS[0])
    for draft in (target, None):
        assert torch.equal(speculative(target, draft, spec_k=8, **plan).generate(PROMPTS[0]), base)


# -- sampling: the very text (distributions: test_speculative_sampling) ----------------------


@pytest.mark.parametrize("name", DRAFTS)
def test_sample_match_with_a_seed_gives_the_very_text_of_plain_decoding(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    settings = {"temperature": 0.7, "top_k": 20, "seed": 9, "max_new_tokens": 40}
    base = plain(target, **settings)
    spec = speculative(target, drafts[name], spec_method="sample_match", **settings)
    for prompt in (PROMPTS[0], PROMPTS[1]):
        assert torch.equal(spec.generate(prompt), base.generate(prompt))
    changes: dict[str, Any] = {"spec_extra_token": False}
    for more in (changes, {"eos_token_id": 7, "ignore_eos": False}, {"stop": (9, 14)}):
        both = {**settings, "max_seq_len": 600}
        base = plain(target, **both, **{k: v for k, v in more.items() if k not in changes})
        spec = speculative(target, drafts[name], spec_method="sample_match", **both, **more)
        for prompt in PROMPTS * 3:  # a row that ended within a draft goes on where it stood
            assert torch.equal(spec.generate([prompt]), base.generate([prompt])), more


@pytest.mark.parametrize("name", DRAFTS)
def test_sample_match_goes_on_as_plain_decoding_where_an_iteration_was_left(
    target: Transformer, drafts: dict[str, Transformer | None], name: str
) -> None:
    """Numbers drawn for tokens that were never yielded are those of the next turn."""
    settings = {"temperature": 0.7, "seed": 9, "max_new_tokens": 40, "max_seq_len": 300}
    generators = (
        plain(target, **settings),
        speculative(target, drafts[name], spec_method="sample_match", **settings),
    )
    for prompt, count in zip(PROMPTS * 2, (1, 3, 6, 2, 7, 40), strict=True):
        for generator in generators:
            steps: Any = generator.generate_iter([prompt])
            for _, _ in zip(range(count), steps, strict=False):
                pass
            steps.close()
        assert generators[0].tokens == generators[1].tokens


# -- how much it takes -----------------------------------------------------------------------


def test_a_draft_that_is_always_right(target: Transformer) -> None:
    spec = speculative(target, target, spec_k=4, max_new_tokens=21)
    spec.generate(PROMPTS)
    assert spec.acceptance_rate == 1.0 and spec.tokens_per_pass == 5.0
    assert spec.stats.passes == 4 and spec.stats.new_tokens == 60  # the first came with the prompt
    assert spec.report["speculation"]["acceptance_rate"] == 1.0


class Contrary(Transformer):
    """Always guesses what the target holds least likely."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return -super().forward(*args, **options)


def contrary(target: Transformer) -> Contrary:
    other = Contrary(target.config).to(target.device).eval()
    other.load_state_dict(target.state_dict())
    return other


def test_a_draft_that_is_always_wrong(target: Transformer) -> None:
    spec = speculative(target, contrary(target), max_new_tokens=9)
    assert torch.equal(spec.generate(PROMPTS), plain(target, max_new_tokens=9).generate(PROMPTS))
    assert spec.acceptance_rate == 0.0 and spec.tokens_per_pass == 1.0 and spec.stats.passes == 8


def test_k_follows_the_acceptance(target: Transformer) -> None:
    adaptive = {"spec_k_adaptive": True, "spec_k_interval": 1, "max_new_tokens": 60}
    up = speculative(target, target, spec_k=2, spec_k_max=6, **adaptive)
    up.generate(PROMPTS[0])
    assert up.stats.spec_k == 6
    down = speculative(target, contrary(target), spec_k=5, spec_k_min=2, **adaptive)
    down.generate(PROMPTS[0])
    assert down.stats.spec_k == 2


def test_a_draft_that_does_not_pay_is_dropped_for_the_run(target: Transformer) -> None:
    spec = speculative(
        target, contrary(target), spec_k=3, spec_k_interval=2, spec_disable_below_accept=0.3
    )
    base = plain(target)
    for prompts in (PROMPTS, MORE):
        assert torch.equal(spec.generate(prompts), base.generate(prompts))
        assert spec.stats.drafted == 2 * 3 * 3 and "0.3" in str(spec.stats.disabled)


def test_rows_accept_each_on_their_own(target: Transformer) -> None:
    """A batch takes as many passes as its slowest row alone, not the minimum of every round."""
    alone = []
    for prompt in PROMPTS:
        spec = speculative(target, None, max_new_tokens=40)
        spec.generate(prompt)
        alone.append(spec.stats.passes)
    together = speculative(target, None, max_new_tokens=40)
    together.generate(PROMPTS)
    assert together.stats.passes == max(alone)


def test_several_answers_to_one_prompt(
    target: Transformer, drafts: dict[str, Transformer | None]
) -> None:
    settings = {"temperature": 1.0, "seed": 1, "num_return_sequences": 3}
    spec = speculative(target, drafts["a model near it"], **settings)
    out = spec.generate(PROMPTS)
    assert len(out) == 9 and len({tuple(row) for row in out.tolist()}) == 9
    check_whole(spec)
    assert len(spec.generate(MORE * 3)) == 9


# -- lookup ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "count", "draft"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),  # the longest run wins
        ([1, 2, 5, 9, 2, 7, 1, 2], 2, [5, 9]),  # over a later, shorter one
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # of equal runs the latest
        ([4, 4, 4], 5, [4, 4, 4, 4, 4]),  # past the end it repeats
        ([1, 2, 1, 2], 4, [1, 2, 1, 2]),
        ([1, 2, 3], 2, []),
        ([1], 2, []),
    ],
)
def test_lookup_drafts_what_followed(row: Sequence[int], count: int, draft: list[int]) -> None:
    assert NGramIndex(3, 1).draft(row, count) == draft


def test_shorter_runs_can_be_ruled_out() -> None:
    assert NGramIndex(3, 2).draft([1, 2, 9, 2], 2) == []


def test_an_index_follows_a_row_that_grows_and_shrinks() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, row = LookupDraft(3, 1), TokenSequence([1, 2])
    draft.feed([[1, 2]])
    for _ in range(300):
        step = int(torch.randint(-3, 5, (), generator=generator))
        if step < 0:
            row.pop(min(-step, len(row) - 1))
        else:
            row.extend(torch.randint(0, 4, (step,), generator=generator).tolist())
        found = draft.propose([row], [6]).tokens[0]
        assert found == NGramIndex(3, 1).draft(row.tokens, 6)


# -- bad input -------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no draft": ({"spec_k": 0}, "spec_k.*greater than or equal to 1"),
    "too long a draft": ({"spec_k": 32}, "spec_k.*less than or equal to 31"),
    "an unknown method": ({"spec_method": "typical"}, "spec_method.*reject_sampling"),
    "beams": ({"num_beams": 2}, "num_beams.*speculation allows 1"),
    "k outside its range": (
        {"spec_k_adaptive": True, "spec_k": 2, "spec_k_min": 3}, "spec_k is 2.*spec_k_min=3.*16",
    ),
    "runs the wrong way": (
        {"lookup_min_ngram": 4, "lookup_max_ngram": 3}, "lookup_min_ngram is 4.*lookup_max_ngram=3",
    ),
    "a threshold above 1": (
        {"spec_disable_below_accept": 1.1}, "spec_disable_below_accept.*less than or equal to 1",
    ),
    "an unknown field": ({"spec_q": 3}, "spec_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_settings_that_contradict_are_named(name: str) -> None:
    settings, message = BAD[name]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        SpeculativeConfig(**settings)


def test_a_draft_with_another_vocabulary_is_refused(
    target: Transformer, device: torch.device
) -> None:
    with pytest.raises(ValueError, match="vocabulary of 60 and the target of 61"):
        speculative(target, model_of(1, device, vocab_size=60))


def test_a_config_of_the_other_generator_is_refused(target: Transformer) -> None:
    with pytest.raises(TypeError, match="SpeculativeConfig, which SpeculativeGenerator takes"):
        Generator(target, SpeculativeConfig())
    with pytest.raises(TypeError, match="GenerateConfig; a SpeculativeConfig is needed"):
        SpeculativeGenerator(target, None, GenerateConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("draft", [True, False])
def test_a_longer_draft_in_one_call_has_to_fit_the_cache_that_there_is(
    target: Transformer, draft: bool
) -> None:
    made = SpeculativeGenerator(
        target, target if draft else None, cache="q4", temperature=0.0, max_new_tokens=8
    )
    with pytest.raises(ValueError, match=r"spec_k reaches 31.*tail_slack=12.*up to 11"):
        made.generate([PROMPTS[0]], spec_k=31)
    made.generate([PROMPTS[0]], spec_k=11)
    longer = SpeculativeGenerator(
        target, target if draft else None, cache="q4", temperature=0.0, max_new_tokens=8, spec_k=31
    )
    longer.generate([PROMPTS[0]])
    longer.generate([PROMPTS[0]], spec_k=4)


def test_a_draft_longer_than_the_tail_can_take_back_is_refused(target: Transformer) -> None:
    kind = "q4:residual_len=32,tail_slack=8"
    with pytest.raises(ValueError, match=r"spec_k reaches 8.*tail_slack=8.*up to 7"):
        speculative(target, None, cache_kind=kind, spec_k=8)
    spec, base = (f(target, **{"cache_kind": kind}) for f in (_lookup_of_7, plain))
    assert torch.equal(spec.generate(PROMPTS), base.generate(PROMPTS))


def _lookup_of_7(target: Transformer, **settings: Any) -> SpeculativeGenerator:
    return speculative(target, None, spec_k=7, **settings)


class OneRowAlone:
    """Drafts what is right for the first row, and nothing for the others."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, rows: Sequence[TokenSequence], counts: Sequence[int]) -> Drafted:
        held = len(rows[0])
        return Drafted([self.text[held : held + counts[0]], *([] for _ in rows[1:])], None)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("taken", [3, 10, 17])
def test_a_row_far_ahead_is_what_it_was_when_the_run_is_left(
    target: Transformer, kind: str, taken: int
) -> None:
    given: dict[str, Any] = {"cache_kind": kind, "max_new_tokens": 100, "max_seq_len": 256}
    prompts = [list(range(1, 51)), list(range(9, 60))]
    whole = plain(target, **given)
    whole.generate(prompts)
    found = []
    for made in (plain(target, **given), speculative(target, None, spec_k=4, **given)):
        if isinstance(made, SpeculativeGenerator):
            made._draft = OneRowAlone(whole.tokens[0])
        steps = made.generate_iter(prompts)
        for _ in range(taken):
            next(steps)
        steps.close()
        assert made.tokens == [row[: len(row) - 100 + taken] for row in whole.tokens]
        found.append(made.prefill(MORE[:2]))
    assert (found[0] - found[1]).abs().max() < 1e-4
    assert made.stats.accepted >= 8  # it was ahead
