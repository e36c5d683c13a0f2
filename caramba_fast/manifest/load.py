"""From YAML to a `Manifest`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from caramba_fast.manifest.problems import ManifestError, problems
from caramba_fast.manifest.schema import Manifest


class _Loader(yaml.SafeLoader):
    """YAML without code, and without keys that are given twice; ``<<: *anchor`` may be overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ManifestError(f"{_where(key.start_mark)}: a key must be a word")
            if (key.tag, key.value) in seen:
                raise ManifestError(
                    f"{_where(key.start_mark)}: the key {key.value!r} is given twice"
                )
            seen.add((key.tag, key.value))
        return node


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file.

    Raises:
        FileNotFoundError: there is none.
        ManifestError: it is no YAML, has unknown keys, or settings that are wrong.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"{file} {what}; a manifest (a YAML file) is needed")
    try:
        return read_manifest(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file} is no UTF-8 text: {error}") from error
    except ManifestError as error:
        raise ManifestError(f"{file}: {error}") from error


def read_manifest(text: str) -> Manifest:
    """The manifest in a text.

    Raises:
        ManifestError: as `load_manifest`.
    """
    raw = _parsed(text)
    if raw is None:
        raise ManifestError("it is empty; a mapping with the key 'targets' is needed")
    if not isinstance(raw, Mapping):
        raise ManifestError(
            f"it is a {type(raw).__name__}; a mapping with the key 'targets' is needed"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        raise ManifestError("; ".join(problems(error, raw))) from error


def _parsed(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        place = f"{_where(error.problem_mark)}: " if error.problem_mark else ""
        raise ManifestError(f"no valid YAML: {place}{error.problem}") from error
    except ManifestError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2024-13-01 is a ValueError
        raise ManifestError(f"no valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ManifestError("it is nested too deeply to be read") from error


def _where(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
