"""The rollout workers' side: bring live weights to a version, proved, by the cheapest way.

A version is reported only once its bits are proved. Every step along the way leaves the live weights at one
version or the next: a patch is proved before its first element is written, and an anchor is downloaded,
proved and patched in scratch files before it is copied in. Objects that are missing or corrupt are gone around;
where no way over patches is left, or the live weights are not what they should be, the way over an anchor is taken.
The report says why.

A patch proves the elements that it writes. Whether anything else wrote to the others is told only by counting
them all: `verify_live` does that before a sync, so that altered weights are found before a patch is put on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.history.heartbeat import Heart, Heartbeat, sentence
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.restore import Work, follow, restore, scratch, way_out
from pulse_rl.history.trail import REQUEST_NBYTES, Faults, State, cheapest, cost, state_of
from pulse_rl.patch.apply import carry_through, live_digest, resolve
from pulse_rl.store.base import Store
from pulse_rl.sync.reports import SyncReport, Way
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    from pulse_rl.history.signing import PublicKey

POLL_S, LONGEST_POLL_S = 0.05, 1.0  # between looks at the store while waiting: a request each, paid for on clouds


class Subscriber:
    """Follows one history with one model's live weights.

    store: a Store, or the URL or path of one. One subscriber belongs to one set of weights: it keeps their
    proved version and digest from sync to sync, and reads only what changed. Any number of subscribers may
    follow one history; they write nothing to it but heartbeats. Memory: the patch that is applied and the one after
    it, and a few MB a thread. Not thread-safe.

    verify_live: recount every live bit before each sync (True), before every so many (a number), or only when
    `verify` is called (False). Weights that something else wrote to are then overwritten by the version synced
    to, and the report's `recovered` says so. A recount reads all weights once, those on a device through the host.

    public_key: an Ed25519 key (a PEM file's path, or the key). Then a history that is not signed by it, or was altered,
    is refused. Needs the extra `sign`.

    heartbeat: an id for this subscriber (at most 64 letters, digits and `. _ -`). Then it tells in the store, after
    each sync, done or failed, what it holds and what went wrong, for `pulse-rl status`: in the background, at once if
    that is news and every 15 s otherwise. What cannot be written is a logged warning, once for each cause.
    Raises ValueError for any other value.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        verify_live: bool | int = False,
        public_key: PublicKey | None = None,
        heartbeat: str | None = None,
    ) -> None:
        if not isinstance(verify_live, int) or verify_live < 0:
            raise ValueError(f"verify_live: expected True, False or a number of syncs, found {verify_live}")
        self.history = History(store, public_key=public_key)
        self._heart = Heart(self.history.store, heartbeat) if heartbeat is not None else None
        self._recount_every = int(verify_live)  # syncs; 0 for never
        self._syncs = 0
        self._newest = 0  # the highest sequence number of a version that it was to come to
        self._held: State | None = None
        self._tied: dict[str, str] = {}  # of the version that is held

    @property
    def version(self) -> int | None:
        """The version whose bits the weights are proved to hold; None until then, and after a failed write."""
        return self._held.version if self._held else None

    @property
    def digest(self) -> str | None:
        """The digest of that version."""
        return self._held.digest if self._held else None

    def latest(self) -> int | None:
        """The newest version in the history, None if it is empty."""
        head = self.history.head()
        return head.version if head else None

    def wait(self, version: int, timeout: float) -> int:
        """Wait until the history holds this version or a newer one; return the newest. Does not sync.

        timeout: seconds. Raises TimeoutError, saying what the newest version is by then.
        """
        start = time.monotonic()
        while True:
            newest = self.latest()
            if newest is not None and newest >= version:
                return newest
            waited = time.monotonic() - start
            if waited >= timeout:
                raise TimeoutError(
                    f"waited {timeout} s for version {version} in {self.history.store.url}; "
                    f"the newest is {'none yet' if newest is None else newest}"
                )
            # By a twentieth of what was waited already a version may come later.
            time.sleep(min(max(POLL_S, waited / 20), LONGEST_POLL_S, timeout - waited))

    def sync(self, weights: Any, *, version: int | None = None) -> SyncReport:
        """Bring the weights to the newest version (or the one given), in place, by the cheapest way.

        weights: a torch module, a state dict or a mapping with the published tensors; they keep their memory
        and device, and tied tensors are written once.
        On a first sync, weights that already hold a version of the history (as after loading an anchor) are
        recognised by their digest and go on from there.

        What is proved: every element that a patch writes, and through the digest kept from version to version
        the whole, provided that nothing else wrote to the weights since. `verify_live` and `verify` recount all.

        Raises VersionNotFoundError (empty history, or no such version), StoreError, IntegrityError (also where the
        newest version is older than the one that is held), BaseMismatchError (tensors of another model). After any
        of them the weights hold a version of the history, bit for bit, and `version` says which; if they never were
        synced, they are as they were. Where they were found altered, or a write failed, `version` is None until a
        later sync has repaired them.
        """
        start = time.perf_counter()
        try:
            report = self._sync(weights, version, start)
        except Exception as error:
            self._beat(error, None, start)
            raise
        self._beat(None, report, start)
        return report

    def _beat(self, error: Exception | None, report: SyncReport | None, start: float) -> None:
        """Tell what has become of a sync."""
        if self._heart is None:
            return
        held = self._held
        self._heart.beat(
            Heartbeat(
                id=self._heart.id,
                version=held.version if held else None,
                sequence=held.sequence if held else None,
                lag=max(0, self._newest - held.sequence) if held else None,
                error=sentence(error) if error else None,
                sync_s=time.perf_counter() - start,
                fetched_nbytes=report.fetched_nbytes if report else None,
            )
        )

    def _sync(self, weights: Any, version: int | None, start: float) -> SyncReport:
        """See `sync`."""
        live = layout(weights)
        work = Work()
        altered = self._altered(live, work)
        previous = self.version
        try:
            target = self._target(version)
            self._newest = max(self._newest, target.sequence)
            route, recovered = self._come_to(target, live, work)
        except PulseError as error:
            if altered:
                error.add_note(f"before that: {altered}")
            self.history.forget()
            raise
        return SyncReport(
            version=target.version,
            previous=previous,
            digest=target.digest,
            route=route,
            patches=work.patches,
            changes=work.changes,
            density=work.changes / target.elements if target.elements else 0.0,
            full_nbytes=target.full_nbytes,
            fetched_nbytes=work.nbytes,
            reduction=target.full_nbytes / work.nbytes if work.nbytes else float("inf"),
            recovered="; ".join(filter(None, [altered, *recovered])) or None,
            fetch_s=work.fetch_s,
            decode_s=work.decode_s,
            apply_s=work.apply_s,
            prove_s=work.prove_s,
            total_s=time.perf_counter() - start,
        )

    def verify(self, weights: Any) -> str:
        """Recount the digest of all live weights; return it. One read of every bit; a sync does
        not prove more than what changes.

        Raises IntegrityError if they no longer hold `version`: something else wrote to them. Then `version` is
        None, and the next `sync` loads them anew.
        """
        if self._held is None:
            raise VersionNotFoundError("no version to verify: sync the weights first")
        live = layout(weights)
        held, self._held = self._held, None  # not known until they are counted
        try:
            found = digests.to_hex(live_digest(_by_name(live, self._tied)))
        except BaseMismatchError as error:  # a tied copy
            raise IntegrityError(f"{error}: something other than this subscriber has written to them") from None
        if found != held.digest:
            raise IntegrityError(
                f"the live weights have digest {found}, version {held.version} has {held.digest}: "
                "something other than this subscriber has written to them"
            )
        self._held = held
        return found

    def _altered(self, live: Layout, work: Work) -> str | None:
        """Recount the live weights if that is due. Returns what is wrong with them; then no version is held."""
        self._syncs += 1
        if self._held is None or not self._recount_every or self._syncs % self._recount_every:
            return None
        try:
            with work.timing("prove_s"):
                self.verify(live)
        except IntegrityError as error:
            return str(error)
        return None

    def _target(self, version: int | None) -> Manifest:
        if version is not None:
            return self.history.find(version)
        with way_out():
            head = self.history.head()
        if head is None:
            raise VersionNotFoundError(f"{self.history.store.url} holds no version yet")
        if self._held is not None and head.sequence < self._held.sequence:
            raise IntegrityError(
                f"{self.history.store.url} has gone back: these weights hold version {self._held.version}, its newest "
                f"is {head.version}; if that is meant to be, follow it with a new Subscriber"
            )
        return head

    @way_out()
    def _come_to(self, target: Manifest, live: Layout, work: Work) -> tuple[Way, list[str]]:
        """Take the cheapest way to a version. Returns which it was, and what was wrong on the way."""
        faults = Faults()
        if self._held is None:
            self._recognise(live, target, faults)
        # What is tied is counted once: what was proved of these weights holds only while the same names are.
        tied_alike = self._held is not None and self._tied == target.tied
        if self._held is not None and tied_alike and self._held.sequence <= target.sequence:
            limit = target.full_nbytes + REQUEST_NBYTES  # from where on the anchor is less to take
            steps = self.history.steps(self._held.sequence, target, faults, limit)
            chain = cheapest(steps, self._held.sequence, target.sequence)
            if chain is not None and cost(chain) < limit:
                try:
                    follow(self.history, live, self._held, target, work, faults, self._moved, sure=False)
                except BaseMismatchError as error:
                    faults.say(str(error))
                except IntegrityError as error:
                    faults.say(str(error))
                    self._held = None  # these are not its bits
        if self._held == state_of(target) and tied_alike:
            return "patches" if work.patches else "none", faults.said
        try:
            self._load(target, live, work, faults)
        except PulseError as error:
            before = [said for said in faults.said if said not in str(error)]
            if before:
                error.add_note(f"before that: {'; '.join(before)}")
            raise
        return "anchor", faults.said

    def _moved(self, held: State | None) -> None:
        self._held = held

    def _recognise(self, live: Layout, target: Manifest, faults: Faults) -> None:
        """Find out whether the live weights already hold a version from which patches lead to the target."""
        try:
            found = digests.to_hex(live_digest(_by_name(live, target.tied)))
        except BaseMismatchError:
            return
        for state in self._known(target, faults):
            if state.digest == found:
                self._held, self._tied = state, target.tied
                return

    def _known(self, target: Manifest, faults: Faults) -> Iterator[State]:
        """The versions that patches may lead from to the target: of its trail, and its newest anchor's."""
        yield state_of(target)
        if target.trail is not None:
            try:
                trail = self.history.trail(target)
                yield from dict.fromkeys(step.to for step in reversed(trail.steps() if trail else []))
            except PulseError as error:
                faults.add(target.trail.name, error)
        with suppress(VersionNotFoundError, IntegrityError):  # said later, if that anchor is needed
            yield state_of(self.history.read(target.anchor_sequence))

    def _load(self, target: Manifest, live: Layout, work: Work, faults: Faults) -> None:
        """A version, proved in scratch files, into the live weights."""
        with scratch() as directory:
            proved = restore(self.history, target, directory, work, faults)
            targets = resolve(proved, target.tied, live)
            _refuse_shared_memory(proved, targets)
            self._held = None  # not known while elements are being written
            with work.timing("apply_s"):
                carry_through(lambda: _copy(proved, targets))
        with work.timing("prove_s"):
            found = digests.to_hex(live_digest(targets))
        if found != target.digest:
            raise IntegrityError(
                f"the weights should have digest {target.digest} after loading version {target.version}, found {found}"
            )
        self._held, self._tied = state_of(target), target.tied


def _by_name(live: Layout, tied: Mapping[str, str]) -> dict[str, list[Bits]]:
    """Live tensors under the names of a version, with their tied copies."""
    tensors = live.all_names()
    names = {name: [bits] for name, bits in tensors.items() if name not in tied}
    for alias, owner in tied.items():
        if alias in tensors and owner in names and tensors[alias].storage != names[owner][0].storage:
            names[owner].append(tensors[alias])
    return names


def _refuse_shared_memory(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    """Raise BaseMismatchError if two tensors of a version are one in the live weights but differ in bits."""
    names: dict[object, str] = {}
    for name, copies in targets.items():
        for copy in copies:
            other = names.setdefault(copy.storage, name) if copy.size else name
            pieces = segments(copy.size)
            if other != name and any((source[other].read(*at) != source[name].read(*at)).any() for at in pieces):
                raise BaseMismatchError(
                    f"tensors {other!r} and {name!r} share memory in these weights, but the version holds different "
                    "bits for them: expected weights in which they are not tied"
                )


def _copy(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    for name, bits in source.items():
        for start, stop in segments(bits.size):
            for copy in targets[name]:
                copy.write(start, bits.read(start, stop))
