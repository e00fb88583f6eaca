"""Work that all ranks do at once: each gets what all found, or all raise."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.errors import ExchangeError, FormatError, one_line
from pulse_rl.group.collectives import Group, name_ranks

LIMIT = 1 << 16  # bytes of one rank's result as JSON
_CHARACTERS = 300  # of an error's text, as one rank reports it to the others
_SHOWN = 3  # errors of other ranks, in a message
_FOUND, _FAILED = b"=", b"!"  # what the JSON after it is: a result, or the text of an error

T = TypeVar("T")


def share(group: Group, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
    """Run work on every rank and return what it returned on each, by rank. A collective.

    A rank whose work fails raises its own error, an interruption too. All others raise ExchangeError: it has the ranks
    that failed and their errors' text. If a rank is lost, all that are left raise one that names it, as far as the
    group knows (`PrivateGroup` does), and a failing rank still raises its own error.

    what: the name of the work, which errors begin with. work: without collectives of this group. kind: what it
    returns, as msgspec reads it from JSON of at most 64 KiB: structs with `array_like=True` are the shortest.
    """
    failure: BaseException | None = None
    try:
        message = _FOUND + msgspec.json.encode(work())
        if len(message) > LIMIT:
            raise ValueError(f"{what}: expected a result of at most {LIMIT} bytes, found {len(message)}")
    except BaseException as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
        text = f"{type(error).__name__}: {one_line(error)}"
        message = _FAILED + msgspec.json.encode(text[:_CHARACTERS])
    try:
        messages = group.gather(message, LIMIT)
    except ExchangeError as error:
        if failure is None:
            raise ExchangeError(f"{what}: {error}", ranks=error.ranks) from error
        failure.add_note(f"the other ranks may not know it: {one_line(error)}")
    if failure is not None:
        raise failure
    _raise_if_one_failed(group, what, messages)
    return [_decode(group, what, rank, found, kind) for rank, found in enumerate(messages)]


def _raise_if_one_failed(group: Group, what: str, messages: list[memoryview]) -> None:
    failed = [rank for rank, found in enumerate(messages) if found[:1] == _FAILED]
    if failed:
        texts = [f"rank {rank}: {_decode(group, what, rank, messages[rank], str)}" for rank in failed[:_SHOWN]]
        listed = "; ".join(texts if len(failed) > 1 else [texts[0].partition(": ")[2]])
        where = name_ranks(failed, group.size)
        raise ExchangeError(group.wording.with_advice(f"{what} failed on {where}: {listed}"), ranks=failed)


def _decode(group: Group, what: str, rank: int, found: memoryview, kind: type[T]) -> T:
    try:
        return decode_json(found[1:], kind, f"{what}, rank {rank} of {group.size}")
    except FormatError as error:
        raise ExchangeError(str(error), ranks=(rank,)) from None
