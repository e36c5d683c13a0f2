"""Suggestions for misspelt names, and settings classes that make them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

#: Most names that are listed; with more, only a likely match is suggested.
MOST_LISTED = 16
UNKNOWN = "extra_forbidden"
#: Levels of lists in a field of numbers that are searched; no field has as many, and pydantic refuses the others.
DEEPEST = 8


def hint(name: str, allowed: Sequence[str]) -> str:
    """A suggestion of what ``name`` was meant to be, or the allowed names."""
    near = difflib.get_close_matches(name, allowed, 1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(allowed) <= MOST_LISTED:
        return f"allowed are {', '.join(allowed)}"
    return f"{len(allowed)} others are known, and none is spelt like it"


def names_of(model: type[BaseModel]) -> list[str]:
    """Names that a model accepts, aliases included."""
    names: list[Any] = list(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names += field.validation_alias.choices
    return [name for name in dict.fromkeys(names) if isinstance(name, str)]


def check_truth_values(model: type[BaseModel], data: Mapping[Any, Any]) -> None:
    """Raises ValueError for True or False where a number is needed: pydantic takes them for 1 and 0."""
    for name, value in data.items():
        if name in _numbers_of(model) and _has_truth_value(value):
            raise ValueError(f"{name}={value!r}: True and False are no numbers")


@functools.cache
def _numbers_of(model: type[BaseModel]) -> frozenset[str]:
    """Names that a model accepts, aliases included, of fields that are numbers or hold nothing else."""
    found: list[Any] = []
    for name, field in model.model_fields.items():
        kinds = field.annotation
        if _mentions(kinds, (int, float)) and not _mentions(kinds, (bool, str, Any)):
            alias = field.validation_alias
            found += [name, *(alias.choices if isinstance(alias, AliasChoices) else ())]
    return frozenset(name for name in found if isinstance(name, str))


def _mentions(annotation: Any, kinds: tuple[Any, ...]) -> bool:
    return annotation in kinds or any(_mentions(part, kinds) for part in get_args(annotation))


def _has_truth_value(value: Any, levels: int = DEEPEST) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return isinstance(value, bool)
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and any(_has_truth_value(part, levels - 1) for part in parts)


class NamedFields(BaseModel):
    """Settings that suggest a field for an unknown name, and refuse a field given under two names.

    True and False are no numbers.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _names_are_known(cls, data: Any, handler: Any) -> Any:
        if isinstance(data, dict):
            _check_given_once(cls, data)
            check_truth_values(cls, data)
        try:
            return handler(data)
        except ValidationError as error:
            items = error.errors(include_url=False)
            if all(item["type"] != UNKNOWN for item in items):
                raise
            allowed = names_of(cls)
            raise ValidationError.from_exception_data(
                cls.__name__, [_line(item, allowed) for item in items]
            ) from None


def _check_given_once(model: type[BaseModel], data: dict[str, Any]) -> None:
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            given = [str(name) for name in field.validation_alias.choices if name in data]
            if len(given) > 1:
                raise ValueError(
                    f"{' and '.join(given)} are the same setting and both given; give one of them"
                )


def _line(item: Any, allowed: Sequence[str]) -> InitErrorDetails:
    """The error unchanged or, for an unknown name, with a suggestion."""
    kind: Any = item["type"]
    if kind == UNKNOWN:
        name = str(item["loc"][-1])[:80]
        kind = PydanticCustomError(UNKNOWN, "unknown field; {hint}", {"hint": hint(name, allowed)})
    elif kind == "value_error":
        kind = PydanticCustomError("value_error", "{said}", {"said": item["msg"]})
    return {"type": kind, "loc": item["loc"], "input": item["input"], "ctx": item.get("ctx", {})}
