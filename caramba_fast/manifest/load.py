"""From YAML to a `Manifest`, with errors that say where."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from caramba_fast.manifest.schema import Manifest


class ManifestError(ValueError):
    """A manifest that cannot be used; the message has the path of every wrong key."""


class _Loader(yaml.SafeLoader):
    """YAML without code, and without keys that are given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ManifestError(f"line {line}: the key {key.value!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file.

    Raises:
        FileNotFoundError: there is none.
        ManifestError: it is no YAML, has unknown keys, or settings that are wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; a manifest (a YAML file) is needed")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file} is no UTF-8 text: {error}") from error
    try:
        return read_manifest(text)
    except ManifestError as error:
        raise ManifestError(f"{file}: {error}") from error


def read_manifest(text: str) -> Manifest:
    """The manifest in a text.

    Raises:
        ManifestError: as `load_manifest`.
    """
    try:
        raw = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ManifestError(f"no valid YAML: {error}") from error
    if not isinstance(raw, Mapping):
        raise ManifestError(f"a {type(raw).__name__}; a mapping with the key 'targets' is needed")
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        raise ManifestError("; ".join(_problems(error, raw))) from error


def _problems(error: ValidationError, raw: Any) -> Iterator[str]:
    """One line for every wrong key: its path, its value, what is allowed."""
    for item in error.errors():
        path = _path(item["loc"])
        if item["type"] == "extra_forbidden":
            allowed = _fields_at(item["loc"][:-1])
            name = str(item["loc"][-1])
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"
            yield f"{path}: unknown key; {hint}"
        elif item["type"] == "missing":
            yield f"{path}: is missing"
        else:
            reason = item["msg"].removeprefix("Value error, ")
            value = _value_at(raw, item["loc"])
            shown = "" if isinstance(value, (Mapping, list)) else f"={value!r}"
            yield f"{path}{shown}: {reason}"


def _path(place: tuple[int | str, ...]) -> str:
    """``targets[0].runs[1].generate.top_p``."""
    words = ""
    for part in place:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else part
    return words or "the manifest"


def _value_at(raw: Any, place: tuple[int | str, ...]) -> Any:
    for part in place:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return {}
    return raw


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    """Keys allowed in the mapping at ``place``."""
    model: type[BaseModel] = Manifest
    for part in place:
        if isinstance(part, str):
            model = _model_of(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``tuple[Target, ...]`` or ``GenerateConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_of(inner)
        if found is not None:
            return found
    return None
