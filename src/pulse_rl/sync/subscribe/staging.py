"""A staged version: fetched, decoded and proved while generation goes on, to be written in a moment.

It belongs to the weights that it was staged on, in the memory and at the version that they had then. If they have moved
on since, it is obsolete: `apply` refuses it, and nothing is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pulse_rl.errors import BaseMismatchError
from pulse_rl.history.trail import State
from pulse_rl.sync.subscribe.landings import Keeping
from pulse_rl.sync.subscribe.report import Arrival, Route, SyncReport
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.memory import LiveWeights, Memory

if TYPE_CHECKING:
    from types import TracebackType


class Made(NamedTuple):
    """What a call of `Subscriber.stage` has made."""

    apply: Callable[[Staged], SyncReport]
    weights: Any
    kept: Kept  # what keeps their layout
    memory: Memory  # of the weights
    base: State | None  # what they held
    keeping: Keeping
    arrival: Arrival


class Staged:
    """A version that `Subscriber.stage` has fetched, decoded and proved. No weight was touched.

    `apply` writes it. It may be called in another thread than `stage` was, and not while this subscriber is in another
    call. A staged version that is not wanted any more is dropped by `discard`, or at the end of a `with` block.

    Args:
        made: What `Subscriber.stage` has made.

    Attributes:
        version: The version.
        digest: Its digest, 16 hex digits.
        previous: The version that the weights hold, on which it was staged; None if that was not known.
        route: As in `SyncReport`.
        nbytes: Bytes that it holds until it is applied or discarded: decoded changes in memory (beyond 32 MB, or 1/64
            of the weights if that is more, in a temporary file), or a whole version in temporary files.
        changes: Elements that its patches change.
        fetched_nbytes: Bytes that were read from the store.
    """

    def __init__(self, made: Made) -> None:
        arrival, keeping = made.arrival, made.keeping
        self.version = arrival.target.version
        self.digest = arrival.target.digest
        self.previous = arrival.previous
        self.route: Route = arrival.route
        self.nbytes = keeping.nbytes
        self.changes = arrival.effort.changes
        self.fetched_nbytes = arrival.effort.nbytes
        self._apply, self._weights, self._kept = made.apply, made.weights, made.kept
        self._memory, self._base = made.memory, made.base
        self._keeping: Keeping | None = keeping
        self._arrival = arrival
        self._at_exit = weakref.finalize(self, keeping.discard)  # removes temporary files, where nothing else did

    def apply(self) -> SyncReport:
        """Write the version to the weights that it was staged on: only the scatter, while generation pauses.

        Every element that is written is read back. The version is applied once.

        Returns:
            What was done, and what it took: `total_s` of this call, the other numbers of both.

        Raises:
            BaseMismatchError: It is obsolete: the weights hold another version than when it was staged, or are in other
                memory, or torch has written to them. Nothing was written; stage again.
            IntegrityError: An element does not read back as written. Then `Subscriber.version` is None, and the next
                sync repairs the weights.
            RuntimeError: It was applied or discarded before, or another thread is using the subscriber.
        """
        return self._apply(self)

    def discard(self) -> None:
        """Drop what it holds. The weights are as they are. A second call does nothing."""
        self.nbytes, self._keeping = 0, None
        self._at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def _held(self) -> tuple[Keeping, Arrival]:
        """What is to be written. Raises as `apply`."""
        if self._keeping is None:
            raise RuntimeError(f"version {self.version} was applied or discarded before: stage it again")
        return self._keeping, self._arrival

    def _view(self, held: State | None) -> LiveWeights:
        """The weights to write to. held: what they hold now. Raises as `apply`."""
        self._held()
        live = LiveWeights(self._weights, self._kept)
        if held != self._base or not self._memory.is_still(live):
            expected, found = (f"version {s.version}" if s else "no version that is known" for s in (self._base, held))
            what = "they are in other memory, or torch has written to them" if held == self._base else f"found {found}"
            raise BaseMismatchError(
                f"version {self.version} was staged on weights that held {expected}: {what}; nothing was written, and "
                "what was staged is discarded: stage again",
                expected=self._base.digest if self._base else None,
                found=held.digest if held else None,
            )
        return live
