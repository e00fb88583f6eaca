"""What each process of an engine says, and what the engine holds by that: what all of them hold.

The ranks that hold shares of one model change together. Replicas of a model in one server do not know of each other:
one may fail alone, and then they hold different versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pulse_rl.engines.states import BUSY, EngineState, Failure, Follow, Mapped, Phase, Prepared


class RankState(msgspec.Struct, frozen=True):
    """What one process holds.

    follow, pending: as in `EngineState`. synced: whether it was brought to a version since its start. stopped: whether
    its weights are of no version, so that the engine must stay paused. working: whether a job is not done.
    """

    instance: str
    follow: Follow | None
    pending: Follow | None
    version: int | None
    digest: str | None
    synced: bool
    stopped: bool
    working: bool
    prepared: Prepared | None
    mapped: Mapped | None
    failure: Failure | None


class Applied(NamedTuple):
    """What came of an apply in one process."""

    state: RankState
    seconds: float


class Outside(NamedTuple):
    """What the engine says besides."""

    model: str
    paused: bool
    weight_version: str


def is_stopped(ranks: Sequence[RankState]) -> bool:
    """Whether the engine must not generate before an update has succeeded: replicas that differ must not, either."""
    differ = len(_versions(ranks)) > 1 and not any(rank.working for rank in ranks)
    return differ or any(rank.stopped for rank in ranks)


def merge(ranks: Sequence[RankState], outside: Outside) -> EngineState:
    """What an engine holds. ranks: its processes, by rank."""
    first = ranks[0]
    held = _versions(ranks)
    version, digest = next(iter(held)) if len(held) == 1 else (None, None)
    working = any(rank.working for rank in ranks)
    prepared = _prepared(ranks)
    phase: Phase = "working" if working else "staged" if prepared else "idle"
    ready = version is not None and not outside.paused and all(rank.synced for rank in ranks)
    return EngineState(
        instance=first.instance,
        model=outside.model,
        follow=first.follow if all(rank.follow == first.follow for rank in ranks) else None,
        pending=next((rank.pending for rank in ranks if rank.pending), None),
        version=version,
        digest=digest,
        ready=ready,
        paused=outside.paused,
        weight_version=outside.weight_version,
        phase=phase,
        prepared=prepared,
        mapping=_mapped(ranks),
        failure=None if working else _failure(ranks),
        ranks=len(ranks),
    )


def _prepared(ranks: Sequence[RankState]) -> Prepared | None:
    """What all ranks have staged."""
    found = [rank.prepared for rank in ranks if rank.prepared is not None]
    if len(found) < len(ranks) or len(_versions(found)) > 1:
        return None
    return msgspec.structs.replace(
        max(found, key=lambda each: ("none", "patches", "anchor").index(each.route)),
        nbytes=sum(each.nbytes for each in found),
        fetched_nbytes=sum(each.fetched_nbytes for each in found),
        changes=max(each.changes for each in found),
        stage_s=max(each.stage_s for each in found),
    )


def _mapped(ranks: Sequence[RankState]) -> Mapped | None:
    found = [rank.mapped for rank in ranks if rank.mapped is not None]
    if len(found) < len(ranks):
        return None
    return msgspec.structs.replace(found[0], seconds=max(each.seconds for each in found))


def _versions(found: Sequence[RankState] | Sequence[Prepared]) -> set[tuple[int | None, str | None]]:
    """The versions that ranks hold or have staged, each with its digest."""
    return {(each.version, each.digest) for each in found}


def _failure(ranks: Sequence[RankState]) -> Failure | None:
    """The failure that explains the others: an ExchangeError says that another rank has failed."""
    found = [rank.failure for rank in ranks if rank.failure is not None]
    if not found and len(_versions([rank.prepared for rank in ranks if rank.prepared is not None])) > 1:
        message = "a version came while its replicas staged the newest: stage again"
        return Failure("stage", BUSY, message, temporary=True)
    return next((each for each in found if each.kind != "ExchangeError"), found[0] if found else None)
