"""The HTTP server: OpenAI's own client gets what the engine says, and who goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import math
import sys
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402
from support.http_server import NAME, ChattyTokenizer, new_engine, serving, until  # noqa: E402

from caramba_fast.infer import grammar  # noqa: E402
from caramba_fast.infer.logprobs import TokenLogprobs  # noqa: E402
from caramba_fast.models import demo_tokenizer  # noqa: E402
from caramba_fast.serve.http.logprobs import LogprobsWriter, TokenTexts  # noqa: E402
from caramba_fast.serve.http.protocol import Message  # noqa: E402
from caramba_fast.serve.http.server import ServerConfig, _event, create_app  # noqa: E402

PROMPT = "def main():\n    "
CHAT = [{"role": "system", "content": "Write."}, {"role": "user", "content": "a reader"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server():
    engine = new_engine()
    with serving(engine) as address:
        yield address
    assert not engine.problems() and not engine.has_unfinished


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def direct():
    """What the engine itself says."""
    engine = new_engine()

    def said(prompt: Any, **options: Any) -> Any:
        if not isinstance(prompt, str):
            prompt = engine.tokenizer.chat(prompt)
        return engine.generate_batch([prompt], **options)[0]

    return said


# -- what OpenAI's client gets -------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}]
)
def test_a_completion_is_what_the_engine_says(client, direct, sampling):
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, **sampling)
    wanted = direct(PROMPT, max_new_tokens=12, **sampling)
    assert found.choices[0].text == wanted.texts[0]
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
        len(wanted.prompt_ids),
        12,
    )
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=12,
            stream=True,
            stream_options=options,
            **sampling,
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == wanted.texts[0]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12 and len(chunks) > 5
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])


def test_one_prompt_may_stand_in_a_list(client, direct):
    wanted = direct(PROMPT, max_new_tokens=12, temperature=0.0)
    for prompt in ([PROMPT], [list(wanted.prompt_ids)]):
        found = client.completions.create(model=NAME, prompt=prompt, **GREEDY)
        assert found.choices[0].text == wanted.texts[0]


def test_defaults_that_clients_send_ask_for_nothing(client, direct):
    wanted = direct(PROMPT, max_new_tokens=12, temperature=0.0).texts[0]
    found = client.completions.create(
        model=NAME, prompt=PROMPT, best_of=1, echo=False, n=1, logit_bias={}, stop=[], **GREEDY
    )
    assert found.choices[0].text == wanted
    options = {"include_usage": True, "include_obfuscation": False}
    chunks = client.completions.create(
        model=NAME, prompt=PROMPT, stream=True, stream_options=options, **GREEDY
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == wanted


def test_ids_end_an_answer_but_not_before_its_least_length(client, direct):
    output = direct(PROMPT, max_new_tokens=12, temperature=0.0)
    (first, second, *_), *_ = output.answers

    def ended(least: int, **stop: Any) -> tuple[int, str]:
        more = {**({} if "stop" in stop else stop), "min_tokens": least}
        given = {name: x for name, x in stop.items() if name == "stop"}
        found = client.completions.create(
            model=NAME, prompt=PROMPT, **GREEDY, **given, extra_body=more
        )
        return found.usage.completion_tokens, found.choices[0].finish_reason

    assert first != second and ended(1, stop_token_ids=[second]) == (2, "stop")
    assert ended(8, stop_token_ids=[second])[0] >= 8
    text = new_engine().tokenizer.decode([second])
    assert ended(0, stop=text) == (2, "stop")
    assert ended(2, stop=text)[0] > 2, "a text within the least length ends nothing"


def test_what_a_body_says_holds_whatever_the_engine_has_for_its_requests():
    engine = new_engine(do_sample=False, max_new_tokens=8, ignore_eos=True)
    with serving(engine) as address:

        def ask(**body: Any) -> Any:
            return httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, **body}).json()

        assert ask(max_tokens=64)["usage"]["completion_tokens"] == 64
        texts = [ask(max_tokens=12, temperature=1.0, seed=seed) for seed in range(4)]
        assert len({x["choices"][0]["text"] for x in texts}) > 1
        assert len(ask(n=2, temperature=1.0, max_tokens=4)["choices"]) == 2
        drawn = [
            ask(max_tokens=12, temperature=1.0, seed=s)["choices"][0]["text"] for s in range(4)
        ]
        assert len(set(drawn)) > 1
        plain = [ask(max_tokens=12)["choices"][0]["text"] for _ in range(2)]
        assert plain[0] == plain[1], "what it leaves open is the engine's"


def test_answers_and_stops_that_the_engine_has_for_its_requests(direct):
    """How many texts there are, and what is left out of them, is the request's, whoever said it."""
    whole = direct(PROMPT, max_new_tokens=40, temperature=0.0).texts[0]
    stop = whole[15:20]
    engine = new_engine(num_return_sequences=2, stop=(stop,), temperature=1.0, top_k=1)
    with serving(engine) as address:
        body = {"prompt": PROMPT, "max_tokens": 40}
        for streamed in (False, True):
            found = httpx.post(f"{address}/v1/completions", json={**body, "stream": streamed})
            assert found.status_code == 200, found.text
            texts = ["", ""]
            lines = found.text.splitlines() if streamed else [f"data: {found.text}"]
            for line in lines:
                for choice in json.loads(line[6:])["choices"] if "{" in line else ():
                    texts[choice["index"]] += choice["text"]
            assert texts == [whole[: whole.index(stop)]] * 2
        refused = httpx.post(f"{address}/v1/completions", json={**body, "temperature": 0})
        assert refused.status_code == 400
        assert "n, which is not given, is 2 on this server" in refused.json()["error"]["message"]


def test_text_that_comes_by_several_tokens_ends_where_it_does_token_by_token():
    """What drafted tokens bring before the last of them, within the least length, ended nothing."""
    body = {"prompt": "    x = 1\n" * 20, "max_tokens": 60, "temperature": 0, "stop": "t_t"}
    said = []
    for lookup in (0, 6):
        engine = new_engine(lookup_tokens=lookup)
        with serving(engine) as address:
            bodies = [{**body, "min_tokens": least} for least in range(20, 32, 2)]
            found = [httpx.post(f"{address}/v1/completions", json=one).json() for one in bodies]
        said.append([(x["choices"][0]["text"], x["usage"]["completion_tokens"]) for x in found])
    assert engine.metrics.accepted > 50
    assert said[1] == said[0]
    assert len({text for text, _ in said[0]}) > 2


@pytest.mark.parametrize(
    ("route", "given"), [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": CHAT})]
)  # fmt: skip
def test_reading_the_text_counts_towards_the_time_of_a_request(monkeypatch, route, given):
    encode = ChattyTokenizer.encode

    def slowly(*args: Any, **options: Any) -> list[int]:
        time.sleep(0.5)
        return encode(*args, **options)

    engine = new_engine(max_time=0.4)
    with serving(engine) as address:
        monkeypatch.setattr(ChattyTokenizer, "encode", slowly)
        found = httpx.post(f"{address}/v1/{route}", json={**given, "n": 3}).json()
        streamed = httpx.post(f"{address}/v1/{route}", json={**given, "n": 3, "stream": True}).text
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 3
    assert found["usage"]["completion_tokens"] == 0
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    ends = [
        (event["choices"][0]["index"], event["choices"][0]["finish_reason"]) for event in events
    ]
    assert ends == [(0, "length"), (1, "length"), (2, "length")]


def test_arguments_of_calls_are_laid_out_as_json():
    def laid_out(arguments: Any) -> Any:
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        message = Message(role="assistant", content=None, tool_calls=[call])
        return message.laid_out()["tool_calls"][0]["function"]["arguments"]

    assert laid_out('{"city": "Ulm"}') == {"city": "Ulm"}
    assert laid_out("no JSON") == "no JSON" and laid_out({"a": 1}) == {"a": 1}
    assert laid_out("[" * 10**5) == "[" * 10**5


def test_a_message_that_only_calls_tools_has_an_empty_content():
    """transformers removes None, and ChatML templates join the content of every message to text."""
    transformers = pytest.importorskip("transformers", reason="a template needs it")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(),
        chat_template="{% for m in messages %}{{ m.role + ':' + m['content'] + ';' }}{% endfor %}",
    )
    message = Message(role="assistant", content=None, tool_calls=[{"id": "1"}]).laid_out()
    assert tokenizer.apply_chat_template([message], tokenize=False) == "assistant:;"


def test_a_template_that_joins_arguments_to_text_gets_them_as_text():
    engine = new_engine()
    chat = engine.tokenizer.chat

    def joins(messages: Any, **options: Any) -> list[int]:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        said = "".join("json " + call["function"]["arguments"] for call in calls)
        return [*chat([{"role": "user", "content": said}])]

    engine.tokenizer.chat = joins
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with serving(engine) as address:
        found = httpx.post(
            f"{address}/v1/chat/completions", json={"messages": asked, "max_tokens": 2}
        )
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["prompt_tokens"] == len(
        chat([{"role": "user", "content": 'json {"a": 1}'}])
    )


def test_arguments_that_a_template_cannot_write_are_refused():
    """They come as text, and only the template finds how deep they are nested."""
    transformers = pytest.importorskip("transformers", reason="a template needs it")
    template = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson(indent=1) }}{% endfor %}"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(), chat_template=template
    )
    arguments = '{"a":' * 900 + "1" + "}" * 900
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 2}
    before = sys.getrecursionlimit()  # compilers raise it
    with serving(new_engine(tokenizer=tokenizer)) as address:
        sys.setrecursionlimit(1000)
        try:
            found = httpx.post(f"{address}/v1/chat/completions", json=body)
        finally:
            sys.setrecursionlimit(before)
    assert found.status_code == 400
    assert "the chat template refuses the messages" in found.json()["error"]["message"]


def test_the_model_is_found_by_its_name(client):
    assert client.models.retrieve(NAME) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


def test_a_chat_is_laid_out_answered_and_streamed(client, direct):
    wanted = direct(CHAT, max_new_tokens=12, temperature=0.0)
    found = client.chat.completions.create(model=NAME, messages=CHAT, **GREEDY)
    assert found.choices[0].message.content == wanted.texts[0]
    assert found.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted.texts[0]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "reader"}]
    again = client.chat.completions.create(
        model=NAME, messages=[CHAT[0], {"role": "user", "content": parts}], **GREEDY
    )
    assert again.choices[0].message.content == wanted.texts[0]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with_tool = client.chat.completions.create(model=NAME, messages=CHAT, tools=[tool], **GREEDY)
    without = client.chat.completions.create(
        model=NAME, messages=CHAT, tools=[tool], tool_choice="none", **GREEDY
    )
    assert with_tool.usage.prompt_tokens > without.usage.prompt_tokens == found.usage.prompt_tokens


def test_a_chat_without_a_limit_goes_on_to_the_end_of_what_there_is_room_for():
    """Of the pool, where it holds fewer tokens than max_seq_len."""
    engine = new_engine(num_pages=2, page_size=64, max_batch_size=1)
    with serving(engine) as address:
        found = httpx.post(
            f"{address}/v1/chat/completions",
            json={"messages": CHAT, "temperature": 0, "ignore_eos": True},
            timeout=30,
        )
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["total_tokens"] == 128
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["max_model_len"] == 128


def test_several_answers_stops_and_penalties(client, direct):
    several = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "n": 3}
    found = client.completions.create(model=NAME, prompt=PROMPT, **several)
    wanted = direct(PROMPT, temperature=1.0, seed=3, max_new_tokens=8, num_return_sequences=3).texts
    assert [choice.text for choice in found.choices] == wanted
    streamed = ["", "", ""]
    for chunk in client.completions.create(model=NAME, prompt=PROMPT, stream=True, **several):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == wanted
    whole = direct(PROMPT, max_new_tokens=40, temperature=0.0).texts[0]
    stop = whole[15:20]
    ended = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]
    )
    assert ended.choices[0].text == whole[: whole.index(stop)]
    assert ended.choices[0].finish_reason == "stop"
    pieces = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in pieces) == whole[: whole.index(stop)]
    varied = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, frequency_penalty=2.0, presence_penalty=2.0
    )  # fmt: skip
    tokens = direct(
        PROMPT, max_new_tokens=40, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert varied.choices[0].text == tokens.texts[0] != whole
    assert len(set(tokens.generated_tokens)) > len(
        set(direct(PROMPT, max_new_tokens=40, temperature=0.0).generated_tokens)
    )


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}]
)
def test_logprobs_are_those_of_the_engine_streamed_or_not(client, direct, sampling):
    wanted = direct(PROMPT, max_new_tokens=8, logprobs=2, **sampling)
    told = wanted.logprobs[0]
    asked = dict(model=NAME, prompt=PROMPT, max_tokens=8, logprobs=2, **sampling)
    found = client.completions.create(**asked).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx([one.logprob for one in told], abs=1e-3)
    assert "".join(found.logprobs.tokens) == found.text == wanted.texts[0]
    offsets = [len("".join(found.logprobs.tokens[:place])) for place in range(8)]
    assert found.logprobs.text_offset == offsets
    for token, best in zip(found.logprobs.tokens, found.logprobs.top_logprobs, strict=True):
        assert token in best and 1 <= len(best) <= 3
    tokens, values = [], []
    for chunk in client.completions.create(stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens
            values += chunk.choices[0].logprobs.token_logprobs
    assert tokens == found.logprobs.tokens
    assert values == pytest.approx(found.logprobs.token_logprobs, abs=1e-3)


def test_logprobs_of_a_chat_have_texts_and_bytes(client, direct):
    told = direct(CHAT, max_new_tokens=12, temperature=0.0, logprobs=3).logprobs[0]
    asked = dict(model=NAME, messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    found = client.chat.completions.create(**asked).choices[0]
    content = found.logprobs.content
    assert [one.logprob for one in content] == pytest.approx([o.logprob for o in told], abs=1e-3)
    assert "".join(one.token for one in content) == found.message.content
    for one, wanted in zip(content, told, strict=True):
        assert bytes(one.bytes).decode() == one.token
        assert one.token == one.top_logprobs[0].token  # greedy
        best = [value for _, value in wanted.top]
        assert [each.logprob for each in one.top_logprobs] == pytest.approx(best, abs=1e-3)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    streamed = [
        one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in content]
    alone = client.chat.completions.create(model=NAME, messages=CHAT, logprobs=True, **GREEDY)
    assert alone.choices[0].logprobs.content[0].top_logprobs == []
    assert (
        client.chat.completions.create(model=NAME, messages=CHAT, **GREEDY).choices[0].logprobs
        is None
    )


def test_a_part_of_a_character_has_no_bytes_and_nothing_is_infinite():
    texts = TokenTexts(new_engine().tokenizer)
    writer = LogprobsWriter(texts, chat=True)
    part = next(token for token in range(2048) if "\ufffd" in texts.of(token))
    writer.put(0, [TokenLogprobs(part, -math.inf, ((part, -1.5),))])
    [one] = writer.take(0)["content"]
    assert (one["bytes"], one["logprob"]) == (None, -9999.0)
    assert writer.take(0) is None


def test_answers_fit_the_format_that_is_asked_for(client):
    schema = {
        "type": "object", "properties": {"name": {"enum": ["reader", "writer"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"], "additionalProperties": False,
    }  # fmt: skip
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "one", "schema": schema, "strict": True},
    }
    sampling = {"temperature": 1.0, "seed": 1, "max_tokens": 300, "n": 2}
    found = client.chat.completions.create(
        model=NAME, messages=CHAT, response_format=wanted, **sampling
    )
    for choice in found.choices:
        assert set(json.loads(choice.message.content)) == {"name", "ok"}
        assert choice.finish_reason == "stop"
    pieces = client.completions.create(
        model=NAME, prompt=PROMPT, stream=True, temperature=0, max_tokens=300,
        extra_body={"response_format": {"type": "json_object"}},
    )  # fmt: skip
    assert isinstance(json.loads("".join(c.choices[0].text for c in pieces)), dict)


@pytest.mark.parametrize(
    ("response_format", "said"),
    [
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}, "uniqueItems"),
        ({"type": "yaml"}, "response_format"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_kept_to_is_refused(server, response_format, said):
    body = {"messages": CHAT, "response_format": response_format}
    found = httpx.post(f"{server}/v1/chat/completions", json=body)
    assert found.status_code == 400 and said in found.json()["error"]["message"]


def test_without_its_library_a_format_is_refused_with_what_to_install(server, monkeypatch):
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    body = {"messages": CHAT, "response_format": {"type": "json_object"}}
    found = httpx.post(f"{server}/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert "pip install llguidance" in found.json()["error"]["message"]


# -- what surrounds ------------------------------------------------------------------------------


def test_models_tokens_health_and_metrics(server, client):
    assert [card.id for card in client.models.list()] == [NAME]
    assert httpx.get(f"{server}/health").status_code == 200
    ids = httpx.post(f"{server}/tokenize", json={"prompt": PROMPT}).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 512
    laid_out = httpx.post(f"{server}/tokenize", json={"messages": CHAT}).json()
    assert laid_out["count"] > ids["count"]
    given_ids = client.completions.create(model=NAME, prompt=ids["tokens"], **GREEDY)
    assert given_ids.usage.prompt_tokens == ids["count"]
    figures = httpx.get(f"{server}/metrics").text
    assert "caramba_fast_new_tokens_total" in figures and "caramba_fast_pages_held" in figures


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("completions", {"prompt": PROMPT, "model": "gpt-4"}, 404, "'demo' is served"),
        ("completions", {"prompt": [True, 5]}, 400, "prompt"),
        ("completions", {"prompt": PROMPT, "max_tokens": True}, 400, "max_tokens=True"),
        ("completions", {"prompt": PROMPT, "temperature": 3}, 400, "temperature"),
        ("completions", {"prompt": PROMPT, "repetition_penalty": 5e-324}, 400, "repetition_penalty"),
        ("completions", {"prompt": PROMPT, "logprobs": 30}, 400, "max_logprobs allows 20"),
        ("completions", {"prompt": PROMPT, "max_tokens": 5000}, 400, "max_seq_len"),
        ("completions", {"prompt": PROMPT, "n": 100}, 400, "max_batch_size"),
        ("completions", {"prompt": [10**6]}, 400, "0 to"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": [PROMPT, PROMPT]}, 400, "2 prompts are in one body; 1 is served"),
        ("completions", {"prompt": [[5, 6], [7]]}, 400, "2 prompts are in one body"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": PROMPT, "min_tokens": 20}, 400, "min_new_tokens"),
        ("completions", {"prompt": PROMPT, "tempreature": 1}, 400, "tempreature is not served"),
        ("completions", {"prompt": PROMPT, "stream_options": {}}, 400, "stream"),
        ("completions", {"prompt": "x" * 100_000}, 400, "characters"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages.0.content: a part has the type 'image_url'; 'text' is served"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400,
         "messages.0.content: it is 3; text, or a list of text parts, is served"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
         "messages.0.content: a part is {'type': 'text'}; an object with the type 'text' and a text"),
        ("completions", {"prompt": PROMPT, "stop": ["a", ""]}, 400, "stop.1: String should have at least 1"),
        ("completions", {"prompt": PROMPT, "stop": 3}, 400, "stop: it is 3; text, or a list of texts"),
        ("completions", {"prompt": PROMPT, "best_of": 2}, 400, "best_of is not served"),
        ("completions", {"prompt": PROMPT, "n": 2, "temperature": 0}, 400, "n is 2 and temperature 0"),
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "x" * 100_000}}]},
         400, "characters"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(server, route, body, status, said):
    found = httpx.post(f"{server}/v1/{route}", json=body)
    assert found.status_code == status
    assert said in found.json()["error"]["message"]


def test_a_body_that_is_no_json_is_told_where(server):
    address, body = f"{server}/v1/completions", b'{"prompt": ,}'
    found = httpx.post(address, content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert "no valid JSON at character 11" in found.json()["error"]["message"]
    found = httpx.post(address, content=b'{"prompt": "a"}')
    assert found.status_code == 400
    assert "a JSON object is needed, with Content-Type" in found.json()["error"]["message"]


@pytest.mark.parametrize("chat", [False, True])
def test_null_leaves_a_field_to_its_default(server, chat):
    asked = {"messages": CHAT} if chat else {"prompt": PROMPT}
    route = f"{server}/v1/{'chat/' if chat else ''}completions"
    wanted = httpx.post(route, json={**asked, "max_tokens": 4, "temperature": 0}).json()
    nothing = dict.fromkeys(
        ("top_p", "n", "stream", "stream_options", "stop", "seed", "logit_bias", "presence_penalty",
         "frequency_penalty", "logprobs", "user", *([] if chat else ["echo", "suffix", "best_of"]))
    )  # fmt: skip
    found = httpx.post(route, json={**asked, **nothing, "max_tokens": 4, "temperature": 0})
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == wanted["choices"]
    assert (
        httpx.post(route, json={**asked, "temperature": None, "max_tokens": 1}).status_code == 200
    )
    assert httpx.post(route, json={**asked, "tempreature": None}).status_code == 400
    assert httpx.post(route, json={**dict.fromkeys(asked), "max_tokens": 1}).status_code == 400


def test_a_route_that_is_not_there_is_an_error_as_clients_expect(server):
    found = httpx.get(f"{server}/v1/images")
    assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"


def test_a_failure_of_the_model_is_told_and_logged(monkeypatch, caplog):
    engine = new_engine()

    def broken(*_: Any) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(engine.model, "forward_ragged", broken, raising=False)
    body = {"prompt": PROMPT}
    with serving(engine) as address:
        found = httpx.post(f"{address}/v1/completions", json=body)
        assert found.status_code == 500 and "no such layer" in found.json()["error"]["message"]
        streamed = httpx.post(f"{address}/v1/completions", json={**body, "stream": True}).text
    assert "no such layer" in streamed and streamed.endswith("data: [DONE]\n\n")
    assert "no such layer" in caplog.text


def test_bodies_have_a_limit_announced_or_not():
    with serving(new_engine(), max_body_bytes=1000) as address:
        large = json.dumps({"prompt": "x" * 2000}).encode()
        head = {"content-type": "application/json"}
        pieces = iter([large[:500], large[500:]])
        for content in (large, pieces):
            found = httpx.post(f"{address}/v1/completions", content=content, headers=head)
            assert found.status_code == 413 and "1000 bytes" in found.json()["error"]["message"]
        assert httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT}).status_code == 200


def test_keys_are_asked_for_and_keep_prefixes_apart():
    prompt = list(range(10, 150))

    def hits(address: str, key: str) -> int:
        found = httpx.post(
            f"{address}/v1/completions", json={"prompt": prompt, "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}"},
        )  # fmt: skip
        return found.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    for shared in (False, True):
        with serving(new_engine(), api_keys=("one", "two"), share_prefixes=shared) as address:
            assert httpx.get(f"{address}/health").status_code == 200
            for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}):
                assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 401
            assert [hits(address, key) for key in ("one", "one", "two")] == [0, 128, 128 * shared]


# -- load, and those who go away -----------------------------------------------------------------


def test_an_event_is_a_line_to_clients_that_split_at_every_line_end_of_unicode():
    """As httpx' ``iter_lines`` does, and clients built on it."""
    text = "a\u2028b\u2029c\x85d\x0be\r\nf \u6f22\U0001f60a"
    response = httpx.Response(200, content=_event({"text": text}).encode())
    line, *rest = response.iter_lines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text} and not any(rest)


def test_who_goes_away_is_not_answered_any_more():
    engine = new_engine(max_seq_len=2048)
    long = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
    with serving(engine) as address:
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={**long, "stream": True}
        ) as found:
            next(found.iter_lines())
        until(lambda: not engine.has_unfinished, "a stream that was left is cancelled")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=long, timeout=0.5)
        until(lambda: not engine.has_unfinished, "a request nobody waits for is cancelled")
        done = engine.metrics.new_tokens
        assert httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT}).status_code == 200
        assert engine.metrics.new_tokens <= done + 16
        counted = httpx.get(f"{address}/metrics").text
    assert (
        "caramba_fast_cancelled_total 2.0" in counted and "caramba_fast_failed_total 0.0" in counted
    )
    assert not engine.problems() and not engine.metrics.pages_held


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_who_goes_away_while_text_is_sent_is_not_answered_any_more(version):
    """Nothing is left to Python's garbage collector, which may not come by for hours."""
    engine = new_engine(max_seq_len=2048)
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    asked = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    head = [(b"content-type", b"application/json")]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": version}, "method": "POST",
             "path": "/v1/completions", "query_string": b"", "headers": head}  # fmt: skip

    async def go() -> None:
        received, sent, gone = iter([asked]), [], asyncio.Event()

        async def receive() -> Any:
            for message in received:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 4:
                gone.set()
                if version == "2.4":
                    raise OSError("the client is gone")
                await asyncio.sleep(60)  # nobody reads

        app = create_app(engine, ServerConfig(NAME))
        async with app.router.lifespan_context(app):
            with contextlib.suppress(ClientDisconnect):
                await app(scope, receive, send)
            for _ in range(200):
                if not engine.has_unfinished:
                    return
                await asyncio.sleep(0.02)
        raise AssertionError("the request goes on")

    gc.disable()
    try:
        asyncio.run(go())
    finally:
        gc.enable()
    assert engine.metrics.cancelled == 1 and engine.metrics.pages_held == 0


def test_too_many_are_told_to_come_again():
    engine = new_engine(max_batch_size=1, max_waiting=1, max_seq_len=2048)
    long = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with serving(engine) as address:
        found: list[int] = []
        with (
            httpx.stream("POST", f"{address}/v1/completions", json=long) as first,
            httpx.stream("POST", f"{address}/v1/completions", json=long) as second,
        ):
            lines = first.iter_lines()  # to be left is to be cancelled
            next(lines)
            assert second.status_code == 200
            until(lambda: len(engine.under_way) == 2, "both are taken on")
            third = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT})
            found.append(third.status_code)
        assert found == [429] and third.headers["retry-after"] == "1"
        until(lambda: not engine.has_unfinished, "both are cancelled")


def test_many_clients_of_whom_some_leave_lose_nothing(direct):
    engine = new_engine(max_batch_size=4, cache_bytes=2_000_000)
    wanted = {
        seed: direct(PROMPT, max_new_tokens=20, temperature=0.9, seed=seed).texts[0]
        for seed in range(12)
    }
    wrong: list[Any] = []

    def ask(address: str, seed: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.9, "seed": seed}
        if seed % 4 == 3:
            with httpx.stream(
                "POST", f"{address}/v1/completions", json={**body, "stream": True}
            ) as found:
                next(found.iter_lines())
            return
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
        if answer["choices"][0]["text"] != wanted[seed]:
            wrong.append((seed, answer))

    with serving(engine) as address:
        threads = [threading.Thread(target=ask, args=(address, seed)) for seed in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        until(lambda: not engine.has_unfinished, "nothing is left over")
    assert not wrong and not engine.problems() and not engine.metrics.pages_held


def test_requests_under_way_end_when_the_server_is_told_to_stop():
    engine = new_engine(max_seq_len=2048)
    found: list[Any] = []

    def ask(address: str) -> None:
        try:
            found.append(
                httpx.post(
                    f"{address}/v1/completions",
                    json={"prompt": PROMPT, "max_tokens": 60},
                    timeout=30,
                )
            )
        except httpx.HTTPError as error:
            found.append(error)

    with serving(engine) as address:
        thread = threading.Thread(target=ask, args=(address,))
        thread.start()
        until(lambda: engine.has_unfinished, "it is under way")
    thread.join(30)
    assert found and found[0].status_code == 200
    assert not engine.has_unfinished and not engine.problems()


def test_requests_that_are_cut_off_are_told_so():
    """Two requests outlast the time of grace: one that is streamed, and one that waits for its whole answer."""
    engine = new_engine(max_seq_len=4096)
    slow = threading.Event()
    step = engine.step

    def slowly() -> Any:
        slow.wait(0.2)
        return step()

    engine.step = slowly
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    found: list[Any] = []

    def ask(address: str, streamed: bool) -> None:
        try:
            sent = httpx.post(
                f"{address}/v1/completions", json={**body, "stream": streamed}, timeout=60
            )
            found.append((sent.status_code, sent.json()["error"]["message"]))
        except httpx.RemoteProtocolError:
            found.append("cut")

    with serving(engine, grace_s=1) as address:
        threads = [threading.Thread(target=ask, args=(address, s)) for s in (False, True)]
        for thread in threads:
            thread.start()
        until(lambda: engine.metrics.new_tokens > 2, "both are under way")
    for thread in threads:
        thread.join(30)
    slow.set()
    assert (503, "the server is stopping; the request was not answered") in found
    assert len(found) == 2 and not engine.has_unfinished and not engine.problems()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stream",
    "logit_bias", "presence_penalty", "stream_options", "response_format", "cache_salt", "tools", "model", "logprobs",
    "top_logprobs", "repetition_penalty", "frequency_penalty", "ignore_eos", "echo", "tool_choice",
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), st.booleans())
def test_no_body_is_answered_with_500_or_not_at_all(server, fields, chat):
    body = {"max_tokens": 2, **({"messages": CHAT} if chat else {"prompt": PROMPT}), **fields}
    route = "chat/completions" if chat else "completions"
    found = httpx.post(
        f"{server}/v1/{route}", content=json.dumps(body), headers={"content-type": "application/json"}, timeout=30
    )  # fmt: skip
    assert found.status_code in (200, 400, 404), found.text
    if found.status_code != 200:
        assert found.json()["error"]["message"]


@pytest.mark.parametrize("shared", [False, True])
def test_keys_share_prefixes_in_memory_and_on_disk_only_where_they_may(tmp_path, shared):
    """What each of two keys finds of what the first sent, before and after a restart."""
    config = {"api_keys": ("a", "b"), "share_prefixes": shared}
    prompt, found = "def read(path):\n" * 40, []
    for _ in range(2):
        engine = new_engine(prefix_store=tmp_path / "store", max_seq_len=1024)
        with serving(engine, **config) as address:
            for key in ("a", "b", "b"):
                before = engine.metrics
                sent = httpx.post(
                    f"{address}/v1/completions",
                    json={"prompt": prompt, **GREEDY},
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=30,
                )
                assert sent.status_code == 200
                after = engine.metrics
                memory = after.prefix_hit_tokens > before.prefix_hit_tokens
                disk = after.prefix_store_tokens > before.prefix_store_tokens
                found.append("disk" if disk else "memory" if memory else "nothing")
        engine.store.close()
    first = ["nothing", "memory" if shared else "nothing", "memory"]
    assert found == [*first, "disk", "memory" if shared else "disk", "memory"]
    held = b"".join(file.read_bytes() for file in (tmp_path / "store").glob("*.page"))
    assert hashlib.sha256(b"a").hexdigest().encode() not in held, "no key, nor its digest, is kept"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("[" * 100_000, 400),
        (f'{{"prompt": {nested(50_000)}}}', 400),
        ('{"prompt": "\\ud800"}', 400),
        ('{"prompt": "a", "temperature": NaN}', 400),
        (f'{{"prompt": "a", "temperature": {nested(600)}}}', 400),
        (b"\xff\xfe", 400),
        ("", 400),
        (f'{{"prompt": "a", "max_tokens": 1, "metadata": {nested(200)}}}', 200),
    ],
    ids=[
        "open",
        "deep",
        "half a character",
        "nan",
        "deep number",
        "no text",
        "empty",
        "deep and allowed",
    ],
)
def test_odd_bodies_are_answered(server, content, status):
    head = {"content-type": "application/json"}
    found = httpx.post(f"{server}/v1/completions", content=content, headers=head, timeout=30)
    assert found.status_code == status
    assert ("error" in found.json()) == (status != 200)


def test_headers_have_a_limit_and_the_server_goes_on(server):
    assert httpx.get(f"{server}/v1/models", headers={"x": "a" * 10_000}).status_code == 200
    try:
        status = httpx.get(f"{server}/v1/models", headers={"x": "a" * 500_000}).status_code
    except httpx.TransportError:
        status = 400  # it has stopped reading before all was written
    assert status in (400, 431)
    assert httpx.get(f"{server}/v1/models").status_code == 200
