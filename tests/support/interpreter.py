"""Removes repeated work from Triton's interpreter, which takes most of the time of the Triton tests."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def patch_the_language_once() -> None:
    """Within a launch, patches `triton.language` only once.

    At a launch the interpreter replaces functions of `triton.language`, and does so again, without effect, for every
    function that a kernel calls: 40% of the time of a launch.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    builtins = functools.cache(_builtins)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang(fn: Any) -> Any:
        found = [
            x for x in fn.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core
        ]
        if found and not any(interpreter.tl.core.is_builtin(x.load) for x in found):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang


def _builtins(package: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
