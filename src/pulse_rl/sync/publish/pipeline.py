"""The way of one version on the trainer's side: find → code → move → put → commit, or undo.

    find      find the changes since the baseline; from here on nothing reads the trainer's weights, so what follows can
              go on in the background
    code      code them, and prove that they lead to the new version
    move      write them into the baseline
    put       put the objects into the store, and commit the manifest
    undo      where the version was not committed: write back what the move overwrote

An `Attempt` is one version on this way, and does not change. The pipeline is in one of four states:

    state      committed          baseline       in flight
    empty      None               None           None          nothing is known of the history
    ready      version n          of version n   None
    in flight  version n or None  None           the attempt that is in the background
    broken     version n          None           None          what the baseline's memory holds is not known

From empty and broken it first rebuilds the newest version, or publishes an anchor if it is asked to or there is none.
In flight, every call waits for the attempt. An attempt that fails is undone, or leaves it broken. Two rules make every
line safe to interrupt: the baseline is of the committed version or None; and what changes its memory clears the field
before, and restores it once the contents are known.

If rank 2 of 4 fails: what can fail on one rank alone is work of a step of `Ranks`, so it fails on all four. None goes
on, each undoes its move, and nothing is committed; the next call begins at the version before. Where it is the first
rank that is lost in the commit itself, the others cannot tell whether it was committed: `docs/sharded.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pulse_rl.group.ranks import Ranks
from pulse_rl.history.history import holds
from pulse_rl.logs import logger
from pulse_rl.sync.publish.attempt import Attempt, Clock, VersionStart
from pulse_rl.sync.publish.delivery import Delivered
from pulse_rl.sync.publish.intake import Given, Request
from pulse_rl.sync.publish.line import Line
from pulse_rl.sync.publish.report import PublishReport, publish_report
from pulse_rl.sync.publish.views import ViewLine
from pulse_rl.sync.shares import Share

log = logger(__name__)


class _InFlight(NamedTuple):
    """A version that is coded and put in the background."""

    future: Future[Delivered]
    attempt: Attempt


class Pipeline:
    """Takes versions into a history, one after another.

    line: of the weights as they are published. views: of the same versions. tell: gets the report of each version that
    is committed.
    """

    def __init__(
        self, ranks: Ranks, line: Line, views: Sequence[ViewLine], tell: Callable[[PublishReport], None]
    ) -> None:
        self._ranks, self._line, self._views, self._tell = ranks, line, views, tell
        self._in_flight: _InFlight | None = None
        self._unsure = False  # whether the last attempt failed: it may be committed all the same
        self._pool: ThreadPoolExecutor | None = None  # of the newest version that was put in the background

    def begin(self, anchor: bool, share: Share | None, bandwidth: float | None, *, look: bool = True) -> VersionStart:
        """Where the next version goes, and what comes before it. A collective.

        share: what this rank holds; None to find out where the history ends. bandwidth: bits per second of the link to
        a worker; None for what was measured. look: as of `Position.begin`.
        """
        self.flush()
        position = self._line.position
        if position.baseline is None:
            self.await_pool()
        bandwidth = bandwidth or self._line.delivery.measured_bandwidth
        return position.begin(anchor, share, bandwidth, look=look or self._unsure)

    def find(self, start: VersionStart, given: Given, request: Request, clock: Clock) -> Attempt:
        """As `Line.find`. A collective."""
        for view in self._views:
            view.check(start.head)
        return self._line.find(start, given, request, clock)

    def deliver(self, attempt: Attempt, *, background: bool) -> PublishReport:
        """Code the version, move the baseline, put the version and commit it, or undo the move. A collective."""
        if background:
            self._start(attempt)
            return publish_report(attempt, None)
        try:
            delivered = self._put(attempt)
        finally:
            self._settle(attempt)
        return self._report(attempt, delivered)

    def _start(self, attempt: Attempt) -> None:
        """Code and put a version in the background."""

        def put() -> Delivered:
            try:
                with self._ranks.collective():
                    return self._put(attempt)
            except Exception as error:
                # Perhaps nobody asks for the result any more.
                log.error("version %d could not be published: %s", attempt.manifest.version, error)
                raise

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pulse-publish")
        future = self._pool.submit(put)
        self._in_flight = _InFlight(future, attempt)
        self._pool.shutdown(wait=False)  # its thread ends with this version

    def _put(self, attempt: Attempt) -> Delivered:
        """Code, put and commit a version.

        Where nobody has looked at the store in this call, the history may have been rolled back since: then no patch
        can start from its end.
        """
        base, delivery = attempt.base, self._line.delivery
        if base is not None and not attempt.start.head_is_fresh and not holds(delivery.history.store, base):
            raise self._line.position.changed(base, delivery.history.end()[1])
        attempt = self._line.advance(attempt)
        return delivery.deliver(attempt, {view.name: view.encode(attempt) for view in self._views})

    def _settle(self, attempt: Attempt) -> None:
        """After a delivery, take the baselines back."""
        self._unsure = not self._line.settle(attempt)
        for view in self._views:
            view.settle()

    def flush(self) -> PublishReport | None:
        """Wait until the version in flight is committed. Returns its full report; None if none is in flight."""
        flight = self._in_flight
        if flight is None:
            return None
        error = flight.future.exception()  # waits; if that is interrupted, the version stays in flight
        self._in_flight = None
        self._settle(flight.attempt)
        if error is not None:
            raise error
        return self._report(flight.attempt, flight.future.result())

    def _report(self, attempt: Attempt, delivered: Delivered) -> PublishReport:
        report = publish_report(attempt, delivered)
        self._tell(report)
        return report

    def await_pool(self) -> None:
        """Wait for a version that is put although it is not in flight, as the call that began it was interrupted."""
        if self._pool is not None:
            self._pool.shutdown()
