"""One call that reads a history: with which ranks, what it has taken, and what it has found wrong."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec

from pulse_rl.group.ranks import Ranks
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.search import FaultLog, Faults, find_chain
from pulse_rl.history.trail import PatchLink, State

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

    def find_chain(self, held: State, target: Manifest, limit: int | None = None) -> list[PatchLink] | None:
        """The cheapest chain of patches between two versions, as `search.find_chain` finds it.

        A collective. Raises StoreError where the store is unreachable.
        """
        find = partial(find_chain, self.history, held.sequence, target, self.faults, limit)
        return self.lead("find patches", find, list[PatchLink] | None)  # type: ignore[arg-type]
