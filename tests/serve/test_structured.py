"""Structured output: whatever a random model would like to say, what it says fits the grammar."""

from __future__ import annotations

import json
import re
from array import array

import pytest
import torch

pytest.importorskip("llguidance", reason="structured output needs the extra serve")

from support.interrupts import count_positions, interrupted_at

from caramba_fast.infer import (
    Generator,
    SpeculativeConfig,
    SpeculativeGenerator,
    grammar,
)
from caramba_fast.models import Transformer, demo_tokenizer
from caramba_fast.models.config import ModelConfig
from caramba_fast.serve import Engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "count", "kinds"],
    "additionalProperties": False,
}
LONG = {"max_new_tokens": 480, "max_seq_len": 1024}


@pytest.fixture(scope="module")
def model():
    """A random model over the tokens of the demo models; it has never seen JSON."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    return Transformer(config).eval().requires_grad_(False)


def check(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "count", "kinds"}
    assert len(found["name"]) <= 8 and 0 <= found["count"] <= 99
    assert len(found["kinds"]) <= 2 and set(found["kinds"]) <= {"a", "b"}


@pytest.mark.parametrize("lookup", [0, 3])
def test_every_answer_of_an_engine_is_json_of_the_schema(model, lookup):
    engine = Engine(
        model,
        cache_kind="q4",
        tokenizer=demo_tokenizer(),
        lookup_tokens=lookup,
        num_pages=64,
        **LONG,
    )
    free = engine.add_request("def f(", max_new_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    asked = {
        engine.add_request(
            "def f(", temperature=1.0, seed=seed, num_return_sequences=2,
            structured_outputs={"json": SCHEMA},
        )
        for seed in range(0, 8, 2)
    }  # fmt: skip
    outputs = {e.request_id: e.output for e in engine if e.output is not None}
    texts = [text for name in asked for text in outputs[name].texts]
    for text in texts:
        check(text)
    assert len(set(texts)) == 8  # sampled, not forced
    assert len(outputs[free].generated_tokens) == 40
    assert {reason for name in asked for reason in outputs[name].finish_reasons} == {"eos"}


def test_generators_with_and_without_drafts_keep_to_it(model):
    tokenizer = demo_tokenizer()
    prompts = [tokenizer.encode(text).ids for text in ("def f(", "class A")]
    settings = {"cache_kind": "q8", "structured_outputs": {"json": SCHEMA}, **LONG}
    for generator in (
        Generator(model, tokenizer=tokenizer, seed=3, return_dict=True, **settings),
        SpeculativeGenerator(
            model,
            tokenizer=tokenizer,
            config=SpeculativeConfig(seed=3, return_dict=True, **settings),
        ),
    ):
        found = generator.generate(prompts)
        width = max(map(len, prompts))
        for row, new in zip(found.sequences.tolist(), found.new_tokens, strict=True):
            check(tokenizer.decode(row[width : width + new]))


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": "[a-c]{3}-[0-9]{2,4}"}, re.compile("[a-c]{3}-[0-9]{2,4}").fullmatch),
        ({"grammar": 'start: "yes" | "no"'}, {"yes", "no"}.__contains__),
    ],
)
def test_other_grammars(model, asked, fits):
    engine = Engine(model, tokenizer=demo_tokenizer(), num_pages=64, **LONG)
    # Any object may be as long as its model likes; this bias makes it short.
    bias = {demo_tokenizer().token_to_id("}"): 8.0, 1: 8.0}
    outputs = engine.generate_batch(
        ["def f("] * 3, structured_outputs=asked, seed=2, logit_bias=bias
    )
    assert all(fits(output.texts[0]) for output in outputs)


@pytest.mark.parametrize("drafts", [{}, {"lookup_tokens": 3}])
def test_a_complete_answer_ends_although_it_is_shorter_than_the_least(model, drafts):
    """Where a longer one fits, it is written."""
    engine = Engine(model, tokenizer=demo_tokenizer(), max_seq_len=512, **drafts)
    settings = {"max_new_tokens": 250, "temperature": 1.0, "seed": 3}
    for regex, least, fewest in (("abc", 10, 1), ("(ab){0,200}", 20, 20)):
        out = engine.generate_batch(
            ["x = "], structured_outputs={"regex": regex}, min_new_tokens=least, **settings
        )[0]
        assert out.finish_reasons == ["eos"] and re.fullmatch(regex, out.texts[0])
        assert len(out.generated_tokens) > fewest  # the end is one of them


def test_an_answer_ends_where_its_draft_would_go_on_and_nothing_could(model):
    """The prompt goes on after its end of text; behind that of the answer no token is left to choose."""
    tokenizer = demo_tokenizer()
    word = tokenizer.encode("abababab").ids
    given = {
        "temperature": 0.0, "structured_outputs": {"regex": "(ab){4}"}, "bad_words_ids": ((1, 1),)
    }  # fmt: skip
    for lookup in (0, 7):
        engine = Engine(model, tokenizer=tokenizer, num_pages=64, lookup_tokens=lookup, **LONG)
        (output,) = engine.generate_batch([[*word, 1, 5] * 2], **given)
        assert (output.generated_tokens, output.error) == ([*word, 1], None)
    assert engine.metrics.accepted == len(word) - 1


@pytest.mark.parametrize("size", [2040, 2048, 2100])
def test_model_and_tokenizer_may_have_more_ids_than_the_other(size):
    """Logits are padded, and tokens are added to tokenizers that their models never say."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    made = Transformer(config).eval().requires_grad_(False)
    assert demo_tokenizer().get_vocab_size() == 2048
    given = {"tokenizer": demo_tokenizer(), "structured_outputs": {"json": SCHEMA}, **LONG}
    check(
        Engine(made, num_pages=64, **given).generate_batch(["def f("], temperature=0.0)[0].texts[0]
    )
    found = Generator(made, return_dict=True, temperature=0.0, **given).generate(["def f("])
    check(demo_tokenizer().decode(found.sequences[0, -found.new_tokens[0] :].tolist()))


def letters_after(model):
    """A function: which of the letters a to c and the end may follow letters of "ab*c"."""
    tokenizer = demo_tokenizer()
    config = Generator(model, tokenizer=tokenizer, structured_outputs={"regex": "ab*c"}).config
    made = grammar.grammar_of(config, tokenizer, 2048, frozenset({1}))
    ids = {text: tokenizer.token_to_id(text) for text in "abc"}

    class Row:
        start = 1

    def allowed(*texts: str) -> set[str]:
        row = Row()
        tokens = [5, *(1 if text == "end" else ids[text] for text in texts)]
        row.tokens = array("q", tokens)
        scores = torch.zeros(2048)
        made.mask(scores, row, 0)
        left = {1: "end", **{token: text for text, token in ids.items()}}
        return {left[i] for i in scores.isfinite().nonzero().flatten().tolist() if i in left}

    return allowed


def test_a_row_may_take_tokens_back(model):
    """Drafts are pushed and popped, interrupted steps are undone: what may follow is that of the tokens there are."""
    allowed = letters_after(model)
    assert allowed() == {"a"}
    assert allowed("a", "b", "c") == {"end"}
    assert allowed("a", "b", "c", "end") == {"end"}
    assert allowed("a") == {"b", "c"}
    assert allowed("a", "b", "b") == {"b", "c"}
    assert allowed() == {"a"}
    with pytest.raises(ValueError, match="structured_outputs"):
        allowed("b")


def test_an_interrupt_while_a_row_is_read_changes_nothing(model):
    """It may come between a token and the note that it was read."""
    allowed = letters_after(model)

    def read():
        allowed("a", "b")

    allowed()  # from then on there is a row
    positions = count_positions(read, grammar.__file__)
    for position in range(positions):
        allowed()
        assert interrupted_at(position, read, grammar.__file__)
        assert allowed("a", "b") == {"b", "c"}, position


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "nonsense"}}, "nonsense"),
        ({"json": "{"}, "structured_outputs"),
        ({"json": {"$ref": "#"}}, "structured_outputs"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "http://127.0.0.1/schema"),
        ({"json": {"enum": ["a" * 70_000]}}, "max_structure_chars allows 65536"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: 'a"}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "json_schema and regex"),
        ({}, "nothing"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(model, asked, said):
    engine = Engine(model, tokenizer=demo_tokenizer(), num_pages=64, **LONG)
    with pytest.raises(ValueError, match=said):
        engine.add_request("def f(", structured_outputs=asked)
    assert not engine.has_unfinished


def test_what_is_missing_is_named(model, monkeypatch):
    asked = {"structured_outputs": {"json_object": True}}
    with pytest.raises(ValueError, match="there is none"):
        Engine(model, num_pages=64).add_request([5], **asked)
    with pytest.raises(ValueError, match="end-of-sequence"):
        Engine(model, tokenizer=demo_tokenizer(), num_pages=64).add_request(
            "a", ignore_eos=True, **asked
        )
    with pytest.raises(ValueError, match="num_beams is 2"):
        Generator(model, tokenizer=demo_tokenizer(), num_beams=2, **asked)
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="llguidance: pip install llguidance"):
        Generator(model, tokenizer=demo_tokenizer(), **asked)


def test_a_grammar_is_compiled_once_however_many_answers_it_has(model, monkeypatch):
    """Compiling may take a second, and rows begin within a step that others wait for."""
    import llguidance

    matcher, made = llguidance.LLMatcher, []

    class Counted:
        grammar_from_json_schema = staticmethod(matcher.grammar_from_json_schema)

        def __new__(cls, *args, **options):
            made.append(args)
            return matcher(*args, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    engine = Engine(model, tokenizer=demo_tokenizer(), **LONG)
    (output,) = engine.generate_batch(
        ["x"], structured_outputs={"json": SCHEMA}, num_return_sequences=3, temperature=1.0, seed=1
    )
    for answer in output.texts:
        check(answer)
    assert len(made) == 1
