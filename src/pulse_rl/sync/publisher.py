"""The trainer's side: publish a version as a patch, and every so often as an anchor.

The publisher holds one copy of the last published bits, its baseline. A version is published in this order:
find the changes against the baseline and code them; prove that the patch, decoded again, turns the baseline
into the new version; move the baseline; put the patch, the anchor if one is due and the trail; commit the manifest;
and last, where they are due, put skip patches and prune. What fails before the commit is undone: the baseline goes back
to the newest committed version, so the next patch starts from what subscribers have. All that follows the move needs
the trainer's weights no more, and can go on behind its back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pulse_rl.codecs.choose import Chooser, CodecName, Trial
from pulse_rl.dtypes import UINTS
from pulse_rl.errors import BaseMismatchError, StoreError
from pulse_rl.history.anchor import check_assets, model_config
from pulse_rl.history.log import History
from pulse_rl.history.manifest import FORMAT, FORMAT_VERSION, MAX_SEQUENCE, Manifest, manifest_name, new_token
from pulse_rl.history.prune import GRACE_S, Retention
from pulse_rl.history.restore import Work, restore, scratch, way_out
from pulse_rl.history.trail import Faults, state_of
from pulse_rl.patch import encode
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application, resolve
from pulse_rl.patch.overlay import Overlay, Replaced
from pulse_rl.store.base import Store
from pulse_rl.sync.delivery import Delivered, Delivery, Upcoming
from pulse_rl.sync.reports import Coded, PublishReport, publish_report
from pulse_rl.sync.skips import LARGEST
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.casts import cast_name
from pulse_rl.weights.layout import Layout, compare_layouts, layout
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    import torch

    from pulse_rl.history.signing import PrivateKey

log = logging.getLogger(__name__)


class Publisher:
    """Publishes versions of one model's weights to one history.

    store: a Store, or the URL or path of one. anchor_every: a full checkpoint every so many versions (the
    first version always is one). codec: "context", "gap", "raw", or "auto": of the first two the one that is at
    the workers first, as tried on the patches themselves (see `codecs.choose`). bandwidth: bytes a second of the
    slowest link between this trainer and a worker, for that choice; may be set at any time as an attribute; None
    takes what putting the last anchor showed of this side's. cast: the dtype that floating-point tensors
    are published as (torch.bfloat16, or "bfloat16", where the trainer holds FP32 masters); None publishes them
    as they are. sign_with: an Ed25519 private key (a PEM file's path, or the key) that signs every manifest; needs the
    extra `sign`.
    retain: keep at least this many of the newest versions and delete older ones, but those that still counted `grace`
    seconds ago; None keeps all. keep_every: of the older ones keep every so many-th anchor for good.
    Raises ValueError for a setting that makes no sense.

    Memory: the published bits once (the baseline), one patch (two where "auto" tries both codecs), decoded changes
    of up to 32 MB for each, and scratch of up to 8 MB a thread (14 MB for 8-byte elements). What the last version and
    the last 4, 16 and 64 overwrote lies in temporary files, of up to half the model each.

    A history has one publisher at a time. On a history that has versions already, the first `publish`
    rebuilds the baseline from it, proved, and goes on from its newest version (where it cannot be rebuilt,
    `publish(…, anchor=True)` goes on without it); a publisher that another one has overtaken gets a StoreError
    and publishes nothing. Not thread-safe.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        anchor_every: int = 50,
        codec: CodecName = "auto",
        bandwidth: float | None = None,
        cast: str | torch.dtype | None = None,
        sign_with: PrivateKey | None = None,
        retain: int | None = None,
        keep_every: int | None = None,
        grace: float = GRACE_S,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every: expected at least 1, found {anchor_every}")
        if retain is None and keep_every is not None:
            raise ValueError("keep_every: expected retain with it, which says what else is kept")
        self.bandwidth = bandwidth
        self.history = History(store, sign_with=sign_with)
        self._chooser = Chooser(codec)
        self._anchor_every = anchor_every
        self._cast = cast_name(cast) if cast is not None else None
        self._token = new_token()
        self._delivery = Delivery(self.history, Retention(retain, keep_every, grace) if retain is not None else None)
        self._head: Manifest | None = None  # the newest version that is committed
        self._newest: Manifest | None = None  # the version that the baseline holds: the head, or one on its way
        self._baseline: Layout | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: _Pending | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the slowest link between this trainer and a worker, for codec="auto"; may be set."""
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, value: float | None) -> None:
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"bandwidth: expected bytes a second, more than 0, found {value!r}")
        self._bandwidth = value

    @property
    def version(self) -> int | None:
        """The newest version that this publisher has committed or resumed from; None before the first."""
        return self._head.version if self._head else None

    @property
    def digest(self) -> str | None:
        """The digest of that version."""
        return self._head.digest if self._head else None

    def resume(self) -> int | None:
        """Take up the newest version of a history that has versions already; `publish` does so by itself.

        Returns that version, None for an empty history. Rebuilds the baseline, proved, in scratch files first.
        Raises IntegrityError or StoreError if the history does not give its newest version back (then
        `publish(…, anchor=True)` goes on without it), StoreError if another publisher has committed since.
        """
        self.flush()
        self._settle()
        with way_out():
            head = self.history.head()
        self._notice(head)
        if head is not None and self._baseline is None:
            faults = Faults()
            with way_out(), scratch() as directory:
                baseline = _copy(restore(self.history, head, directory, Work(), faults))
            for fault in faults.said:
                log.warning("resumed version %d, around this: %s", head.version, fault)
            baseline.tied = dict(head.tied)
            self._delivery.go_on(head)
            self._head = self._newest = head
            self._baseline = baseline
        return head.version if head else None

    def _settle(self) -> None:
        """Give the baseline up if it holds a version that is neither committed nor on its way.

        That is what an interruption (Ctrl-C, no thread to be had) can leave wherever it comes: a patch made from such
        a baseline would lead from bits that no subscriber has.
        """
        if self._pending is None and self._newest is not self._head:
            if self._thread is not None:
                self._thread.shutdown()  # the version may be on its way all the same
                self._thread = None
            self._baseline, self._newest = None, self._head

    def _notice(self, head: Manifest | None) -> None:
        """See whether the history ends where this publisher left it. Raises StoreError if another one went on."""
        if self._head is None or head == self._head:
            return
        if head is not None and head.publisher == self._token and head.sequence > self._head.sequence:
            # An own commit that came through, though its answer was lost.
            self._head = self._newest = self._baseline = None
        else:
            raise StoreError(
                f"another publisher ({head.publisher if head else 'unknown'}) has changed "
                f"{self.history.store.url} since version {self._head.version}: a history has one publisher at a "
                "time; open a new Publisher to go on from its newest version"
            )

    def publish(
        self,
        weights: Any,
        *,
        version: int,
        anchor: bool = False,
        background: bool = False,
        cast: str | torch.dtype | None = None,
        assets: Mapping[str, bytes] | None = None,
    ) -> PublishReport:
        """Publish the weights as a new version; when this returns, subscribers can have it.

        weights: a torch module (its parameters and persistent buffers), a state dict, or any mapping of
        name → tensor or array; not modified, and not to be modified meanwhile. version: greater than every
        version of the history. anchor: write a full checkpoint too, whatever `anchor_every` says. Where this
        publisher holds no baseline yet, nothing of the history is rebuilt then, so that a damaged one can go on:
        the version is an anchor only, and subscribers come to it over that. cast: as the constructor's, for this
        call. assets: small files to put beside an anchor (a tokenizer's); a Transformers model's config.json is
        added by itself.

        background: return as soon as the weights are read and the patch is made and proved; the rest goes on in a
        thread, and the weights may be modified. What fails there is logged, and raised by the next `publish`, `flush`
        or `close`. One version is on its way at a time: the next one is coded meanwhile, then waits for it.

        Raises ValueError (version not newer, an asset's name that no anchor can have), BaseMismatchError (other tensors
        than the version before), StoreError (the store failed, or another publisher has committed), IntegrityError (the
        weights changed while they were read, or the history is damaged). After any of them the history is as it was and
        `publish` can be called again. What fails after the commit is no error, but the report's `trouble`.
        """
        start = time.perf_counter()
        patch_format.check_version("version", version)
        self.history.store.check_create()
        cast = self._cast if cast is None else cast_name(cast)
        check_assets(assets or {})
        self._settle()
        if self._pending is None and self._baseline is None and anchor:
            sequence, head = self.history.end()
            self._notice(head)
        else:
            if self._pending is None:
                self.resume()
            head = self._newest
            sequence = head.sequence + 1 if head else 0
        if sequence > MAX_SEQUENCE:
            raise StoreError(
                f"{self.history.store.url} is full: it holds {manifest_name(MAX_SEQUENCE)}, after which "
                "no name is left; if that is none of its own, delete it"
            )
        baseline, tensors = self._baseline, layout(weights, cast)
        if head is not None:
            _check_successor(head, baseline, tensors, version)
        if head is None or baseline is None:
            application, baseline = None, _copy(tensors)
            copied = time.perf_counter()
            digest = digests.to_hex(digests.state_digest(baseline))
            coded = Coded(digest, None, None, copied - start, time.perf_counter() - copied, 0.0)
        else:
            application, coded = self._encode(head, baseline, tensors, version)
            self.flush()  # the version before must stand before this one builds on it
        manifest = self._manifest(sequence, head, baseline, version, coded, anchor)
        before = state_of(head) if head is not None and application is not None else None
        files = model_config(weights, cast) | dict(assets or {})
        replaced = self._move(application, baseline, manifest)
        upcoming = Upcoming(manifest, before, coded.patch, replaced, baseline, files)
        if background:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="pulse-publish")
            future = self._thread.submit(self._deliver_behind, upcoming)
            report = publish_report(manifest, coded, None, start)
            self._pending = _Pending(future, upcoming, coded, start)
            return report
        try:
            delivered = self._delivery.deliver(upcoming)
        except BaseException:
            self._undo(upcoming)
            raise
        self._head = self._newest = delivered.manifest
        return publish_report(delivered.manifest, coded, delivered, start)

    def flush(self) -> PublishReport | None:
        """Wait until the version that is on its way in the background is committed.

        Returns its report, None if there is none on its way. Raises what publishing it failed with; then the version
        is not published, and the next one starts from the one before.
        """
        if self._pending is None:
            return None
        pending = self._pending
        try:
            delivered = pending.future.result()
        except Exception:
            self._pending = None
            self._undo(pending.upcoming)
            raise
        self._pending = None
        self._head = self._newest = delivered.manifest
        return publish_report(delivered.manifest, pending.coded, delivered, pending.start)

    def close(self) -> None:
        """Wait for what is on its way; raises what it failed with. The publisher can be used again."""
        try:
            self.flush()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deliver_behind(self, upcoming: Upcoming) -> Delivered:
        """In the background: a failure is logged at once, should nobody ask for it any more."""
        try:
            return self._delivery.deliver(upcoming)
        except Exception as error:
            log.error("version %d could not be published: %s", upcoming.manifest.version, error)
            raise

    def _move(self, application: Application | None, baseline: Layout, manifest: Manifest) -> Overlay | None:
        """Bring the baseline to a new version. Returns what that overwrote, unless it is too much to keep."""
        replaced = None
        if application is not None:
            if application.changed_nbytes <= baseline.nbytes * LARGEST:
                try:
                    replaced = Overlay(Replaced(name, start, old) for name, _, start, old in application.replaced())
                except OSError as error:
                    log.warning("version %d: no skip patches, for want of temporary files: %s", manifest.version, error)
            # Should this be interrupted, there is no baseline, and the next publish rebuilds it from the history.
            self._baseline = None
            application.write()
        self._newest = manifest  # first: it says what the baseline holds, see _settle
        self._baseline = baseline
        return replaced

    def _undo(self, upcoming: Upcoming) -> None:
        """Bring the baseline back to the newest version that is committed; without what it held it is given up."""
        baseline, self._baseline = self._baseline, None
        if upcoming.replaced is not None and baseline is not None:
            for name, start, (indices, values) in upcoming.replaced.replaced():
                baseline[name].scatter(start, indices, values)
        self._newest = self._head
        if upcoming.replaced is not None:
            self._baseline = baseline

    def _encode(self, head: Manifest, baseline: Layout, tensors: Layout, version: int) -> tuple[Application, Coded]:
        """Code the changes since the baseline, and prove the patch against it."""
        base_digest = int(head.digest, 16)
        bandwidth = self.bandwidth or self._delivery.seen_bandwidth

        def prove() -> dict[Trial, tuple[Application, encode.EncodedPatch]]:
            patches = encode.encode(
                baseline,
                tensors,
                base=head.version,
                target=version,
                codecs=self._chooser.codecs(bandwidth),
                base_digest=base_digest,
                tied=tensors.tied,
            )
            proved = {}
            for coded in patches:
                start = time.perf_counter()
                patch = patch_format.unpack(coded.data)
                application = Application(patch, resolve(patch.by_name(), patch.tied, baseline))
                application.prove(base_digest)
                decode_s = time.perf_counter() - start
                proved[Trial(coded.header.codec, len(coded.data), coded.encode_s, decode_s)] = (application, coded)
            return proved

        proved = prove()
        if len(proved) > 1 and self._chooser.untried:
            proved = prove()  # the first time kernels may have been compiled, which is none of a codec's merit
        coded = next(iter(proved.values()))[1]
        density = coded.header.changes / max(1, tensors.elements)
        application, coded = proved[self._chooser.choose(list(proved), density, bandwidth)]
        prove_s = sum(trial.decode_s for trial in proved)
        made = Coded(coded.header.target_digest, coded, self._chooser.reason, coded.read_s, coded.diff_s, prove_s)
        return application, made

    def _manifest(
        self, sequence: int, head: Manifest | None, tensors: Layout, version: int, coded: Coded, anchor: bool
    ) -> Manifest:
        """All of a new version's manifest but its objects."""
        due = anchor or head is None or coded.patch is None or sequence - head.anchor_sequence >= self._anchor_every
        number = 0 if head is None else head.anchor_number + due
        return Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            sequence=sequence,
            version=version,
            digest=coded.digest,
            elements=tensors.elements,
            full_nbytes=tensors.nbytes,
            tied=tensors.tied,
            patch=None,
            anchor=(),
            anchor_sequence=sequence if due or head is None else head.anchor_sequence,
            anchor_number=number,
            trail=None,
            publisher=self._token,
            created=time.time(),
        )


class _Pending(NamedTuple):
    """A version on its way in the background."""

    future: Future[Delivered]
    upcoming: Upcoming
    coded: Coded
    start: float


def _check_successor(head: Manifest, baseline: Layout | None, tensors: Layout, version: int) -> None:
    """Raise ValueError or BaseMismatchError unless these tensors can be the version after the newest one."""
    if version <= head.version:
        raise ValueError(f"version: expected more than {head.version}, the newest one, found {version}")
    what = f"version {head.version} and version {version}"
    if baseline is not None:
        compare_layouts(baseline.all_names(), tensors.all_names(), what)
    elif (tensors.elements, tensors.nbytes) != (head.elements, head.full_nbytes):
        raise BaseMismatchError(
            f"{what}: the tensors differ: expected {head.elements} elements in {head.full_nbytes} bytes, found "
            f"{tensors.elements} in {tensors.nbytes}: publish the same model, with the same cast"
        )
    if head.tied != tensors.tied:
        raise BaseMismatchError(f"{what}: the tied tensors differ: {head.tied} and {tensors.tied}")


def _copy(tensors: Layout) -> Layout:
    """A copy of all bits in host memory, segment by segment."""
    copied: dict[str, Bits] = {}
    for name, bits in tensors.items():
        array = np.empty(bits.size, UINTS[bits.itemsize])
        for start, stop in segments(bits.size):
            array[start:stop] = bits.read(start, stop)
        copied[name] = HostBits(bits.dtype, array.reshape(bits.shape))
    result = Layout(copied)
    result.tied = dict(tensors.tied)
    return result
