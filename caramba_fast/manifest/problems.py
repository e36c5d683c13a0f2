"""What is wrong with a manifest, in words: the path of a key, its value, what is allowed."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from caramba_fast.config.files import shown
from caramba_fast.manifest.schema import Manifest

Place = tuple["int | str", ...]
#: More names than this are not listed; the likeliest is still guessed.
MOST_LISTED = 16
#: Wrong keys that are told at once.
MOST_ERRORS = 16
#: pydantic's words for what YAML calls otherwise.
_WORDS = {
    "Input should be a valid tuple": "a list is needed",
    "Input should be a valid dictionary or object to extract fields from": "a mapping is needed",
    "Input should be a valid dictionary or instance of": "a mapping is needed",
    "Tuple should have at least 1 item": "at least 1 item is needed; it is empty",
}


class ManifestError(ValueError):
    """A manifest that cannot be used; the message has the path of every wrong key."""


@contextlib.contextmanager
def at(path: str) -> Iterator[None]:
    """What goes wrong inside is a `ManifestError` that begins with ``path``."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ManifestError(f"{path}: {error}") from error


def problems(error: ValidationError, raw: Any) -> list[str]:
    """One line for every wrong key, without errors that follow from others."""
    found: dict[str, list[str]] = {}
    listed = error.errors()[:MOST_ERRORS]
    places = [item["loc"] for item in listed]
    for item in listed:
        place = item["loc"]
        inner = any(len(other) > len(place) and other[: len(place)] == place for other in places)
        if not (inner and item["type"] == "too_short"):
            key, reason = _problem(item, raw)
            reasons = found.setdefault(key, [])
            reasons += [] if reason in reasons else [reason]
    return [f"{key}: {' or '.join(reasons)}" for key, reasons in found.items()]


def _problem(item: Any, raw: Any) -> tuple[str, str]:
    """(path with value, reason)."""
    place: Place = item["loc"]
    if item["type"] == "extra_forbidden":
        return path_of(place), f"unknown key; {_hint(str(place[-1])[:80], _names_at(place[:-1]))}"
    if item["type"] == "missing":
        return path_of(place), "is missing"
    place, value = _reached(raw, place)
    reason = item["msg"].removeprefix("Value error, ")
    for words, ours in _WORDS.items():
        reason = ours if reason.startswith(words) else reason
    # A reason about several keys of a mapping has their values in it.
    told = "" if isinstance(value, Mapping) or value in ([], ()) else f"={shown(value)}"
    return f"{path_of(place)}{told}", reason


def path_of(place: Place) -> str:
    """``targets[0].runs[1].generate.top_p``."""
    words = ""
    for part in place:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else part
    return shown(words, 300)[1:-1] if len(words) > 300 else words or "the manifest"


def _reached(raw: Any, place: Place) -> tuple[Place, Any]:
    """As far as ``place`` goes in the YAML (pydantic adds the names of alternatives), and what is there."""
    for index, part in enumerate(place):
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return place[:index], raw
    return place, raw


def _hint(name: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, allowed, 1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(allowed) <= MOST_LISTED:
        return f"allowed are {', '.join(allowed)}"
    return f"{len(allowed)} others are known, and none is spelt like it"


def _names_at(place: Place) -> list[str]:
    """Keys allowed in the mapping at ``place``."""
    model: type[BaseModel] = Manifest
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    names = list(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names += [
                name
                for name in field.validation_alias.choices
                if isinstance(name, str) and name not in names
            ]
    return names


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``tuple[Target, ...]`` or ``GenerateConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
