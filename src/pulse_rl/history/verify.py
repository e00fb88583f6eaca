"""verify: prove a patch, a checkpoint or a whole history, and say what is wrong where.

A history is walked once, from its oldest version to its newest. One copy of the model in scratch files follows it: it
starts from an anchor and takes every patch, each proved as a subscriber would prove it; skip patches are proved on it
where they begin; at every anchor and at the end, its digest is counted anew over all bits. A fault does not end the
walk: it goes on from the next anchor. Needs room for two models in the directory for temporary files; memory holds one
patch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pulse_rl.checkpoint.files import files_of, open_checkpoint
from pulse_rl.disk import map_file
from pulse_rl.errors import (
    BaseMismatchError,
    CannotListError,
    IntegrityError,
    PatchFormatError,
    PulseError,
    VersionNotFoundError,
)
from pulse_rl.history.contents import kind_of
from pulse_rl.history.log import FIRST, History
from pulse_rl.history.manifest import Manifest, manifest_name
from pulse_rl.history.restore import Work, load_anchor, prove, unpack
from pulse_rl.history.trail import Step, state_of, step_of
from pulse_rl.parallel import ordered_map
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application, live_digest, resolve
from pulse_rl.store.base import Store
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, compare_layouts, layout
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    from pulse_rl.history.signing import PublicKey

Progress = Callable[[int, int, str], None]  # (steps done, steps in all, what comes next)

FAULTS = (PulseError, ValueError, FileNotFoundError)  # of what is verified; other OSErrors are this machine's


class VerifyReport(msgspec.Struct, frozen=True):
    """What was proved and what is wrong."""

    ok: bool  # no problems
    kind: Literal["patch", "checkpoint", "store", "file"]  # "file": neither patch nor checkpoint
    target: str  # the path or URL that was verified
    problems: tuple[str, ...]  # one sentence each; empty if all is well
    nbytes: int  # read and proved
    digest: str | None = None  # of the checkpoint, the patch's target, or the newest good version
    good_versions: tuple[int, ...] = ()  # of a store: those that a new subscriber can load, bit for bit
    bad_versions: tuple[int, ...] = ()  # the others that have a manifest
    leftovers: tuple[str, ...] = ()  # objects that nothing names (yet): harmless
    weights_version: int | None = None  # the version that the weights given hold, every bit compared


def verify(
    target: str | Path | Store,
    *,
    deep: Any = None,
    public_key: PublicKey | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Prove everything that can be proved about a patch, a checkpoint, a store or a run directory.

    target: a path, a store's URL, or an open Store. deep: weights to compare it with, a module or a mapping as
    Subscriber takes them, not modified: which version of a store they hold, or whether they are a patch's base.
    public_key: the Ed25519 key that a store's manifests must be signed by. progress: called before every step.
    Patch: its hash, header and index, and every block decoded with all indices in range (with codec "context" only
    its heads, unless its base is given: what it changes can be proved against that alone). Checkpoint: its layout,
    and its digest counted. Store: see the module; weights are compared bit by bit with the copy, at the version with
    their digest, or with the newest.
    Returns a report; problems are listed in it, not raised. Raises FileNotFoundError if there is nothing at
    target, VersionNotFoundError for a store without versions, StoreError if it cannot be listed.
    """
    tell = progress or (lambda done, total, what: None)
    weights = layout(deep) if deep is not None else None
    if not isinstance(target, str | Path):
        return verify_history(History(target, public_key=public_key), tell, weights)
    try:
        kind, place = kind_of(str(target))
    except PatchFormatError as error:
        return VerifyReport(False, "file", str(target), (str(error),), 0)
    if kind == "store":
        return verify_history(History(place, public_key=public_key), tell, weights)
    if public_key is not None:
        raise ValueError(f"public_key: expected a store, whose manifests it checks, found the {kind} {place}")
    tell(0, 1, place)
    if kind == "patch":
        return _verify_patch(Path(place), weights)
    if weights is not None:
        raise ValueError(f"deep: expected a store or a patch to compare weights with, found the checkpoint {place}")
    return _verify_checkpoint(Path(place))


def _verify_patch(path: Path, base: Layout | None) -> VerifyReport:
    data = map_file(path)
    version = None
    try:
        patch = patch_format.unpack(data)
        if base is None:
            _decode_all(patch)
        else:
            targets = resolve(patch.by_name(), patch.tied, base, written=False)
            Application(patch, targets).prove(live_digest(targets))
            version = patch.header.base
    except (PatchFormatError, BaseMismatchError, IntegrityError) as error:
        return VerifyReport(False, "patch", str(path), (f"{path}: {error}",), len(data))
    return VerifyReport(True, "patch", str(path), (), len(data), patch.header.target_digest, weights_version=version)


def _verify_checkpoint(path: Path) -> VerifyReport:
    files = files_of(path)
    try:
        digest = digests.to_hex(digests.state_digest(open_checkpoint(path)))
        nbytes = sum(file.stat().st_size for file in files)
    except FAULTS as error:
        return VerifyReport(False, "checkpoint", str(path), (_sentence(error),), 0)
    return VerifyReport(True, "checkpoint", str(path), (), nbytes, digest)


def _decode_all(patch: patch_format.Patch) -> None:
    """Decode all that can be decoded without the base, which proves its indices. Raises PatchFormatError."""
    pieces = list(patch.pieces())
    if not patch.codec.conditional:
        deque(ordered_map(lambda piece: piece[1].decode([]), pieces), maxlen=0)


def verify_history(history: History, tell: Progress, weights: Layout | None = None) -> VerifyReport:
    """Walk a whole history. See `verify`."""
    sequences = history.sequences()
    if not sequences:
        raise VersionNotFoundError(f"{history.store.url} holds no version yet")
    with tempfile.TemporaryDirectory(prefix="pulse-rl-verify-") as scratch:
        walk = _Walk(history, sequences, Path(scratch), weights)
        for done, sequence in enumerate(sequences):
            tell(done, len(sequences) + 1, f"manifest {sequence}")
            walk.step(sequence)
        tell(len(sequences), len(sequences) + 1, "the newest version, all bits")
        walk.finish()
    named = walk.named
    leftovers: list[str] = []
    with suppress(CannotListError):  # what no manifest names can only be found by listing
        leftovers = [o.name for prefix in ("patches", "trails", "anchors") for o in history.store.list(prefix)]
    good = walk.good
    return VerifyReport(
        ok=not walk.problems,
        kind="store",
        target=history.store.url,
        problems=tuple(walk.problems),
        nbytes=walk.work.nbytes,
        digest=good[-1].digest if good else None,
        good_versions=tuple(manifest.version for manifest in good),
        bad_versions=tuple(manifest.version for manifest in walk.bad),
        leftovers=tuple(name for name in leftovers if name not in named),
        weights_version=walk.weights_version,
    )


class _Walk:
    """One way through a history: the copy that follows it, and what was found."""

    def __init__(self, history: History, sequences: list[int], scratch: Path, weights: Layout | None) -> None:
        self.history = history
        self.work = Work()
        self.problems: list[str] = []
        self._first = self._begins(sequences)
        self.good: list[Manifest] = []
        self.bad: list[Manifest] = []
        self.named: set[str] = set()
        self._scratch = scratch
        self._copy: Layout | None = None  # holds the version of self._held, proved
        self._files: Path | None = None  # the directory that it is mapped from
        self._held: Manifest | None = None
        self._last: Manifest | None = None  # the newest manifest read so far
        self._listed: int | None = None  # the number of the newest manifest looked at, broken or not
        self._skips: dict[int, dict[str, Step]] = {}  # skip patches, by the sequence number where they begin
        self._weights = weights
        self._weights_digest = digests.to_hex(digests.state_digest(weights)) if weights is not None else None
        self.weights_version: int | None = None
        self._read_trails(sequences)

    def _begins(self, sequences: list[int]) -> int:
        """The number from which on there is no gap; 0 where what says so is wrong."""
        try:
            first = self.history.first()
        except IntegrityError as error:
            self.problems.append(_sentence(error))
            return 0
        if first <= sequences[-1]:
            return first
        self.problems.append(
            f"{FIRST} says that the history begins with {manifest_name(first)}, beyond its newest one, "
            f"{manifest_name(sequences[-1])}: nobody can publish, and nobody read it where it cannot be listed; "
            f"delete {FIRST}"
        )
        return 0

    def step(self, sequence: int) -> None:
        """Prove one version: its manifest, its patch on the copy, its anchor against the copy."""
        before, self._listed = self._listed, sequence
        # Before the number that pruning has left there may be gaps between anchors that are kept for good.
        if before is not None and sequence != before + 1 and sequence > self._first:
            self.problems.append(f"manifests {before + 1} to {sequence - 1} are missing")
        try:
            manifest = self.history.read(sequence)
        except FAULTS as error:
            self.problems.append(_sentence(error))
            return
        self.named.update(ref.name for ref in (*manifest.anchor, *filter(None, [manifest.patch, manifest.trail])))
        self._order(manifest)
        around = False
        if manifest.patch:
            self._patch(manifest)
            around = self._held != manifest and self._go_around(manifest)
        if manifest.anchor:
            self._recount()
            around = not self._restore(manifest) and around
        # A skip patch is told of by the next version's trail: it leads to what comes after, and not to this version.
        (self.good if self._held == manifest and not around else self.bad).append(manifest)
        for skip in self._skips.get(sequence, {}).values():
            self._skip(skip, manifest)
        if manifest.digest == self._weights_digest and self._held == manifest and not self._differing():
            self.weights_version = manifest.version
        self._last = manifest

    def _read_trails(self, sequences: list[int]) -> None:
        """Collect what the trails tell of, and say where they are wrong."""
        there = set(sequences)
        for sequence in sequences:
            try:
                manifest = self.history.read(sequence)
            except FAULTS:
                continue  # said in the walk
            try:
                trail = self.history.trail(manifest)
            except FAULTS as error:
                self._fault(manifest, _sentence(error))
                continue
            for step in trail.steps() if trail else []:
                if step.to.sequence in there and step.to.sequence >= self._first:
                    self.named.add(step.ref.name)
                    if step.to.sequence - step.base > 1:
                        self._skips.setdefault(step.base, {})[step.ref.name] = step

    def _skip(self, step: Step, manifest: Manifest) -> None:
        """Prove a skip patch on the copy, where it holds the version that the patch begins with."""
        try:
            data = self.history.fetch(step.ref)
            self.work.nbytes += len(data)
            patch = unpack(data, step, state_of(manifest))
            if self._copy is not None and self._held == manifest:
                prove(patch, self._copy, Work())
            else:
                _decode_all(patch)
        except FAULTS as error:
            self.problems.append(
                f"the skip patch from version {manifest.version} to {step.to.version}: {_sentence(error)}"
            )

    def finish(self) -> None:
        """Count the digest of the version at the end over all bits, and say what weights that were given differ in."""
        self._recount()
        if self._weights is None or self.weights_version is not None:
            return
        differing = self._differing()
        if self._held is not None and not differing:
            self.weights_version = self._held.version  # tied tensors stand apart in them, and have digests of their own
            return
        there = f"version {self._held.version}, the last sound one," if self._held else "any version"
        self.problems.append(f"the weights given hold no version; from {there} they differ in {differing}")

    def _differing(self) -> str:
        """In which tensors the copy and the weights given differ, and in how many elements; "" if in none."""
        assert self._weights is not None
        if self._copy is None:
            return "everything, for none could be rebuilt"
        ours, theirs = self._copy.all_names(), self._weights.all_names()
        tied = self._held.tied if self._held else {}
        ours |= {alias: ours[owner] for alias, owner in tied.items() if alias in theirs}
        try:
            compare_layouts(ours, theirs, "the weights given")
        except BaseMismatchError as error:
            return str(error)
        counts = {
            name: sum(int((bits.read(a, b) != theirs[name].read(a, b)).sum()) for a, b in segments(bits.size))
            for name, bits in ours.items()
        }
        differing = [f"{name} ({count} of {ours[name].size})" for name, count in counts.items() if count]
        more = f" and {len(differing) - 8} tensors more" if len(differing) > 8 else ""
        return ", ".join(differing[:8]) + more

    def _recount(self) -> None:
        """Count the copy's digest over all bits; if it is not what it should be, give the copy up."""
        held = self._held
        if self._copy is None or held is None:
            return
        found = digests.to_hex(digests.state_digest(self._copy))
        if found == held.digest:
            return
        self._fault(held, f"patches lead to digest {found}, its manifest says {held.digest}")
        if held in self.good:
            self.good.remove(held)
            self.bad.append(held)
        self._drop()

    def _order(self, manifest: Manifest) -> None:
        """What a manifest can say wrong about its place among the others."""
        last = self._last
        if last is None:
            if not manifest.anchor:
                self._fault(manifest, "it is the oldest one and has no anchor to start from")
            return
        contiguous = manifest.sequence == last.sequence + 1
        if contiguous and not manifest.anchor and manifest.anchor_sequence != last.anchor_sequence:
            expected, found = last.anchor_sequence, manifest.anchor_sequence
            self._fault(manifest, f"its newest anchor should be number {expected}, its manifest says {found}")
        if manifest.version <= last.version:
            self._fault(manifest, f"it comes after version {last.version}")

    def _patch(self, manifest: Manifest) -> None:
        """Bring the copy from the version before to this one, or only decode the patch where there is no copy."""
        step = step_of(manifest)
        assert step is not None  # the caller has looked
        try:
            data = self.history.fetch(step.ref)
            self.work.nbytes += len(data)
            if self._copy is None or self._held is None or self._held.sequence != manifest.sequence - 1:
                _decode_all(patch_format.unpack(data))
                return
            prove(unpack(data, step, state_of(self._held)), self._copy, Work()).write()
            self._held = manifest
        except FAULTS as error:
            self._fault(manifest, _sentence(error))

    def _go_around(self, manifest: Manifest) -> bool:
        """Bring the copy here over a skip patch, where the patch from the version before could not."""
        if self._copy is None or self._held is None:
            return False
        for step in self._skips.get(self._held.sequence, {}).values():
            if step.to == state_of(manifest):
                with suppress(*FAULTS):  # said where it begins
                    prove(unpack(self.history.fetch(step.ref), step, state_of(self._held)), self._copy, Work()).write()
                    self._held = manifest
                    return True
        return False

    def _restore(self, manifest: Manifest) -> bool:
        """Load and prove an anchor; the walk goes on from it. A faulty one leaves the copy as it was."""
        files = self._scratch / str(manifest.sequence)
        files.mkdir()
        try:
            tensors = load_anchor(self.history, manifest, files, self.work)
            counts = (tensors.elements, tensors.nbytes)
            if counts != (manifest.elements, manifest.full_nbytes):
                raise IntegrityError(
                    f"its manifest promises (elements, bytes) {(manifest.elements, manifest.full_nbytes)}, "
                    f"its anchor holds {counts}"
                )
        except FAULTS as error:
            shutil.rmtree(files)
            reach = "; patches from the anchor before still lead to it" if self._held == manifest else ""
            self._fault(manifest, f"{_sentence(error)}{reach}")
            return False
        self._drop()
        self._copy, self._files, self._held = tensors, files, manifest
        return True

    def _drop(self) -> None:
        if self._files is not None:
            shutil.rmtree(self._files)
        self._copy = self._files = self._held = None

    def _fault(self, manifest: Manifest, what: str) -> None:
        self.problems.append(f"version {manifest.version}: {what}")


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())
