"""The rollout workers' side: bring live weights to a version, proved, by the cheapest way.

A version is reported only once its bits are proved. Every step along the way leaves the live weights at one
version or the next: a patch is proved before its first element is written, and an anchor is downloaded,
proved and patched in scratch files before it is copied in. If the way over patches fails (something is
missing, corrupt, or the live weights are not what they should be), the way over an anchor is taken and the
report says why.

A patch proves the elements that it writes. Whether anything else wrote to the others is told only by counting
them all: `verify_live` does that before a sync, so that altered weights are found before a patch is put on them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pulse_rl import digests
from pulse_rl.application import carry_through, live_digest, resolve
from pulse_rl.bits import Bits, Layout, layout
from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.history import History, Manifest, Route
from pulse_rl.store.base import Store
from pulse_rl.sync.restore import Work, prepare, restore, way_out

POLL_S = 0.05  # between looks at the store while waiting: a listing each, cheap on files, a request on clouds


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. Seconds of decode and prove are work summed over threads; the others wall time."""

    version: int  # the weights' version now, proved
    previous: int | None  # their version before; None if it was not known, or they were altered
    digest: str  # of the version, 16 hex digits
    route: Literal["none", "patches", "anchor"]  # nothing to do, over patches alone, or from an anchor
    patches: int  # how many were applied
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


class Subscriber:
    """Follows one history with one model's live weights.

    store: a Store, or the URL or path of one. One subscriber belongs to one set of weights: it keeps their
    proved version and digest from sync to sync, and reads only what changed. Any number of subscribers may
    follow one history; they write nothing to it. Memory: one patch, and a few MB a thread. Not thread-safe.

    verify_live: recount every live bit before each sync (True), before every so many (a number), or only when
    `verify` is called (False). Weights that something else wrote to are then overwritten by the version synced
    to, and the report's `recovered` says so. A recount reads all weights once, those on a device through the host.
    Raises ValueError for any other value.
    """

    def __init__(self, store: Store | str | Path, *, verify_live: bool | int = False) -> None:
        if not isinstance(verify_live, int) or verify_live < 0:
            raise ValueError(f"verify_live: expected True, False or a number of syncs, found {verify_live}")
        self.history = History(store)
        self._recount_every = int(verify_live)  # syncs; 0 for never
        self._syncs = 0
        self._held: Manifest | None = None

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
        deadline = time.monotonic() + timeout
        while True:
            newest = self.latest()
            if newest is not None and newest >= version:
                return newest
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"waited {timeout} s for version {version} in {self.history.store.url}; "
                    f"the newest is {'none yet' if newest is None else newest}"
                )
            time.sleep(min(POLL_S, left))

    def sync(self, weights: Any, *, version: int | None = None) -> SyncReport:
        """Bring the weights to the newest version (or the one given), in place, by the cheapest way.

        weights: a torch module, a state dict or a mapping with the published tensors; they keep their memory
        and device, and tied tensors are written once.
        On a first sync, weights that already hold a version of the history (as after loading an anchor) are
        recognised by their digest and go on from there.

        What is proved: every element that a patch writes, and through the digest kept from version to version
        the whole, provided that nothing else wrote to the weights since. `verify_live` and `verify` recount all.

        Raises VersionNotFoundError (empty history, or no such version), StoreError, IntegrityError,
        BaseMismatchError (tensors of another model). After any of them the weights hold a version of the
        history, bit for bit, and `version` says which; if they never were synced, they are as they were. Where
        they were found altered, or a write failed, `version` is None until a later sync has repaired them.
        """
        start = time.perf_counter()
        live = layout(weights)
        work = Work()
        altered = self._altered(live, work)
        previous = self.version
        try:
            target = self._target(version)
            route, recovered = self._follow(target, live, work)
        except PulseError as error:
            if altered:
                error.add_note(f"before that: {altered}")
            # What was read wrong once must not be believed for ever: the next sync reads its manifests anew.
            self.history = History(self.history.store)
            raise
        return SyncReport(
            version=target.version,
            previous=previous,
            digest=target.digest,
            route="anchor" if route.anchor else "patches" if work.patches else "none",
            patches=work.patches,
            changes=work.changes,
            density=work.changes / target.elements if target.elements else 0.0,
            full_nbytes=target.full_nbytes,
            fetched_nbytes=work.nbytes,
            reduction=target.full_nbytes / work.nbytes if work.nbytes else float("inf"),
            recovered="; ".join(filter(None, [altered, recovered])) or None,
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
            found = digests.to_hex(live_digest(_by_name(live, held)))
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
        return head

    @way_out()
    def _follow(self, target: Manifest, live: Layout, work: Work) -> tuple[Route, str | None]:
        """Take the cheapest way to a version. Returns the way taken, and why the first one failed if it did."""
        if self._held is None:
            self._recognise(live, target)
        recovered = None
        route = self.history.route(self._held.sequence if self._held else None, target)
        if route.anchor is None:
            try:
                for manifest in route.patches:
                    assert self._held is not None  # a route without an anchor starts from what is held
                    self._step(self._held, manifest, live, work)
            except PulseError as error:
                recovered = str(error)
                route = self.history.anchor_route(target)
        if route.anchor is not None:
            try:
                self._load(route, target, live, work)
            except PulseError as error:
                if recovered and recovered != str(error):
                    error.add_note(f"after the way over patches had failed: {recovered}")
                raise
        return route, recovered

    def _recognise(self, live: Layout, target: Manifest) -> None:
        """Find out whether the live weights already hold a version between the anchor and the target."""
        try:
            found = digests.to_hex(live_digest(_by_name(live, target)))
        except BaseMismatchError:
            return
        for sequence in range(target.sequence, target.anchor_sequence - 1, -1):
            manifest = self.history.read(sequence)
            if manifest.digest == found:
                self._held = manifest
                return

    def _step(self, held: Manifest, manifest: Manifest, live: Layout, work: Work) -> None:
        """One patch further."""
        application = prepare(self.history, manifest, live, held.digest, work)
        self._held = None  # not known while elements are being written
        with work.timing("apply_s"):
            application.write()
        self._held = manifest

    def _load(self, route: Route, target: Manifest, live: Layout, work: Work) -> None:
        """A version, proved in scratch files, into the live weights."""
        with tempfile.TemporaryDirectory(prefix="pulse-rl-") as scratch:
            proved = restore(self.history, route, Path(scratch), work)
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
        self._held = target


def _by_name(live: Layout, manifest: Manifest) -> dict[str, list[Bits]]:
    """Live tensors under the names of a version, with their tied copies."""
    tensors = live.all_names()
    names = {name: [bits] for name, bits in tensors.items() if name not in manifest.tied}
    for alias, owner in manifest.tied.items():
        if alias in tensors and owner in names and tensors[alias].storage != names[owner][0].storage:
            names[owner].append(tensors[alias])
    return names


def _refuse_shared_memory(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    """Raise BaseMismatchError if two tensors of a version are one in the live weights but differ in bits."""
    names: dict[object, str] = {}
    for name, copies in targets.items():
        for copy in copies:
            other = names.setdefault(copy.storage, name) if copy.size else name
            pieces = digests.segments(copy.size)
            if other != name and any((source[other].read(*at) != source[name].read(*at)).any() for at in pieces):
                raise BaseMismatchError(
                    f"tensors {other!r} and {name!r} share memory in these weights, but the version holds different "
                    "bits for them: expected weights in which they are not tied"
                )


def _copy(source: Layout, targets: Mapping[str, Sequence[Bits]]) -> None:
    for name, bits in source.items():
        for start, stop in digests.segments(bits.size):
            for copy in targets[name]:
                copy.write(start, bits.read(start, stop))
