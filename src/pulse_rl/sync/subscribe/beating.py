"""The heartbeat of a subscriber: what it holds and what went wrong, after each sync and while it waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pulse_rl.errors import one_line
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.heartbeat import MAX_ERROR, Heart, Heartbeat
from pulse_rl.sync.subscribe.proof import Proof
from pulse_rl.sync.subscribe.report import SyncReport


class Beating:
    """Sends the heartbeats of one subscriber.

    heart: None for a subscriber without any. proof: what its weights hold. ranks: of which the first one sends them.
    """

    def __init__(self, heart: Heart | None, proof: Proof, ranks: Ranks) -> None:
        self.heart = heart
        self._proof = proof
        self._ranks = ranks
        self._newest = 0  # the highest sequence number of a version that a sync was to reach

    def aim(self, sequence: int) -> None:
        """Note the version that a sync is to reach."""
        self._newest = max(self._newest, sequence)

    @contextmanager
    def failures(self, start: float) -> Iterator[None]:
        """Send a heartbeat if the block fails. start: `time.perf_counter()` when the call began."""
        try:
            yield
        except Exception as error:
            self.beat(error, None, start)
            raise

    def beat(self, error: Exception | None, report: SyncReport | None, start: float) -> None:
        """Send the heartbeat after a sync."""
        if self.heart is None or self._ranks.rank:
            return
        held = self._proof.held
        self.heart.beat(
            Heartbeat(
                id=self.heart.id,
                version=held.version if held else None,
                sequence=held.sequence if held else None,
                lag=max(0, self._newest - held.sequence) if held else None,
                error=one_line(error, MAX_ERROR) if error else None,
                sync_s=time.perf_counter() - start,
                fetched_nbytes=report.fetched_nbytes if report else None,
            )
        )

    def beat_again(self) -> None:
        """Say, while waiting, that this subscriber is alive."""
        if self.heart is not None and self._ranks.rank == 0 and not self.heart.repeat():
            self.heart.beat(Heartbeat(self.heart.id, None, None, None, None, 0.0, None))
