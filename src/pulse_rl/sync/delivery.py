"""Putting a version into the store: its objects, the manifest that commits it, then skip patches and pruning.

Everything here reads the publisher's baseline, which holds the version and does not change meanwhile. So it can run in
the background, while the trainer takes its next step.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from pulse_rl.codecs.choose import CODECS
from pulse_rl.errors import PulseError, StoreError, VersionSkewError, one_line
from pulse_rl.history.anchor import put_anchor
from pulse_rl.history.ending import END
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest, ObjectRef, PatchRef, anchor_name, new_token, patch_name, trail_name
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.trail import PatchLink, Trail, decode_trail, state_of
from pulse_rl.logs import logger
from pulse_rl.parallel import submit
from pulse_rl.patch import encode
from pulse_rl.sync.baseline import Move
from pulse_rl.sync.skips import Skips, skip_patch

log = logger(__name__)


@dataclass(frozen=True)
class Upcoming:
    """A version that the baseline holds and the store does not yet."""

    move: Move  # of the baseline, to this version
    patch: encode.EncodedPatch | None  # from move.base; None for a version that has an anchor only
    assets: Mapping[str, bytes]  # small files to put with an anchor

    @property
    def manifest(self) -> Manifest:
        """All of the version's manifest but its objects."""
        return self.move.baseline.manifest


@dataclass(frozen=True)
class Delivered:
    """A version that is committed."""

    manifest: Manifest
    skip_nbytes: int
    put_s: float  # until the commit
    skip_s: float  # making and putting skip patches
    warning: str | None  # what failed after the commit


class Delivery:
    """Puts one publisher's versions into its history, one after another."""

    def __init__(self, history: History, retention: Retention | None) -> None:
        self.measured_bandwidth: float | None = None  # bits per second, while the last anchor was put
        self.committed: Manifest | None = None  # the last version that was committed, whatever came after the commit
        self.marked = False  # whether the store may hold the mark of a run's end
        self._history = history
        self._retention = retention
        self._trail = Trail(0)  # to the newest version
        self._unlisted: list[PatchLink] = []  # skip patches to it: the next version's trail will list them
        self._skips = Skips()

    def resume(self, head: Manifest) -> None:
        """Continue after this version of the history."""
        self._skips.clear()
        self._unlisted = []
        self._trail = Trail(head.sequence)
        self.marked = True
        try:
            self._trail = self._history.trail(head) or self._trail
        except VersionSkewError:
            raise
        except PulseError as error:
            log.warning("version %d: its trail is left behind, a new one begins here: %s", head.version, error)

    def deliver(self, upcoming: Upcoming) -> Delivered:
        """Put the objects, commit, then put skip patches and prune.

        Raises IntegrityError or StoreError if the version could not be committed. A failure after the commit is logged
        and returned as a warning; an interruption after it is raised, and `committed` says that the version stands.
        """
        start = time.perf_counter()
        token = new_token()
        try:
            manifest, trail = self._put_objects(upcoming, token)
            self._history.seal(manifest)  # which proves that it can be read
        except BaseException:
            self._delete_objects(upcoming.manifest.sequence, token)
            raise
        self._history.commit(manifest)
        try:
            self._trail, self._unlisted = trail, []
            self.committed = manifest
            return self._follow_up(upcoming, manifest, start)
        except BaseException:  # an interruption: the skip patches may lack this version
            self._skips.clear()
            raise

    def _follow_up(self, upcoming: Upcoming, manifest: Manifest, start: float) -> Delivered:
        """What is done after the commit, which cannot fail any more."""
        committed = time.perf_counter()
        warnings: list[str] = []
        skip_nbytes = 0
        with _noting(warnings, f"skip patches to version {manifest.version}"):
            skip_nbytes = self._put_skips(upcoming, manifest)
        skipped = time.perf_counter()
        if self._retention is not None:
            with _noting(warnings, "deleting old versions"):
                delete_planned(self._history, self._retention.plan(self._history))
        if self.marked:
            with _noting(warnings, f"deleting {END}"):  # which is void: it names an older version
                self._history.store.delete(END)
                self.marked = False
        for warning in warnings:
            log.warning("version %d is published, but: %s", manifest.version, warning)
        put_s, skip_s = committed - start, skipped - committed
        return Delivered(manifest, skip_nbytes, put_s, skip_s, "; ".join(warnings) or None)

    def _delete_objects(self, sequence: int, token: str) -> None:
        """Delete the objects of a version that will not be committed: they may be what fills the disk."""
        with suppress(StoreError):
            store, files = self._history.store, self._history.store.list(anchor_name(sequence, token))
            for name in (patch_name(sequence, token), trail_name(sequence, token), *(info.name for info in files)):
                store.delete(name)

    def _put_objects(self, upcoming: Upcoming, token: str) -> tuple[Manifest, Trail]:
        """Put the objects of a version. Returns its manifest, which names them, and the trail to it."""
        manifest, base, store = upcoming.manifest, upcoming.move.base, self._history.store
        trail = Trail(manifest.sequence)
        if upcoming.patch is not None and base is not None:
            data, header = upcoming.patch.data, upcoming.patch.header
            ref = _ref(patch_name(manifest.sequence, token), data)
            link = PatchLink(ref, base.sequence, state_of(manifest))
            trail = self._trail.extended(manifest.sequence, [*self._unlisted, link])
            encoded = trail.encode()
            decode_trail(encoded, manifest, "the new trail")  # no reader gets what it could not read
            trail_ref = _ref(trail_name(manifest.sequence, token), encoded)
            with ThreadPoolExecutor(1) as pool:  # both at once saves a round trip
                trail_put = submit(pool, store.put, trail_ref.name, encoded)
                store.put(ref.name, data)
                trail_put.result()
            patch = PatchRef(ref.name, ref.nbytes, ref.blake3, base.version, header.codec, header.changes)
            manifest = msgspec.structs.replace(manifest, patch=patch, trail=trail_ref)
        if manifest.anchor_sequence == manifest.sequence:
            start = time.perf_counter()
            directory, tensors = anchor_name(manifest.sequence, token), upcoming.move.baseline.tensors
            files = put_anchor(store, directory, tensors, manifest.digest, upcoming.assets)
            manifest = msgspec.structs.replace(manifest, anchor=files)
            self.measured_bandwidth = 8 * manifest.anchor_nbytes / (time.perf_counter() - start)
        return msgspec.structs.replace(manifest, created=time.time()), trail

    def _put_skips(self, upcoming: Upcoming, manifest: Manifest) -> int:
        """Make and put the skip patches that are due. Returns their bytes."""
        move = upcoming.move
        if upcoming.patch is None or move.base is None or move.replaced is None:
            self._skips.clear()
            return 0
        state, codec = state_of(manifest), CODECS[upcoming.patch.header.codec]
        total = 0
        try:
            for base, overlay in self._skips.add(state_of(move.base), state, move.replaced, manifest.full_nbytes):
                data = skip_patch(base, overlay, move.baseline.tensors, state, codec).data
                ref = _ref(patch_name(state.sequence, new_token()), data)
                self._history.store.put(ref.name, data)
                self._unlisted.append(PatchLink(ref, base.sequence, state))
                total += len(data)
        except Exception:
            self._skips.clear()
            raise
        return total


@contextmanager
def _noting(warnings: list[str], what: str) -> Iterator[None]:
    """Turn what fails in a block into a warning: the version stands, whatever it is."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        warnings.append(f"{what}: {one_line(error)}")


def _ref(name: str, data: bytes) -> ObjectRef:
    return ObjectRef(name, len(data), blake3(data).hexdigest())
