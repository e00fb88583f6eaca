"""The rollout workers' side: bring live weights to a version of a history, proved, by the route with the fewest bytes.

A sync finds the version, then advances the weights to it: first by patches, each proved before it writes an element;
otherwise by loading (`loading`), where an anchor is downloaded, patched and proved in temporary files before it is
written. So the weights hold a version whenever a sync returns or raises, but where a write itself failed. Objects that
are missing or damaged are avoided, and the report says which.

A proof belongs to the memory that it was made of. A sync into other memory, or one that torch has written to since,
begins with a recount of all bits. Writes that nothing counts, as NumPy's, are found by `verify` and by `verify_live`.
Finding and reading the objects is the history's part, in `history.restore`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError, one_line
from pulse_rl.history.heartbeat import MAX_ERROR, Heart, Heartbeat
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest, check_same_history
from pulse_rl.history.restore import Effort, add_recovery_hint, follow
from pulse_rl.history.search import FaultLog, check_line, find_links
from pulse_rl.history.trail import REQUEST_NBYTES, State, cheapest, cost, state_of
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.sync.counting import check, recognise
from pulse_rl.sync.loading import load
from pulse_rl.sync.polling import LONGEST_POLL_S, POLL_S, check_intervals, wait
from pulse_rl.sync.reports import Route, SyncReport, sync_report
from pulse_rl.sync.turn import Turn, in_turn
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.memory import LiveWeights, Memory

if TYPE_CHECKING:
    from pulse_rl.history.signing import PublicKey


class Subscriber:
    """Follows one history with one model's live weights.

    One subscriber belongs to one set of weights: it keeps their proved version and digest from sync to sync, and reads
    only what changed. Weights in other memory, or that torch has written to since, are recognised anew by a recount.
    Any number of subscribers may follow one history; they write nothing to it but heartbeats. One is used by one thread
    at a time: a second call meanwhile gets a RuntimeError, and a process that was forked after the first one a
    StoreError.

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
        patience: Seconds for which a failure of the store that may pass (a timeout, a connection that is refused or
            lost, an error of the server) is tried again before it is raised. 0: at once. `wait` has its own timeout.
        poll: The first interval of `wait` between two looks, in seconds. It grows to 5 % of the time waited.
        poll_max: The longest such interval, in seconds.

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
        patience: float = PATIENCE_S,
        poll: float = POLL_S,
        poll_max: float = LONGEST_POLL_S,
    ) -> None:
        if not isinstance(verify_live, int) or verify_live < 0:
            raise ValueError(f"verify_live: expected True, False or a number of syncs, found {verify_live}")
        check_intervals(poll, poll_max)
        self._poll, self._poll_max = poll, poll_max
        self.history = History(store, public_key=public_key, patience=patience)
        self._heart = Heart(self.history.store, heartbeat) if heartbeat is not None else None
        self._recount_every = int(verify_live)  # syncs; 0 for never
        self._syncs = 0
        self._newest = 0  # the highest sequence number of a version that a sync was to reach
        self._held: State | None = None  # what the weights are proved to hold; None while elements are being written
        self._tied: dict[str, str] = {}  # the tied tensors of that version
        self._memory: Memory | None = None  # that was proved to hold it
        self._highest: State | None = None  # the newest version that was ever held: the history may not go back
        self._reached: Manifest | None = None  # of the last sync that succeeded: the next one is of the same history
        self._turn = Turn("Subscriber", nested=False)

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
        head = self.history.head(polling=True)
        return head.version if head else None

    @property
    def ended(self) -> bool:
        """Whether the run has ended: its trainer called `Publisher.end` after the newest version. Asks the store.

        Raises:
            StoreError: The store failed.
            IntegrityError: The newest manifest is damaged, or is not signed by the public key.
        """
        return self.history.ended()

    def wait(self, version: int, timeout: float) -> int:
        """Wait until the history holds this version or a newer one. Does not sync.

        Args:
            version: The version to wait for.
            timeout: Seconds; 0 looks once. A store that is out of reach is asked again until then; a request that it
                accepts and does not answer may take two minutes longer.

        Returns:
            The newest version.

        Raises:
            TimeoutError: The history does not hold the version in time, or the store was out of reach.
            StoreError: The store failed for a reason that does not pass.
            IntegrityError: As `latest`.
            ValueError: The timeout is not a number of at least 0.
        """
        return wait(self.latest, self.history.store, version, timeout, (self._poll, self._poll_max), self._beat_again)

    @in_turn
    def sync(self, weights: Any, *, version: int | None = None) -> SyncReport:
        """Bring the weights to the newest version, or to the one given, in place, by the route with the fewest bytes.

        On a first sync, weights that already hold a version of the history (as after loading an anchor) are recognised
        by their digest, and patched from there.

        What is proved: every element that a patch writes; and all elements by the digest that is kept from version to
        version, for the memory that it was proved of. If these are other weights, or in other memory, or torch has
        written to them since, all bits are recounted first. Writes through NumPy, through `tensor.data` or by another
        process are not noticed: `verify_live` and `verify` find them. A backward pass whose forward pass came before
        the sync raises torch's error.

        After any error the weights hold a version of the history, bit for bit, and `version` says which; if they were
        never synced, they are as they were. Where they were found altered, or a write failed, `version` is None until
        a later sync has repaired them.

        Args:
            weights: A torch module, a state dict or a mapping of name → tensor or array, with the published tensors.
                They keep their memory and device, and tied tensors are written once. A module or mapping that gives
                copies at each access (FSDP1, an .npz file) is refused.
            version: The version to sync to. None: the newest.

        Returns:
            What was done, and what it took.

        Raises:
            VersionNotFoundError: The history is empty, or does not hold that version.
            BaseMismatchError: The tensors are those of another model.
            IntegrityError: The history is damaged, and no other route leads to the version; or it has gone back behind
                a version that this subscriber has held, or is another history than before.
            StoreError: The store failed.
            VersionSkewError: The version is of a newer format than this release knows: upgrade it.
            ValueError: A tensor cannot be written.
            TypeError: Something is not a tensor, or is a copy.
            RuntimeError: Another thread is using this subscriber.
        """
        start = time.perf_counter()
        try:
            report = self._sync(LiveWeights(weights), version, start)
        except Exception as error:
            self._beat(error, None, start)
            raise
        self._beat(None, report, start)
        return report

    @in_turn
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
            TypeError: As in `sync`.
            RuntimeError: As in `sync`.
        """
        if self._held is None:
            raise VersionNotFoundError("no version to verify: sync the weights first", url=self.history.store.url)
        live = LiveWeights(weights)
        found = self._verify(self._held, live.layout)
        self._memory = Memory(live.tensors)
        return found

    def _verify(self, held: State, live: Layout) -> str:
        """Recount live weights that should hold a version. Returns their digest; raises as `verify`."""
        self._held = None  # not known until they are counted
        found = check(live, self._tied, held)
        self._held = held
        return found

    def _sync(self, live: LiveWeights, version: int | None, start: float) -> SyncReport:
        """See `sync`."""
        effort, faults = Effort(), FaultLog()
        altered = self._recount(live, effort)
        before, previous = self._held, self.version
        try:
            target = self._find_target(version, faults)
            self._newest = max(self._newest, target.sequence)
            loaded = self._advance_to(target, live, effort, faults)
            self._reached = target
        except PulseError as error:
            if altered:
                error.add_note(f"before that: {altered}")
            self.history.forget()
            raise
        finally:
            self._remember(live, before)
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

    def _beat_again(self) -> None:
        """Say, while waiting, that this subscriber is alive."""
        if self._heart is not None and not self._heart.repeat():
            self._heart.beat(Heartbeat(self._heart.id, None, None, None, None, 0.0, None))

    def _recount(self, live: LiveWeights, effort: Effort) -> str | None:
        """Recount live weights that may not be those that were proved, or if that is due.

        Returns what is wrong with them; then no version is held.
        """
        self._syncs += 1
        if self._memory is not None and not self._memory.is_still(live.tensors):
            self._memory = None
        due = self._recount_every and self._syncs % self._recount_every == 0
        if self._held is None or (self._memory is not None and not due):
            return None
        try:
            with effort.timing("prove_s"):
                self._verify(self._held, live.layout)
        except IntegrityError as error:
            return str(error)
        return None

    def _remember(self, live: LiveWeights, before: State | None) -> None:
        """Keep which memory the weights that hold a version now are in. before: what it held when the sync began."""
        if self._held is None:
            self._memory = None
        elif self._memory is None:
            self._memory = Memory(live.tensors)
        elif self._held != before:  # the same memory: this subscriber has written to it
            self._memory.count_writes(live.tensors)

    def _find_target(self, version: int | None, faults: FaultLog) -> Manifest:
        """The version to sync to. What is wrong with the one before it is reported to faults. Raises as `sync`."""
        target = self.history.find(version) if version is not None else self._find_newest()
        if self._reached is None:  # nothing tells which history it should be, but a version swapped in is noticed
            check_line(self.history, target, faults)
            return target
        try:
            check_same_history(target, self._reached)
        except IntegrityError as error:
            error.add_note("if that is intended, follow it with a new Subscriber")
            raise
        return target

    def _find_newest(self) -> Manifest:
        """The newest version. Raises as `sync`."""
        url = self.history.store.url
        with add_recovery_hint():
            head = self.history.head()
        highest = self._highest
        if head is None and highest is not None:
            raise IntegrityError(
                f"{url} has gone back: this Subscriber has held version {highest.version}, and it holds no version any "
                "more; if that is intended, follow what comes next with a new Subscriber",
                expected=highest.digest,
            )
        if head is None:
            raise VersionNotFoundError(f"{url} holds no version yet", url=url)
        if highest is not None and highest != state_of(head) and highest.sequence >= head.sequence:
            raise IntegrityError(
                f"{url} has gone back: this Subscriber has held version {highest.version} (digest {highest.digest}), "
                f"its newest is {head.version} ({head.digest}); if that is intended, follow it with a new Subscriber",
                expected=highest.digest,
                found=head.digest,
            )
        return head

    @add_recovery_hint()
    def _advance_to(self, target: Manifest, live: LiveWeights, effort: Effort, faults: FaultLog) -> bool:
        """Bring the live weights to a version. Returns whether it had to be loaded, as patches did not lead there."""
        if self._held is None:
            self._hold(recognise(self.history, live.layout, target, faults), target.tied)
        # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
        if self._held is not None and self._tied == target.tied:
            if self._held.sequence < target.sequence:
                self._patch(self._held, target, live.layout, effort, faults)
            if self._held == state_of(target):
                return False
        try:
            load(self.history, target, live.layout, effort, faults, lambda: self._hold(None))
        except PulseError as error:
            before = [message for message in faults.messages if message not in str(error)]
            if before:
                error.add_note(f"before that: {'; '.join(before)}")
            raise
        self._hold(state_of(target), target.tied)
        return True

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
        except BaseMismatchError as error:  # of other tensors, or another version: the weights hold what they held
            faults.note(str(error))
        except IntegrityError as error:  # these are not the bits that were proved: what they hold is not known
            faults.note(str(error))
            self._held = None

    def _hold(self, held: State | None, tied: dict[str, str] | None = None) -> None:
        """Note what the weights are proved to hold. tied: the tied tensors of that version; None: as before."""
        if tied is not None:
            self._tied = tied
        self._held = held
        if held is not None and (self._highest is None or held.sequence > self._highest.sequence):
            self._highest = held
