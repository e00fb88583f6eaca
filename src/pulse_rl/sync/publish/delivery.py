"""Putting a version into the store: its objects, the manifest that commits it, then skip patches and pruning.

Everything here reads the publisher's baseline, which holds the version and does not change meanwhile.

Several ranks put their parts of a patch at once. The first rank puts the list of them and commits, after all others
have succeeded; the history's trail and its pruning are its business too.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from pulse_rl.codecs.base import Codec
from pulse_rl.codecs.choose import CODECS
from pulse_rl.errors import CannotListError, PulseError, StoreError, VersionSkewError, one_line
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import put_anchor
from pulse_rl.history.ending import END
from pulse_rl.history.history import History, commit, seal
from pulse_rl.history.manifest import (
    Manifest,
    PatchObject,
    PatchRef,
    anchor_name,
    part_name,
    parts_name,
    patch_name,
    trail_name,
)
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.history.patches import describe, list_parts
from pulse_rl.history.trail import SPANS, PatchLink, State, Trail, decode_trail, state_of
from pulse_rl.log.objects import new_token, refer
from pulse_rl.logs import logger
from pulse_rl.parallel import submit
from pulse_rl.patch.encode import Coded, EncodedPatch
from pulse_rl.patch.overlay import Overlay
from pulse_rl.sync.freed import return_freed
from pulse_rl.sync.publish.anchors import put_anchor_together
from pulse_rl.sync.publish.attempt import Attempt
from pulse_rl.sync.publish.encoding import Encoded
from pulse_rl.sync.publish.skips import Skips, find_skip, prove_skip
from pulse_rl.weights.layout import Layout

log = logger(__name__)

_LOCAL = ("file:", "memory:")  # stores that tell nothing of the link to a worker


@dataclass(frozen=True)
class Delivered:
    """A version that is committed."""

    manifest: Manifest  # on the first rank with all its objects, on others without the trail
    encoded: Encoded | None
    skip_nbytes: int
    put_s: float  # until the commit
    skip_s: float  # making and putting skip patches
    warning: str | None  # what failed after the commit


class InView(NamedTuple):
    """A version as one of its views is, on its way."""

    form: str
    delivery: "Delivery"
    attempt: Attempt


class _Skip(msgspec.Struct, array_like=True):
    """A skip patch that one rank has coded."""

    delta: int  # what the digest gains
    token: str  # on the first rank: of the patch


class Delivery:
    """Puts one publisher's versions into its history, one after another."""

    def __init__(self, history: History, retention: Retention | None, ranks: Ranks) -> None:
        self.history = history
        self.publisher = new_token()  # names it in manifests
        self.measured_bandwidth: float | None = None  # bits per second, while the last anchor was put
        self.committed: Manifest | None = None  # the last version that was committed or resumed from
        self.marked = False  # whether the store may hold the mark of a run's end
        self._retention = retention
        self._ranks = ranks
        self._trail = self._next_trail = Trail(0)  # to the newest version; to the one on its way
        self._unlisted: list[PatchLink] = []  # skip patches to it: the next version's trail will list them
        self._skips = Skips()
        self._committing: str | None = None  # the token of the last attempt that may have been committed
        self._one_store = False  # whether the first rank is known to have the store of all others

    def resume(self, head: Manifest) -> None:
        """Continue after this version of the history."""
        self._skips.clear()
        self._unlisted = []
        self._trail = Trail(head.sequence)
        self.marked = True
        if self._ranks.rank == 0:
            try:
                self._trail = self.history.trail(head) or self._trail
            except VersionSkewError:
                raise
            except PulseError as error:
                log.warning("version %d: its trail is left behind, a new one begins here: %s", head.version, error)
        self.committed = head

    def deliver(self, attempt: Attempt, views: Mapping[str, InView]) -> Delivered:
        """Put the objects, those of views too, commit, then put skip patches and prune. A collective.

        Raises IntegrityError or StoreError if the version could not be committed, and ExchangeError on the other ranks.
        A failure after the commit is logged and returned as a warning; an interruption after it is raised, and
        `committed` tells that the version stands.
        """
        start = time.perf_counter()
        try:
            manifest, data = self._put_parts(attempt)
            manifest = self._put_anchor(attempt, manifest)
            entries = {name: view.delivery.put(view.attempt).entry(view.form) for name, view in views.items()}
            manifest = self._commit(attempt, msgspec.structs.replace(manifest, views=entries), data)
            for name, view in views.items():
                view.delivery._stand(manifest.of(name))
        except BaseException:
            # The first rank knows whether it commits; another one only where all know that a step has failed.
            if self._committing != attempt.start.token and (self._ranks.rank == 0 or self._ranks.failure_is_shared):
                for one in (attempt, *(view.attempt for view in views.values())):
                    self._delete_objects(one.manifest.sequence, one.start.token)
            raise
        try:
            return self._follow_up(attempt, manifest, views, start)
        except BaseException:  # an interruption: the skip patches may lack this version
            for delivery in (self, *(view.delivery for view in views.values())):
                delivery._skips.clear()
            raise

    def put(self, attempt: Attempt) -> Manifest:
        """Put the objects of a view's version. A collective. Returns the manifest with them: on ranks but the first
        without the trail.
        """
        manifest, data = self._put_parts(attempt)
        manifest = self._put_anchor(attempt, manifest)
        return self._ranks.do("put a trail", partial(self._put_trail, attempt, manifest, data))

    def _put_parts(self, attempt: Attempt) -> tuple[Manifest, bytes]:
        """Put every rank's part of the patch. Returns the manifest with the patch, and what is put under its name."""
        manifest, base = attempt.manifest, attempt.base
        if attempt.encoded is None or base is None:
            return manifest, b""
        patch = attempt.encoded.patch
        data, ref = self._put_patch("put a patch", patch, manifest.sequence, attempt.start.token)
        fields = {name: getattr(ref, name) for name in PatchObject.__struct_fields__}
        changes = attempt.new.changes
        described = PatchRef(**fields, base=base.version, codec=patch.header.codec, changes=changes)
        return msgspec.structs.replace(manifest, patch=described), data

    def _put_patch(self, what: str, patch: EncodedPatch, sequence: int, token: str) -> tuple[bytes, PatchObject]:
        """Put this rank's part of a patch, unless it is alone. Returns what is put under its name, and its reference.

        That is the patch of one rank, or the list of several parts: it is put together with the trail, which saves a
        round trip.
        """
        if self._ranks.size == 1:
            return patch.data, describe(patch_name(sequence, token), patch)
        name = parts_name(sequence, token)

        def put() -> tuple[int, str, int, str]:
            part = describe(part_name(name, self._ranks.rank), patch)
            self.history.store.put(part.name, patch.data)
            return part.nbytes, part.blake3, part.head_nbytes, part.head_blake3

        rows = self._ranks.share(what, put, tuple[int, str, int, str])
        return list_parts(name, [PatchObject(part_name(name, rank), *row) for rank, row in enumerate(rows)])

    def _put_anchor(self, attempt: Attempt, manifest: Manifest) -> Manifest:
        """Put the version's anchor, if it has one. Returns the manifest with it."""
        if manifest.anchor_sequence != manifest.sequence:
            return manifest
        start, store, own = time.perf_counter(), self.history.store, attempt.tensors
        directory = anchor_name(manifest.sequence, attempt.start.token)
        if self._ranks.size == 1:
            files = put_anchor(store, directory, own, manifest.digest, attempt.assets)
        else:
            plan, digest = attempt.plan, manifest.digest
            files = put_anchor_together(self._ranks, store, directory, own, plan, digest, attempt.assets)
        manifest = msgspec.structs.replace(manifest, anchor=files)
        if not store.url.startswith(_LOCAL):
            self.measured_bandwidth = 8 * manifest.anchor_nbytes / (time.perf_counter() - start)
        return_freed()  # an upload holds some parts of 8 MB
        return manifest

    def _commit(self, attempt: Attempt, manifest: Manifest, data: bytes) -> Manifest:
        """Put the trail, and on the first rank commit. Returns the manifest as it is committed."""
        if self._ranks.rank:
            self._committing = attempt.start.token
        commits = partial(self._commit_first, attempt, manifest, data)
        created = self._ranks.share("commit a version", commits, float)[0]
        if self._ranks.rank:
            self._stand(msgspec.structs.replace(manifest, created=created))
        assert self.committed is not None
        return self.committed

    def _stand(self, manifest: Manifest | None) -> None:
        """Go on from a version that is committed."""
        self.committed, self._trail, self._unlisted = manifest, self._next_trail, []

    def _commit_first(self, attempt: Attempt, manifest: Manifest, data: bytes) -> float:
        """On the first rank: put the list of parts and the trail, and commit. Returns when."""
        if self._ranks.rank:
            return 0.0
        manifest = self._put_trail(attempt, manifest, data)
        manifest = msgspec.structs.replace(manifest, created=time.time())
        sealed = seal(self.history, manifest)
        self._committing = attempt.start.token
        commit(self.history, manifest, sealed)
        self._stand(manifest)
        return manifest.created

    def _put_trail(self, attempt: Attempt, manifest: Manifest, data: bytes) -> Manifest:
        """On the first rank: put the patch or the list of its parts, and the trail. Returns the manifest with it."""
        if self._ranks.rank:
            return manifest
        self._check_one_store(manifest)
        if manifest.patch is None or attempt.base is None:
            self._next_trail = Trail(manifest.sequence)
            return manifest
        link = PatchLink(manifest.patch, attempt.base.sequence, state_of(manifest))
        self._next_trail = self._trail.extended(manifest.sequence, [*self._unlisted, link])
        encoded = self._next_trail.encode()
        trail_ref = refer(trail_name(manifest.sequence, attempt.start.token), encoded)
        name = manifest.patch.name
        manifest = msgspec.structs.replace(manifest, trail=trail_ref)
        decode_trail(encoded, manifest, "the new trail")  # no reader gets what it could not read
        with ThreadPoolExecutor(1) as pool:  # both at once saves a round trip
            trail_put = submit(pool, self.history.store.put, trail_ref.name, encoded)
            self.history.store.put(name, data)
            trail_put.result()
        return manifest

    def _check_one_store(self, manifest: Manifest) -> None:
        """Find in the store of the first rank what the others have put, until a part of each was there once.

        A directory that is not shared by all machines takes every put. Raises StoreError.
        """
        if self._one_store or self._ranks.size == 1:
            return
        patch = manifest.patch
        parts = [part_name(patch.name, rank) for rank in range(patch.parts)] if patch else []
        names = [*parts, *(file.name for file in manifest.anchor)]
        store = self.history.store
        try:
            found = {info.name for folder in {name.rpartition("/")[0] for name in names} for info in store.list(folder)}
        except CannotListError:  # one of the caller's own
            return
        for name in names:
            if name not in found:
                who = f"rank {parts.index(name)}" if name in parts else "another rank"
                raise StoreError(
                    f"expected one store on all ranks: what {who} has put is missing from {store.url}: {name}",
                    url=store.url,
                    name=name,
                )
        self._one_store = bool(parts)

    def _follow_up(self, attempt: Attempt, manifest: Manifest, views: Mapping[str, InView], start: float) -> Delivered:
        """What is done after the commit, which cannot fail any more."""
        committed = time.perf_counter()
        warnings: list[str] = []
        skip_nbytes = 0
        with _noting(warnings, f"skip patches to version {manifest.version}"):
            skip_nbytes = self._put_skips(attempt, manifest)
        for name, view in views.items():
            with _noting(warnings, f"skip patches to version {manifest.version} in view {name!r}"):
                skip_nbytes += view.delivery._put_skips(view.attempt, manifest.of(name) or manifest)
        skipped = time.perf_counter()
        if self._retention is not None and self._ranks.rank == 0:
            with _noting(warnings, "deleting old versions"):
                delete_planned(self.history, self._retention.plan(self.history))
        if self.marked and self._ranks.rank == 0:
            with _noting(warnings, f"deleting {END}"):  # which is void: it names an older version
                self.history.store.delete(END)
                self.marked = False
        for warning in warnings:
            log.warning("version %d is published, but: %s", manifest.version, warning)
        put_s, skip_s = committed - start, skipped - committed
        return Delivered(manifest, attempt.encoded, skip_nbytes, put_s, skip_s, "; ".join(warnings) or None)

    def _delete_objects(self, sequence: int, token: str) -> None:
        """Delete the objects of a version that will not be committed: they may be what fills the disk."""
        with suppress(StoreError):
            store = self.history.store
            if self._ranks.size > 1:
                store.delete(part_name(parts_name(sequence, token), self._ranks.rank))
            if self._ranks.rank == 0:  # which alone knows whether it has committed, so it deletes the others' parts too
                folders = anchor_name(sequence, token), parts_name(sequence, token).rpartition("/")[0]
                files = [info.name for folder in folders for info in store.list(folder)]
                for name in (patch_name(sequence, token), trail_name(sequence, token), *files):
                    store.delete(name)

    def _put_skips(self, attempt: Attempt, manifest: Manifest) -> int:
        """Make and put the skip patches that are due. Returns their bytes."""
        if attempt.encoded is None or attempt.base is None:
            self._skips.clear()
            return 0
        try:
            codec = CODECS[attempt.encoded.patch.header.codec]
            return self._make_skips(attempt, state_of(attempt.base), state_of(manifest), codec)
        except Exception:
            self._skips.clear()
            raise

    def _make_skips(self, attempt: Attempt, before: State, now: State, codec: Codec) -> int:
        replaced, newest = attempt.new.replaced, attempt.tensors

        def add() -> tuple[list[tuple[State, Overlay]], list[int]]:
            if replaced is None:
                self._skips.clear()
                return [], []
            due = self._skips.add(before, now, replaced, newest.held_nbytes)
            return due, [base.sequence for base, _ in due]

        if now.sequence % SPANS[0]:
            add()
            return 0
        # A rank whose overlay grew too large has none: then nobody makes this one.
        due, everywhere = self._ranks.do_and_share("find skip patches", add, list[int])
        return sum(
            self._put_skip(base, now, overlay, newest, codec)
            for base, overlay in due
            if all(base.sequence in bases for bases in everywhere)
        )

    def _put_skip(self, base: State, now: State, overlay: Overlay, newest: Layout, codec: Codec) -> int:
        """Code, prove and put one skip patch. Returns its bytes."""

        def find() -> tuple[Coded, _Skip]:
            coded = find_skip(overlay, newest, codec)
            return coded, _Skip(coded.found.delta, new_token())

        coded, found = self._ranks.do_and_share("code a skip patch", find, _Skip)
        delta = sum(one.delta for one in found)
        prove = partial(prove_skip, coded, base, now, overlay, newest, delta, self._ranks)
        proved = self._ranks.do("prove a skip patch", prove)
        data, ref = self._put_patch("put a skip patch", proved, now.sequence, found[0].token)

        def put_first() -> None:
            if self._ranks.rank == 0:
                self.history.store.put(ref.name, data)
                self._unlisted.append(PatchLink(ref, base.sequence, now))

        self._ranks.do("list a skip patch", put_first)
        return ref.total_nbytes


@contextmanager
def _noting(warnings: list[str], what: str) -> Iterator[None]:
    """Turn what fails in a block into a warning: the version stands, whatever it is."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        warnings.append(f"{what}: {one_line(error)}")
