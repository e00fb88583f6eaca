"""JSON from outside, decoded against a type: one error for whatever is wrong with it, and the types of its members."""

import re
from functools import cache
from threading import Lock
from typing import Annotated, Any, TypeVar

import msgspec

from pulse_rl.errors import FormatError

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # of a state of weights
Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # BLAKE3
HeadHash = Annotated[str, msgspec.Meta(pattern="^(|[0-9a-f]{32})$")]  # the first half of a BLAKE3; empty without one
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # random
_VIEW_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ViewName = Annotated[str, msgspec.Meta(pattern=_VIEW_NAME)]

T = TypeVar("T")

# Held while msgspec first reads a type. It shows other threads what it knows of a Struct before it knows all of it, and
# one that decodes with that ends by a segmentation fault (0.22; tests/test_documents.py).
LEARNING = Lock()

_decoder: Any = cache(msgspec.json.Decoder)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Msgspec's decoder of a type, made once."""
    with LEARNING:
        found: msgspec.json.Decoder[T] = _decoder(kind)
    return found


def check_view_name(name: object) -> None:
    """Raise ValueError unless a view can have this name."""
    if not isinstance(name, str) or not re.fullmatch(_VIEW_NAME, name):
        raise ValueError(f"view: expected a name of at most 64 letters, digits and . _ -, found {name!r}")


def convert(value: Any, kind: type[T], strict: bool = True) -> T:
    """What msgspec.convert makes of a value, from any thread. Raises msgspec.ValidationError."""
    decoder(kind)  # by which msgspec knows the type
    return msgspec.convert(value, kind, strict=strict)


def decode_json(data: bytes | bytearray | memoryview, kind: type[T], what: str) -> T:
    """Decode a JSON document of untrusted bytes.

    kind: the type that it must have. what: a name for the document, which the error begins with.
    Raises FormatError if it is not JSON, not UTF-8, nested too deeply or of another type.
    """
    try:
        return decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{what}: {error}") from None
