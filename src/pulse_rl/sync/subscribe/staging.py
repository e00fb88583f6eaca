"""A staged version: fetched, decoded and proved while generation goes on, to be written in a moment.

It belongs to the weights that it was staged on, in the memory and at the version that they had then. If they have moved
on since, it is obsolete: `apply` refuses it, and nothing is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Self

from pulse_rl.errors import BaseMismatchError
from pulse_rl.history.trail import State
from pulse_rl.sync.subscribe.landings import Keeping
from pulse_rl.sync.subscribe.sync import Route, Sync, SyncReport
from pulse_rl.weights.memory import LiveWeights, Memory


class Staged:
    """A version that `Subscriber.stage` has fetched, decoded and proved. No weight was touched.

    `apply` writes it. It may be called in another thread than `stage` was, and not while this subscriber is in another
    call. A staged version that is not wanted any more is dropped by `discard`, or at the end of a `with` block.

    Args:
        apply: What `apply` calls.
        view: Views the weights.
        memory: Their memory.
        base: What they hold.
        keeping: What is to be written.
        sync: The call of `Subscriber.stage` that has brought it.

    Attributes:
        version: The version.
        digest: Its digest, 16 hex digits.
        previous: The version that the weights hold, on which it was staged; None if that was not known.
        route: As in `SyncReport`.
        nbytes: Bytes that it holds until it is applied or discarded: decoded changes in memory (beyond 32 MB, or 1/32
            of the weights if that is more, in a temporary file), or a whole version in temporary files.
        changes: Elements that its patches change.
        fetched_nbytes: Bytes that were read from the store.
    """

    def __init__(
        self,
        apply: Callable[[Staged], SyncReport],
        view: Callable[[], LiveWeights],
        memory: Memory,
        base: State | None,
        keeping: Keeping,
        sync: Sync,
    ) -> None:
        self.version = sync.target.version
        self.digest = sync.target.digest
        self.previous = sync.previous
        self.route: Route = sync.route
        self.nbytes = keeping.nbytes
        self.changes = sync.reading.effort.changes
        self.fetched_nbytes = sync.reading.effort.nbytes
        self._apply, self._make, self._memory, self._base = apply, view, memory, base
        self._made: tuple[Keeping, Sync] | None = keeping, sync
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
        self.nbytes, self._made = 0, None
        self._at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _held(self) -> tuple[Keeping, Sync]:
        """What is to be written, and the call that has brought it. Raises as `apply`."""
        if self._made is None:
            raise RuntimeError(f"version {self.version} was applied or discarded before: stage it again")
        return self._made

    def _view(self, held: State | None) -> LiveWeights:
        """The weights to write to. held: what they hold now. Raises as `apply`."""
        self._held()
        live = self._make()
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
