"""Files are written whole or not at all, and never take the place of unrelated ones.

Apart from `config`, because benchmarks run where pydantic is not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

#: Age in seconds from which an unlocked temporary file counts as left by a killed writer.
STALE = 60.0


@contextlib.contextmanager
def replacing(
    path: str | Path, *, sweep: bool = True, private: bool = False
) -> Iterator[IO[bytes]]:
    """Atomic write: yields a temporary file that replaces ``path`` once it is complete.

    Permissions of an existing file are kept; a new one with ``private`` is its owner's alone. If the path is a symbolic
    link, its target is replaced. With ``sweep``, temporary files left by killed writers of the same file are removed,
    for which the folder is read. Raises OSError, leaving an existing file untouched, if the
    folder is missing, not writable or full, or the path is not a regular file.
    """
    shown, target = Path(path), Path(os.path.realpath(path))
    try:
        mode = _mode_of(target)
        if sweep:
            _remove_stale(target)
    except OSError as error:
        raise _cannot_write(shown, error) from error
    partial = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        try:  # an interrupt may come as soon as the file is there
            handle = os.open(
                partial,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                0o666 if mode is None and not private else 0o600,
            )
            with os.fdopen(handle, "wb") as stream:
                _hold(stream)
                if mode is not None:
                    os.fchmod(stream.fileno(), mode)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(shown, error) from error


def check_regular(path: Path) -> None:
    """Raises FileExistsError if a folder, a device or a pipe is at ``path``."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise FileExistsError(f"{path} is {what}; the name of a file is needed")


def _mode_of(target: Path) -> int | None:
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise OSError(f"it is {what}")
    return stat.S_IMODE(found.st_mode)


def _cannot_write(path: Path, error: OSError) -> OSError:
    return type(error)(
        error.errno, f"cannot write {path}: {error.strerror or error}; what was there is untouched"
    )


def _hold(stream: IO[bytes]) -> None:
    """Locks a temporary file for as long as it is open and this process lives."""
    try:
        import fcntl  # noqa: PLC0415 - POSIX
    except ModuleNotFoundError:
        return
    fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_stale(target: Path) -> None:
    """Removes temporary files left by killed writers of ``target``: old ones that no process holds a lock on."""
    try:
        import fcntl  # noqa: PLC0415 - POSIX
    except ModuleNotFoundError:
        return
    name = re.compile(rf"\.{re.escape(target.name)}\.[A-Za-z0-9_-]+\.part")
    for entry in os.scandir(target.parent):
        if not name.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        found = entry.stat(follow_symlinks=False)
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < STALE:
            continue
        with (
            contextlib.suppress(OSError),
            Path(entry.path).open("rb") as file,
        ):  # held, or just gone
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(entry.path).unlink(missing_ok=True)


def check_replaceable(
    path: str | Path, what: str, is_one: Callable[[Path], bool], *, force: bool = False
) -> None:
    """Raises FileExistsError unless there is no file at ``path``, an empty one, or one of the same kind (``is_one``).

    ``what`` names the kind in the message; ``force`` allows replacing any file.
    """
    file = Path(path)
    check_regular(file)
    if not force and file.exists() and file.stat().st_size and not is_one(file):
        raise FileExistsError(
            f"{file} exists and is no {what} of caramba-fast: it is not replaced; give "
            "another name, or force=True (--force)"
        )
