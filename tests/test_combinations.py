"""Every cell of docs/combinations.md: what works is run, what is refused says so."""

from __future__ import annotations

import pytest
from support import combination_ranks
from support.combinations import COLUMNS, KINDS, PAGE, REFUSED, page
from support.distributed_ranks import Ranks

HERE = {name: check for name, check in COLUMNS.items() if name != combination_ranks.COLUMN}
_ranks: dict[str, list[str | None]] = {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", HERE)
def test_a_cell(column: str, kind: str) -> None:
    combination_ranks.run(kind, column)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes run the checks of all kinds at the first of these tests."""
    module = combination_ranks.__name__
    if not _ranks:
        names = {each: f"{module}.{combination_ranks.name_of(each)}" for each in KINDS}
        found = Ranks(2, tmp_path_factory.mktemp("ranks"), list(names.values())).finish()
        _ranks.update({each: [rank.get(name) for rank in found] for each, name in names.items()})
    assert _ranks[kind] == ["ok", "ok"]


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run PYTHONPATH=tests python -m support.combinations"
    )
    assert set(REFUSED) <= {(kind, column) for kind in KINDS for column in COLUMNS}
