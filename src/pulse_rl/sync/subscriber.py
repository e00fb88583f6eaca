"""The rollout workers' side: bring live weights to a version of a history, proved, by the route with the fewest bytes.

A sync finds the version, then advances the weights to it: first by patches, each proved before it writes an element;
otherwise by loading, where an anchor is downloaded, patched and proved in temporary files before it is written. So the
weights hold a version whenever a sync returns or raises, but where a write itself failed. Objects that are missing or
damaged are avoided, and the report says which.

A patch proves the elements that it writes. Whether something else wrote to the others only a recount of all bits shows:
with `verify_live` a sync begins with one. Finding and reading the objects is the history's part, in `history.restore`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError, one_line
from pulse_rl.history.heartbeat import MAX_ERROR, Heart, Heartbeat
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.restore import Effort, add_recovery_hint, follow, restore, scratch
from pulse_rl.history.search import FaultLog, find_links
from pulse_rl.history.trail import REQUEST_NBYTES, State, cheapest, cost, state_of
from pulse_rl.patch.apply import finish_despite_interrupt
from pulse_rl.patch.live import by_name, live_digest, resolve, shared_memory
from pulse_rl.store.base import Store
from pulse_rl.sync.reports import Route, SyncReport, sync_report
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    from pulse_rl.history.signing import PublicKey

POLL_S, LONGEST_POLL_S = 0.05, 1.0  # between two requests while waiting; clouds charge for each


class Subscriber:
    """Follows one history with one model's live weights.

    One subscriber belongs to one set of weights: it keeps their proved version and digest from sync to sync, and reads
    only what changed. Any number of subscribers may follow one history; they write nothing to it but heartbeats. Not
    thread-safe.

    Memory: the patch that is applied and the one after it, and a few MB a thread.

    Args:
        store: A Store, or the URL or path of one.
        verify_live: Whether to recount every live bit before a sync: True, before each; a number N, before every N-th;
            False, never (then only `verify` does). Weights that something else wrote to are overwritten by the version
            synced to, and the report's `recovered` says so. A recount reads all weights once, those on a device
            through the host.
        public_key: An Ed25519 public key, or the path of its PEM file: a history that it did not sign, or that was
            altered, is refused. Needs the extra `sign`. None: signatures are not looked at.
        heartbeat: An id for this subscriber, of at most 64 letters, digits and `. _ -`. After each sync, failed ones
            too, it then writes to the store what it holds and what went wrong, for `pulse-rl status`: in the
            background, at once if that is news, every 15 s otherwise. A heartbeat that cannot be written is a logged
            warning, once for each cause. None: no heartbeat.

    Raises:
        ValueError: A setting makes no sense.

    Attributes:
        history: The history that it follows.
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
        self._newest = 0  # the highest sequence number of a version that a sync was to reach
        self._held: State | None = None  # what the weights are proved to hold; None while elements are being written
        self._tied: dict[str, str] = {}  # the tied tensors of that version

    @property
    def version(self) -> int | None:
        """The version that the weights are proved to hold; None before the first sync and after a failed write."""
        return self._held.version if self._held else None

    @property
    def digest(self) -> str | None:
        """The digest of that version, 16 hex digits; None without one."""
        return self._held.digest if self._held else None

    def latest(self) -> int | None:
        """Look up the newest version in the history.

        Returns:
            That version; None for an empty history.

        Raises:
            StoreError: The store failed.
            IntegrityError: The newest manifest is damaged, or is not signed by the public key.
        """
        head = self.history.head()
        return head.version if head else None

    def wait(self, version: int, timeout: float) -> int:
        """Wait until the history holds this version or a newer one. Does not sync.

        Args:
            version: The version to wait for.
            timeout: Seconds; 0 looks once.

        Returns:
            The newest version.

        Raises:
            TimeoutError: The history does not hold the version in time.
            StoreError: The store failed.
            IntegrityError: As `latest`.
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
            # The poll interval grows to 5 % of the time waited.
            time.sleep(min(max(POLL_S, waited / 20), LONGEST_POLL_S, timeout - waited))

    def sync(self, weights: Any, *, version: int | None = None) -> SyncReport:
        """Bring the weights to the newest version, or to the one given, in place, by the route with the fewest bytes.

        On a first sync, weights that already hold a version of the history (as after loading an anchor) are recognised
        by their digest, and patched from there.

        What is proved: every element that a patch writes; and all elements by the digest that is kept from version to
        version, provided that nothing else wrote to the weights since. `verify_live` and `verify` recount them all.

        After any error the weights hold a version of the history, bit for bit, and `version` says which; if they were
        never synced, they are as they were. Where they were found altered, or a write failed, `version` is None until
        a later sync has repaired them.

        Args:
            weights: A torch module, a state dict or a mapping of name → tensor or array, with the published tensors.
                They keep their memory and device, and tied tensors are written once.
            version: The version to sync to. None: the newest.

        Returns:
            What was done, and what it took.

        Raises:
            VersionNotFoundError: The history is empty, or does not hold that version.
            BaseMismatchError: The tensors are those of another model.
            IntegrityError: The history is damaged, and no other route leads to the version; or its newest version is
                older than the one held.
            StoreError: The store failed.
            ValueError: A tensor cannot be written.
        """
        start = time.perf_counter()
        try:
            report = self._sync(weights, version, start)
        except Exception as error:
            self._beat(error, None, start)
            raise
        self._beat(None, report, start)
        return report

    def verify(self, weights: Any) -> str:
        """Recount the digest of all live weights: one read of every bit.

        Args:
            weights: As in `sync`.

        Returns:
            The digest, 16 hex digits, which is that of `version`.

        Raises:
            IntegrityError: The weights no longer hold `version`: something else wrote to them. Then `version` is None,
                and the next `sync` repairs them.
            VersionNotFoundError: The weights have not been synced yet.
        """
        if self._held is None:
            raise VersionNotFoundError("no version to verify: sync the weights first", url=self.history.store.url)
        live = layout(weights)
        held, self._held = self._held, None  # not known until they are counted
        try:
            found = digests.to_hex(live_digest(by_name(live, self._tied)))
        except BaseMismatchError as error:  # a tied copy
            raise IntegrityError(
                f"{error}: something other than this subscriber has written to them", expected=held.digest
            ) from None
        if found != held.digest:
            raise IntegrityError(
                f"the live weights: expected digest {held.digest} of version {held.version}, found {found}: "
                "something other than this subscriber has written to them",
                expected=held.digest,
                found=found,
            )
        self._held = held
        return found

    def _sync(self, weights: Any, version: int | None, start: float) -> SyncReport:
        """See `sync`."""
        live = layout(weights)
        effort, faults = Effort(), FaultLog()
        altered = self._recount(live, effort)
        previous = self.version
        try:
            target = self._find_target(version)
            self._newest = max(self._newest, target.sequence)
            loaded = self._advance_to(target, live, effort, faults)
        except PulseError as error:
            if altered:
                error.add_note(f"before that: {altered}")
            self.history.forget()
            raise
        route: Route = "anchor" if loaded else "patches" if effort.patches else "none"
        recovered = "; ".join(filter(None, [altered, *faults.messages])) or None
        return sync_report(target, previous, route, effort, recovered, start)

    def _beat(self, error: Exception | None, report: SyncReport | None, start: float) -> None:
        """Send the heartbeat after a sync."""
        if self._heart is None:
            return
        held = self._held
        self._heart.beat(
            Heartbeat(
                id=self._heart.id,
                version=held.version if held else None,
                sequence=held.sequence if held else None,
                lag=max(0, self._newest - held.sequence) if held else None,
                error=one_line(error, MAX_ERROR) if error else None,
                sync_s=time.perf_counter() - start,
                fetched_nbytes=report.fetched_nbytes if report else None,
            )
        )

    def _recount(self, live: Layout, effort: Effort) -> str | None:
        """Recount the live weights if that is due. Returns what is wrong with them; then no version is held."""
        self._syncs += 1
        if self._held is None or not self._recount_every or self._syncs % self._recount_every:
            return None
        try:
            with effort.timing("prove_s"):
                self.verify(live)
        except IntegrityError as error:
            return str(error)
        return None

    def _find_target(self, version: int | None) -> Manifest:
        """The version to sync to. Raises as `sync`."""
        if version is not None:
            return self.history.find(version)
        url = self.history.store.url
        with add_recovery_hint():
            head = self.history.head()
        if head is None:
            raise VersionNotFoundError(f"{url} holds no version yet", url=url)
        if self._held is not None and head.sequence < self._held.sequence:
            raise IntegrityError(
                f"{url} has gone back: these weights hold version {self._held.version}, its newest is {head.version}; "
                "if that is intended, follow it with a new Subscriber",
                expected=self._held.digest,
                found=head.digest,
            )
        return head

    @add_recovery_hint()
    def _advance_to(self, target: Manifest, live: Layout, effort: Effort, faults: FaultLog) -> bool:
        """Bring the live weights to a version. Returns whether it had to be loaded, as patches did not lead there."""
        if self._held is None:
            self._recognise(live, target, faults)
        # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
        if self._held is not None and self._tied == target.tied:
            if self._held.sequence < target.sequence:
                self._patch(self._held, target, live, effort, faults)
            if self._held == state_of(target):
                return False
        try:
            self._load(target, live, effort, faults)
        except PulseError as error:
            before = [message for message in faults.messages if message not in str(error)]
            if before:
                error.add_note(f"before that: {'; '.join(before)}")
            raise
        return True

    def _recognise(self, live: Layout, target: Manifest, faults: FaultLog) -> None:
        """Find out whether the live weights already hold a version from which patches lead to the target."""
        try:
            found = digests.to_hex(live_digest(by_name(live, target.tied)))
        except BaseMismatchError:
            return
        for state in self._candidates(target, faults):
            if state.digest == found:
                self._held, self._tied = state, target.tied
                return

    def _candidates(self, target: Manifest, faults: FaultLog) -> Iterator[State]:
        """The versions from which patches may lead to the target: those of its trail, and its newest anchor's."""
        yield state_of(target)
        if target.trail is not None:
            try:
                trail = self.history.trail(target)
                yield from dict.fromkeys(link.to for link in reversed(trail.links() if trail else []))
            except PulseError as error:
                faults.add(target.trail.name, error)
        with suppress(VersionNotFoundError, IntegrityError):  # reported later, if that anchor is needed
            yield state_of(self.history.read(target.anchor_sequence))

    def _patch(self, held: State, target: Manifest, live: Layout, effort: Effort, faults: FaultLog) -> None:
        """Patch the live weights towards a version, unless loading its anchor takes fewer bytes.

        Each patch is proved, then written. `_held` says how far that went; None if these are not the weights that were
        proved before.
        """
        limit = target.full_nbytes + REQUEST_NBYTES
        chain = cheapest(find_links(self.history, held.sequence, target, faults, limit), held.sequence, target.sequence)
        if chain is None or cost(chain) >= limit:
            return
        try:
            follow(self.history, live, held, target, effort, faults, self._hold, sure=False)
        except BaseMismatchError as error:
            faults.note(str(error))
        except IntegrityError as error:
            faults.note(str(error))
            self._held = None

    def _hold(self, held: State | None) -> None:
        self._held = held

    def _load(self, target: Manifest, live: Layout, effort: Effort, faults: FaultLog) -> None:
        """Load a version: build and prove it in temporary files, then write all of it to the live weights."""
        with scratch() as directory:
            proved = restore(self.history, target, directory, effort, faults)
            targets = resolve(proved, target.tied, live)
            _refuse_shared_memory(proved, targets)
            self._held = None
            with effort.timing("apply_s"):
                finish_despite_interrupt(lambda: _write_all(proved, targets))
        with effort.timing("prove_s"):
            found = digests.to_hex(live_digest(targets))
        if found != target.digest:
            raise IntegrityError(
                f"the live weights after loading version {target.version}: expected digest {target.digest}, "
                f"found {found}",
                expected=target.digest,
                found=found,
            )
        self._held, self._tied = state_of(target), target.tied


def _refuse_shared_memory(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    """Raise BaseMismatchError if two tensors are one in the live weights, but differ in the version."""
    names = list(targets)
    for pair in shared_memory(targets.values()):
        one, other = (names[place] for place in pair)
        ranges = segments(source[one].size)
        if any((source[one].read(*at) != source[other].read(*at)).any() for at in ranges):
            raise BaseMismatchError(
                f"tensors {one!r} and {other!r} share memory in these weights, but the version holds different bits "
                "for them: expected weights in which they are not tied"
            )


def _write_all(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    """Write every tensor of a version to its live tensors. May be repeated."""
    for name, bits in source.items():
        for start, stop in segments(bits.size):
            for copy in targets[name]:
                copy.write(start, bits.read(start, stop))
