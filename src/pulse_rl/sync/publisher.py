"""The trainer's side: publish a version as a patch, and every so often as an anchor.

The publisher holds one copy of the last published bits, its baseline. A version is published in this order:
find the changes against the baseline and code them; prove that the patch, decoded again, turns the baseline
into the new version; put the patch, and the anchor if one is due; commit the manifest; and only then move
the baseline. Whatever fails, the baseline is the newest committed version, so the next patch starts from
what subscribers have.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from blake3 import blake3

from pulse_rl import digests, encode, patchfile
from pulse_rl.application import Application, resolve
from pulse_rl.bits import Bits, HostBits, Layout, cast_name, compare_layouts, layout
from pulse_rl.codecs.choose import Chooser, CodecName, Trial
from pulse_rl.dtypes import UINTS
from pulse_rl.errors import BaseMismatchError, StoreError
from pulse_rl.history import FORMAT, FORMAT_VERSION, History, Manifest, ObjectRef, PatchRef, new_token
from pulse_rl.store.base import Store
from pulse_rl.sync.anchor import model_config, put_anchor
from pulse_rl.sync.restore import Work, restore, way_out

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PublishReport:
    """What one publish did. Seconds of cast and diff are work summed over threads; encode and put are wall time."""

    version: int
    base: int | None  # version the patch starts from; None for a version that is an anchor only, as the first one
    digest: str  # of the published version, 16 hex digits
    codec: str | None  # None without a patch
    choice: str | None  # why this codec: what each candidate took; None without a patch
    elements: int
    changes: int  # elements whose bits differ from the base
    density: float  # changes / elements
    full_nbytes: int  # of the whole model's bits
    patch_nbytes: int  # what a following subscriber reads; 0 without a patch
    anchor_nbytes: int  # 0 unless this version is an anchor too
    sent_nbytes: int  # patch and anchor together: what went into the store
    reduction: float  # full_nbytes / patch_nbytes; 1 without a patch
    cast_s: float
    diff_s: float
    encode_s: float
    put_s: float
    total_s: float


class _Coded(NamedTuple):
    """A new version, ready to be put and committed."""

    digest: str
    patch: encode.EncodedPatch | None
    choice: str | None
    cast_s: float
    diff_s: float


class Publisher:
    """Publishes versions of one model's weights to one history.

    store: a Store, or the URL or path of one. anchor_every: a full checkpoint every so many versions (the
    first version always is one). codec: "context", "gap", "raw", or "auto": of the first two the one that is at
    the workers first, as tried on the patches themselves (see `codecs.choose`). bandwidth: bytes a second of the
    slowest link between this trainer and a worker, for that choice; may be set at any time as an attribute; None
    takes what putting the last anchor showed of this side's. cast: the dtype that floating-point tensors
    are published as (torch.bfloat16, or "bfloat16", where the trainer holds FP32 masters); None publishes them
    as they are. retain: keep at least this many of the newest versions and delete older ones; None keeps all.
    Raises ValueError for a setting that makes no sense.

    Memory: the published bits once (the baseline), one patch (two where "auto" tries both codecs), decoded changes
    of up to 32 MB for each, and scratch of up to 8 MB a thread (14 MB for 8-byte elements).

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
        retain: int | None = None,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every: expected at least 1, found {anchor_every}")
        if retain is not None and retain < 1:
            raise ValueError(f"retain: expected at least 1 version, found {retain}")
        self.bandwidth = bandwidth
        self.history = History(store)
        self._seen_bandwidth: float | None = None
        self._chooser = Chooser(codec)
        self._anchor_every = anchor_every
        self._cast = cast_name(cast) if cast is not None else None
        self._retain = retain
        self._token = new_token()
        self._head: Manifest | None = None  # the version that the baseline holds
        self._baseline: Layout | None = None

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
        with way_out():
            head = self.history.head()
        self._notice(head)
        if head is not None and self._baseline is None:
            with way_out(), tempfile.TemporaryDirectory(prefix="pulse-rl-") as scratch:
                restored = restore(self.history, self.history.anchor_route(head), Path(scratch), Work())
                baseline = _copy(restored)
            baseline.tied = dict(head.tied)
            self._head, self._baseline = head, baseline
        return head.version if head else None

    def _notice(self, head: Manifest | None) -> None:
        """See whether the history ends where this publisher left it. Raises StoreError if another one went on."""
        if self._head is None or head == self._head:
            return
        if head is not None and head.publisher == self._token and head.sequence > self._head.sequence:
            self._head = self._baseline = None  # an own commit that came through, though its answer was lost
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

        Raises ValueError (version not newer), BaseMismatchError (other tensors than the version before),
        StoreError (the store failed, or another publisher has committed), IntegrityError (the weights changed
        while they were read, or the history is damaged). After any of them the history is as it was and `publish`
        can be called again.
        One exception: if deleting what `retain` no longer keeps fails, the StoreError comes after the commit, and
        `version` says that the new version stands.
        """
        start = time.perf_counter()
        patchfile.check_version("version", version)
        cast = self._cast if cast is None else cast_name(cast)
        if anchor and self._baseline is None:
            sequence, head = self.history.end()
            self._notice(head)
        else:
            self.resume()
            head = self._head
            sequence = head.sequence + 1 if head else 0
        baseline, tensors = self._baseline, layout(weights, cast)
        if head is not None:
            _check_successor(head, baseline, tensors, version)
        if head is None or baseline is None:
            application, baseline = None, _copy(tensors)
            copied = time.perf_counter()
            digest = digests.to_hex(digests.state_digest(baseline))
            coded = _Coded(digest, None, None, copied - start, time.perf_counter() - copied)
            tensors = baseline
        else:
            application, coded = self._encode(head, baseline, tensors, version)
        put = time.perf_counter()
        files = model_config(weights, cast) | dict(assets or {})
        manifest = self._put(sequence, head, tensors, version, coded, anchor, files)
        put_s = time.perf_counter() - put
        # Committed: move the baseline. Should even that fail, the next publish rebuilds it from the history.
        self._head, self._baseline = manifest, None
        if application is not None:
            application.write()
        self._baseline = baseline
        if self._retain is not None:
            self.history.prune(self._retain)
        return _report(manifest, coded, put_s, start)

    def _encode(self, head: Manifest, baseline: Layout, tensors: Layout, version: int) -> tuple[Application, _Coded]:
        """Code the changes since the baseline, and prove the patch against it."""
        base_digest = int(head.digest, 16)
        bandwidth = self.bandwidth or self._seen_bandwidth

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
                patch = patchfile.unpack(coded.data)
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
        made = _Coded(coded.header.target_digest, coded, self._chooser.reason, coded.read_s, coded.diff_s)
        return application, made

    def _put(
        self,
        sequence: int,
        head: Manifest | None,
        tensors: Layout,
        version: int,
        coded: _Coded,
        anchor: bool,
        assets: Mapping[str, bytes],
    ) -> Manifest:
        """Put the objects of a version, then commit its manifest."""
        token = new_token()
        store = self.history.store
        ref = None
        if head is not None and coded.patch is not None:
            data, header = coded.patch.data, coded.patch.header
            name = f"patches/{sequence:012d}-{token}.safetensors"
            store.put(name, data)
            ref = PatchRef(name, len(data), blake3(data).hexdigest(), head.version, header.codec, header.changes)
        full: tuple[ObjectRef, ...] = ()
        if anchor or head is None or ref is None or sequence - head.anchor_sequence >= self._anchor_every:
            start = time.perf_counter()
            full = put_anchor(store, f"anchors/{sequence:012d}-{token}", tensors, coded.digest, assets)
            self._seen_bandwidth = sum(ref.nbytes for ref in full) / (time.perf_counter() - start)
        manifest = Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            sequence=sequence,
            version=version,
            digest=coded.digest,
            elements=tensors.elements,
            full_nbytes=tensors.nbytes,
            tied=tensors.tied,
            patch=ref,
            anchor=full,
            anchor_sequence=sequence if full or head is None else head.anchor_sequence,
            publisher=self._token,
            created=time.time(),
        )
        self.history.commit(manifest)
        return manifest


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


def _report(manifest: Manifest, coded: _Coded, put_s: float, start: float) -> PublishReport:
    patch = manifest.patch
    patch_nbytes, changes = (patch.nbytes, patch.changes) if patch else (0, 0)
    return PublishReport(
        version=manifest.version,
        base=patch.base if patch else None,
        digest=manifest.digest,
        codec=patch.codec if patch else None,
        choice=coded.choice,
        elements=manifest.elements,
        changes=changes,
        density=changes / manifest.elements if manifest.elements else 0.0,
        full_nbytes=manifest.full_nbytes,
        patch_nbytes=patch_nbytes,
        anchor_nbytes=manifest.anchor_nbytes,
        sent_nbytes=patch_nbytes + manifest.anchor_nbytes,
        reduction=manifest.full_nbytes / patch_nbytes if patch_nbytes else 1.0,
        cast_s=coded.cast_s,
        diff_s=coded.diff_s,
        encode_s=coded.patch.encode_s if coded.patch else 0.0,
        put_s=put_s,
        total_s=time.perf_counter() - start,
    )


def _copy(tensors: Layout) -> Layout:
    """A copy of all bits in host memory, segment by segment."""
    copied: dict[str, Bits] = {}
    for name, bits in tensors.items():
        array = np.empty(bits.size, UINTS[bits.itemsize])
        for start, stop in digests.segments(bits.size):
            array[start:stop] = bits.read(start, stop)
        copied[name] = HostBits(bits.dtype, array.reshape(bits.shape))
    result = Layout(copied)
    result.tied = dict(tensors.tied)
    return result
