"""API reference of the site: every public name has an entry, or the build fails.

A hook of mkdocs (`mkdocs.yml`). A page ``docs/api/<package>.md`` gets the entries of the package's ``__all__``, and
``docs/api/index.md`` the names of ``caramba_fast`` itself.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from pathlib import Path
from typing import Any

import caramba_fast

HEADINGS = {
    "hf": "Hugging Face", "infer": "Generation", "serve": "Serving", "models": "Models", "cache": "Caches",
    "policy": "Choosing", "config": "Settings of caches", "ops": "Ops",
}  # fmt: skip


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds the entries of the page."""
    folder, _, name = page.file.src_uri.partition("/")
    if folder != "api":
        return markdown
    package = name.removesuffix(".md")
    return f"{markdown}\n\n{_names() if package == 'index' else _entries(package)}"


def on_post_build(config: Any) -> None:
    """Compares the built reference with the public names; raises PluginError for a name without an entry."""
    from mkdocs.exceptions import PluginError  # noqa: PLC0415 - only the build has it

    inventory = (Path(config["site_dir"]) / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    wanted = [_entry(home, name) for name, home in caramba_fast._HOME.items()]
    wanted += [
        _entry(package, name) for package in caramba_fast._PACKAGES for name in _public(package)
    ]
    missing = sorted(set(wanted) - known)
    if missing:
        raise PluginError(f"public names without an entry in the reference: {', '.join(missing)}")


def _names() -> str:
    lines: list[str] = []
    for home, heading in HEADINGS.items():
        lines += ["", f"## {heading}", ""]
        for name in caramba_fast._NAMES[home]:
            lines.append(
                f"- [`{name}`][{_entry(home, name)}]: {_summary(getattr(caramba_fast, name))}"
            )
    lines += ["", "## Packages", ""]
    for package in caramba_fast._PACKAGES:
        lines.append(f"- [`{package}`]({package}.md): {_summary(_package(package))}")
    return "\n".join(lines)


def _entries(package: str) -> str:
    shown = [str(_package(package).__doc__).strip()]
    for name in _public(package):
        shown += [
            _directive(_entry(package, name), 2),
            *(_directive(path, 3) for path in _themes(package, name)),
        ]
    return "\n\n".join(shown)


def _directive(path: str, level: int) -> str:
    return f"::: {path}\n    options: {{heading_level: {level}}}"


def _themes(package: str, name: str) -> list[str]:
    """Base classes that explain fields of settings such as `GenerateConfig`, if they have no entry in the package."""
    found = getattr(_package(package), name)
    bases = [
        base for base in getattr(found, "__bases__", ()) if getattr(base, "model_fields", None)
    ]
    return [
        f"{base.__module__}.{base.__name__}"
        for base in bases
        if base.__name__ not in _public(package)
    ]


def _entry(package: str, name: str) -> str:
    """The path a name is documented at: its package, unless a module there has the same name and hides it."""
    path = f"caramba_fast.{package}.{name}"
    if path not in sys.modules:
        return path
    return f"{getattr(_package(package), name).__module__}.{name}"


def _public(package: str) -> list[str]:
    return sorted(_package(package).__all__)


def _package(name: str) -> Any:
    return importlib.import_module(f"caramba_fast.{name}")


def _summary(found: Any) -> str:
    return str(found.__doc__).strip().split("\n")[0].replace("``", "`")
