"""Loads a `Manifest` from YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from caramba_fast.config.files import shown
from caramba_fast.manifest.schema import Manifest, ManifestError, problems

#: Largest manifest that is read, in bytes and in values.
LARGEST, MOST_VALUES = 2**20, 20_000
#: Numbers in bases 8 and 60 of YAML 1.1, which later versions of YAML read as something else: ``010``, ``1:30``.
_OLD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
#: What PyYAML raises for a value that does not match its explicit tag, such as ``!!int ""``.
_BAD_TAG = (KeyError, IndexError, AttributeError, TypeError, OverflowError)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys; keys of ``<<: *anchor`` may be overridden."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Limits the number of nodes."""
        self.nodes += 1
        if self.nodes > MOST_VALUES:
            raise ManifestError(f"it holds more than {MOST_VALUES} values")
        return super().compose_node(parent, index)

    def compose_document(self) -> Any:
        """Limits the number of values after expansion of aliases, before anything is constructed."""
        root = super().compose_document()
        if _expanded(root, {}) > MOST_VALUES:
            raise ManifestError(f"its aliases make more than {MOST_VALUES} values of it")
        return root

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Refuses numbers that YAML 1.1 and 1.2 read differently."""
        node = super().compose_scalar_node(anchor)
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and _OLD_NUMBER.fullmatch(node.value):
            raise ManifestError(
                f"{_where(node.start_mark)}: YAML 1.1 and 1.2 read {node.value} differently; write it without "
                "leading zeros and colons, or in quotes if it is text"
            )
        return node

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


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Number of values in a node, with aliases expanded."""
    if node not in known:
        known[node] = MOST_VALUES + 1  # reached again before it is known: it contains itself
        children: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in children for part in pair]
        known[node] = 1 + sum(_expanded(child, known) for child in children)
    return known[node]


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file.

    Raises:
        FileNotFoundError: the file does not exist.
        ManifestError: it is not YAML, has unknown keys, or has invalid settings.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise FileNotFoundError(f"{file} {what}; a manifest (a YAML file) is needed")
    try:
        if file.stat().st_size > LARGEST:
            raise ManifestError(f"it is larger than {LARGEST} bytes")
        return read_manifest(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file} is no UTF-8 text: {error}") from error
    except ManifestError as error:
        raise ManifestError(f"{file}: {error}") from error


def read_manifest(text: str) -> Manifest:
    """The manifest in a string; raises ManifestError as `load_manifest`."""
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
    except _BAD_TAG as error:
        raise ManifestError(
            f"no valid YAML: a value does not fit its tag ({shown(error)})"
        ) from error
    except RecursionError as error:
        raise ManifestError("it is nested too deeply to be read") from error


def _where(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
