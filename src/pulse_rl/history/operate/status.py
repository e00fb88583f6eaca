"""status: what an operator wants to know of a store at a glance, at the cost of a glance.

Names, sizes and times come from listing the store; the newest version from its manifest; the sizes of the last
patches from its trail, which reaches back up to 64 versions; each subscriber from its heartbeat. So a history of
100,000 versions takes a few requests besides its listing. That the newest version can be reached is judged by the
names that are listed. Nothing is proved here: `verify` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from pulse_rl.errors import CannotListError, IntegrityError, PulseError, one_line
from pulse_rl.history import heartbeat
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, Scalar, ViewInfo, manifest_name, manifest_sequence, object_sequence
from pulse_rl.history.operate.missing import find_missing
from pulse_rl.history.operate.subscribers import SILENT_S, Limits, SubscriberInfo, Verdict, read_subscribers, worst
from pulse_rl.history.operate.targets import open_history
from pulse_rl.history.operate.unfinished import partial_uploads
from pulse_rl.history.trail import Trail, link_of
from pulse_rl.history.versions import newest_readable, no_version
from pulse_rl.log.signing import PublicKey
from pulse_rl.parallel import at_once
from pulse_rl.store.base import ObjectInfo, Store

FOLDERS = ("manifests", "patches", "anchors", "trails", heartbeat.PREFIX)
T = TypeVar("T")

INTERVALS = 64  # between the newest versions, of which the median is reported
AT_ONCE = 16  # requests; also the newest manifests that are tried until one can be read


class Objects(msgspec.Struct, frozen=True):
    """Some objects of a store.

    Attributes:
        count: How many there are.
        nbytes: Their size in bytes.
    """

    count: int
    nbytes: int


class Listing(msgspec.Struct, frozen=True):
    """What a listing of a store tells: names, sizes, and times by the store's own clock.

    Attributes:
        manifests: The manifests.
        patches: The patches, skip patches included.
        anchors: The files of anchors; `anchor_sequences` says how many anchors they make.
        trails: The trails.
        unnamed: Those of them whose sequence number has no manifest: left by a failed attempt, or being written.
        partial: Uploads that were not finished, as a publisher that was killed leaves in a directory. A bucket does not
            list its own: there they are always 0.
        anchor_sequences: The sequence numbers of the versions that have an anchor.
        modified: When the newest manifest was written, in seconds since 1970.
        interval_s: The median seconds between the newest versions; None for a single one.
        age_s: Seconds since then, as this machine's clock or the store's says.
    """

    manifests: Objects
    patches: Objects
    anchors: Objects
    trails: Objects
    unnamed: Objects
    partial: Objects
    anchor_sequences: tuple[int, ...]
    modified: float
    interval_s: float | None
    age_s: float


class RecentPatches(msgspec.Struct, frozen=True):
    """The patches between the last versions, from the newest trail.

    Attributes:
        versions: How many versions it reaches back.
        patches: The patches from each version to the next.
        skips: The patches over several versions.
        patch_nbytes: The median size of the former in bytes; 0 without any.
        reduction: How many times smaller that is than the weights; 1 without any.
        sizes: The sizes of the former in bytes, the newest version's last.
    """

    versions: int
    patches: Objects
    skips: Objects
    patch_nbytes: int
    reduction: float
    sizes: tuple[int, ...]


class Status(msgspec.Struct, frozen=True):
    """A store at a glance.

    Attributes:
        url: The store.
        versions: How many versions it holds.
        first: The sequence number from which on there is no gap; before it are anchors that are kept permanently.
        oldest: The oldest version; None if its manifest cannot be read.
        newest: The newest version whose manifest can be read.
        sequence: Its sequence number.
        digest: Its digest, 16 hex digits.
        history: The id of the history, 16 hex digits: a run that is begun anew has another one.
        created: When it was published, in seconds since 1970 by the publisher's clock.
        metadata: What the trainer has noted of it, as its own step; None for nothing.
        elements: How many elements its weights have.
        full_nbytes: How many bytes they have.
        anchor_sequence: The sequence number of the newest anchor.
        listing: What listing the store tells; None where it cannot be listed.
        recent: The patches between the last versions; None where the trail cannot be read.
        subscribers: What each subscriber last reported, by id; None where the store cannot be listed.
        expired: How many heartbeats were left out, as their subscribers were silent for longer than `expire`.
        signed: Whether the newest version is signed, by whatever key.
        ended: Whether the trainer has ended the run with this version (`Publisher.end`).
        nonfinite: How many of its weights are NaN or infinite.
        density: The share of its elements that its patch changes; None without a patch.
        views: Its views, by name.
        problems: What is wrong at a glance, one sentence each; `verify` looks at everything.
        verdict: "damaged" where there are problems, otherwise the worst verdict of a subscriber.
    """

    url: str
    versions: int
    first: int
    oldest: int | None
    newest: int
    sequence: int
    digest: str
    history: str
    created: float
    metadata: dict[str, Scalar] | None
    elements: int
    full_nbytes: int
    anchor_sequence: int
    listing: Listing | None
    recent: RecentPatches | None
    subscribers: tuple[SubscriberInfo, ...] | None
    expired: int
    signed: bool
    ended: bool
    nonfinite: int
    density: float | None
    views: tuple[ViewInfo, ...]
    problems: tuple[str, ...]
    verdict: Verdict


def status(
    target: Store | str | Path,
    *,
    public_key: PublicKey | None = None,
    max_lag: int | None = None,
    max_silence: float = SILENT_S,
    expire: float = heartbeat.EXPIRE_S,
) -> Status:
    """Look at a store: its versions, sizes, last patches, and who follows it.

    Takes a listing and a few requests, however long the history is, and one request for each heartbeat.

    Args:
        target: A Store, or the URL or path of one, or a directory with one named `store`.
        public_key: The Ed25519 public key that the manifests that are read must be signed by: a PEM file or the key
            itself. By default signatures are not checked.
        max_lag: How many versions a subscriber may be behind the newest one. By default any number.
        max_silence: Seconds for which a subscriber may write no heartbeat; five minutes by default.
        expire: Seconds after which a silent subscriber is taken for gone and left out; a day by default.

    Returns:
        What was found. Problems are listed in it where something is left to report.

    Raises:
        FileNotFoundError: If there is nothing at target.
        ValueError: If target is a patch or a checkpoint.
        VersionNotFoundError: If the store holds no versions.
        IntegrityError: If none of the newest manifests can be read.
        VersionSkewError: If a newer pulse-rl has written the newest one: upgrade this one.
        StoreError: If the store cannot be read.
    """
    history = open_history(target, public_key, patience=0)
    store = history.store
    problems: list[str] = []
    objects = _list(store)
    manifests = _manifests(objects)
    sequences = list(manifests) if objects is not None else history.sequences()
    if not sequences:
        raise no_version(store)
    first = _unless_broken(history.first, 0, problems, IntegrityError)
    line = [sequence for sequence in manifests if sequence >= first]
    if line and (missing := line[-1] - line[0] + 1 - len(line)):
        problems.append(f"{missing} manifests are missing from {manifest_name(line[0])} on")
    newest = _newest(history, sequences, problems)
    recent = _unless_broken(lambda: _recent(history.trail(newest), newest, first), None, problems)
    if objects is not None:
        problems.extend(problem for problem in _missing(history, newest, first, objects) if problem not in problems)
    oldest = _unless_broken(lambda: history.read(sequences[0]).version, None, problems)
    ended = _unless_broken(history.ended, False, [])  # a newest manifest that is damaged is a problem by itself
    subscribers, expired, listing = None, 0, None
    if objects is not None:
        beats = objects[heartbeat.PREFIX]
        now = heartbeat.store_time(beats, manifests)
        # Where the run has ended, subscribers go.
        limits = Limits(max_lag, math.inf if ended else max_silence, expire, now)
        written = {sequence: info.modified for sequence, info in manifests.items()}
        subscribers, expired = read_subscribers(store, beats, newest, problems, limits, written)
        listing = _listing(objects, manifests, partial_uploads(store), now)
    return Status(
        url=store.url,
        versions=len(sequences),
        first=first,
        oldest=oldest,
        newest=newest.version,
        sequence=newest.sequence,
        digest=newest.digest,
        history=newest.history,
        created=newest.created,
        metadata=newest.metadata,
        elements=newest.elements,
        full_nbytes=newest.full_nbytes,
        anchor_sequence=newest.anchor_sequence,
        listing=listing,
        recent=recent,
        subscribers=subscribers,
        expired=expired,
        signed=history.is_signed(newest.sequence),
        ended=ended,
        nonfinite=newest.nonfinite,
        density=newest.density,
        views=newest.view_infos,
        problems=tuple(problems),
        verdict="damaged" if problems else worst(subscribers or ()),
    )


def _list(store: Store) -> dict[str, list[ObjectInfo]] | None:
    """All objects, by folder; None where they cannot be listed."""
    try:
        return dict(zip(FOLDERS, at_once(store.list, FOLDERS, len(FOLDERS), "status"), strict=True))
    except CannotListError:
        return None


def _manifests(objects: dict[str, list[ObjectInfo]] | None) -> dict[int, ObjectInfo]:
    """The manifests of a listing by sequence number, ascending; none without a listing."""
    listed = objects["manifests"] if objects is not None else []
    return {sequence: info for info in listed if (sequence := manifest_sequence(info.name)) is not None}


def _unless_broken(read: Callable[[], T], otherwise: T, problems: list[str], kind: type[PulseError] = PulseError) -> T:
    """Read a part of a history. An error of this kind is a problem, and no part."""
    try:
        return read()
    except kind as error:
        problems.append(one_line(error))
        return otherwise


def _newest(history: History, sequences: list[int], problems: list[str]) -> Manifest:
    """The newest manifest that can be read, of the last few."""
    broken: list[PulseError] = []
    found = newest_readable(history, sequences[-AT_ONCE:], broken)
    problems.extend(map(one_line, broken))
    if found is None:
        raise IntegrityError(f"none of the newest manifests in {history.store.url} can be read: {problems[-1]}")
    return found


def _missing(history: History, newest: Manifest, first: int, objects: dict[str, list[ObjectInfo]]) -> list[str]:
    """What is missing on the way to the newest version."""
    found = _find_missing(history, newest, first, [*objects["patches"], *objects["anchors"]])
    if not found:
        return []
    # The folders are listed at once: of a version that was committed meanwhile, only the manifest may be listed.
    listed = [info for folder in ("patches", "anchors") for info in history.store.list(folder)]
    return _find_missing(history, newest, _unless_broken(history.first, 0, [], IntegrityError), listed)


def _find_missing(history: History, newest: Manifest, first: int, objects: list[ObjectInfo]) -> list[str]:
    """As `find_missing`, of the weights and of each view."""
    found = find_missing(history, newest, first, objects)
    for view, head in zip(newest.views, newest.each_view()[1:], strict=True):
        of_view = find_missing(history.of(view), head, first, objects)
        found += [f"view {view!r}: {problem}" for problem in of_view if problem not in found]
    return found


def _total(objects: Iterable[ObjectInfo]) -> Objects:
    sizes = [info.nbytes for info in objects]
    return Objects(len(sizes), sum(sizes))


def _listing(
    objects: dict[str, list[ObjectInfo]], manifests: dict[int, ObjectInfo], partial: list[ObjectInfo], now: float
) -> Listing:
    payload = [info for folder in ("patches", "anchors", "trails") for info in objects[folder]]
    anchors = {object_sequence(info.name) for info in objects["anchors"]}
    times = [info.modified for info in manifests.values()][-1 - INTERVALS :]
    # Where the clock was set back between two versions, it does not tell the time between them.
    between = [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later >= earlier]
    return Listing(
        manifests=_total(manifests.values()),
        patches=_total(objects["patches"]),
        anchors=_total(objects["anchors"]),
        trails=_total(objects["trails"]),
        unnamed=_total(info for info in payload if object_sequence(info.name) not in manifests),
        partial=_total(partial),
        anchor_sequences=tuple(sorted(manifests.keys() & anchors)),
        modified=times[-1],
        interval_s=median(between) if between else None,
        age_s=max(0.0, now - times[-1]),
    )


def _recent(trail: Trail | None, newest: Manifest, first: int) -> RecentPatches:
    """The patches that a trail lists, or without one the newest version's own; without those that were pruned."""
    own = link_of(newest)
    links = trail.links() if trail else [own] if own else []
    links = [link for link in links if link.to.sequence >= first]
    patches = [link.ref.total_nbytes for link in links if link.to.sequence - link.base_sequence == 1]
    skips = [link.ref.total_nbytes for link in links if link.to.sequence - link.base_sequence > 1]
    middle = int(median(patches)) if patches else 0
    return RecentPatches(
        versions=len(patches),
        patches=Objects(len(patches), sum(patches)),
        skips=Objects(len(skips), sum(skips)),
        patch_nbytes=middle,
        reduction=newest.full_nbytes / middle if middle else 1.0,
        sizes=tuple(patches),
    )
