"""What a publish and a sync tell of themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pulse_rl.history.manifest import Manifest
from pulse_rl.patch.encode import EncodedPatch
from pulse_rl.sync.delivery import Delivered

Way: TypeAlias = Literal["none", "patches", "anchor"]  # nothing to do, over patches alone, or from an anchor


@dataclass(frozen=True)
class PublishReport:
    """What one publish did. Seconds of cast and diff are work summed over threads; the others wall time."""

    version: int
    base: int | None  # version the patch starts from; None for a version that is an anchor only, as the first one
    digest: str  # of the published version, 16 hex digits
    codec: str | None  # None without a patch
    choice: str | None  # why this codec: what each candidate took; None without a patch
    elements: int
    changes: int  # elements whose bits differ from the base
    density: float  # changes / elements
    full_nbytes: int  # of the whole model's bits
    patch_nbytes: int  # what a following subscriber reads; 0 without a patch
    pending: bool  # on its way in the background: what follows is known, and told by `flush`, when it is committed
    anchor_nbytes: int  # 0 unless this version is an anchor too
    skip_nbytes: int  # of skip patches to it, for subscribers that slept
    sent_nbytes: int  # patch, anchor, trail and skip patches together: what went into the store
    reduction: float  # full_nbytes / patch_nbytes; 1 without a patch
    cast_s: float
    diff_s: float
    encode_s: float
    prove_s: float  # decoding every patch again, and proving it against the baseline
    put_s: float  # until the commit
    skip_s: float  # making and putting skip patches, after the commit
    total_s: float  # of the call
    trouble: str | None  # what went wrong after the commit (skip patches, pruning): the version stands all the same


class Coded(NamedTuple):
    """A new version, coded."""

    digest: str
    patch: EncodedPatch | None
    choice: str | None
    cast_s: float
    diff_s: float
    prove_s: float


def publish_report(manifest: Manifest, coded: Coded, delivered: Delivered | None, start: float) -> PublishReport:
    """The report of a version; delivered: None while it is on its way."""
    patch = coded.patch
    patch_nbytes, changes = (len(patch.data), patch.header.changes) if patch else (0, 0)
    skip_nbytes = delivered.skip_nbytes if delivered else 0
    trail_nbytes = manifest.trail.nbytes if manifest.trail else 0
    return PublishReport(
        version=manifest.version,
        base=patch.header.base if patch else None,
        digest=manifest.digest,
        codec=patch.header.codec if patch else None,
        choice=coded.choice,
        elements=manifest.elements,
        changes=changes,
        density=changes / manifest.elements if manifest.elements else 0.0,
        full_nbytes=manifest.full_nbytes,
        patch_nbytes=patch_nbytes,
        pending=delivered is None,
        anchor_nbytes=manifest.anchor_nbytes,
        skip_nbytes=skip_nbytes,
        sent_nbytes=patch_nbytes + manifest.anchor_nbytes + trail_nbytes + skip_nbytes if delivered else 0,
        reduction=manifest.full_nbytes / patch_nbytes if patch_nbytes else 1.0,
        cast_s=coded.cast_s,
        diff_s=coded.diff_s,
        encode_s=patch.encode_s if patch else 0.0,
        prove_s=coded.prove_s,
        put_s=delivered.put_s if delivered else 0.0,
        skip_s=delivered.skip_s if delivered else 0.0,
        total_s=time.perf_counter() - start,
        trouble=delivered.trouble if delivered else None,
    )


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. Seconds of decode and prove are work summed over threads; the others wall time."""

    version: int  # the weights' version now, proved
    previous: int | None  # their version before; None if it was not known, or they were altered
    digest: str  # of the version, 16 hex digits
    route: Way
    patches: int  # how many were applied, skip patches over several versions among them
    changes: int  # elements they overwrote
    density: float  # changes / elements of the model
    full_nbytes: int  # of the whole model's bits
    fetched_nbytes: int
    reduction: float  # full_nbytes / fetched_nbytes; infinite if nothing was fetched
    recovered: str | None  # what was wrong on the way and was got past: with the live weights, or with the history
    fetch_s: float
    decode_s: float
    apply_s: float
    prove_s: float
    total_s: float
