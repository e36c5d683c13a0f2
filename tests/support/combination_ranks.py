"""The cells of `combinations` that need several ranks: a check for each kind of cache, for `Ranks`."""

from __future__ import annotations

from functools import partial

import pytest
from support.combinations import COLUMNS, KINDS, REFUSED, Row

COLUMN = "tensor parallel"


def name_of(kind: str) -> str:
    return "check_" + "".join(letter if letter.isalnum() else "_" for letter in kind)


def run(kind: str, column: str = COLUMN) -> None:
    """Checks one cell: it works, or is refused with its message."""
    if (kind, column) not in REFUSED:
        COLUMNS[column](Row(kind))
        return
    with pytest.raises((ValueError, TypeError), match=REFUSED[kind, column]):
        COLUMNS[column](Row(kind))


vars().update({name_of(kind): partial(run, kind) for kind in KINDS})
