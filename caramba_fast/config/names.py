"""Names that are spelt wrong: what was probably meant, and settings that say so."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import (
    AliasChoices,
    BaseModel,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

#: More names than this are not listed; the likeliest is still guessed.
MOST_LISTED = 16
UNKNOWN = "extra_forbidden"


def hint(name: str, allowed: Sequence[str]) -> str:
    """What may have been meant by ``name``, or what is allowed."""
    near = difflib.get_close_matches(name, allowed, 1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(allowed) <= MOST_LISTED:
        return f"allowed are {', '.join(allowed)}"
    return f"{len(allowed)} others are known, and none is spelt like it"


def names_of(model: type[BaseModel]) -> list[str]:
    """Names a model takes, other spellings included."""
    names: list[Any] = list(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names += field.validation_alias.choices
    return [name for name in dict.fromkeys(names) if isinstance(name, str)]


class NamedFields(BaseModel):
    """Settings that guess which field was meant by an unknown one, and refuse one given by two names."""

    @model_validator(mode="wrap")
    @classmethod
    def _names_are_known(cls, data: Any, handler: Any) -> Any:
        if isinstance(data, dict):
            _check_given_once(cls, data)
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
    """An error as it was, or one about a name with a guess."""
    kind: Any = item["type"]
    if kind == UNKNOWN:
        name = str(item["loc"][-1])[:80]
        kind = PydanticCustomError(UNKNOWN, "unknown field; {hint}", {"hint": hint(name, allowed)})
    elif kind == "value_error":
        kind = PydanticCustomError("value_error", "{said}", {"said": item["msg"]})
    return {"type": kind, "loc": item["loc"], "input": item["input"], "ctx": item.get("ctx", {})}
