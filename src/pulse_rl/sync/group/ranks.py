"""The processes that publish or sync one model together: the ranks of a process group, or one process alone.

What they do is written once, for any number: each step is some work on every rank and a `share` of what it gave. If it
fails on one rank, all ranks raise, so that none goes on alone. A rank that is interrupted between two steps leaves the
group (`collective`), so that none waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from pulse_rl.errors import ExchangeError, PulseError, one_line
from pulse_rl.group.collectives import Wording, default_place
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.sharing import share

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
P = ParamSpec("P")
# Outside of shared work these follow from what all ranks know, so all raise them.
ALIKE = (PulseError, ValueError)


class Gathering(Protocol):
    """The processes that agree on something."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        """The bytes of every rank. limit: of one rank's."""


class Ranks(Gathering, Protocol):
    """The processes that work together."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent to the others."""

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        """Run work on every rank and return what it returned on each, by rank.

        what: the name of the work, for errors. kind: the type of what it returns, as msgspec reads it. A rank whose
        work fails raises its own error, all others an ExchangeError that has its text.
        """

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        """Send data[r] to rank r. Returns what each rank sent here. limit: bytes of one message."""

    told: bool  # whether all ranks know that the last step of this block has failed, on this rank or on another

    def collective(self) -> AbstractContextManager[None]:
        """A block that all ranks run. What can fail on one of them is shared work.

        A rank that something else fails on, as an interruption, leaves the group: the others learn at once that it is
        lost, and each later call raises on all of them.
        """


class Alone:
    """One process, without a group."""

    rank, size, sent_nbytes = 0, 1, 0
    told = True

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        return [work()]

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        return [data]

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        return [memoryview(data[0])]

    def collective(self) -> AbstractContextManager[None]:
        return nullcontext()


class Together:
    """The ranks of a process group.

    group: torch's; its ranks are connected once more over Gloo, for us alone, which is a collective of that group.
    """

    def __init__(self, group: dist.ProcessGroup | None, wording: Wording, timeout: float | None = None) -> None:
        self.group = PrivateGroup.of(group, wording, timeout=timeout)
        self.rank, self.size = self.group.place
        self._thread = threading.local()  # `told`, of the block that each thread runs

    @property
    def sent_nbytes(self) -> int:
        return self.group.sent_nbytes

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        self.told = False
        failures: list[BaseException] = []

        def attempt() -> T:
            try:
                return work()
            except BaseException as error:
                failures.append(error)
                raise

        try:
            return share(self.group, what, attempt, kind)
        except BaseException as error:
            self.told = error in failures or (isinstance(error, ExchangeError) and not self.group.has_left)
            raise
        finally:
            failures.clear()  # its frames hold this list

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        return [bytes(found) for found in self.group.gather(data, limit)]

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        return self.group.all_to_all(data, limit)

    @property
    def told(self) -> bool:
        return bool(self._thread.told)

    @told.setter
    def told(self, value: bool) -> None:
        self._thread.told = value

    @contextmanager
    def collective(self) -> Iterator[None]:
        self.told = False
        try:
            yield
        except BaseException as error:
            if not self.told and not isinstance(error, ALIKE):
                why = f"{type(error).__name__}: {one_line(error)}"
                self.group.leave(f"rank {self.rank} failed in an earlier call ({why})")
            raise


class World:
    """The ranks of torch's default process group, connected when they first work together.

    So the group may be made after this. One process alone, if there is none even then.
    """

    def __init__(self, wording: Wording, timeout: float | None) -> None:
        self._connect = partial(Together, None, wording, timeout)
        self._found: Ranks | None = None

    @property
    def _ranks(self) -> Ranks:
        if self._found is None:
            self._found = Alone() if default_place() is None else self._connect()
        return self._found

    @property
    def rank(self) -> int:
        """Also before they are connected."""
        return self._found.rank if self._found is not None else (default_place() or Alone).rank

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def sent_nbytes(self) -> int:
        return self._ranks.sent_nbytes

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        return self._ranks.share(what, work, kind)

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        return self._ranks.gather(data, limit)

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        return self._ranks.exchange(data, limit)

    @property
    def told(self) -> bool:
        return self._ranks.told

    @told.setter
    def told(self, value: bool) -> None:
        self._ranks.told = value

    def collective(self) -> AbstractContextManager[None]:
        return self._ranks.collective()


def ranks_of(group: Any, wording: Wording, timeout: float | None = None) -> Ranks:
    """The ranks of a process group, or of "world"; one process alone for None. Raises ValueError for other text."""
    if isinstance(group, str):
        if group != "world":
            raise ValueError(f"group: expected a process group, 'world' or None, found {group!r}")
        return World(wording, timeout)
    return Alone() if group is None else Together(group, wording, timeout)


@contextmanager
def making(ranks: Ranks, what: str, make: Callable[[], T]) -> Iterator[T]:
    """A block that makes an object on every rank, with what `make` returns here; alone where ranks are connected later.

    what: the name of that work, for errors. Otherwise as `Ranks.collective`.
    """
    if isinstance(ranks, World):
        yield make()
        return
    made: list[T] = []  # not told to the others

    def here() -> bool:
        made.append(make())
        return True

    with ranks.collective():
        ranks.share(what, here, bool)
        yield made[0]


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
