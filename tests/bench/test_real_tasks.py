"""Tasks for real models: their scores, and answers that are kept; with the demo model."""

from __future__ import annotations

import time

import pytest
import torch

from caramba_fast.bench.real import agreement, answers, completion, retrieval
from caramba_fast.bench.real.functions import MODULE, PROBLEMS
from caramba_fast.bench.real.kivi import with_kivi
from caramba_fast.cli.quality import Subject, load_subject
from caramba_fast.models.demos import demo_path

# -- scores --------------------------------------------------------------------------------------

#: Right bodies, in the order of the problems.
BODIES = """a + b | n % 2 == 0 | 1 if n < 2 else n * factorial(n - 1)
n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
text[::-1] | text == text[::-1] | sum(c in 'aeiou' for c in text.lower()) | max(values) | list(dict.fromkeys(items))
sum(lists, []) | {w: text.split().count(w) for w in text.split()} | degrees * 9 / 5 + 32
n > 1 and all(n % d for d in range(2, n)) | a if b == 0 else gcd(b, a % b) | sum(map(int, str(n)))
max(low, min(value, high)) | [i * i for i in range(1, n + 1)] | sorted(set(values))[-2] | text.replace(' ', '')
text.title() | sum(x * y for x, y in zip(a, b)) | sorted(a + b) | {v: k for k, v in mapping.items()} | f'{n:b}'
int(text, 2) | items.count(item) | sorted(a.lower()) == sorted(b.lower())
[sum(values[:i + 1]) for i in range(len(values))] | 'Fizz' * (n % 3 == 0) + 'Buzz' * (n % 5 == 0) or str(n)
year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) | [v for v in values if v % 2 == 0]
max(text.split(), key=len) | items[n:] + items[:n] | values.index(target) if target in values else -1
base ** exponent | text.swapcase() | sorted(set(a) & set(b)) | abs(a - b)
(sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) / 2
''.join(chr((ord(c) - 97 + shift) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)"""


def test_every_function_can_be_completed():
    bodies = BODIES.replace("\n", " | ").split(" | ")
    assert len(bodies) == len(PROBLEMS) == 40
    compile(MODULE, "MODULE", "exec")
    for problem, line in zip(PROBLEMS, bodies, strict=True):
        assert completion.passes(problem, f"    return {line}\n\n\ndef other"), problem.head
    assert not any(f"def {problem.head.partition('(')[0]}(" in MODULE for problem in PROBLEMS)


@pytest.mark.parametrize(
    "answer",
    [
        "    return a - b", "    return a +", "    raise SystemExit(0)", "    import os; os._exit(0)",
        "    print('x'); exit()", "    return [0] * 10**10", "",
    ],
)  # fmt: skip
def test_a_wrong_function_does_not_pass(answer):
    assert not completion.passes(PROBLEMS[0], answer)


def test_a_function_that_does_not_end_is_ended():
    began = time.monotonic()
    assert not completion.passes(PROBLEMS[0], "    while True: pass", seconds=0.5)
    assert time.monotonic() - began < 8


def test_what_follows_a_function_is_cut_off():
    assert completion.body("    return 1\n\n\nprint(x)\n\ndef f") == "    return 1\n\n"
    assert completion.body("    return 1") == "    return 1"


@pytest.mark.parametrize(
    ("answer", "right"),
    [("71884", True), (" The code is 71884.", True), ("71,884", True), ("7188", False), ("", False),
     ("718845", False), ("12345, then 71884", False)],
)  # fmt: skip
def test_a_fact_is_the_first_number(answer, right):
    assert retrieval.is_right(answer, "71884") == right


def test_facts_are_in_their_context_once(monkeypatch):
    words = " ".join(map(str, range(3000)))
    monkeypatch.setattr(retrieval, "passages", lambda *_: [words] * 32)
    tokenizer = answers.TextTokenizer.of(demo_path("gqa"))
    found = retrieval.contexts(tokenizer)
    assert len(found) == 4 and sum(len(one.facts) for one in found) == 120
    for one in found:
        for name, code in one.facts:
            assert one.text.count(retrieval.FACT.format(name=name, code=code)) == 1


def test_agreement_ends_with_the_first_difference():
    assert agreement.agreement([1, 2, 3], [1, 2, 4]) == 2
    assert agreement.agreement([1, 2], [1, 2]) == 2
    assert agreement.agreement([1, 2, 3], [1]) == 1
    assert agreement.agreement([], [1]) == 0


def test_what_prompts_share():
    assert answers.shared([[1, 2, 3], [1, 2, 4]]) == 2
    assert answers.shared([[1, 2], [1, 2]]) == 1
    assert answers.shared([[1, 2, 3], [1]]) == 0
    assert answers.shared([[5, 2], [6, 2]]) == 0


# -- answers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Subject:
    return load_subject(str(demo_path("gqa")), "cpu")


def test_answers_behind_a_shared_prompt_are_those_of_each_alone(demo, monkeypatch):
    monkeypatch.setattr(answers, "ROWS", 2)
    tokenizer = answers.TextTokenizer.of(demo.name)
    start = tokenizer.encode("def mean(values):\n    return sum(values) / len(values)\n" * 3)
    ends = ("def f(x):\n", "class A:\n    pass\n\n", "import os\n")
    prompts = tuple((*start, *tokenizer.encode(end)) for end in ends)
    for spec in ("fp32", "q8"):
        found = answers.answers(demo, tokenizer, spec, answers.Group(prompts, 12))
        assert [len(row) for row in found] == [12] * 3
        if spec == "fp32":
            for prompt, row in zip(prompts, found, strict=True):
                assert answers.answers(demo, tokenizer, spec, answers.Group((prompt,), 12)) == [row]


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_reads_what_its_codes_stand_for(demo, bits):
    """However tokens came; the newest are as they were, and of old ones a group has as many values as codes."""
    shape = with_kivi(demo.model, bits).cache_layout[0]
    x = torch.randn(2, 2, shape.n_kv_heads, 400, shape.k_dim // shape.n_kv_heads).half().float()
    found = []
    for cuts in ((400,), (100, 30, 150, 1, 119)):
        cache = shape.new_cache(batch_size=2, max_seq_len=512)
        for part in zip(*(y.split(cuts, dim=2) for y in x), strict=True):
            cache.append(*part)
        found.append(cache.get())
    assert all(map(torch.equal, *found))
    k, v = found[0]
    assert torch.equal(k[:, :, 384:], x[0, :, :, 384:]) and torch.equal(
        v[:, :, 272:], x[1, :, :, 272:]
    )
    for old, given, last in ((k, x[0], 384), (v, x[1], 272)):
        assert not torch.isclose(old[:, :, :last], given[:, :, :last]).all(-1).any()
    channel, token = k[0, 0, 64:96, 3], v[0, 0, 100, :32]
    assert len(channel.unique()) <= 2**bits and len(token.unique()) <= 2**bits
    assert (k - x[0]).abs().max() < 8 / (2**bits - 1) and (v - x[1]).abs().max() < 8 / (2**bits - 1)


def test_answers_through_kivi(demo):
    tokenizer = answers.TextTokenizer.of(demo.name)
    start = tokenizer.encode("def mean(values):\n    return sum(values) / len(values)\n" * 30)
    prompts = tuple((*start, *tokenizer.encode(end)) for end in ("def f(x):\n", "import os\n"))
    two, four, exact = (
        answers.answers(demo, tokenizer, spec, answers.Group(prompts, 12))
        for spec in ("KIVI, 2 bits", "KIVI, 4 bits", "fp16")
    )
    assert all(len(row) == 12 for row in (*two, *four)) and two != exact


def test_answers_are_kept(demo, tmp_path, monkeypatch):
    group = answers.Group(((5, 6, 7), (5, 6, 8)), 3)
    first = answers.AnswerStore(tmp_path, demo).answers("facts", "q8", group)
    with monkeypatch.context() as patch:
        patch.setattr(answers, "answers", None)
        assert answers.AnswerStore(tmp_path, demo).answers("facts", "q8", group) == first
    other = answers.AnswerStore(tmp_path, demo)
    other.answers("facts", "q8", answers.Group(((5, 6, 7), (5, 6, 8)), 4))
    other.answers("facts", "q4", group)
    files = sorted(tmp_path.glob("facts-*.json"))
    assert len(files) == 3
    for file in files:
        file.write_text('{"answers": []}')
    with pytest.raises(ValueError, match="is damaged; remove it"):
        other.answers("facts", "q8", group)
