"""Putting a version into the store: its objects, then the manifest that commits it, then what may follow.

Everything here reads the publisher's baseline, which holds the version already and does not change meanwhile; so it
can run beside the trainer's next step.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from pulse_rl.codecs.choose import CODECS
from pulse_rl.errors import PulseError, StoreError
from pulse_rl.history.anchor import put_anchor
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest, ObjectRef, PatchRef, anchor_name, new_token, patch_name, trail_name
from pulse_rl.history.prune import Retention, carry_out
from pulse_rl.history.trail import State, Step, Trail, state_of
from pulse_rl.parallel import submit
from pulse_rl.patch import encode
from pulse_rl.patch.overlay import Overlay
from pulse_rl.sync.skips import Skips, skip_patch
from pulse_rl.weights.layout import Layout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Upcoming:
    """A version that the baseline holds and the store does not yet."""

    manifest: Manifest  # all but its objects
    before: State | None  # what its patch starts from; None without a patch
    patch: encode.EncodedPatch | None
    replaced: Overlay | None  # what the patch overwrote in the baseline; None if that is too much to keep
    baseline: Layout
    assets: Mapping[str, bytes]  # small files to go with an anchor


@dataclass(frozen=True)
class Delivered:
    """A version that is committed."""

    manifest: Manifest
    skip_nbytes: int
    put_s: float  # until the commit
    skip_s: float  # skip patches, made and put
    trouble: str | None  # what went wrong after the commit; the version stands all the same


class Delivery:
    """Puts one publisher's versions into its history, one after another."""

    def __init__(self, history: History, retention: Retention | None) -> None:
        self.seen_bandwidth: float | None = None  # bytes a second, while the last anchor was put
        self._history = history
        self._retention = retention
        self._trail = Trail(0)  # to the newest version
        self._made: list[Step] = []  # skip patches that no trail tells of yet
        self._skips = Skips()

    def go_on(self, head: Manifest) -> None:
        """Go on from a version of which the baseline was rebuilt."""
        self._skips.clear()
        self._made = []
        self._trail = Trail(head.sequence)
        try:
            self._trail = self._history.trail(head) or self._trail
        except PulseError as error:
            log.warning("the trail begins anew at version %d: %s", head.version, error)

    def deliver(self, upcoming: Upcoming) -> Delivered:
        """Put the objects, commit, then put skip patches and prune.

        Raises IntegrityError or StoreError if the version could not be committed. What fails after that is logged, and
        told in the result: it takes nothing from the version.
        """
        start = time.perf_counter()
        token = new_token()
        try:
            manifest, trail = self._put(upcoming, token)
        except BaseException:
            self._take_back(upcoming.manifest.sequence, token)
            raise
        self._history.commit(manifest)
        self._trail, self._made = trail, []
        committed = time.perf_counter()
        troubles, skip_nbytes = [], 0
        try:
            skip_nbytes = self._put_skips(upcoming, manifest)
        except (PulseError, OSError) as error:
            self._skips.clear()
            troubles.append(f"skip patches to version {manifest.version}: {error}")
        skipped = time.perf_counter()
        if self._retention is not None:
            try:
                carry_out(self._history, self._retention.plan(self._history))
            except PulseError as error:
                troubles.append(f"deleting old versions: {error}")
        for trouble in troubles:
            log.warning("version %d stands, but: %s", manifest.version, trouble)
        put_s, skip_s = committed - start, skipped - committed
        return Delivered(manifest, skip_nbytes, put_s, skip_s, "; ".join(troubles) or None)

    def _take_back(self, sequence: int, token: str) -> None:
        """Delete what was put of a version that will not be committed: the disk may be full of it."""
        with suppress(StoreError):
            store, files = self._history.store, self._history.store.list(anchor_name(sequence, token))
            for name in (patch_name(sequence, token), trail_name(sequence, token), *(info.name for info in files)):
                store.delete(name)

    def _put(self, upcoming: Upcoming, token: str) -> tuple[Manifest, Trail]:
        """Put the objects of a version. Returns its manifest, and the trail to it."""
        manifest, trail = upcoming.manifest, Trail(upcoming.manifest.sequence)
        if upcoming.patch is not None and upcoming.before is not None:
            data, header = upcoming.patch.data, upcoming.patch.header
            patch = _ref(patch_name(manifest.sequence, token), data)
            step = Step(patch, upcoming.before.sequence, state_of(manifest))
            trail = self._trail.extended(manifest.sequence, [*self._made, step])
            encoded = trail.encode()
            told = _ref(trail_name(manifest.sequence, token), encoded)
            with ThreadPoolExecutor(1) as beside:  # both at once: a round trip less until the commit
                second = submit(beside, self._history.store.put, told.name, encoded)
                self._history.store.put(patch.name, data)
                second.result()
            facts = (upcoming.before.version, header.codec, header.changes)
            patch = PatchRef(patch.name, patch.nbytes, patch.blake3, *facts)
            manifest = msgspec.structs.replace(manifest, patch=patch, trail=told)
        if manifest.anchor_sequence == manifest.sequence:
            start = time.perf_counter()
            directory = anchor_name(manifest.sequence, token)
            full = put_anchor(self._history.store, directory, upcoming.baseline, manifest.digest, upcoming.assets)
            manifest = msgspec.structs.replace(manifest, anchor=full)
            self.seen_bandwidth = manifest.anchor_nbytes / (time.perf_counter() - start)
        return msgspec.structs.replace(manifest, created=time.time()), trail

    def _put_skips(self, upcoming: Upcoming, manifest: Manifest) -> int:
        """Make and put the skip patches that are due. Returns their bytes."""
        if upcoming.patch is None or upcoming.before is None or upcoming.replaced is None:
            self._skips.clear()
            return 0
        state, codec = state_of(manifest), CODECS[upcoming.patch.header.codec]
        total = 0
        for base, overlay in self._skips.add(upcoming.before, state, upcoming.replaced, manifest.full_nbytes):
            data = skip_patch(base, overlay, upcoming.baseline, state, codec).data
            ref = _ref(patch_name(state.sequence, new_token()), data)
            self._history.store.put(ref.name, data)
            self._made.append(Step(ref, base.sequence, state))
            total += len(data)
        return total


def _ref(name: str, data: bytes) -> ObjectRef:
    return ObjectRef(name, len(data), blake3(data).hexdigest())
