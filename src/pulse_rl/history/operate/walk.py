"""The walk that proves a whole history, once from its oldest version to its newest.

A copy of the model in scratch files follows the walk. It starts from an anchor and takes every patch, each proved as
a subscriber would prove it; skip patches are proved on it where they begin, and not taken; at every anchor and at the
end its digest is counted over all bits. A fault does not end the walk: where other patches lead past it, the copy is
restored as a new subscriber restores it; otherwise the walk goes on from the next anchor.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pulse_rl.codecs.base import Units
from pulse_rl.disk import temporary_directory
from pulse_rl.errors import (
    BaseMismatchError,
    CannotListError,
    IntegrityError,
    PulseError,
    VersionNotFoundError,
    one_line,
)
from pulse_rl.history.follow import prove
from pulse_rl.history.history import History
from pulse_rl.history.manifest import PARTS, Manifest, check_same_history, manifest_name, object_sequence
from pulse_rl.history.patches import check_promised, fetch_patch
from pulse_rl.history.reading import Effort, Reading
from pulse_rl.history.restore import load_anchor, restore
from pulse_rl.history.search import costs
from pulse_rl.history.trail import PatchLink, link_of, state_of
from pulse_rl.history.versions import some_sequences
from pulse_rl.log.beginning import FIRST
from pulse_rl.log.objects import limit_of
from pulse_rl.parallel import ordered_map
from pulse_rl.patch import format as patch_format
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, Sides, compare_layouts
from pulse_rl.weights.segments import segments

FAULTS = (PulseError, ValueError, FileNotFoundError)  # of what is verified; other OSErrors are this machine's
MOST_NAMED = 8  # tensors that a problem lists by name


@dataclass
class _Copy:
    """The weights of one version, proved, in scratch files."""

    held: Manifest
    tensors: Layout  # mapped from the files
    files: Path


class Walk:
    """The walk through one history, and what it finds."""

    def __init__(self, history: History, sequences: list[int], scratch: Path, weights: Layout | None) -> None:
        self.problems: list[tuple[int | None, str]] = []  # each with the sequence number of the version that has it
        self.visited: dict[int, Manifest] = {}  # versions, by sequence number
        self.bad: set[int] = set()  # of these, those that a new subscriber cannot load
        self.past_fault: set[int] = set()  # and those of the others that are reached past a fault
        self.leftovers: tuple[str, ...] = ()  # objects that nothing refers to
        self.effort = Effort()
        self.weights_version: int | None = None  # the version that the given weights hold
        self.views: set[str] = set()  # names of all views of its versions
        self._history, self._sequences = history, sequences
        self._scratch = scratch
        self._weights = weights
        self._weights_digest = digests.to_hex(digests.state_digest(weights)) if weights is not None else None
        self._copy: _Copy | None = None
        self._restored = False  # whether the copy has gone past a fault since the last anchor
        self._before: int | None = None  # the sequence number visited last, with a broken manifest or not
        self._faulty: set[str] = set()  # names of patches and anchors in which a fault was found
        self._named: set[str] = set()  # objects that manifests and trails refer to
        self._unreadable: set[int | None] = set()  # sequence numbers whose manifests do not say what they refer to
        self._first = self._check_first(sequences)
        self._skips = self._read_trails(sequences)

    def visit(self, sequence: int) -> None:
        """Prove one version: its manifest, its patch on the copy, its anchor against the copy."""
        before, self._before = self._before, sequence
        last = next(reversed(self.visited.values()), None)
        # Before the first number there may be gaps between anchors that are kept permanently.
        if before is not None and sequence != before + 1 and sequence > self._first:
            self.problems.append((sequence, f"manifests {before + 1} to {sequence - 1} are missing"))
        try:
            manifest = self._history.read(sequence)
            if last is not None:
                check_same_history(manifest, last)
        except FAULTS as error:
            if self._history.view is not None and isinstance(error, VersionNotFoundError):
                return  # the version does not have the view
            self.problems.append((sequence, one_line(error)))
            self._unreadable.add(sequence)
            return
        self._named.update(ref.name for ref in manifest.refs)
        self.views.update(manifest.views)
        self._check_place(manifest, last)
        if (link := link_of(manifest)) is not None:
            base = self._copy.held if self._copy and self._copy.held.sequence == link.base_sequence else None
            self._prove(link, base, manifest, f"version {manifest.version}", take=True)
        if manifest.anchor:
            self._recount()
            self._load(manifest)
        if not self._holds(manifest):
            self._restore(manifest)
        self.visited[sequence] = manifest
        if not self._holds(manifest):
            self.bad.add(sequence)
        elif self._restored:
            self.past_fault.add(sequence)
        for link in self._skips.get(sequence, {}).values():
            what = f"the skip patch from version {manifest.version} to {link.to.version}"
            self._prove(link, manifest, manifest, what)
        if manifest.digest == self._weights_digest and self._holds(manifest) and not self._differences():
            self.weights_version = manifest.version

    def finish(self) -> None:
        """Count the last version's digest over all bits, compare the given weights with it, and list leftovers."""
        self._recount()
        self._compare_weights()
        with suppress(CannotListError):  # what nothing refers to can only be found by listing
            listed = [o.name for folder in ("patches", "trails", "anchors") for o in self._history.store.list(folder)]
            # The parts of a patch lie beside their list, which may be missing or damaged.
            named = {name.removesuffix(PARTS) for name in self._named}
            self.leftovers = tuple(
                name
                for name in listed
                if not {name, f"{name.rpartition('/')[0]}/"} & named and object_sequence(name) not in self._unreadable
            )

    def leave_out_pruned(self) -> None:
        """Forget the versions that were pruned meanwhile: a manifest goes before the objects that it names."""
        with suppress(IntegrityError):
            first = self._history.first()
            gone = {sequence for sequence in self._sequences if sequence < first} - set(self._history.sequences())
            self.problems = [(of, problem) for of, problem in self.problems if of not in gone]
            self.visited = {sequence: one for sequence, one in self.visited.items() if sequence not in gone}
            self.bad -= gone
            self.past_fault -= gone

    # Before the walk

    def _check_first(self, sequences: list[int]) -> int:
        """The sequence number from which on there is no gap; 0 where what says so is wrong."""
        try:
            first = self._history.first()
        except IntegrityError as error:
            self.problems.append((None, one_line(error)))
            return 0
        if first <= sequences[-1]:
            return first
        beyond = (
            f"{FIRST} says that the history begins with {manifest_name(first)}, beyond its newest one, "
            f"{manifest_name(sequences[-1])}: nobody can publish, and where it cannot be listed nobody can read it; "
            f"delete {FIRST}, or continue with publish(…, anchor=True)"
        )
        self.problems.append((None, beyond))
        return 0

    def _read_trails(self, sequences: list[int]) -> dict[int, dict[str, PatchLink]]:
        """The skip patches that trails list, by the sequence number where they begin and by name."""
        skips: dict[int, dict[str, PatchLink]] = {}
        existing = set(sequences)
        for sequence in sequences:
            try:
                manifest = self._history.read(sequence)
            except FAULTS:
                continue  # the visit reports it
            try:
                trail = self._history.trail(manifest)
            except FAULTS as error:
                self._report(manifest, one_line(error))
                continue
            for link in trail.links() if trail else []:
                if link.to.sequence in existing and link.to.sequence >= self._first:
                    self._named.add(link.ref.name)
                    if link.to.sequence - link.base_sequence > 1:
                        skips.setdefault(link.base_sequence, {})[link.ref.name] = link
        return skips

    # The copy

    def _holds(self, manifest: Manifest) -> bool:
        return self._copy is not None and self._copy.held == manifest

    def _prove(
        self, link: PatchLink, base: Manifest | None, manifest: Manifest, what: str, *, take: bool = False
    ) -> None:
        """Prove a patch on the copy if that holds its base, and take it if so wished; else only decode it.

        base: the version that it starts from; None where the version that lies there is not known. manifest: one with
        the names that are tied then. what: of which a problem is reported.
        """
        copy = self._copy
        # No larger than the model allows: the copy's size, or without a copy what the manifest says.
        limit = limit_of(copy.tensors.nbytes if copy else manifest.full_nbytes)
        try:
            patch = fetch_patch(self._history.store, link.ref, limit)
            self.effort.nbytes += patch.nbytes
            if base is not None:
                check_promised(patch, link, state_of(base), manifest.tied)
            if copy is None or copy.held != base:
                decode_all(patch.parts)
                return
            application = prove(patch, copy.tensors)
            if take:
                application.write()
                copy.held = manifest
        except FAULTS as error:
            self._faulty.add(link.ref.name)
            self.problems.append((manifest.sequence, f"{what}: {one_line(error)}"))

    def _restore(self, manifest: Manifest) -> None:
        """Bring the copy to a version that its own patch does not give, if others lead there from a good version.

        A skip patch to a version is listed in the trail of the next one, so it leads past its end, not to it.
        """
        with suppress(*FAULTS):  # reported by the visit that has found them
            trail = self._history.trail(manifest)
            reached = costs(trail.links() if trail else [], manifest.sequence, self._faulty)
            if self.visited.keys() - self.bad & reached.keys():
                reading = Reading(self._history)
                reading.faults.names |= self._faulty
                self._replace_copy(manifest, lambda files: restore(reading, manifest, files, None))
                self._restored = True

    def _load(self, manifest: Manifest) -> None:
        """Load and prove an anchor, which replaces the copy; a faulty one leaves the copy as it was."""

        def load(files: Path) -> Layout:
            tensors = load_anchor(self._history, manifest, files, self.effort, limit_of(manifest.full_nbytes))
            counts = (tensors.elements, tensors.nbytes)
            if counts != (manifest.elements, manifest.full_nbytes):
                raise IntegrityError(
                    f"its manifest promises (elements, bytes) {(manifest.elements, manifest.full_nbytes)}, "
                    f"its anchor holds {counts}"
                )
            return tensors

        try:
            self._replace_copy(manifest, load)
            self._restored = False
        except FAULTS as error:
            self._faulty.add(manifest.anchor[0].name)
            note = "; patches from the anchor before still lead to it" if self._holds(manifest) else ""
            self._report(manifest, f"{one_line(error)}{note}")

    def _replace_copy(self, manifest: Manifest, make: Callable[[Path], Layout]) -> None:
        """Let the copy be a version that is made in files. If that fails it stays as it was."""
        files = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            tensors = make(files)
        except BaseException:
            shutil.rmtree(files)
            raise
        self._drop_copy()
        self._copy = _Copy(manifest, tensors, files)

    def _recount(self) -> None:
        """Count the copy's digest over all bits; drop the copy if it is not its version's."""
        if self._copy is None:
            return
        held, found = self._copy.held, digests.to_hex(digests.state_digest(self._copy.tensors))
        if found == held.digest:
            return
        self._report(held, f"patches lead to digest {found}, its manifest says {held.digest}")
        self.bad |= {held.sequence} & self.visited.keys()
        self.past_fault.discard(held.sequence)
        self._drop_copy()

    def _drop_copy(self) -> None:
        if self._copy is not None:
            shutil.rmtree(self._copy.files)
        self._copy = None

    # Findings

    def _report(self, manifest: Manifest, problem: str) -> None:
        self.problems.append((manifest.sequence, f"version {manifest.version}: {problem}"))

    def _check_place(self, manifest: Manifest, last: Manifest | None) -> None:
        """Report what a manifest says that contradicts the last one that could be read."""
        if last is None:
            if not manifest.anchor:
                self._report(manifest, "it is the oldest one and has no anchor to start from")
            return
        contiguous = manifest.sequence == last.sequence + 1
        if contiguous and not manifest.anchor and manifest.anchor_sequence != last.anchor_sequence:
            expected, found = last.anchor_sequence, manifest.anchor_sequence
            self._report(manifest, f"its newest anchor should be number {expected}, its manifest says {found}")
        if manifest.version <= last.version:
            self._report(manifest, f"it comes after version {last.version}")

    def _compare_weights(self) -> None:
        """Report where the given weights differ from the copy, unless they hold a version that was visited."""
        if self._weights is None or self.weights_version is not None:
            return
        differences = self._differences()
        if self._copy is not None and not differences:
            # Tied tensors are separate in these weights, so they have another digest and the same bits.
            self.weights_version = self._copy.held.version
            return
        version = f"version {self._copy.held.version}, the last sound one," if self._copy else "any version"
        problem = f"the weights given hold no version; from {version} they differ in {differences}"
        self.problems.append((None, problem))

    def _differences(self) -> str:
        """In which tensors the given weights differ from the copy, and in how many elements; "" for none."""
        assert self._weights is not None
        if self._copy is None:
            return "everything, as none could be rebuilt"
        ours, theirs = self._copy.tensors.all_names(), self._weights.all_names()
        ours |= {alias: ours[owner] for alias, owner in self._copy.held.tied.items() if alias in theirs}
        try:
            compare_layouts(ours, theirs, Sides("the weights given", "the store", "these weights"))
        except BaseMismatchError as error:
            return str(error)
        counts = {
            name: sum(int((bits.read(a, b) != theirs[name].read(a, b)).sum()) for a, b in segments(bits.size))
            for name, bits in ours.items()
        }
        differing = [f"{name} ({count} of {ours[name].size})" for name, count in counts.items() if count]
        more = f" and {len(differing) - MOST_NAMED} tensors more" if len(differing) > MOST_NAMED else ""
        return ", ".join(differing[:MOST_NAMED]) + more


def walk(history: History, progress: Callable[[int, int, str], None], weights: Layout | None = None) -> Walk:
    """Walk a whole history. Raises VersionNotFoundError if it is empty, and StoreError where it cannot be listed.

    progress: called before each step with the number of steps done, the number of all, and what comes next.
    weights: to find out which version they hold.
    """
    sequences = some_sequences(history)
    found = _walk(history, sequences, progress, weights)
    for view in sorted(found.views):
        of_view = _walk(history.of(view), sequences, progress, None)
        known = set(found.problems)  # what is wrong with a manifest is found in each walk
        of_this = [(of, f"view {view!r}: {text}") for of, text in of_view.problems if (of, text) not in known]
        found.problems += of_this
        found.effort.nbytes += of_view.effort.nbytes
        found.leftovers = tuple(name for name in found.leftovers if name in of_view.leftovers)
    found.leave_out_pruned()
    return found


def _walk(
    history: History, sequences: list[int], progress: Callable[[int, int, str], None], weights: Layout | None
) -> Walk:
    of = f" of view {history.view}" if history.view is not None else ""
    with temporary_directory() as scratch:
        found = Walk(history, sequences, scratch, weights)
        for done, sequence in enumerate(sequences):
            progress(done, len(sequences) + 1, f"manifest {sequence}{of}")
            found.visit(sequence)
        progress(len(sequences), len(sequences) + 1, f"the newest version{of}, all bits")
        found.finish()
    return found


def decode_all(parts: Sequence[patch_format.Patch]) -> None:
    """Decode what can be decoded without the base, which proves its indices. Raises PatchFormatError."""
    spans = [units for part in parts if not part.codec.conditional for _, units in part.opened()]
    deque(ordered_map(Units.all, spans), maxlen=0)
