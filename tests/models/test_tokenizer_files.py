"""A tokenizer.json that makes the reader in Rust panic is a damaged file, and an interrupt is an interrupt."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from caramba_fast.models import demo_path, load_tokenizer
from caramba_fast.models.config import CheckpointError


class PanicException(BaseException):
    """A stand-in for pyo3's, which is no Exception and cannot be imported."""


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [(PanicException, CheckpointError), (OSError, CheckpointError)]
    + [(kind, kind) for kind in (KeyboardInterrupt, SystemExit)],
)
def test_what_reading_a_tokenizer_raises(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], wanted: type[BaseException]
) -> None:
    class Reader:
        @staticmethod
        def from_file(path: str) -> None:
            assert Path(path).is_file()
            raise raised("index out of bounds")

    monkeypatch.setattr(tokenizers, "Tokenizer", Reader)
    with pytest.raises(wanted, match="index out of bounds"):
        load_tokenizer(demo_path())
