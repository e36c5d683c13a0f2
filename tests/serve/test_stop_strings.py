"""What a server sends of an answer that a stop string ended: all text before it, and nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from hypothesis import given
from hypothesis import strategies as st

from caramba_fast.infer import GenerateConfig
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.stopping import Stopping
from caramba_fast.serve.http.protocol import StopTrimmer


def sent(pieces: Sequence[str], stops: Sequence[Any], least: int = 0) -> Iterator[tuple[str, str]]:
    """What is sent of an answer, whose token i is piece i, and what it has said by then, until it ends."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(pieces[token] for token in ids))
    config = GenerateConfig(stop=stops, min_new_tokens=least)
    stopping, row = Stopping(config, frozenset(), tokenizer, (), 0), TokenSequence()
    row.begin(len(pieces))
    trimmer = StopTrimmer(config.stop_strings)
    for token, piece in enumerate(pieces):
        row.push(token)
        reason = stopping.after(row)
        ending = stopping.stop_text(row) if reason == "stop" else ""
        yield trimmer.put(piece, reason is not None, ending), "".join(pieces[: token + 1])
        if reason is not None:
            return


@pytest.mark.parametrize(
    ("stops", "pieces", "told"),
    [
        (["\n"], ["a", "\n\n"], "a"), (["\n\n", "\n"], ["a", "\n\n"], "a"), (["b"], ["ab", "cbd"], "abc"),
        (["xy"], ["xyx", "yx", "y"], "xyxy"), (["xy", 1], ["axy", ""], "axy"), (["b", 1], ["ab", "cd"], "abcd"),
    ],
)  # fmt: skip
def test_what_ended_an_answer_is_left_out_and_nothing_that_ended_none(stops, pieces, told):
    """Within its least length stop strings end nothing, and stay."""
    assert "".join(text for text, _ in sent(pieces, stops, len(pieces) - 1)) == told


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=20, max_size=20),
)
def test_a_stop_string_ends_the_text_wherever_pieces_are_cut(text, stops, cuts):
    """The engine stops with the piece in which a stop string is complete."""
    pieces = [text[begin:end] for begin, end in pairwise(accumulate(cuts, initial=0))]
    told = seen = ""
    for new, seen in sent(pieces, stops):
        told += new
        assert seen.startswith(told)
    if any(stop in text for stop in stops):
        assert told == seen[: min(seen.find(s) for s in stops if s in seen)]
    else:
        assert told == text


def test_text_of_several_tokens_is_cut_where_the_last_of_them_ended_it():
    """A character that two tokens share comes with the second, and what the first has before it as well."""
    for stop_text, told in (("", "xyeét"), ("t", "xyeé"), ("ét", "xye")):
        trimmer = StopTrimmer(["ye", "t", "ét"])
        assert (
            "".join(map(trimmer.put, ("x", "y", ""))) + trimmer.put("eét", True, stop_text) == told
        )


def test_a_stop_string_with_a_special_token_is_left_out_although_that_is_no_text():
    trimmer = StopTrimmer(["y</s>"])
    assert trimmer.put("x") + trimmer.put("y") + trimmer.put("", True, "y</s>") == "x"
