"""Work that all ranks do at once: each gets what all found, or all raise."""

from collections.abc import Callable
from typing import TypeVar
from zlib import crc32

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.errors import ExchangeError, FormatError, one_line
from pulse_rl.group.collectives import Group, name_ranks

LIMIT = 1 << 16  # bytes of one rank's result as JSON
_CHARACTERS = 300  # of an error's text, as one rank reports it to the others
_SHOWN = 3  # errors of other ranks, in a message
# A message is one of these, the CRC-32 of the work's name, and JSON: a result, or the text of an error.
_FOUND, _FAILED = b"=", b"!"
_HEAD = 5  # bytes

T = TypeVar("T")


def share(group: Group, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
    """Run work on every rank and return what it returned on each, by rank. A collective.

    A rank whose work fails raises its own error, an interruption too. All others raise ExchangeError: it has the ranks
    that failed and their errors' text. If a rank is lost, all that are left raise one that names it, as far as the
    group knows (`PrivateGroup` does), and a failing rank still raises its own error.

    what: the name of the work, the same on all ranks: errors begin with it, and all raise if a rank is at other work.
    work: without collectives of this group. kind: what it returns, as msgspec reads it from JSON of at most 64 KiB:
    structs with `array_like=True` are the shortest.
    """
    failure: BaseException | None = None
    name = crc32(what.encode()).to_bytes(4, "little")
    try:
        message = _FOUND + name + msgspec.json.encode(work())
        if len(message) > LIMIT:
            raise ValueError(f"{what}: expected a result of at most {LIMIT} bytes, found {len(message)}")
    except BaseException as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
        text = f"{type(error).__name__}: {one_line(error)}"
        message = _FAILED + name + msgspec.json.encode(text[:_CHARACTERS])
    try:
        messages = group.gather(message, LIMIT)
    except ExchangeError as error:
        if failure is None:
            raise ExchangeError(f"{what}: {error}", ranks=error.ranks) from error
        failure.add_note(f"the other ranks may not know it: {one_line(error)}")
    if failure is not None:
        raise failure
    if elsewhere := [rank for rank, found in enumerate(messages) if found[1:_HEAD] != name]:
        where = name_ranks(elsewhere, group.size)
        raise ExchangeError(
            f"{what}: expected the same work on all ranks, found other work on {where}", ranks=elsewhere
        )
    _raise_if_one_failed(group, what, messages)
    return [_decode(group, what, rank, found, kind) for rank, found in enumerate(messages)]


def _raise_if_one_failed(group: Group, what: str, messages: list[memoryview]) -> None:
    failed = [rank for rank, found in enumerate(messages) if found[:1] == _FAILED]
    if failed:
        texts = [f"rank {rank}: {_decode(group, what, rank, messages[rank], str)}" for rank in failed[:_SHOWN]]
        listed = "; ".join(texts if len(failed) > 1 else [texts[0].partition(": ")[2]])
        where = name_ranks(failed, group.size)
        raise ExchangeError(group.wording.with_state(f"{what} failed on {where}: {listed}"), ranks=failed)


def _decode(group: Group, what: str, rank: int, found: memoryview, kind: type[T]) -> T:
    try:
        return decode_json(found[_HEAD:], kind, f"{what}, rank {rank} of {group.size}")
    except FormatError as error:
        raise ExchangeError(str(error), ranks=(rank,)) from None
