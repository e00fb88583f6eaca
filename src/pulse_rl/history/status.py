"""status: what an operator wants to know of a store at a glance, at the cost of a glance.

Names, sizes and times come from listing the store; what the newest version is, from its manifest; how large the last
patches are, from the newest trail, which tells of up to 64 versions; and each subscriber from its heartbeat. So a
history of 100,000 versions takes a few requests beside its listing. Nothing is proved here: that is `verify`'s.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec

from pulse_rl.errors import CannotListError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.history import heartbeat
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest, manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.trail import Trail, step_of
from pulse_rl.store.base import ObjectInfo, Store

FOLDERS = ("manifests", "patches", "anchors", "trails", heartbeat.PREFIX)
INTERVALS = 64  # of the newest versions, of which the time between them is told
MAX_SUBSCRIBERS = 1000  # of which heartbeats are read, those seen last
AT_ONCE = 16  # requests


class Objects(msgspec.Struct, frozen=True):
    """Some objects of a store."""

    count: int
    nbytes: int


class Listing(msgspec.Struct, frozen=True):
    """What listing a store tells: of objects, their names, sizes, and times by the store's own clock."""

    manifests: Objects
    patches: Objects  # skip patches among them
    anchors: Objects  # files
    trails: Objects
    unnamed: Objects  # of those, what bears no listed version's number: a failed attempt's, or one's under way
    anchor_sequences: tuple[int, ...]  # sequence numbers of the versions that have an anchor
    modified: float  # when the newest manifest was written, seconds since 1970
    interval_s: float | None  # median time between the newest versions; None for a single one


class Recent(msgspec.Struct, frozen=True):
    """What the newest trail tells of the patches between the last versions."""

    versions: int  # that it reaches back
    patches: Objects  # from each version to the next
    skips: Objects  # over several versions
    patch_nbytes: int  # median of the patches; 0 without any
    reduction: float  # full_nbytes / patch_nbytes; 1 without any


class SubscriberInfo(msgspec.Struct, frozen=True):
    """What a subscriber last said of itself. Its text is made safe to print; none of it is to be relied on."""

    id: str
    seen: float  # when its heartbeat was written, seconds since 1970 by the store's clock
    version: int | None  # None if it holds none that is proved
    lag: int | None  # versions that it is behind the newest one now, unless it has taken some since
    lag_then: int | None  # versions that it was behind the newest one that it had seen
    error: str | None  # what its last sync failed with
    sync_s: float | None  # what that sync took
    fetched_nbytes: int | None  # and read
    unreadable: str | None  # why its heartbeat cannot be read; then nothing else is known


class Status(msgspec.Struct, frozen=True):
    """A store at a glance."""

    url: str
    versions: int  # how many there are
    first: int  # the sequence number from which on there is no gap; before it are anchors kept for good
    oldest: int | None  # version; None if its manifest cannot be read
    newest: int  # version, the newest whose manifest can be read
    sequence: int  # its sequence number
    digest: str
    created: float  # seconds since 1970 by the publisher's clock
    elements: int
    full_nbytes: int  # of all its bits
    anchor_sequence: int  # of the newest anchor
    listing: Listing | None  # None where the store cannot be listed
    recent: Recent | None  # None where the trail cannot be read
    subscribers: tuple[SubscriberInfo, ...] | None  # by id; None where the store cannot be listed
    problems: tuple[str, ...]  # what stands out; `verify` looks at everything


def status(history: History) -> Status:
    """Look at a store. Raises VersionNotFoundError for a store without versions, StoreError, and IntegrityError if
    none of the newest manifests can be read."""
    store = history.store
    problems: list[str] = []
    objects = _list(store)
    first = _first(history, problems)
    if objects is None:
        sequences = history.sequences()
    else:
        numbers = (manifest_sequence(info.name) for info in objects["manifests"])
        sequences = [sequence for sequence in numbers if sequence is not None]
        line = [sequence for sequence in sequences if sequence >= first]
        missing = line[-1] - line[0] + 1 - len(line) if line else 0
        if missing:
            problems.append(f"{missing} manifests are missing from {manifest_name(line[0])} on")
    if not sequences:
        raise VersionNotFoundError(f"{store.url} holds no version yet")
    newest = _newest(history, sequences, problems)
    recent = None
    try:
        recent = _recent(history.trail(newest), newest, first)
    except PulseError as error:
        problems.append(_line(error))
    oldest = None
    try:
        oldest = history.read(sequences[0]).version
    except PulseError as error:
        problems.append(_line(error))
    return Status(
        url=store.url,
        versions=len(sequences),
        first=first,
        oldest=oldest,
        newest=newest.version,
        sequence=newest.sequence,
        digest=newest.digest,
        created=newest.created,
        elements=newest.elements,
        full_nbytes=newest.full_nbytes,
        anchor_sequence=newest.anchor_sequence,
        listing=_listing(objects, set(sequences)) if objects is not None else None,
        recent=recent,
        subscribers=_subscribers(store, objects[heartbeat.PREFIX], newest, problems) if objects is not None else None,
        problems=tuple(problems),
    )


def _list(store: Store) -> dict[str, list[ObjectInfo]] | None:
    """All objects, by folder; None where they cannot be listed."""
    with ThreadPoolExecutor(len(FOLDERS)) as pool:
        try:
            return dict(zip(FOLDERS, pool.map(store.list, FOLDERS), strict=True))
        except CannotListError:
            return None


def _first(history: History, problems: list[str]) -> int:
    try:
        return history.first()
    except IntegrityError as error:
        problems.append(_line(error))
        return 0


def _newest(history: History, sequences: list[int], problems: list[str]) -> Manifest:
    """The newest manifest that can be read, of the last few."""
    for sequence in sequences[: -1 - AT_ONCE : -1]:
        try:
            return history.read(sequence)
        except (IntegrityError, VersionNotFoundError) as error:
            problems.append(_line(error))
    raise IntegrityError(f"none of the newest manifests in {history.store.url} can be read: {problems[-1]}")


def _total(objects: Iterable[ObjectInfo]) -> Objects:
    sizes = [info.nbytes for info in objects]
    return Objects(len(sizes), sum(sizes))


def _listing(objects: dict[str, list[ObjectInfo]], sequences: set[int]) -> Listing:
    payload = [info for folder in ("patches", "anchors", "trails") for info in objects[folder]]
    anchors = {object_sequence(info.name) for info in objects["anchors"]}
    manifests = [info for info in objects["manifests"] if manifest_sequence(info.name) is not None]
    times = [info.modified for info in manifests[-1 - INTERVALS :]]
    # A clock that was set back between two versions tells nothing of the time between them.
    between = [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later >= earlier]
    return Listing(
        manifests=_total(manifests),
        patches=_total(objects["patches"]),
        anchors=_total(objects["anchors"]),
        trails=_total(objects["trails"]),
        unnamed=_total(info for info in payload if object_sequence(info.name) not in sequences),
        anchor_sequences=tuple(sorted(sequences.intersection(anchors))),
        modified=times[-1],
        interval_s=median(between) if between else None,
    )


def _recent(trail: Trail | None, newest: Manifest, first: int) -> Recent:
    """The patches that a trail tells of, or without one the newest version's own; without what has been pruned."""
    own = step_of(newest)
    steps = trail.steps() if trail else [own] if own else []
    steps = [step for step in steps if step.to.sequence >= first]
    patches = [step.ref.nbytes for step in steps if step.to.sequence - step.base == 1]
    skips = [step.ref.nbytes for step in steps if step.to.sequence - step.base > 1]
    middle = int(median(patches)) if patches else 0
    return Recent(
        versions=len(patches),
        patches=Objects(len(patches), sum(patches)),
        skips=Objects(len(skips), sum(skips)),
        patch_nbytes=middle,
        reduction=newest.full_nbytes / middle if middle else 1.0,
    )


def _subscribers(
    store: Store, objects: list[ObjectInfo], newest: Manifest, problems: list[str]
) -> tuple[SubscriberInfo, ...]:
    """Read the heartbeats that a listing shows."""
    beats = [info for info in objects if heartbeat.heartbeat_id(info.name) is not None]
    if len(beats) > MAX_SUBSCRIBERS:
        problems.append(f"of {len(beats)} heartbeats, the {MAX_SUBSCRIBERS} written last are shown")
        beats = sorted(sorted(beats, key=lambda info: info.modified)[-MAX_SUBSCRIBERS:])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tuple(pool.map(lambda info: _subscriber(store, info, newest.sequence), beats))


def _subscriber(store: Store, info: ObjectInfo, newest: int) -> SubscriberInfo:
    name = heartbeat.heartbeat_id(info.name)
    assert name is not None  # the caller has looked
    try:
        beat = heartbeat.read(store, info.name)
    except (PulseError, FileNotFoundError) as error:
        return SubscriberInfo(name, info.modified, None, None, None, None, None, None, _line(error))
    return SubscriberInfo(
        id=name,
        seen=info.modified,
        version=beat.version,
        lag=max(0, newest - beat.sequence) if beat.sequence is not None else None,
        lag_then=beat.lag,
        error=printable(beat.error[: heartbeat.MAX_ERROR]) if beat.error is not None else None,
        sync_s=beat.sync_s,
        fetched_nbytes=beat.fetched_nbytes,
        unreadable=None,
    )


def printable(text: str) -> str:
    """Text of somebody else as one line that does nothing to a terminal: no control or invisible characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


def _line(error: BaseException) -> str:
    return printable(heartbeat.sentence(error))
