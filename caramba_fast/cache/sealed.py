"""Sealed files: named tensors with metadata, in safetensors format, with a checksum over every byte.

Files are written atomically. Any changed bit, in header or tensors, is detected before anything is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from caramba_fast.config.files import parse_json, shown
from caramba_fast.writing import check_regular, replacing

#: The only key of the metadata. Its value is JSON that begins with the checksum, so that it can be located.
KEY = "caramba_fast"
_BEGIN = f'{{"__metadata__":{{"{KEY}":'.encode()
_FRONT, _EMPTY = b'\\"checksum\\":\\"', b"0" * 64


class SealedFileError(ValueError):
    """A file of the wrong kind, or damaged; the message says which and how."""


class Sealed(NamedTuple):
    """The contents of a sealed file: metadata (JSON values), and tensors by name, on the CPU."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]


def write_sealed(
    path: str | Path, what: str, version: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:  # fmt: skip
    """Writes a file, replacing an existing one.

    Args:
        path: the file.
        what: the kind of file, which readers have to name.
        version: format version of that kind.
        about: metadata (JSON values).
        tensors: by name, on any device.

    Raises:
        OSError: it cannot be written; an existing file is untouched.
    """
    data = sealed(what, version, about, tensors)
    with replacing(path) as stream:
        stream.write(data)


def sealed(
    what: str, version: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> bytearray:
    """The bytes of such a file."""
    from safetensors.torch import save  # noqa: PLC0415 - only files need it

    metadata = {"checksum": _EMPTY.decode(), "what": what, "version": version, "about": dict(about)}
    text = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
    whole = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    data = bytearray(save(whole, {KEY: text}))
    place = _place(data)
    data[place : place + len(_EMPTY)] = _checksum(data, place)
    return data


def _place(data: bytes | bytearray) -> int:
    """Offset of the checksum in the header; -1 if it has none."""
    place = data.find(_FRONT, 8, 8 + _header_size(data))
    return -1 if place < 0 else place + len(_FRONT)


def _header_size(data: bytes | bytearray) -> int:
    return int.from_bytes(data[:8], "little")


def _checksum(data: bytes | bytearray, place: int) -> bytes:
    """SHA-256 of all bytes, with the checksum itself replaced by zeros."""
    found, view = hashlib.sha256(), memoryview(data)
    for part in (view[:place], _EMPTY, view[place + len(_EMPTY) :]):
        found.update(part)
    return found.hexdigest().encode()


def read_sealed(path: str | Path, what: str, version: int) -> Sealed:
    """Reads a file of the kind ``what``; ``version`` is the newest supported, older ones are returned unconverted.

    Raises:
        SealedFileError: another kind of file, a newer version, a truncated file, or any changed bit.
        OSError: it cannot be read.
    """
    check_regular(Path(path))
    with Path(path).open("rb") as stream:
        # A file of another kind, such as a model's weights, may be too large to be read whole.
        if not _BEGIN.startswith(stream.read(8 + len(_BEGIN))[8:]):
            raise SealedFileError(f"{path} is no {what} of caramba-fast")
        stream.seek(0)
        data = stream.read()
    try:
        return _opened(data, what, version)
    except SealedFileError as error:
        raise SealedFileError(f"{path} {error}") from None


def is_sealed(path: str | Path, what: str) -> bool:
    """Whether a file claims to be of this kind; its checksum is not verified."""
    with Path(path).open("rb") as stream:
        start = stream.read(8)
        front = stream.read(min(_header_size(start), 2**20))
    return f'\\"what\\":\\"{what}\\"'.encode() in front and _FRONT in front


def _opened(data: bytes, what: str, version: int) -> Sealed:
    from safetensors import SafetensorError  # noqa: PLC0415 - only files need it
    from safetensors.torch import load  # noqa: PLC0415

    size, place = _header_size(data), _place(data)
    metadata, end = _metadata(data[8 : 8 + size])
    if place < 0 or metadata.get("what") != what:
        if len(data) < 8 + size and data[8:].startswith(_BEGIN):
            raise SealedFileError(f"was cut short: it ends within its header of {size} bytes")
        raise SealedFileError(f"is no {what} of caramba-fast")
    found = metadata.get("version")
    if type(found) is int and found > version:
        raise SealedFileError(
            f"is a {what} of format version {shown(found)}; this version of caramba-fast reads up to {version}"
        )
    if len(data) < 8 + size + end:
        raise SealedFileError(f"was cut short: it has {len(data)} of {8 + size + end} bytes")
    if data[place : place + len(_EMPTY)] != _checksum(data, place):
        raise SealedFileError(
            "is damaged: its bytes do not have the checksum they were written with, so that some were lost or changed"
        )
    about = metadata.get("about")
    if type(found) is not int or found < 1 or not isinstance(about, dict):
        raise SealedFileError(f"has version {shown(found)} and no such contents")
    try:
        return Sealed(about, load(data))
    except (SafetensorError, ValueError, KeyError, AssertionError) as error:
        raise SealedFileError(f"holds no tensors that can be read: {shown(error)}") from error


def _metadata(header: bytes) -> tuple[dict[str, Any], int]:
    """Our metadata in a header, and the byte size of its tensors; ({}, 0) if there is none."""
    try:
        entries = parse_json(header)
        found = parse_json(entries.pop("__metadata__")[KEY], finite=True)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}, 0
    return (found, end) if isinstance(found, dict) else ({}, 0)
