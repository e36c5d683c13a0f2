"""Facts in a long context, asked for in a chat: 120 questions, answered exactly or not.

A context is held-out text that contains lines such as ``The access code of Martin is 48213.``; a question asks for one
of them. Names and numbers are drawn with a seed. Several questions share a context and its cache. The questions are
easy enough for a model of 0.5B parameters to answer most of them from an fp16 cache.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from caramba_fast.bench.real.text import BLANK, passages
from caramba_fast.infer.tokenizer import TextTokenizer

#: Tokens of each context, roughly, and facts in each: 4 × 30 questions.
CONTEXTS, FACTS = (2000, 2650, 3300, 4000), 30
NEW_TOKENS = 16
_WORDS = """Adrian Beatrice Clement Dorothy Edmund Felicity Gilbert Harriet Isidore Josephine Kenneth Lavinia
    Malcolm Nathalie Oswald Penelope Quentin Rosalind Sebastian Theodora Ulysses Veronica Winston Xavier
    Yolanda Zachary Arabella Bertrand Cordelia Desmond Eleanor Frederick Georgina Humphrey Ingrid
    Jeremiah Katherine Leopold Marianne Nicholas Octavia Percival Roderick Sylvester Tabitha Valentine
    Wilhelmina Augustus Bernadette Cornelius"""
NAMES = _WORDS.split()
ASK = (
    "{context}\n\nAnswer from the text above. What is the access code of {name}? "
    "Reply with the number only."
)
FACT = "The access code of {name} is {code}."
NUMBER = re.compile(r"\d[\d,]*")


@dataclass(frozen=True)
class Context:
    """A text with hidden facts, each a (name, code) to ask for."""

    text: str
    facts: tuple[tuple[str, str], ...]


def contexts(tokenizer: TextTokenizer, facts: int = FACTS, seed: int = 0) -> list[Context]:
    """A context of each length of `CONTEXTS`, alternately of English and of documentation."""
    rng = random.Random(seed)
    kinds = ("English", "documentation")
    found = []
    for index, size in enumerate(CONTEXTS):
        source = passages(kinds[index % 2], "held out", 32)[17 + index]
        names = rng.sample(NAMES, facts)
        pairs = [(name, str(rng.randrange(10000, 100000))) for name in names]
        lines = [FACT.format(name=name, code=code) for name, code in pairs]
        room = size - len(tokenizer.encode("\n".join(lines), special=False))
        filler = tokenizer.decode(tokenizer.encode(source[: 16 * room], special=False)[:room])
        rng.shuffle(pairs)
        found.append(Context(_mixed(filler, lines), tuple(pairs)))
    return found


def _mixed(filler: str, lines: list[str]) -> str:
    """Lines spread evenly over a text, each a paragraph."""
    words = filler.split(" ")
    step = len(words) / len(lines)
    parts = (
        f"{' '.join(words[round(i * step) : round((i + 1) * step)])}{BLANK}{line}"
        for i, line in enumerate(lines)
    )
    return BLANK.join(parts)


def prompts(tokenizer: TextTokenizer, context: Context) -> tuple[tuple[int, ...], ...]:
    """Token ids of each question, in the tokenizer's chat template."""
    return tuple(
        tuple(
            tokenizer.chat(
                [{"role": "user", "content": ASK.format(context=context.text, name=name)}]
            )
        )
        for name, _ in context.facts
    )


def is_right(answer: str, code: str) -> bool:
    """Whether the first number of an answer is the code."""
    found = NUMBER.search(answer)
    return found is not None and found[0].replace(",", "") == code
