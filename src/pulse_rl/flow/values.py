"""Values of a TOML file, compared with the type that they must have, and with the bounds in it."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from pulse_rl import documents

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", dict: "a table"}
_MANY = {int: "whole numbers", float: "numbers", str: "strings"}


def convert(value: Any, wanted: Any, key: str) -> Any:
    """A value as its type.

    wanted: a type that msgspec knows. key: where the value stands.
    Raises ValueError that names the key, what was expected and what was found; TypeError if msgspec has no such type.
    """
    try:
        return documents.convert(value, wanted)
    except msgspec.ValidationError:
        raise ValueError(f"{key}: expected {_expected(wanted)}, found {found(value)}") from None


def found(value: Any) -> str:
    """A value as errors show it."""
    return "a table" if isinstance(value, dict) else repr(value)


def _expected(wanted: Any) -> str:
    wanted, bounds = _bounded(wanted)
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(_expected(option) for option in arguments if option is not NoneType)
    if origin in (list, tuple):
        number = len(arguments) if origin is tuple and ... not in arguments else "a list of"
        kind, bounds = _bounded(arguments[0])
        return f"{number} {_MANY.get(kind, 'values')}{bounds}"
    return _NAMES.get(origin or wanted, str(wanted)) + bounds


def _bounded(wanted: Any) -> tuple[Any, str]:
    """A type without its bounds, and these in words."""
    if get_origin(wanted) is not Annotated:
        return wanted, ""
    kind, meta = get_args(wanted)
    if meta.gt is not None:
        return kind, f" above {meta.gt:,} and at most {meta.le:,.15g}"
    return kind, f" from {meta.ge:,} to " + (f"{meta.le:,}" if meta.lt is None else f"below {meta.lt:,}")
