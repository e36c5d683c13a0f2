"""The public API and commands as plain data, to compare two versions of the package.

Signatures are read from the objects and options from the command line's own parser, independent of the layout of the
modules and the width of a terminal. Words in annotations that are no public name are left out: private classes may be
renamed.
"""

from __future__ import annotations

import argparse
import builtins
import collections.abc
import enum
import importlib
import inspect
import re
import types
import typing
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer
from support import guide_snippets
from typer.testing import CliRunner

import caramba_fast

ROOT = Path(__file__).resolve().parents[2]
#: Special methods that are part of the API.
SPECIAL = (
    "__aenter__", "__aexit__", "__aiter__", "__call__", "__contains__", "__enter__", "__exit__",
    "__getitem__", "__iter__", "__len__", "__next__",
)  # fmt: skip
#: ``from X import A, B`` over one line or several.
IMPORT = re.compile(r"^from (caramba_fast[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
DOTTED = re.compile(r"\bcaramba_fast(?:\.[A-Za-z_]\w*)+")


def documented() -> list[str]:
    """Every path to a name shown in README, docs, the examples they name and the guides' snippets."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    examples = sorted(set(re.findall(r"examples/\w+\.py", "\n".join(texts))))
    texts += [(ROOT / name).read_text(encoding="utf-8") for name in examples]
    texts += [text for text in vars(guide_snippets).values() if isinstance(text, str)]
    found = set()
    for text in texts:
        for module, names in IMPORT.findall(text):
            for line in names.strip("()").splitlines():
                shown = line.partition("#")[0].split(",")
                found |= {f"{module}.{name.split()[0]}" for name in shown if name.strip()}
        found |= set(DOTTED.findall(text))
    return sorted(found)


def resolve(path: str) -> Any:
    """The object that ``from … import`` gives for a dotted path: an attribute, or else a module."""
    place, *names = path.split(".")
    found: Any = importlib.import_module(place)
    for name in names:
        place = f"{place}.{name}"
        if isinstance(found, types.ModuleType) and not hasattr(found, name):
            found = importlib.import_module(place)
        else:
            found = getattr(found, name)
    return found


class Missing:
    """Stands for a path that no longer resolves, so that the others can still be compared."""


def _resolved(path: str) -> Any:
    try:
        return resolve(path)
    except (ImportError, AttributeError):
        return Missing()


def exported(module: types.ModuleType) -> list[str]:
    """``__all__``, or without one the public names that are no modules and were not imported from elsewhere."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    )


def names(paths: list[str] | None = None) -> dict[str, Any]:
    """Signatures by path, by default of the documented ones; packages with the names they export."""
    paths = documented() if paths is None else paths
    public = {f"caramba_fast.{name}": getattr(caramba_fast, name) for name in caramba_fast.__all__}
    shown = {path: _resolved(path) for path in paths}
    lists = {
        value.__name__: exported(value)
        for value in {**public, **shown}.values()
        if isinstance(value, types.ModuleType)
        and (hasattr(value, "__all__") or value in public.values())
    }
    words = {*caramba_fast.__all__, *(name for listed in lists.values() for name in listed)}
    described: dict[str, Any] = {}
    first: dict[int, str] = {}
    for path, value in {**public, **shown}.items():
        if not isinstance(value, types.ModuleType) and id(value) in first:
            described[path] = {"same as": first[id(value)]}
        elif path not in described:
            described[path] = description(value, words)
            first[id(value)] = path
    return {"documented": sorted(shown), "packages": lists, "described": described}


def description(value: Any, words: set[str]) -> dict[str, Any]:
    """The kind of an object, its signature, and the public members of a class."""
    if isinstance(value, types.ModuleType):
        return {"kind": "module"}
    if isinstance(value, Missing):
        return {"kind": "missing"}
    if inspect.isclass(value):
        return {
            "kind": "class",
            "bases": sorted(
                base.__name__ for base in value.__mro__[1:-1] if not _is_ours(base.__module__)
            ),
            "call": [] if issubclass(value, enum.Enum) else call(value, words),
            "members": {name: _member(value, name, words) for name in _public_members(value)},
        }
    if callable(value):
        return {"kind": "function", "call": call(value, words)}
    return {"kind": type(value).__name__}


def call(value: Any, words: set[str]) -> list[str]:
    """Parameters and return type, without private parts and parts that differ between processes."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []  # an exception's, generated by Python
    parts: list[str] = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = str(parameter.replace(annotation=parameter.empty))
        name, equals, default = text.partition("=")
        if parameter.annotation is not parameter.empty:
            name += f": {_annotation(parameter.annotation, words)}"
        parts.append(f"{name} = {_without_places(default)}" if equals else name)
    if signature.return_annotation is not signature.empty:
        parts.append(f"-> {_annotation(signature.return_annotation, words)}")
    return parts


def _public_members(kind: type) -> list[str]:
    """Members of a class that are defined in this package, inherited ones included."""
    found = []
    for name in dir(kind):
        if name.startswith("_") and name not in SPECIAL:
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is not None and _is_ours(owner.__module__):
            found.append(name)
    return found


def _member(kind: type, name: str, words: set[str]) -> str | list[str]:
    static = inspect.getattr_static(kind, name)
    if isinstance(static, (property, cached_property)):
        return "property"
    if isinstance(static, (staticmethod, classmethod)):
        return [type(static).__name__, *call(getattr(kind, name), words)]
    if isinstance(static, enum.Enum):
        return f"member {static.value!r}"
    if inspect.isfunction(static):
        return call(static, words)
    simple = static is None or isinstance(static, (str, int, float, tuple))
    return f"value {_without_places(repr(static))}" if simple else "attribute"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "caramba_fast"


def _without_places(text: str) -> str:
    """The text without addresses and without modules of classes."""
    module = r"\b(?:caramba_fast(?:\.\w+)*|typing|pathlib|collections\.abc)\.(?=\w)"
    return re.sub(module, "", re.sub(r" at 0x[0-9a-f]+", "", text))


#: Words in annotations that are not from this package.
FOREIGN = {
    *dir(builtins), *dir(typing), *dir(collections.abc), *dir(torch), "Path", "np", "ndarray", "nn", "Module",
    "torch", "numpy", "PreTrainedModel",
}  # fmt: skip


def _annotation(annotation: Any, words: set[str]) -> str:
    if isinstance(annotation, str):
        text = annotation
    else:
        text = inspect.formatannotation(annotation)
    text = _without_places(text)
    strings = re.compile(r"""'[^']*'|"[^"]*"|[A-Za-z_]\w*""")

    def kept(match: re.Match[str]) -> str:
        word = match[0]
        return word if word[0] in "'\"" or word in FOREIGN or word in words else "…"

    return strings.sub(kept, text)


def application() -> typer.Typer:
    (entry,) = metadata.entry_points(group="console_scripts", name="caramba-fast")
    with mock.patch.object(typer.Typer, "__call__", autospec=True) as called:
        entry.load()()
    found: typer.Typer = called.call_args.args[0]
    return found


def commands() -> dict[str, Any]:
    app = application()
    return dict(_commands(typer.main.get_command(app), (), app))


def _commands(
    command: Any, place: tuple[str, ...], app: typer.Typer
) -> collections.abc.Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        shown = sorted(name for name, found in inner.items() if not found.hidden)
        yield " ".join(place), {"help": command.help, "commands": shown}
        for name in shown:
            yield from _commands(inner[name], (*place, name), app)
        return
    found = {
        "help": command.help,
        "parameters": [_parameter(parameter) for parameter in command.params],
    }
    if command.context_settings.get("ignore_unknown_options"):
        found["passed on"] = _parsed(app, place)
    yield " ".join(place), found


#: typer's type names -> click's.
TYPES = {
    "text": "str", "integer": "int", "integer range": "int", "float range": "float", "boolean": "bool",
    "path": "Path",
}  # fmt: skip


def _parameter(parameter: Any) -> dict[str, Any]:
    kind = getattr(parameter, "type_descriptor", None)
    limited = (
        parameter if kind is not None else parameter.type
    )  # typer's own since 0.27, else click's
    name = parameter.type.name if kind is None else _annotation(kind.annotation, set())
    default = parameter.default() if callable(parameter.default) else parameter.default
    found = {
        "name": parameter.name,
        "options": [*parameter.opts, *parameter.secondary_opts],
        "type": TYPES.get(name, name),
        "least": getattr(limited, "min", None),
        "most": getattr(limited, "max", None),
        "default": default if isinstance(default, (int, float, type(None))) else str(default),
        "required": parameter.required or None,
        "repeated": getattr(parameter, "multiple", None) or None,
        "flag": getattr(parameter, "is_flag", None) or None,
        "panel": getattr(parameter, "rich_help_panel", None),
        "help": getattr(parameter, "help", None),
    }
    return {key: value for key, value in found.items() if value is not None}


class _ParsedError(Exception):
    """Stops a benchmark once its parser is known."""


def _parsed(app: typer.Typer, place: tuple[str, ...]) -> list[dict[str, Any]]:
    """The options of a program that parses the rest of the command line itself."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _ParsedError(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        done = CliRunner().invoke(app, [*place])
    assert isinstance(done.exception, _ParsedError), done.exception
    (parser,) = done.exception.args
    return [_option(action) for action in parser._actions]


def _option(action: argparse.Action) -> dict[str, Any]:
    found = {
        "options": action.option_strings or [action.dest],
        "type": getattr(action.type, "__name__", None),
        "default": None if action.default is None else str(action.default),
        "choices": None if action.choices is None else sorted(map(str, action.choices)),
        "takes": action.nargs,
        "help": action.help,
    }
    return {key: value for key, value in found.items() if value is not None}
