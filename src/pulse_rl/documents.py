"""JSON from outside, decoded against a type: one error for whatever is wrong with it."""

from typing import TypeVar

import msgspec

from pulse_rl.errors import FormatError

T = TypeVar("T")


def decode_json(data: bytes | bytearray | memoryview, kind: type[T], what: str) -> T:
    """Decode a JSON document of untrusted bytes.

    kind: the type that it must have. what: a name for the document, which the error begins with.
    Raises FormatError if it is no JSON, no UTF-8, nested too deeply, or of another type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{what}: {error}") from None
