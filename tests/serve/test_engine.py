"""The engine answers: events add up, prefixes are read once, and requests wait, pause and go on in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import alone, engine, small_model, text
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace

from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_tokenizer, load_demo
from caramba_fast.serve import Engine, EngineConfig, RequestStatus

PROMPT = text(1, 70)


def test_events_add_up_to_the_output() -> None:
    serving = engine()
    name = serving.add_request(PROMPT, max_new_tokens=9, temperature=0.0, request_id="mine")
    events = list(serving)
    assert name == "mine"
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    output = events[-1].output
    assert output is not None
    assert output.status is RequestStatus.FINISHED
    assert output.prompt_ids == PROMPT
    assert [token for event in events for token in event.tokens] == output.generated_tokens
    given = (("max_new_tokens", 9), ("temperature", 0.0))
    assert output.generated_tokens == alone("q4", tuple(PROMPT), given)
    assert not serving.has_unfinished


def test_answers_of_one_request_share_its_prompt() -> None:
    serving = engine(max_batch_size=4)
    given = {"max_new_tokens": 12, "temperature": 1.0, "seed": 11}
    serving.add_request(PROMPT[:64], num_return_sequences=3, **given)
    for _ in range(3):
        serving.step()
    assert serving.metrics.pages_held <= 1 + 3, "a prompt of one page, and a page for each answer"
    (output,) = [event.output for event in serving if event.output]
    assert output.answers == [
        alone("q4", tuple(PROMPT[:64]), tuple(sorted({**given, "seed": 11 + i}.items())))
        for i in range(3)
    ]


def test_a_prefix_is_read_once() -> None:
    serving = engine(cache_salt="everybody")
    first, second = PROMPT[:64] + text(5, 9), PROMPT[:64] + text(6, 9)
    outputs = [serving.generate_batch([p], max_new_tokens=4)[0] for p in (first, second, first)]
    assert [output.metrics.prefix_hit_tokens for output in outputs] == [0, 64, 64]
    assert serving.metrics.prefix_hit_rate == pytest.approx(128 / (3 * 73))
    serving.clear_prefixes()
    assert serving.generate_batch([first], max_new_tokens=1)[0].metrics.prefix_hit_tokens == 0


def test_a_prompt_of_whole_known_pages_copies_the_last_one() -> None:
    """Its last token is read again for its logits, and must not be written where others read."""
    serving = engine(cache_salt="everybody")
    given = {"max_new_tokens": 6, "temperature": 0.0}
    outputs = [serving.generate_batch([text(1, 128)], **given)[0] for _ in range(2)]
    # Whole groups: no ring has the tokens before the last one.
    assert outputs[1].metrics.prefix_hit_tokens == 96
    assert outputs[0].generated_tokens == outputs[1].generated_tokens


def test_lookup_gives_the_same_tokens_in_fewer_steps() -> None:
    tokenizer = demo_tokenizer()
    prompt = "def read(path):\n    return open(path).read()\n\n\n" * 4
    found = []
    for lookup in (0, 6):
        serving = Engine(load_demo("gqa"), lookup_tokens=lookup, tokenizer=tokenizer)
        output = serving.generate_batch([prompt], max_new_tokens=40, temperature=0.0)[0]
        found.append((output.generated_tokens, serving.metrics))
    assert found[0][0] == found[1][0]
    assert found[1][1].accepted > 10
    assert found[1][1].steps == found[0][1].steps - found[1][1].accepted


def test_text_goes_in_and_comes_out() -> None:
    serving = Engine(load_demo("gqa"), cache_kind="q8", max_seq_len=256, tokenizer=demo_tokenizer())
    serving.add_request("def add(a, b):\n", max_new_tokens=24, temperature=0.0, stop=["\n"])
    events = list(serving)
    output = events[-1].output
    assert output is not None
    assert output.finish_reasons == ["stop"]
    assert output.texts[0].endswith("\n")
    assert "".join(event.text for event in events) == output.texts[0]


def test_the_text_of_an_answer_is_what_its_events_told() -> None:
    """Decoded alone, an answer would lose the space its first word begins with, as SentencePiece has them."""
    words = ["<unk>", *(f"\u2581{n}" if n % 2 else str(n) for n in range(1, 61))]
    tokenizer = Tokenizer(BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), MetaspaceDecoder()
    serving = engine(tokenizer=tokenizer, temperature=1.0, ignore_eos=True, max_new_tokens=6)
    told: dict[tuple[str, int], str] = {}
    outputs = {}
    for seed in range(4):
        serving.add_request([5, 6, 7], seed=10 * seed, num_return_sequences=2)
    for event in serving:
        key = event.request_id, event.answer
        told[key] = told.get(key, "") + event.text
        if event.output is not None:
            outputs[event.request_id] = event.output
    answers = [tokens for output in outputs.values() for tokens in output.answers]
    wanted = ["".join(words[n].replace("\u2581", " ") for n in tokens) for tokens in answers]
    assert [text for output in outputs.values() for text in output.texts] == wanted
    assert [told[name, i] for name in outputs for i in range(2)] == wanted
    assert {said.startswith(" ") for said in wanted} == {True, False}


def test_keys_with_large_biases_are_read_by_every_request_as_one_wrote_them() -> None:
    model = small_model(qkv_bias=True)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data = 20 * torch.randn(64)
    serving = Engine(model, cache_kind="q4", max_seq_len=256, cache_salt="everybody")
    given = {"max_new_tokens": 10, "temperature": 0.0}
    prompts = [PROMPT, PROMPT[:64] + text(5, 20), text(6, 30)]
    outputs = [serving.generate_batch([prompt], **given)[0] for prompt in prompts]
    assert outputs[1].metrics.prefix_hit_tokens == 64
    wanted = [alone("q4", tuple(p), tuple(sorted(given.items())), model) for p in prompts]
    assert [output.generated_tokens for output in outputs] == wanted


def test_decoupled_attention_is_served() -> None:
    model = load_demo("dba")
    config = GenerateConfig(
        cache_kind="fp32", prefill="stored", max_seq_len=256, max_new_tokens=8, temperature=0.0
    )
    prompt = torch.randint(model.vocab_size, (90,)).tolist()
    wanted: Any = Generator(model, config).generate(torch.tensor([prompt]))
    serving = Engine(model, cache_kind="fp32", max_seq_len=256, max_batch_tokens=40)
    (output,) = serving.generate_batch([prompt], max_new_tokens=8, temperature=0.0)
    assert output.generated_tokens == wanted[0, 90:].tolist()


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    serving = engine(max_batch_tokens=16, max_batch_size=4)
    serving.add_request(text(2, 5), max_new_tokens=30, ignore_eos=True, request_id="short")
    serving.step()
    serving.add_request(text(3, 150), max_new_tokens=2, request_id="long")
    told = [event.request_id for _ in range(8) for event in serving.step()]
    assert told.count("short") == 8, "a token every step"
    assert "long" not in told, "its prompt takes ten steps of 15 tokens"


def test_the_oldest_comes_first() -> None:
    serving = engine(max_batch_size=2)
    names = [serving.add_request(text(i, 20), max_new_tokens=3) for i in range(6)]
    ended = [event.request_id for event in serving if event.output]
    assert sorted(ended[:2]) == sorted(names[:2])
    assert sorted(ended[-2:]) == sorted(names[-2:])


def test_a_batch_beside_other_requests_keeps_their_events() -> None:
    serving = engine()
    other = serving.add_request(PROMPT, max_new_tokens=3, ignore_eos=True)
    serving.generate_batch([[1, 2]], max_new_tokens=10, ignore_eos=True)
    assert not serving.has_unfinished
    events = list(serving)
    assert [event.request_id for event in events] == [other] * 3
    assert events[-1].output is not None
    assert list(serving) == []


def test_whoever_stops_iterating_misses_nothing() -> None:
    serving = engine()
    names = [serving.add_request([1, 2 + i], max_new_tokens=1) for i in range(3)]
    seen = []
    for event in serving:
        seen.append(event.request_id)
        break
    seen += [event.request_id for event in serving]
    assert sorted(seen) == sorted(names)


def test_a_paused_request_keeps_its_place_while_there_is_room() -> None:
    serving = engine(max_batch_size=3, num_pages=20)
    slow = serving.add_request(text(1, 100), max_new_tokens=20, ignore_eos=True)
    serving.step()
    serving.pause(slow)
    serving.add_request(text(2, 100), max_new_tokens=20, ignore_eos=True)
    for _ in range(5):
        serving.step()
    assert serving.metrics.preemptions == 0


def test_a_paused_request_waits_and_gives_way() -> None:
    serving = engine(num_pages=2, max_batch_size=2)
    slow = serving.add_request(text(1, 100), max_new_tokens=20, ignore_eos=True, temperature=0.0)
    serving.step()
    serving.pause(slow)
    assert serving.step() == []
    with pytest.raises(RuntimeError, match="every request is paused"):
        list(serving)
    quick = serving.add_request(text(2, 100), max_new_tokens=20, ignore_eos=True)
    ended = [event.request_id for _ in range(25) for event in serving.step() if event.output]
    assert ended == [quick], "the older one is paused: its pages are needed"
    serving.resume(slow)
    (output,) = [event.output for event in serving if event.output]
    given = (("ignore_eos", True), ("max_new_tokens", 20), ("temperature", 0.0))
    assert output.generated_tokens == alone("q4", tuple(text(1, 100)), given)


def test_memory_is_what_was_asked_for() -> None:
    wanted = 8_000_000
    serving = engine(cache_bytes=wanted)
    assert serving.pool.nbytes <= wanted < serving.pool.nbytes + serving.pool.page_bytes
    assert serving.report["cache_bytes"] == serving.pool.nbytes
    sixteen, four = (
        Engine(small_model(), cache_kind=kind, cache_bytes=wanted).report["cache_tokens"]
        for kind in ("fp16", "q4")
    )
    assert four >= 3.1 * sixteen


def test_engine_settings_are_explained() -> None:
    assert EngineConfig.__doc__ is not None
    for name in EngineConfig.model_fields:
        assert name in EngineConfig.__doc__, name


def test_a_sequence_takes_the_lowest_ring_that_was_free_before_the_step() -> None:
    """Rings that are neighbours are read without copies."""
    made = engine(cache_kind="q8", max_batch_size=4)
    for count in (3, 20, 20):
        made.add_request(text(count, 9), max_new_tokens=count)
    blocks = made._core.scheduler.blocks
    made.step()
    assert blocks.free_rings == [3]
    while len(blocks.free_rings) < 2:
        made.step()
    assert sorted(blocks.free_rings) == [0, 3]
    blocks.free_rings.reverse()
    made.add_request(text(4, 9), max_new_tokens=9)
    made.step()
    assert blocks.free_rings == [3]
