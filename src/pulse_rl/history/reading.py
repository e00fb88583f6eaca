"""One call that reads a history: with which ranks, what it has taken, and what it has found wrong."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from pulse_rl.errors import IntegrityError, ObjectNotFoundError, PulseError, StoreError, VersionSkewError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.history import History

T = TypeVar("T")


@dataclass
class Effort:
    """What it took to reach a version: bytes, patches, changes and seconds. decode_s and prove_s add up threads."""

    nbytes: int = 0
    patches: int = 0
    changes: int = 0
    fetch_s: float = 0.0  # spent waiting: less than the transfers took where they overlapped other work
    decode_s: float = 0.0
    apply_s: float = 0.0
    prove_s: float = 0.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to one of the fields."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


class Faults(msgspec.Struct):
    """What a FaultLog holds, as one process tells it to others."""

    names: list[str]
    messages: list[str]
    damaged: bool
    unreachable: bool
    skew: str | None


class FaultLog:
    """What was wrong with a history during one operation, and which objects to avoid for the rest of it."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # objects to avoid
        self.messages: list[str] = []
        self.damaged = False  # whether any fault was more than an object that is missing or unreachable
        self.unreachable = False  # whether an object could not be read for a reason of the store's
        self.skew: VersionSkewError | None = None  # of the first object of a newer format

    def add(self, name: str, error: PulseError) -> None:
        """Report a fault of one object.

        Raises the error where a second object cannot be read for a reason of the store's: then the store is
        unreachable, and to try all its objects would take hours.
        """
        unreachable = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
        if unreachable and self.unreachable:
            raise error
        self.unreachable |= unreachable
        self.damaged |= not isinstance(error, StoreError)
        if self.skew is None and isinstance(error, VersionSkewError):
            self.skew = error
        self.names.add(name)
        self.note(str(error))

    def note(self, message: str) -> None:
        """Report what was wrong, in words, once."""
        if message not in self.messages:
            self.messages.append(message)

    def failure(self, message: str, url: str) -> PulseError:
        """The error of an operation that these faults have ended."""
        if self.damaged:
            return IntegrityError(message)
        return (StoreError if self.unreachable else ObjectNotFoundError)(message, url=url)

    def state(self) -> Faults:
        """All that it holds."""
        skew = str(self.skew) if self.skew is not None else None
        return Faults(sorted(self.names), list(self.messages), self.damaged, self.unreachable, skew)

    def take(self, faults: Faults) -> None:
        """Hold what another process found too."""
        self.names |= set(faults.names)
        for message in faults.messages:
            self.note(message)
        self.damaged |= faults.damaged
        self.unreachable |= faults.unreachable
        if self.skew is None and faults.skew is not None:
            self.skew = VersionSkewError(faults.skew)


class _Led(msgspec.Struct, Generic[T]):
    """What one process has found for all, and what it found wrong on the way."""

    found: T
    faults: Faults


@dataclass(frozen=True)
class Reading:
    """One call that reads a history. Ranks that hold shares of one model make it together."""

    history: History
    ranks: Ranks = field(default_factory=Ranks)
    effort: Effort = field(default_factory=Effort)
    faults: FaultLog = field(default_factory=FaultLog)

    def lead(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """As `Ranks.lead`. What the first rank has found wrong is known to all."""
        led = self.ranks.lead(what, lambda: _Led(work(), self.faults.state()), _Led[kind])  # type: ignore[valid-type]
        self.faults.take(led.faults)
        return led.found
