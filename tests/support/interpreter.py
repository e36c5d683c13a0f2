"""Removes repeated work from Triton's interpreter, which takes most of the time of the Triton tests."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any


def patch_the_language_once() -> None:
    """Within a launch, patches `triton.language` only once; and describes types and shapes once a process.

    At a launch the interpreter replaces functions of `triton.language`, and does so again, without effect, for every
    function that a kernel calls: 40% of the time of a launch.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    builtins = functools.cache(_builtins)
    languages: dict[int, tuple[dict[str, Any], list[Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in languages:
            both = (interpreter.tl, interpreter.tl.core)
            languages[id(names)] = names, [x for x in names.values() if any(x is y for y in both)]
        found = languages[id(names)][1]
        if found and not any(interpreter.tl.core.is_builtin(x.load) for x in found):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    _check_no_overflow_in_vain(interpreter.interpreter_builder)
    _describe_types_once(interpreter)
    _call_directly(interpreter)
    _unwrap_only_constants(interpreter)
    _decide_types_once(interpreter)


def _check_no_overflow_in_vain(builder: Any) -> None:
    """Integers are added in 64 bits as well, for an assertion that only a debug mode makes: half of all the time."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _describe_types_once(interpreter: Any) -> None:
    """A block's type and a tensor's shape are lists of checked constants, made anew for every operation's result."""
    core = interpreter.tl.core
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def describe(type: Any) -> dict[str, Any]:
        """What tensors of a type have besides their handle, kept with the type."""
        one = core.tensor.__new__(core.tensor)
        make_tensor(one, None, type)
        del one.handle
        type.of_a_tensor = one.__dict__
        return one.__dict__

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, getattr(element_ty, "address_space", None), tuple(shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            describe(self)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.__dict__.update(type.__dict__.get("of_a_tensor") or describe(type))
        self.handle = handle

    def numpy_type_of(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = numpy_type_of


def _call_directly(interpreter: Any) -> None:
    """A call within a kernel copies its options twice, and passes a function that checks one of them."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    checking = core.builtin(lambda: None).__code__

    def patch_attr(place: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr


def _unwrap_only_constants(interpreter: Any) -> None:
    """Whether an argument is a list, a tuple, or a constant is asked of every one, seven times an operation."""
    core = interpreter.tl.core
    unwrap, constant = core._unwrap_if_constexpr, core.constexpr
    others = {int, bool, float, str, type(None)}
    others |= {core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        if kind is constant:
            return x.value
        return x if kind in others else unwrap(x)

    for module in (core, interpreter.tl.semantic, interpreter.tl.math):
        if getattr(module, "_unwrap_if_constexpr", None) is unwrap:
            module._unwrap_if_constexpr = unwrapped


def _decide_types_once(interpreter: Any) -> None:
    """The type of a result follows from those of its operands; most of them agree, and need no cast or broadcast."""
    semantic, block = interpreter.interpreter_semantic, interpreter.tl.core.block_type
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value
    promote, promoted = semantic.computation_type_impl, dict[Any, Any]()

    def cast_if_needed(input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        same = input.type.scalar is dst_ty.scalar
        return input if same else cast(input, dst_ty, fp_downcast_rounding)

    def broadcast_if_needed(a: Any, b: Any) -> Any:
        blocks = (type(a.type) is block) + (type(b.type) is block)
        same = blocks == 0 or (blocks == 2 and a.type.shape == b.type.shape)
        return (a, b) if same else broadcast(a, b)

    def type_of(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in promoted:
            promoted[key] = promote(a, a_is_scalar, b, b_is_scalar, divides)
        return promoted[key]

    semantic.cast, semantic.broadcast_impl_value = cast_if_needed, broadcast_if_needed
    semantic.computation_type_impl = type_of


def _builtins(package: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
