"""One version on its way into the history, and the baseline that it moves."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pulse_rl.group.ranks import Ranks
from pulse_rl.history.manifest import Manifest
from pulse_rl.sync.publish.baseline import Baseline
from pulse_rl.sync.publish.encoding import Encoded, NewVersion
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import place_view


class VersionStart(NamedTuple):
    """Where a version goes, and what comes before it."""

    sequence: int
    token: str  # names its objects, the same on all ranks: 16 random hex digits
    bandwidth: float | None  # bits per second, for the choice of a codec
    head: Manifest | None  # the version before; None for the first
    base: Baseline | None  # that holds it; None where the version gets an anchor only
    head_is_fresh: bool = True  # whether this call has looked where the history ends


class Clock:
    """What a call has taken since this was made: seconds, and bytes that this rank sent over its group."""

    def __init__(self, ranks: Ranks) -> None:
        self._start, self._ranks, self._sent_nbytes = time.perf_counter(), ranks, ranks.sent_nbytes

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def group_nbytes(self) -> int:
        return self._ranks.sent_nbytes - self._sent_nbytes


@dataclass(frozen=True)
class Attempt:
    """One version, from its changes to its commit. It does not change; the memory of the baseline does."""

    manifest: Manifest  # all of it but its objects
    start: VersionStart
    plan: SharePlan  # who owns what
    new: NewVersion
    assets: Mapping[str, bytes]  # small files to put with an anchor
    clock: Clock  # made when publish was called
    asks_anchor: bool  # so that what is damaged before it does not count
    encoded: Encoded | None = None  # None until it is coded, and where there is no patch

    @property
    def base(self) -> Manifest | None:
        """Of the version that the patch starts from; None for a version that has an anchor only."""
        return self.start.base.manifest if self.start.base is not None else None

    @property
    def tensors(self) -> Layout:
        """The memory of the baseline."""
        found = self.new.copy if self.start.base is None else self.start.base.tensors
        assert found is not None  # without a base, the weights were copied
        return found

    def move(self) -> None:
        """Write the proved patch into the baseline. Where this is interrupted, the memory may hold either version."""
        if self.encoded is not None:
            self.encoded.application.write()

    def undo(self) -> Baseline | None:
        """Write back what the move overwrites, whether it has begun or not.

        Returns the baseline of the base; None where that was not kept.
        """
        replaced = self.new.replaced
        if self.base is None or replaced is None:
            return None
        for name, place, (indices, values) in replaced.replaced():
            if len(indices):
                place_view(self.tensors[name], place).scatter(0, indices, values)
        return Baseline(self.tensors, self.base, self.plan)

    def moved(self, manifest: Manifest) -> Baseline:
        """The baseline after the move. manifest: as it was committed."""
        return Baseline(self.tensors, manifest, self.plan)
