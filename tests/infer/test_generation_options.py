"""Edits of the logits, ends of rows, hooks and outputs: as Hugging Face's where it has them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.twins import VOCABULARY, left_padded, twins
from torch import Tensor

from caramba_fast.infer import GenerateConfig, GenerateOutput, Generator, Hooks, generate
from caramba_fast.infer.sampling import filtered_logits
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.stopping import Stopping
from caramba_fast.infer.tokenizer import TextWriter

PROMPTS = [[3, 14, 15, 9, 26, 3, 14], [5, 35, 8], [9, 7, 9, 3, 2, 38, 9, 7]]
PAD, NEW = 60, 20


class Letters:
    """A tokenizer of one letter a token; the last ids have none, or two."""

    def decode(self, ids: list[int]) -> str:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
        return "".join("xy" if i == 59 else "" if i == PAD else letters[i] for i in ids)


def ours(**settings: Any) -> Generator:
    defaults = {
        "cache_kind": "fp32", "max_new_tokens": NEW, "max_seq_len": 128, "pad_token_id": PAD,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    given = {**defaults, **settings}
    if "eos_token_id" in given:
        given.pop("ignore_eos")
    if "max_length" in given:
        given.pop("max_new_tokens")
    return Generator(twins()[1], tokenizer=Letters(), **given)


def theirs(**settings: Any) -> Tensor:
    ids, mask = left_padded(PROMPTS, PAD)
    return twins()[0].generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=PAD, do_sample=False, **settings
    )


# -- edits -----------------------------------------------------------------------------------

EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[9], [3, 14], [7, 9, 3]]},
    {"bad_words_ids": [[9], [22], [3, 41]], "eos_token_id": [9, 41]},
    {"suppress_tokens": [1, 5, 9, 22]},
    {"sequence_bias": {(9,): -4.0, (3, 14): 5.0}},
    {"min_new_tokens": 7, "eos_token_id": [3, 9, 22, 41]},
    {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [4],
        "eos_token_id": 9,
    },
]


@pytest.mark.parametrize("settings", EDITS, ids=str)
def test_edits_give_the_tokens_of_hugging_face(settings: dict[str, Any]) -> None:
    """Row by row: in a padded batch theirs also takes the padding for text."""
    alone = [
        twins()[0].generate(
            torch.tensor([row]), max_new_tokens=NEW, pad_token_id=PAD, do_sample=False,
            attention_mask=torch.ones(1, len(row), dtype=torch.int64), **settings,
        )[0, len(row) :].tolist()
        for row in PROMPTS
    ]  # fmt: skip
    got = ours(**settings).generate(PROMPTS)
    width = max(map(len, PROMPTS))
    for row, want in zip(got[:, width:].tolist(), alone, strict=True):
        assert row == want + [PAD] * (len(row) - len(want))


def test_a_bias_moves_one_logit() -> None:
    one: Any = ours(return_dict=True, output_scores=True, logit_bias={7: 1000.0})
    two: Any = ours(return_dict=True, output_logits=True, logit_bias={7: 1000.0})
    assert set(one.generate(PROMPTS).sequences[:, -NEW:].flatten().tolist()) == {7}
    moved = one.generate(PROMPTS).scores[0]
    two.generate(PROMPTS)
    difference = moved - two.generate(PROMPTS).logits[0]
    assert difference[:, 7].tolist() == [1000.0] * 3
    assert not difference[:, :7].any() and not difference[:, 8:].any()


def test_allowed_tokens_are_asked_for_each_row() -> None:
    seen = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        seen.append((row, ids.tolist()))
        return [10 + row, 20 + row]

    out = ours(max_new_tokens=2).generate(PROMPTS, prefix_allowed_tokens_fn=allowed)
    assert all(set(row) <= {10 + i, 20 + i} for i, row in enumerate(out[:, -2:].tolist()))
    assert seen[:3] == list(enumerate(PROMPTS)) and len(seen) == 6
    with pytest.raises(ValueError, match="allows nothing for row 0"):
        ours().generate(PROMPTS, prefix_allowed_tokens_fn=lambda row, ids: [])


def test_a_history_knows_the_same_after_any_pushes_and_pops() -> None:
    rng, history = random.Random(3), TokenSequence([1, 2, 1, 2])
    for _ in range(400):
        if rng.random() < 0.6:
            history.push(rng.randrange(5))
        else:
            history.pop(min(rng.randrange(4), len(history)))
        fresh = TokenSequence(history.tokens)
        assert torch.equal(history.seen(5, torch.device("cpu")), fresh.seen(5, torch.device("cpu")))
        assert sorted(set(history.repeats(3))) == sorted(set(fresh.repeats(3)))
        if rng.random() < 0.1:
            history = history.copy()


# -- filters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("name", ["min_p", "typical_p"])
def test_filters_keep_what_hugging_faces_keep(name: str, value: float) -> None:
    from transformers import MinPLogitsWarper, TypicalLogitsWarper

    torch.manual_seed(0)
    logits = torch.randn(64, 40) * 3
    warper = {"min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper}[name]
    want = logits if (name, value) == ("typical_p", 1.0) else warper(value)(None, logits.clone())
    assert torch.equal(filtered_logits(logits, GenerateConfig(**{name: value})), want)


# -- ends ------------------------------------------------------------------------------------


def test_stop_ids_and_eos_end_rows_for_reasons_of_their_own() -> None:
    texts = ours().generate(PROMPTS)[:, -NEW:].tolist()
    stop, eos = texts[0][4], next(t for t in texts[1] if t not in texts[0])
    got: Any = ours(stop=stop, eos_token_id=eos, return_dict=True).generate(PROMPTS)
    for text, reason, count in zip(texts, got.finish_reasons, got.new_tokens, strict=True):
        ends = [i for i, token in enumerate(text) if token in (stop, eos)]
        assert count == (ends[0] + 1 if ends else NEW)
        expected = "length" if not ends else "eos" if text[ends[0]] == eos else "stop"
        assert reason == expected


def test_a_stop_string_may_lie_over_tokens_and_inside_them() -> None:
    whole = ours().generate(PROMPTS)[:, -NEW:].tolist()
    text = Letters().decode(whole[0])
    for length, start in ((1, 3), (3, 5), (5, 2)):
        string = text[start : start + length]
        got: Any = ours(stop=(string, "never"), return_dict=True).generate(PROMPTS[0])
        first = text.index(string) + length
        assert got.new_tokens == [first] and got.finish_reasons == ["stop"]


def test_a_stop_string_in_the_prompt_stops_nothing() -> None:
    string = Letters().decode(PROMPTS[0][-2:])
    first = int(ours().generate(PROMPTS[0])[0, -NEW])
    crossing = Letters().decode([PROMPTS[0][-1], first])
    for stop in (string, crossing):
        if stop not in Letters().decode(ours().generate(PROMPTS[0])[0, -NEW:].tolist()):
            assert ours(stop_strings=stop).generate(PROMPTS[0]).shape[1] == len(PROMPTS[0]) + NEW


class Spaced:
    """As SentencePiece: every token begins with a space, which a text does not begin with."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {chr(ord('a') + i)}" for i in ids)[1:]


@pytest.mark.parametrize(
    ("stop", "ends"), [(" d", 1), ("d", 1), (" d e", 2), ("c d", None), ("b", None)]
)
def test_a_stop_string_may_begin_with_the_space_an_answer_begins_with(
    stop: str, ends: int | None
) -> None:
    row = TokenSequence([1, 2])
    row.begin(9)
    stopping = Stopping(GenerateConfig(stop=stop), frozenset(), Spaced(), (), 0)
    found = None
    for token in (3, 4, 5):
        row.push(token)
        if stopping.after(row) == "stop":
            found = row.new
            break
    assert found == ends


class Bytes:
    """Tokens of any bytes, decoded as UTF-8."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def decode(self, ids: Any) -> str:
        return b"".join(self.tokens[token] for token in ids).decode(errors="replace")


SPLIT = Bytes(*(bytes([byte]) for byte in "xé😀😀".encode()))


@pytest.mark.parametrize(
    ("decoder", "prompt", "stop", "least", "ends", "text"),
    [
        # é ends with byte 3, the first 😀 with byte 7: it does so behind a minimum of 4, 5 or 6 bytes, too.
        *((SPLIT, 0, ["é😀"], least, 7, "é😀") for least in range(7)),
        *((SPLIT, 0, ["é😀"], least, None, "") for least in range(7, 11)),
        *((SPLIT, 0, ["😀😀"], least, 11, "😀😀") for least in (3, 6, 10)),
        # "ye" is there with the third token, within the minimum, though its last character is not written yet.
        (Bytes(b"x", b"y", b"e\xc3", b"\xa9t", b"z"), 0, ["ye", 3], 3, 4, ""),
        (Bytes(b"x", b"y", b"e\xc3", b"\xa9t", b"z"), 0, ["ye", "t"], 3, 4, "t"),
        (Bytes(b"x", b"y", b"e\xc3", b"\xa9t", b"z"), 0, ["ye"], 2, 3, "ye\ufffd"),
        # é begins with the last byte of the prompt.
        (Bytes(b"x", b"\xc3", b"\xa9", b"t"), 2, ["é"], 0, 1, "é"),
    ],
)  # fmt: skip
def test_a_stop_string_of_characters_that_are_split(
    decoder: Bytes, prompt: int, stop: list[Any], least: int, ends: int | None, text: str
) -> None:
    """It ends a row with the token that completes it, unless that is one of the least number of tokens."""
    row = TokenSequence(range(prompt))
    row.begin(99)
    config = GenerateConfig(stop=stop, min_new_tokens=least)
    stopping = Stopping(config, frozenset(), decoder, (), 0)
    for token in range(prompt, len(decoder.tokens)):
        row.push(token)
        if stopping.after(row) == "stop":
            break
        assert ends is None or row.new < ends
    assert (row.new, stopping.stop_text(row)) == (ends or len(decoder.tokens), text)
    pieces: list[str] = []
    writer = TextWriter(decoder.decode, pieces.append, list(range(prompt)))
    for token in row.new_tokens:
        writer.put(token)
    writer.close()
    assert "".join(pieces).endswith(text)


def test_max_length_counts_the_prompt_row_by_row() -> None:
    got: Any = ours(max_length=12, return_dict=True).generate(PROMPTS)
    assert got.new_tokens == [12 - len(row) for row in PROMPTS]
    whole = ours().generate(PROMPTS)[:, -NEW:].tolist()
    for row, text, count in zip(got.sequences.tolist(), whole, got.new_tokens, strict=True):
        assert row[8 : 8 + count] == text[:count] and set(row[8 + count :]) <= {PAD}
    with pytest.raises(ValueError, match=r"row 2 holds 8 tokens.*max_length=8"):
        ours(max_length=8).generate(PROMPTS)


def test_a_row_that_is_full_does_not_keep_the_others_from_going_on() -> None:
    generator = ours(max_length=30, max_seq_len=30)
    assert [len(row) for row in (generator.generate(PROMPTS), generator.tokens)[1]] == [30, 30, 30]


def test_max_time_ends_a_run() -> None:
    def slow(ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.02)
        return scores

    got: Any = ours(max_time=0.05, return_dict=True).generate(PROMPTS, logits_processor=slow)
    assert got.finish_reasons == ["time"] * 3 and 1 <= got.new_tokens[0] < NEW


def test_hugging_faces_criteria_and_processors_work_here() -> None:
    from transformers import (
        EosTokenCriteria,
        LogitsProcessorList,
        MaxLengthCriteria,
        RepetitionPenaltyLogitsProcessor,
        StoppingCriteriaList,
    )

    row = PROMPTS[0]
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    out = ours().generate(row, logits_processor=processors)
    assert torch.equal(out, ours(repetition_penalty=1.7).generate(row))
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=len(row) + 4)])
    assert ours().generate(row, stopping_criteria=criteria).shape[1] == len(row) + 4
    whole = ours().generate(PROMPTS)[:, -NEW:].tolist()
    got: Any = ours(return_dict=True).generate(
        PROMPTS, stopping_criteria=EosTokenCriteria(eos_token_id=whole[1][3])
    )
    assert got.new_tokens[1] == whole[1].index(whole[1][3]) + 1
    assert got.finish_reasons[1] == "criteria"


@pytest.mark.parametrize("steps", [3, 60])
@pytest.mark.parametrize("kind", ["q4", "q4:residual_len=8,tail_slack=4"])
def test_what_is_interrupted_late_leaves_every_bit_of_the_conversation(
    kind: str, steps: int
) -> None:
    """The fp16 tail too, although the run has long overwritten it."""
    calls = [0]

    def interrupt(ids: Tensor, scores: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > steps:
            raise KeyboardInterrupt
        return scores

    logits = []
    for interrupted in (False, True):
        generator = ours(cache_kind=kind)
        generator.generate(PROMPTS)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                generator.generate(PROMPTS, max_new_tokens=80, logits_processor=interrupt)
        logits.append(generator.prefill([[1], [2], [3]]))
    assert torch.equal(*logits)


# -- hooks and outputs -----------------------------------------------------------------------


def test_a_streamer_gets_the_prompt_and_every_step() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.values: list[Tensor] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.values.append(value)

        def end(self) -> None:
            self.ended += 1

    streamer = Recorder()
    out = ours().generate(PROMPTS, hooks=Hooks(streamer=streamer))
    assert torch.equal(streamer.values[0], out[:, :8])
    assert torch.equal(torch.stack(streamer.values[1:], dim=1), out[:, 8:]) and streamer.ended == 1


def test_hugging_faces_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer, TextStreamer

    from caramba_fast.models import demo_path, load_demo

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    ids = tokenizer.encode("def main():", return_tensors="pt")
    out = generate(
        load_demo(), ids, 12, temperature=0.0, streamer=TextStreamer(tokenizer, skip_prompt=True)
    )
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, ids.shape[1] :]).strip()


def test_the_output_holds_what_was_asked_for() -> None:
    got: Any = ours(
        return_dict_in_generate=True, output_scores=True, output_logits=True, suppress_tokens=[5]
    ).generate(PROMPTS)
    assert isinstance(got, GenerateOutput) and got["sequences"] is got.sequences
    assert len(got.scores) == len(got.logits) == NEW
    assert all(s.shape == (3, VOCABULARY) and s[:, 5].isneginf().all() for s in got.scores)
    chosen = torch.stack([s.argmax(-1) for s in got.scores], dim=1)
    assert torch.equal(chosen, got.sequences[:, -NEW:])
    assert got.metrics.new_tokens == 3 * NEW and got.report["cache_kind"] == "fp32"
    want = twins()[0](got.sequences[:1, 1:]).logits[0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(torch.stack([x[0] for x in got.logits]), want, atol=1e-4, rtol=1e-4)


def test_several_answers_are_drawn_on_their_own_and_share_the_prompt() -> None:
    generator = ours(temperature=1.0, seed=2, num_return_sequences=4)
    out = generator.generate(PROMPTS)
    assert out.shape == (12, 8 + NEW) and len({tuple(row) for row in out.tolist()}) == 12
    assert torch.equal(out[::4, :8], left_padded(PROMPTS, PAD)[0])
    second = generator.generate([[1, 2]] * 12)  # the rows are those of the conversation now
    assert second.shape == (12, 2 + NEW)
    with pytest.raises(ValueError, match="12 rows and this input 3"):
        generator.generate(PROMPTS)


def test_a_processor_sees_the_first_new_token_in_one_column() -> None:
    """As in Hugging Face's batches: rows that have ended are filled up behind, not before."""
    seen = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.clone())
        return scores

    first = ours().generate(PROMPTS)[0, 8].item()
    out = ours(eos_token_id=first).generate(PROMPTS, logits_processor=note)
    for step, ids in enumerate(seen):
        assert torch.equal(ids, out[:, : 8 + step])


def test_padding_of_one_call_is_its_own() -> None:
    ids = torch.tensor([[7, 7, 3, 14], [5, 35, 8, 9]])
    alone = ours().generate([3, 14])
    got = ours().generate(ids, pad_token_id=7)
    assert torch.equal(got[0, 4:], alone[0, 2:]) and got[0, :2].tolist() == [7, 7]
    assert ours().generate([[3, 14], [5, 35, 8, 9]], pad_token_id=7)[0, :2].tolist() == [7, 7]


def test_the_budget_counts_the_rows_there_will_be() -> None:
    one = ours(temperature=1.0)
    one.generate([3, 14])
    budget = one.cache.nbytes * 2.5 / 2**20
    several = ours(temperature=1.0, num_return_sequences=2, cache_budget_mb=budget)
    several.generate([3, 14])
    assert several.metrics.cache_bytes == several.cache.nbytes == 2 * one.cache.nbytes
    with pytest.raises(ValueError, match="cache_budget_mb"):
        ours(temperature=1.0, num_return_sequences=3, cache_budget_mb=budget).generate([3, 14])
    later = ours(temperature=1.0, cache_budget_mb=budget)
    later.generate([3, 14])
    for more in ({"num_return_sequences": 3}, {"num_beams": 2}):
        held = later.tokens
        with pytest.raises(ValueError, match=r"cache_budget_mb.* cache of 3 rows"):
            later.generate([5], **more)
        assert later.tokens == held
    later.generate([5], num_return_sequences=2)
    assert later.cache.nbytes == 2 * one.cache.nbytes


def test_the_budget_of_a_choice_holds_for_more_rows_later() -> None:
    settings = dict(cache_kind="auto", cache_auto_benchmark=False, temperature=1.0)
    generator = ours(**settings, cache_budget_mb=0.5, cache_auto_candidates=("q8",))
    generator.generate([3, 14])
    generator = ours(**settings, cache_budget_mb=1.5 * generator.cache.nbytes / 2**20)
    generator.generate([3, 14])
    with pytest.raises(ValueError, match=r"cache_budget_mb.* cache of 2 rows"):
        generator.generate([5], num_return_sequences=2)
    generator.reset()
    generator.prefill([3, 14])  # what was refused expects no rows of the next cache


def test_the_bytes_of_a_run_are_those_of_all_answers_of_beams() -> None:
    generator = ours(temperature=0.0)
    out: Any = generator.generate([3, 14], num_beams=3, num_return_sequences=2, return_dict=True)
    assert out.metrics.cache_bytes == out.report["cache_bytes"] == generator.cache.nbytes


def test_special_tokens_can_stop_a_text() -> None:
    class Special(Letters):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return super().decode([i for i in ids if i != 9 or not skip_special_tokens])

    generator = Generator(
        twins()[1], tokenizer=Special(), stop="j", temperature=0.0, cache_kind="fp32",
        ignore_eos=True, logit_bias={9: 1e4}, return_dict=True,
    )  # fmt: skip
    got: Any = generator.generate(PROMPTS[0])
    assert got.finish_reasons == ["stop"] and got.new_tokens == [1]


def test_a_seed_of_a_call_starts_anew_and_max_time_counts_the_prompt() -> None:
    generator = ours(temperature=1.0, seed=3)
    first = generator.generate(PROMPTS, seed=3)
    generator.reset()
    assert torch.equal(generator.generate(PROMPTS, seed=3), first)
    assert ours(return_dict=True).generate(PROMPTS, max_time=1e-9)["new_tokens"] == [1, 1, 1]


def test_scores_are_kept_as_tokens_were_drawn_from_them() -> None:
    settings = {"temperature": 0.5, "top_k": 3, "seed": 1, "return_dict": True}
    got: Any = ours(**settings, output_scores=True).generate(PROMPTS)
    assert all((s > -torch.inf).sum(-1).tolist() == [3, 3, 3] for s in got.scores)
    assert "scores" in got and "logits" not in got


def test_a_call_may_say_the_opposite_of_the_generator() -> None:
    generator = ours(stop=["zz"], return_dict=True, ignore_eos=True)
    out = generator.generate(PROMPTS[0], stop_strings=["q"], return_dict_in_generate=False)
    assert isinstance(out, Tensor)
    generator.reset()
    assert generator.generate(PROMPTS[0], max_length=9)["new_tokens"] == [2]
    generator.reset()
    assert generator.generate(PROMPTS[0], eos_token_id=5)["sequences"].shape[0] == 1


@pytest.mark.parametrize(
    "option", [{"decode_plan": "auto"}, {"cache_budget_mb": 1.0}, {"prefill_chunk": 3}], ids=str
)
def test_what_belongs_to_the_generator_is_refused_in_a_call(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} belongs to the generator"):
        ours().generate(PROMPTS, **option)


def test_settings_of_one_call_are_its_own() -> None:
    generator = ours()
    assert generator.generate(PROMPTS, max_new_tokens=3).shape[1] == 8 + 3
    assert generator.generate(PROMPTS).shape[1] == 8 + NEW
    for name in ("cache", "cache_kind"):
        with pytest.raises(ValueError, match=f"{name} belongs to the generator's cache"):
            generator.generate(PROMPTS, **{name: "q4"})
    with pytest.raises(ValidationError, match="top_p"):
        generator.generate(PROMPTS, top_p=0.0)


def test_a_long_generation_keeps_nothing_but_its_tokens() -> None:
    """Python's own memory over 1,000 steps: a token and a duration of 8 bytes each, and no tensors."""
    import gc
    import tracemalloc

    generator = ours(max_new_tokens=3000, max_seq_len=3072)
    steps = generator.generate_iter(PROMPTS[0])
    for _ in range(500):
        next(steps)
    gc.collect()
    tensors = sum(isinstance(x, Tensor) for x in gc.get_objects())
    grown = []
    for _ in range(2):  # what other threads of the process allocate is in one of them at most
        tracemalloc.start()
        for _ in range(1000):
            next(steps)
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert min(grown) < 1000 * 100  # arrays grow in pieces; reads are described once per 128 tokens
    assert sum(isinstance(x, Tensor) for x in gc.get_objects()) - tensors < 10


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a penalty of 0": ({"repetition_penalty": 0.0}, "repetition_penalty.*greater than 0"),
    "a negative n-gram": ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size.*equal to 0"),
    "min_p above 1": ({"min_p": 1.5}, "min_p.*less than or equal to 1"),
    "both lengths": ({"max_length": 9, "max_new_tokens": 3}, "max_length and max_new_tokens"),
    "more than there may be": (
        {"min_new_tokens": 9, "max_new_tokens": 3},
        "min_new_tokens is 9.*=3",
    ),
    "a negative length": ({"max_length": -4}, "max_length.*greater than or equal to 2"),
    "no time": ({"max_time": 0.0}, "max_time.*greater than 0"),
    "an empty stop string": ({"stop": ("",)}, "stop.*at least 1 character"),
    "sampling at temperature 0": (
        {"do_sample": True, "temperature": 0.0},
        "temperature.*do_sample",
    ),
    "scores nobody gets": ({"output_scores": True}, "output_scores.*return_dict"),
    "a bias that overflows": ({"logit_bias": {3: float("inf")}}, "logit_bias.*less than or equal"),
    "a bias of NaN": ({"logit_bias": {3: float("nan")}}, "logit_bias.*less than or equal"),
    "a sequence's bias that overflows": (
        {"sequence_bias": [((3,), float("inf"))]},
        "sequence_bias.*less than or equal",
    ),
    "an empty bad word": ({"bad_words_ids": [[]]}, "bad_words_ids.*at least 1 item"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_be_are_named(name: str) -> None:
    settings, message = BAD[name]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {VOCABULARY: 1.0}}, {"suppress_tokens": [99]}, {"stop": [70]},
        {"bad_words_ids": [[1, 61]]}, {"sequence_bias": {(61, 1): 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_ids_outside_the_vocabulary_are_refused_before_any_compute(settings: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} holds token id.*0 to 60"):
        ours(**settings)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"stop holds the string 'end'.*tokenizer"):
        Generator(twins()[1], stop="end")


def test_a_row_of_which_nothing_is_left_says_so() -> None:
    settings = {"temperature": 1.0, "suppress_tokens": list(range(VOCABULARY))}
    with pytest.raises(ValueError, match=r"row \d.*no token can be chosen.*suppress_tokens"):
        ours(**settings).generate(PROMPTS)


def test_hooks_must_be_callable() -> None:
    with pytest.raises(TypeError, match="logits_processor holds a str"):
        ours().generate(PROMPTS, logits_processor=["top"])
    with pytest.raises(ValueError, match="hooks and streamer are both given"):
        ours().generate(PROMPTS, hooks=Hooks(), streamer=None)
