"""The versions of a history as a source: its anchors, and what changes after them.

Anchors are downloaded into files. Each patch is proved on a copy of the anchor before it, which then follows it; what
it changes is kept in a file, segment by segment. So however patches cut tensors, walks go by segments.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pulse_rl import History
from pulse_rl.checkpoint.files import copy_checkpoint, open_checkpoint
from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.errors import ObjectNotFoundError, VersionNotFoundError, one_line
from pulse_rl.history.follow import prove
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import Fetched, check_promised, fetch_patch
from pulse_rl.history.reading import Effort
from pulse_rl.history.restore import load_anchor
from pulse_rl.history.trail import link_of, state_of
from pulse_rl.kernels import cpu
from pulse_rl.log.objects import limit_of
from pulse_rl.patch.apply import Application
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import StudiedTensor, check_same_model
from pulse_rl.study.sources.checkpoints import CheckpointReader
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.segments import SEGMENT


class Stored:
    """The versions of a history to study: every one that an anchor, or the patch after another version, gives.

    Others are noted and left out, as those after a patch that is missing, up to the next anchor. Where the trainer has
    noted steps, a version's number is its step; versions without one, as of averaged weights, and those of a training
    that went back to an earlier step, to go on from there, are left out too.

    Anchors are downloaded into files, and what patches change is kept in others. Every object is checked against its
    hash, an anchor against its digest too, and every patch is proved on the version before it.

    Args:
        history: The history.
        directory: An empty directory, for the files; they are needed as long as the source is.
        progress: Called with the number of versions fetched, and of all versions. Default: not called.

    Raises:
        VersionNotFoundError: Fewer than two versions can be had.
        IntegrityError: The history is damaged.
        StoreError: The store cannot be read, or an anchor is missing.
        BaseMismatchError: Tensors differ between versions.

    Attributes:
        location: The store's URL.
        versions: The versions.
        tensors: The dtype and shape of each tensor, by name.
        notes: Which versions were left out, and why.
    """

    kind: Literal["checkpoints", "store"] = "store"

    def __init__(
        self, history: History, directory: Path, *, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> None:
        self.location = history.store.url
        self.notes: list[str] = []
        self._states: list[_Anchor | _Patched] = []
        found: list[Manifest] = []
        newest: Layout | None = None  # the weights of the version before
        manifests = history.manifests()
        for done, manifest in enumerate(manifests):
            progress(done, len(manifests))
            link, limit = link_of(manifest), limit_of(manifest.full_nbytes)
            fetched: Fetched | None = None
            if link is not None and found and link.base_sequence == found[-1].sequence:
                try:
                    fetched = fetch_patch(history.store, link.ref, limit)
                except ObjectNotFoundError as error:
                    self.notes.append(f"no patch leads to version {manifest.version}: {one_line(error)}")
            if link is not None and fetched is not None and newest is not None:
                check_promised(fetched, link, state_of(found[-1]), manifest.tied)
                check_same_model(newest, fetched.by_name(), f"{self.location}: version {manifest.version}")
                application = prove(fetched, newest)
                self._states.append(_Patched(application, newest, directory / f"changes-{manifest.sequence}"))
                application.write()
            elif manifest.anchor:
                files = directory / str(manifest.sequence)
                files.mkdir()
                load_anchor(history, manifest, files, Effort(), limit)
                anchor = _Anchor(files)
                self._states.append(anchor)
                newest = anchor.copied(directory / "newest")
            else:
                self.notes.append(f"version {manifest.version} is left out: no patch leads to it from an anchor")
                continue
            found.append(manifest)
        numbers: list[Any] = [(manifest.metadata or {}).get("step") for manifest in found]
        if not any(type(number) is int for number in numbers):
            numbers = [manifest.version for manifest in found]
        kept: list[int] = []  # the places of the versions that are studied
        for place, number in enumerate(numbers):
            if type(number) is not int:
                self.notes.append(f"version {found[place].version} is left out: no step is noted of it, as of others")
                continue
            while kept and numbers[kept[-1]] >= number:
                gone = found[kept.pop()].version
                self.notes.append(f"version {gone} is left out: training went on from step {number} after it")
            kept.append(place)
        if len(kept) < 2:
            raise VersionNotFoundError(
                f"{self.location}: expected at least two versions, found {len(kept)}", url=self.location
            )
        self.versions = tuple(Version(number=numbers[i], name=f"version {found[i].version}") for i in kept)
        self._kept = set(kept)
        self._directory = directory
        self.tensors: dict[str, StudiedTensor] = self._anchor(0).tensors
        for state, manifest in zip(self._states, found, strict=True):
            if isinstance(state, _Anchor):
                check_same_model(self.tensors, state.tensors, f"{self.location}: version {manifest.version}")

    def _anchor(self, number: int) -> "_Anchor":
        state = self._states[number]
        assert isinstance(state, _Anchor)
        return state

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        """Yield the bits of one segment of a tensor in every version, in order.

        Args:
            name: The tensor.
            start: The flat index of the segment's first element.
            stop: And of the one after its last.

        Yields:
            The bits, (stop − start,); the caller owns the array.
        """
        bits: UIntArray = np.empty(0, UINTS[self.tensors[name].itemsize])  # a history starts from an anchor
        for place, state in enumerate(self._states):
            if isinstance(state, _Anchor):
                bits = state.read(name, start, stop)
            else:
                bits = bits.copy()
                cpu.scatter(bits, *state.changes(name, start))
            if place in self._kept:
                yield bits

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Yield every two neighbouring versions whole, in order. To be called after all walks.

        Yields:
            Both versions' tensors by name, valid until the next pair.
        """
        before, after = (self._versions_in(self._directory / name) for name in ("before", "after"))
        next(after)
        for weights in after:
            yield next(before), weights

    def _versions_in(self, place: Path) -> Iterator[Layout]:
        """The versions that are studied, whole, one after another in the files of a directory."""
        weights = self._anchor(0).copied(place)
        for number, state in enumerate(self._states):
            if number:
                weights = state.following(weights, place)
            if number in self._kept:
                yield weights


class _Anchor(CheckpointReader):
    """A version that an anchor holds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def copied(self, place: Path) -> Layout:
        """Its weights in files of a directory, in place of what is there, to be patched."""
        shutil.rmtree(place, ignore_errors=True)
        copy_checkpoint(self._directory, place)
        return open_checkpoint(place, writable=True)

    def following(self, before: Layout, place: Path) -> Layout:
        """The weights of this version, in place of those before it."""
        del before
        return self.copied(place)


class _Patched:
    """A version that a patch leads to: the new bits of what it changes, segment by segment in a file.

    application: of the patch, proved. tensors: that it is applied to.
    """

    def __init__(self, application: Application, tensors: Mapping[str, Bits], path: Path) -> None:
        self._path = path
        self._segments: dict[tuple[str, int], tuple[int, int]] = {}  # tensor, first element → offset, changes
        self._dtypes = {name: UINTS[bits.itemsize] for name, bits in tensors.items()}
        parts: dict[str, list[tuple[NDArray[np.int64], UIntArray]]] = defaultdict(list)
        for name, box, (indices, values) in application.changes():
            at, flat = box.positions(tensors[name].shape), np.empty(len(indices), np.int64)
            cpu.positions(at.starts, at.run, indices, flat)
            parts[name].append((flat, values))
        with path.open("wb") as file:
            for name, several in parts.items():
                flat, values = (np.concatenate(each) for each in zip(*several, strict=True))
                order = np.argsort(flat)
                flat, values = flat[order], values[order]
                numbers, edges = np.unique(flat // SEGMENT, return_index=True)
                for number, a, b in zip(numbers.tolist(), edges, [*edges[1:], len(flat)], strict=True):
                    self._segments[name, number * SEGMENT] = file.tell(), int(b - a)
                    file.write((flat[a:b] % SEGMENT).astype(np.uint32).data)
                    file.write(values[a:b].data)

    def changes(self, name: str, start: int) -> Changes:
        """The changes of a segment. start: its first element."""
        offset, count = self._segments.get((name, start), (0, 0))
        with self._path.open("rb") as file:
            file.seek(offset)
            return Changes(np.fromfile(file, np.uint32, count), np.fromfile(file, self._dtypes[name], count))

    def following(self, before: Layout, place: Path) -> Layout:
        """The weights of this version, in place of those before it."""
        del place
        for name, start in self._segments:
            before[name].scatter(start, *self.changes(name, start))
        return before
