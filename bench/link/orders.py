"""The side of a `Process`: orders come as lines of JSON, and each is answered with one."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

Order = TypeVar("Order", bound=msgspec.Struct)


def answer(found: Mapping[str, object]) -> None:
    print(json.dumps(found), flush=True)


def orders(kind: type[Order]) -> Iterator[Order]:
    """The orders, until standard input ends."""
    for line in sys.stdin:
        yield msgspec.json.decode(line, type=kind)
