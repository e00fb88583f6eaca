"""What a sync reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pulse_rl.history.manifest import Manifest, Scalar
from pulse_rl.history.reading import Effort

Route: TypeAlias = Literal["none", "patches", "anchor"]  # nothing to do; patches only; from an anchor


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: The version that the weights hold now, proved.
        previous: The version that they held before; None if it was not known, or if they had been altered.
        digest: The digest of the version, 16 hex digits.
        route: "none" if there was nothing to do, "patches" if patches were applied to the weights, "anchor" if a full
            checkpoint was loaded.
        patches: How many patches were applied, also to the anchor; a skip patch counts as one.
        changes: Elements that these patches overwrote.
        density: changes / elements of the model.
        full_nbytes: Bytes of the whole model's bits.
        fetched_nbytes: Bytes of the patches and the anchor that were read; of ranks that hold shares, by this one.
        halo_nbytes: Memory that a rank keeps for strips of other ranks' weights: to decode tiles that it holds in part.
        reduction: full_nbytes / fetched_nbytes; infinite if nothing was fetched.
        recovered: What was wrong with the weights or the history, and was repaired or avoided; None if nothing was.
        fetch_s: Seconds spent waiting for the store.
        decode_s: Seconds of decoding patches, summed over threads.
        apply_s: Seconds of writing to the weights.
        prove_s: Seconds of proving, summed over threads.
        total_s: Seconds of the call that returned this report: all of a `sync`; of a version that was staged only
            `apply`, while the fields above count its staging too.
        metadata: What the trainer noted of the version; None for nothing.
    """

    version: int
    previous: int | None
    digest: str
    route: Route
    patches: int
    changes: int
    density: float
    full_nbytes: int
    fetched_nbytes: int
    halo_nbytes: int
    reduction: float
    recovered: str | None
    fetch_s: float
    decode_s: float
    apply_s: float
    prove_s: float
    total_s: float
    metadata: Mapping[str, Scalar] | None


@dataclass(frozen=True)
class Arrival:
    """How a version was reached."""

    target: Manifest
    previous: int | None  # the version that the weights held before
    route: Route
    effort: Effort
    recovered: str | None

    def report(self, halo_nbytes: int, start: float) -> SyncReport:
        """The report of it. start: `time.perf_counter()` when the call began."""
        target, effort = self.target, self.effort
        return SyncReport(
            version=target.version,
            previous=self.previous,
            digest=target.digest,
            route=self.route,
            patches=effort.patches,
            changes=effort.changes,
            density=effort.changes / target.elements if target.elements else 0.0,
            full_nbytes=target.full_nbytes,
            fetched_nbytes=effort.nbytes,
            halo_nbytes=halo_nbytes,
            reduction=target.full_nbytes / effort.nbytes if effort.nbytes else float("inf"),
            recovered=self.recovered,
            fetch_s=effort.fetch_s,
            decode_s=effort.decode_s,
            apply_s=effort.apply_s,
            prove_s=effort.prove_s,
            total_s=time.perf_counter() - start,
            metadata=target.metadata,
        )
