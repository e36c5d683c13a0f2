"""ScoreStore: scores of a measurement, saved in a folder so that an interrupted run can resume.

Each file has the scores of one cache on one batch, is named by a digest of everything its numbers depend on, and
written atomically. ``manifest.json`` describes the measurement; the folder has no other files.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import re
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from caramba_fast.config import cache_configs
from caramba_fast.config.files import read_json, shown
from caramba_fast.quality.compare import Scores
from caramba_fast.quality.identity import digest_of
from caramba_fast.quality.text import Batch
from caramba_fast.writing import replacing

MANIFEST = "manifest.json"
#: Digest of a model's configuration. Folders of earlier versions lack it and are accepted without it.
CONFIG_DIGEST = "config_digest"
#: What zipfile, zlib, lzma and numpy raise for damaged or foreign files.
_DAMAGE = (
    OSError, ValueError, KeyError, EOFError, RuntimeError, SyntaxError, MemoryError, TypeError, IndexError,
    OverflowError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


class ScoreStore:
    """Scores by cache and batch, in memory, or also in ``folder``.

    Args:
        folder: where to save them; created if missing. None keeps them in memory only.
        settings: what all scores in the folder have in common, JSON values.

    Raises:
        ValueError: the folder was made with other settings, which the message names, or its manifest is damaged.
    """

    def __init__(self, folder: str | Path | None, settings: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.lock():
                settings = self._claim(self.folder / MANIFEST, settings)
        self._settings = json.dumps(settings, sort_keys=True)

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Held while scores are looked up, measured and written; other processes that share the folder wait."""
        if self.folder is None:
            return contextlib.nullcontext()
        from filelock import FileLock  # noqa: PLC0415 - only folders need it

        return FileLock(self.folder / ".lock")

    def load(self, spec: str, batch: Batch) -> Scores | None:
        """The scores of ``spec`` on the batch, or None; a damaged file causes a warning and counts as missing."""
        if self.folder is None or not (file := self._file(spec, batch)).is_file():
            return None
        try:
            _check_headers(file, batch.scored)
            with np.load(file, allow_pickle=False) as stored:
                scores = Scores(*(stored[name] for name in Scores.names()))
            shapes = {getattr(scores, name).shape for name in Scores.names()}
            if shapes != {batch.scored}:
                raise ValueError(f"it has scores of shape {shapes}, not {batch.scored}")
        except _DAMAGE as error:
            why = str(error) or type(error).__name__
            warnings.warn(f"{file} is damaged and measured again: {why}", stacklevel=2)
            return None
        return scores

    def save(self, spec: str, batch: Batch, scores: Scores) -> None:
        """Writes the scores atomically."""
        if self.folder is not None:
            with replacing(self._file(spec, batch)) as stream:
                np.savez(stream, **vars(scores))

    def _file(self, spec: str, batch: Batch) -> Path:
        assert self.folder is not None
        parts: list[str | np.ndarray] = [self._settings]
        for stream, config in cache_configs(spec).items():  # what "q4" means may change
            parts.append(f"{stream} {config.model_dump_json()}")
        for array in (batch.ids, batch.positions):
            if array is not None:
                parts += [str(array.shape), array]
        part = "text" if batch.depths is None else "needles"
        words = re.sub(r"[^A-Za-z0-9_=-]+", ".", spec)[:60]
        return self.folder / f"{part}{batch.ids.shape[1]}-{words}-{digest_of(parts, 12)}.npz"

    @staticmethod
    def _claim(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest, or checks that the existing one agrees; returns its content."""
        if not file.exists():
            with replacing(file) as stream:
                stream.write(json.dumps(settings, indent=1).encode() + b"\n")
            return settings
        try:
            there = read_json(file)
            if CONFIG_DIGEST not in there:
                settings = {n: value for n, value in settings.items() if n != CONFIG_DIGEST}
            names = sorted(set(there) | set(settings))
            other = [name for name in names if there.get(name) != settings.get(name)]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is damaged ({error}); remove the folder to start anew"
            ) from error
        if other:
            found = "; ".join(
                f"{n[:40]} is {shown(there.get(n))}, not {shown(settings.get(n))}"
                for n in other[:8]
            )
            raise ValueError(
                f"{file.parent} holds another measurement, whose {found}: give another folder, or remove it"
            )
        return settings


def _check_headers(file: Path, wanted: tuple[int, ...]) -> None:
    """Raises ValueError unless every array's header has the shape ``wanted``, so that no other is allocated."""
    with zipfile.ZipFile(file) as archive:
        for name in Scores.names():
            with archive.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }.get(version)
                if read is None:
                    raise ValueError(f"{name} has version {version}")
                shape, _, dtype = read(member)
                if shape != wanted or dtype.kind not in "biuf" or dtype.itemsize > 8:
                    raise ValueError(f"{name} is {shape} {dtype}, not numbers of shape {wanted}")
