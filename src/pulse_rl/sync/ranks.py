"""The processes that publish or sync one model together: the ranks of a process group, or one process alone.

What they do is written once, for any number: each step is some work on every rank and a `share` of what it gave. If it
fails on one rank, all ranks raise, so that none goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pulse_rl.group.collectives import Wording
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.sharing import share

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class Gathering(Protocol):
    """The processes that agree on something."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        """The bytes of every rank. limit: of one rank's."""


class Ranks(Protocol):
    """The processes that work together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent to the others."""

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        """Run work on every rank and return what it returned on each, by rank.

        what: the name of the work, for errors. kind: the type of what it returns, as msgspec reads it. A rank whose
        work fails raises its own error, all others an ExchangeError that has its text.
        """

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        """The bytes of every rank. limit: of one rank's."""

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        """Send data[r] to rank r. Returns what each rank sent here. limit: bytes of one message."""


class Alone:
    """One process, without a group."""

    rank, size, sent_nbytes = 0, 1, 0

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        return [work()]

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        return [data]

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        return [memoryview(data[0])]


class Together:
    """The ranks of a process group.

    group: torch's; its ranks are connected once more over Gloo, for us alone, which is a collective of that group.
    """

    def __init__(self, group: dist.ProcessGroup | None, wording: Wording, timeout: float | None = None) -> None:
        self.group = PrivateGroup.of(group, wording, timeout=timeout)
        self.rank, self.size = self.group.place

    @property
    def sent_nbytes(self) -> int:
        return self.group.sent_nbytes

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        return share(self.group, what, work, kind)

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        return [bytes(found) for found in self.group.gather(data, limit)]

    def exchange(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        return self.group.all_to_all(data, limit)


def ranks_of(group: Any, wording: Wording, timeout: float | None = None) -> Ranks:
    """The ranks of a process group; one process alone for None."""
    return Alone() if group is None else Together(group, wording, timeout)
