"""Ranks that work together: each step is work on every rank, and none goes on before it knows how all have ended.

`Ranks` are those of a process group, some of these, or one process alone, which has no group and makes no collective.
What is done with them is written once, for any number. Of each failure all know, by one rule:

    the work of a step fails     the rank tells the others, and raises its own error; all others raise too
    a rank is lost               all that are left raise ExchangeError with that rank, and in each later step again
    between two steps            a PulseError or ValueError follows from what all know, so all raise it; anything else,
                                 as an interruption, is one rank's alone: it leaves the group (`collective`)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar
from zlib import crc32

import msgspec

from pulse_rl import errors
from pulse_rl.documents import decode_json
from pulse_rl.errors import ExchangeError, FormatError, PulseError, one_line
from pulse_rl.group.collectives import PLAIN, Group, RankPlace, Wording, default_place, name_ranks
from pulse_rl.group.private import PrivateGroup

if TYPE_CHECKING:
    import torch.distributed as dist

LIMIT = 1 << 16  # bytes of what one rank shares, as JSON
LED_LIMIT = 32 << 20  # bytes of what the first rank has found for all, as JSON
TEXT_CHARACTERS = 1000  # of an error's text, as one rank tells it to the others
_LISTED, _LISTED_CHARACTERS = 3, 300  # errors of other ranks in one message, and of the text of each
# A message is one of these, the CRC-32 of the work's name, and what is shared, or a failure.
_FOUND, _FAILED = b"=", b"!"
_HEAD = 5  # bytes
_ALIKE = (PulseError, ValueError)  # what all ranks raise if it is raised between two steps

M = TypeVar("M")
T = TypeVar("T")
P = ParamSpec("P")


class _Failure(msgspec.Struct, array_like=True):
    """Why a rank cannot go on."""

    kind: str  # the class of its error
    text: str
    ranks: tuple[int, ...]  # at fault: of an ExchangeError those that it names, else the rank itself

    @property
    def shared_class(self) -> type[PulseError] | None:
        """The class of the error, if it is one that all ranks can raise."""
        found = getattr(errors, self.kind, None)
        return found if isinstance(found, type) and issubclass(found, PulseError) else None


class _Last(threading.local):
    """What a thread has to know of its last step."""

    failure_is_shared = False
    failure: Exception | None = None  # of work after it, which the next one raises


class Ranks:
    """Processes that work together. One thread at a time works with them.

    group: None for one process alone. numbers: the ranks of the group that these are, in their order; None for all.
    """

    def __init__(self, group: Group | None = None, numbers: Sequence[int] | None = None) -> None:
        self._group, self._numbers = group, numbers
        self._connect: Callable[[], Group] | None = None  # until the ranks of "world" are connected
        self._last = _Last()

    @classmethod
    def of(cls, group: dist.ProcessGroup | str | None, wording: Wording, timeout: float | None = None) -> Ranks:
        """The ranks of a process group of torch, connected once more for us alone; one process alone for None.

        "world" is torch's default group, looked up in the first step, so that it may be made after this; one process
        alone if there is none even then. timeout: as of `PrivateGroup.of`. Raises as it does, and ValueError for other
        text. A collective of the group, but of "world" only in that first step.
        """
        if isinstance(group, str):
            if group != "world":
                raise ValueError(f"group: expected a process group, 'world' or None, found {group!r}")
            ranks = cls()
            ranks._connect = partial(PrivateGroup.of, None, wording, timeout=timeout)
            return ranks
        return cls(None if group is None else PrivateGroup.of(group, wording, timeout=timeout))

    @property
    def group(self) -> Group | None:
        """The group that they are of; None for one process alone."""
        if self._connect is not None:
            if default_place() is not None:
                self._group = self._connect()
            self._connect = None
        return self._group

    @property
    def rank(self) -> int:
        """The place of this process among them. Known before they are connected."""
        if self._connect is not None:
            return (default_place() or RankPlace(0, 1)).rank
        if self._group is None:
            return 0
        return self._group.rank if self._numbers is None else self._numbers.index(self._group.rank)

    @property
    def size(self) -> int:
        group = self.group
        return 1 if group is None else len(self._numbers) if self._numbers is not None else group.size

    @property
    def numbers(self) -> Sequence[int]:
        """Their ranks in the group, which errors name."""
        return self._numbers if self._numbers is not None else range(self.size)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent to the others."""
        return self.group.sent_nbytes if self.group is not None else 0

    def among(self, numbers: Sequence[int]) -> Ranks:
        """Some of these, by themselves. The others take no part in their steps, and hear of no failure: where it
        matters to them, the steps are work of a step of all."""
        return Ranks(self.group, numbers)

    def do(self, what: str, work: Callable[[], M], *, alike: bool = False) -> M:
        """Run work on every rank, and return what it returned here, once it has succeeded on all. A collective.

        If it fails on some, these raise their own errors, an interruption too. All others raise ExchangeError: it has
        the ranks that failed (or the ranks at fault, where theirs is an ExchangeError) and their errors' text. If a
        rank is lost, all that are left raise one that names it, as far as the group knows (`PrivateGroup` does).

        what: the name of the work, the same on all ranks: errors begin with it, and all raise if a rank is at other
        work. work: without collectives of these ranks. alike: whether all raise an error of one class after a
        PulseError, which names the first rank that failed, so that all may go on by another way.
        """
        return self.do_and_gather(what, lambda: (work(), b""), 0, alike=alike)[0]

    def share(self, what: str, work: Callable[[], T], kind: type[T], *, alike: bool = False) -> list[T]:
        """As `do`. Returns what work returned on each, by rank.

        kind: of that, as msgspec reads it from JSON of at most 64 KiB: structs with `array_like=True` are the shortest.
        """
        return self.do_and_share(what, lambda: (None, work()), kind, alike=alike)[1]

    def do_and_share(
        self, what: str, work: Callable[[], tuple[M, T]], kind: type[T], *, alike: bool = False
    ) -> tuple[M, list[T]]:
        """As `do` of the first and `share` of the second that work returns."""
        if self.size == 1:
            mine, said = self._attempted(work)
            return mine, [said]

        def encoded() -> tuple[M, bytes]:
            mine, said = work()
            return mine, msgspec.json.encode(said)

        mine, found = self.do_and_gather(what, encoded, LIMIT, alike=alike)
        return mine, [self._decode(what, rank, data, kind) for rank, data in enumerate(found)]

    def lead(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """Run work on the first rank and return on all what it returned there. All fail alike, as `do` says."""
        if self.size == 1:
            return self._attempted(work)

        def encoded() -> tuple[T | None, bytes]:
            found = work() if self.rank == 0 else None
            return found, msgspec.json.encode(found)

        mine, found = self.do_and_gather(what, encoded, LED_LIMIT, alike=True)
        return self._decode(what, 0, found[0], kind) if mine is None else mine

    def gather(self, what: str, work: Callable[[], bytes], limit: int) -> list[memoryview]:
        """As `share` of bytes. limit: of one rank's."""
        return self.do_and_gather(what, lambda: (None, work()), limit)[1]

    def do_and_gather(
        self, what: str, work: Callable[[], tuple[M, bytes]], limit: int, *, alike: bool = False
    ) -> tuple[M, list[memoryview]]:
        """As `do` of the first and `gather` of the second that work returns."""
        if self.size == 1:
            mine, said = self._attempted(work)
            return mine, [memoryview(said)]
        last, name = self._last, crc32(what.encode()).to_bytes(4, "little")
        failure: BaseException | None = None
        error: BaseException | None = None
        try:
            last.failure_is_shared = False
            try:
                mine, said = self._attempted(work)
                if len(said) > limit:
                    raise ValueError(f"{what}: expected at most {limit} bytes of a rank, found {len(said)}")
                message = _FOUND + name + said
            except BaseException as caught:  # noqa: BLE001 - raised below, when the others know
                failure = caught
                message = _FAILED + name + msgspec.json.encode(self._describe(failure))
            last.failure_is_shared = failure is not None
            messages: list[memoryview] = []
            try:
                messages = self._gather(message, _HEAD + max(limit, LIMIT))
            except ExchangeError as lost:
                if failure is None:
                    raise ExchangeError(f"{what}: {lost}", ranks=lost.ranks) from lost
                failure.add_note(f"the other ranks may not know it: {one_line(lost)}")
            if failure is not None and not messages:
                raise failure
            error = self._error(what, name, messages, failure, alike)
            last.failure_is_shared = error is not None
            if error is None:
                return mine, [message[_HEAD:] for message in messages]
            if error is not failure:
                error.__cause__ = failure
            raise error
        finally:
            failure = error = None  # their frames hold this one

    def exchange(self, what: str, work: Callable[[], Sequence[bytes]], limit: int) -> list[memoryview]:
        """Send rank r the r-th bytes that work returns, and return what each rank sent here. Raises as `do`.

        limit: of what one rank sends to another.
        """

        def measured() -> tuple[Sequence[bytes], list[int]]:
            data = work()
            if (longest := max(map(len, data))) > limit:
                raise ValueError(f"{what}: expected at most {limit} bytes for each rank, found {longest}")
            return data, [len(one) for one in data]

        data, lengths = self.do_and_share(what, measured, list[int])
        if self.group is None:
            return [memoryview(data[0])]
        return self.group.all_to_all(data, [row[self.rank] for row in lengths])

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do work of one rank between two steps, where others expect it to go on: the next step raises what fails.

        After a failure this does nothing more, and returns None.
        """
        if self._last.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - raised in the next step
                self._last.failure = error
        return None

    @property
    def failure_is_shared(self) -> bool:
        """Whether the last step of this thread has failed, on this rank or another, and all know it."""
        return self._group is None or self._last.failure_is_shared

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block that all ranks run. What can fail on one of them is a step's work.

        A rank that something else fails on, as an interruption, leaves the group: the others learn at once that it is
        lost, and each later call raises on all of them.
        """
        self._last.failure_is_shared, self._last.failure = False, None
        try:
            yield
        except BaseException as error:
            if not self.failure_is_shared and not isinstance(error, _ALIKE):
                self.leave(f"{type(error).__name__}: {one_line(error)}")
            raise

    def leave(self, why: str) -> None:
        """Leave the group, as this rank cannot go on: the others learn at once that it is lost."""
        if isinstance(self._group, PrivateGroup):
            self._group.leave(f"rank {self._group.rank} failed in an earlier call ({why})")

    def make(self, what: str, work: Callable[[], M]) -> M:
        """As `do`, for what is made before the first step: in this process alone if the ranks are not connected yet."""
        return self.do(what, work) if self._connect is None else work()

    def _attempted(self, work: Callable[[], T]) -> T:
        """Run work, unless `attempt` has failed: then raise that."""
        failure, self._last.failure = self._last.failure, None
        if failure is None:
            return work()
        try:
            raise failure
        finally:
            del failure  # its frames hold this one

    def _gather(self, message: bytes, limit: int) -> list[memoryview]:
        if self._numbers is None:
            assert self._group is not None
            return self._group.gather(message, limit)
        assert isinstance(self._group, PrivateGroup)  # no other can connect some ranks only
        return self._group.gather(message, limit, self._numbers)

    def _describe(self, error: BaseException) -> _Failure:
        at_fault = error.ranks if isinstance(error, ExchangeError) else ()
        text = one_line(error, TEXT_CHARACTERS)
        return _Failure(type(error).__name__, text, at_fault or (self.numbers[self.rank],))

    def _error(
        self, what: str, name: bytes, messages: Sequence[memoryview], own: BaseException | None, alike: bool
    ) -> BaseException | None:
        """What this rank raises after a step, as `do` says; None if no rank has failed. own: what it failed with."""
        size = self._group.size if self._group is not None else 1
        failed = {
            rank: self._decode(what, rank, message[_HEAD:], _Failure)
            for rank, message in enumerate(messages)
            if message[:1] == _FAILED
        }
        if elsewhere := [self.numbers[rank] for rank, found in enumerate(messages) if found[1:_HEAD] != name]:
            where = name_ranks(elsewhere, size)
            reason = f"{what}: expected the same work on all ranks, found other work on {where}"
            return own or ExchangeError(reason, ranks=elsewhere)
        if failed and alike:
            foreign = {rank: failure for rank, failure in failed.items() if failure.shared_class is None}
            first, failure = min(failed.items())
            if not foreign and failure.shared_class is not None:
                where = name_ranks([self.numbers[first]], size)
                return own if first == self.rank else failure.shared_class(f"{where}: {failure.text}")
            failed = foreign
        if not failed or self.rank in failed:
            return own if failed else None
        texts = [
            f"rank {self.numbers[rank]}: {failure.kind}: {failure.text[:_LISTED_CHARACTERS]}"
            for rank, failure in list(failed.items())[:_LISTED]
        ]
        listed = "; ".join(texts if len(failed) > 1 else [texts[0].partition(": ")[2]])
        where = name_ranks([self.numbers[rank] for rank in failed], size)
        at_fault = sorted({rank for failure in failed.values() for rank in failure.ranks})
        wording = self._group.wording if self._group is not None else PLAIN
        return ExchangeError(wording.with_state(f"{what} failed on {where}: {listed}"), ranks=at_fault)

    def _decode(self, what: str, rank: int, data: memoryview, kind: type[T]) -> T:
        number = self.numbers[rank]
        try:
            return decode_json(data, kind, f"{what}, rank {number} of {self._group.size if self._group else 1}")
        except FormatError as error:
            raise ExchangeError(str(error), ranks=(number,)) from None


class _HasRanks(Protocol):
    _ranks: Ranks


S = TypeVar("S", bound=_HasRanks)


def collective(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that all ranks call: `Ranks.collective`."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        with self._ranks.collective():
            return method(self, *args, **options)

    return call
