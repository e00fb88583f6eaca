"""Who follows a history: what each subscriber last reported, judged."""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from pulse_rl.errors import PulseError, one_line, printable
from pulse_rl.history import heartbeat
from pulse_rl.history.manifest import Manifest
from pulse_rl.parallel import at_once
from pulse_rl.store.base import ObjectInfo, Store

SILENT_S = 300.0  # a worker that generates writes no heartbeat meanwhile
MAX_SUBSCRIBERS = 1000  # whose heartbeats are read, those seen last
AT_ONCE = 16  # requests

Verdict: TypeAlias = Literal["ok", "behind", "failing", "silent", "damaged"]  # from good to bad
_WORST: tuple[Verdict, ...] = ("damaged", "silent", "failing", "behind", "ok")


class SubscriberInfo(msgspec.Struct, frozen=True):
    """What a subscriber last reported. Its text is safe to print; none of it is to be relied on.

    Attributes:
        id: Its id.
        seen: When its heartbeat was written, in seconds since 1970 by the store's clock.
        version: The version that it holds, proved; None for none.
        lag: How many versions that is behind the newest one now.
        lag_s: For how many seconds it has been behind: since the version after its own was written.
        lag_then: How many versions it was behind the newest one that it knew of.
        error: The error of its last sync; None if that succeeded.
        sync_s: The seconds that its last sync took.
        fetched_nbytes: The bytes that its last sync read.
        unreadable: Why its heartbeat cannot be read; then nothing else is known.
        host: Where it runs.
        software: What wrote its heartbeat, as "pulse-rl 0.1.0".
        verdict: "damaged": its heartbeat cannot be read. "silent": no heartbeat for longer than `max_silence`.
            "failing": its last sync failed. "behind": more versions behind than `max_lag`. Otherwise "ok".
    """

    id: str
    seen: float
    version: int | None
    lag: int | None
    lag_s: float | None
    lag_then: int | None
    error: str | None
    sync_s: float | None
    fetched_nbytes: int | None
    unreadable: str | None
    host: str | None
    software: str | None
    verdict: Verdict


class Limits(msgspec.Struct, frozen=True):
    """What a subscriber is judged by."""

    max_lag: int | None
    max_silence: float
    expire: float
    now: float

    def judge(self, seen: float, beat: heartbeat.Heartbeat, lag: int | None) -> Verdict:
        if self.now - seen > self.max_silence:
            return "silent"
        if beat.error is not None:
            return "failing"
        return "behind" if self.max_lag is not None and (lag is None or lag > self.max_lag) else "ok"


def worst(subscribers: Iterable[SubscriberInfo]) -> Verdict:
    return min((one.verdict for one in subscribers), key=_WORST.index, default="ok")


def read_subscribers(
    store: Store,
    objects: list[ObjectInfo],
    newest: Manifest,
    problems: list[str],
    limits: Limits,
    written: Mapping[int, float],
) -> tuple[tuple[SubscriberInfo, ...], int]:
    """Read the heartbeats of a listing. Returns them, and how many have expired.

    written: when each manifest was written, by sequence number.
    """
    everyone = [info for info in objects if heartbeat.heartbeat_id(info.name) is not None]
    beats = [info for info in everyone if limits.now - info.modified <= limits.expire]
    expired = len(everyone) - len(beats)
    if len(beats) > MAX_SUBSCRIBERS:
        problems.append(f"of {len(beats)} heartbeats, the {MAX_SUBSCRIBERS} written last are shown")
        beats = sorted(sorted(beats, key=lambda info: info.modified)[-MAX_SUBSCRIBERS:])
    found = at_once(lambda info: _subscriber(store, info, newest.sequence, limits, written), beats, AT_ONCE, "status")
    return tuple(found), expired


def _subscriber(
    store: Store, info: ObjectInfo, newest: int, limits: Limits, written: Mapping[int, float]
) -> SubscriberInfo:
    name = heartbeat.heartbeat_id(info.name)
    assert name is not None  # the caller has looked
    try:
        beat = heartbeat.read(store, info.name)
    except PulseError as error:
        unknown = (None,) * 7
        return SubscriberInfo(name, info.modified, *unknown, one_line(error), None, None, "damaged")
    lag = max(0, newest - beat.sequence) if beat.sequence is not None else None
    lag_s = 0.0 if lag == 0 else None
    if beat.sequence is not None and (since := written.get(beat.sequence + 1)) is not None:
        lag_s = max(0.0, limits.now - since)
    return SubscriberInfo(
        id=name,
        seen=info.modified,
        version=beat.version,
        lag=lag,
        lag_s=lag_s,
        lag_then=beat.lag,
        error=printable(beat.error[: heartbeat.MAX_ERROR]) if beat.error is not None else None,
        sync_s=beat.sync_s,
        fetched_nbytes=beat.fetched_nbytes,
        unreadable=None,
        host=printable(beat.host) if beat.host is not None else None,
        software=printable(beat.software) if beat.software is not None else None,
        verdict=limits.judge(info.modified, beat, lag),
    )
