"""The versions of a history as a source: its anchors and patches, walked segment by segment.

The anchors and every patch are downloaded into files. A walk decodes one segment of one patch after the other, each
onto the bits of the version before. So tensors are walked as most patches cut them; a version whose patch cuts them
otherwise, as of another number of ranks, is rebuilt whole in temporary files.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from pulse_rl import History
from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.codecs.base import Decoded, OldReader
from pulse_rl.disk import map_file
from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import ObjectNotFoundError, VersionNotFoundError, one_line
from pulse_rl.history.follow import prove
from pulse_rl.history.manifest import Manifest, PatchObject
from pulse_rl.history.patches import Fetched, check_promised, part_refs
from pulse_rl.history.reading import Effort
from pulse_rl.history.restore import load_anchor
from pulse_rl.history.trail import link_of, state_of
from pulse_rl.kernels import cpu
from pulse_rl.log.objects import fetch, limit_of
from pulse_rl.patch.format import unpack
from pulse_rl.patch.overlay import Overlay, Replaced
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import StudiedTensor, check_same_model
from pulse_rl.study.sources.checkpoints import CheckpointReader
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import FlatRun
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import Place
from pulse_rl.weights.segments import segments


class Stored:
    """The versions of a history to study: every one that an anchor, or the patch after another version, gives.

    Others are noted and left out, as those after a patch that is missing, up to the next anchor.

    Anchors and patches are downloaded into files. Every object is checked against its hash, an anchor against its
    digest too, and every patch must lead from the digest of one version to that of the next.

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
        kept = _Kept()
        manifests = history.manifests()
        for done, manifest in enumerate(manifests):
            progress(done, len(manifests))
            link = link_of(manifest)
            fetched: Fetched | None = None
            if link is not None and found and link.base_sequence == found[-1].sequence:
                try:
                    fetched = _download(history, link.ref, directory, limit_of(manifest.full_nbytes))
                except ObjectNotFoundError as error:
                    self.notes.append(f"no patch leads to version {manifest.version}: {one_line(error)}")
            if link is not None and fetched is not None:
                check_promised(fetched, link, state_of(found[-1]), manifest.tied)
                self._states.append(_Patched(fetched, kept))
            elif manifest.anchor:
                files = directory / str(manifest.sequence)
                files.mkdir()
                load_anchor(history, manifest, files, Effort(), limit_of(manifest.full_nbytes))
                self._states.append(_Anchor(files))
            else:
                self.notes.append(f"version {manifest.version} is left out: no patch leads to it from an anchor")
                continue
            found.append(manifest)
        if len(found) < 2:
            raise VersionNotFoundError(
                f"{self.location}: expected at least two versions, found {len(found)}", url=self.location
            )
        self.versions = tuple(Version(number=m.version, name=f"version {m.version}") for m in found)
        self.tensors: dict[str, StudiedTensor] = self._states[0].tensors
        for state, version in zip(self._states, self.versions, strict=True):
            check_same_model(self.tensors, state.tensors, f"{self.location}: {version.name}")
        cuts = Counter(state.cut for state in self._states if isinstance(state, _Patched))
        self._states = list(_cut_alike(self._states, max(cuts, key=lambda cut: cuts[cut], default=None), directory))
        self._cut = next((state for state in self._states if isinstance(state, _Patched)), None)

    def places(self, name: str) -> Sequence[Place]:
        """How a tensor is cut for walks: as in most patches.

        Args:
            name: The tensor.

        Returns:
            Boxes or runs of its elements.
        """
        if self._cut is None:
            return [FlatRun(start, stop) for start, stop in segments(self.tensors[name].size)]
        return self._cut.places.get(name, ())

    def walk(self, name: str, place: Place) -> Iterator[UIntArray]:
        """Yield the bits of a tensor's elements in every version, in order.

        Args:
            name: The tensor.
            place: One of its places.

        Yields:
            The bits, (place.size,); the caller owns the array.
        """
        bits: UIntArray | None = None
        for state in self._states:
            bits = state.read(name, place) if isinstance(state, _Anchor) else state.after(name, place, bits)
            yield bits

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Yield every two neighbouring versions whole, in order. To be called after all walks.

        Yields:
            Both versions' tensors by name, valid until the next pair.
        """
        weights = self._opened(0)
        for number, state in enumerate(self._states[1:], 1):
            if isinstance(state, _Anchor):
                before, weights = weights, self._opened(number)
                yield before, weights
                continue
            application = prove(state.fetched, weights)
            past = Overlay(Replaced(name, place, old) for name, place, _, old in application.replaced())
            application.write()
            yield past.over(weights), weights

    def _opened(self, number: int) -> Layout:
        """The weights of an anchor, to be patched in its files."""
        state = self._states[number]
        assert isinstance(state, _Anchor)  # the first version is one
        return open_checkpoint(state.directory, writable=True)


class _Anchor(CheckpointReader):
    """A version that an anchor holds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory


def _download(history: History, ref: PatchObject, directory: Path, limit: int) -> Fetched:
    """A patch in files: all its parts. Raises as `fetch`."""
    refs = part_refs(history.store, ref, limit)
    parts = []
    for part in refs:
        path = directory / part.name.replace("/", "+")  # parts of different patches have the same last name
        path.write_bytes(fetch(history.store, part, limit))
        parts.append(unpack(map_file(path), part.name))
    return Fetched(parts, sum(part.nbytes for part in refs), tuple(part.name for part in refs))


def _cut_alike(
    states: "Sequence[_Anchor | _Patched]", cut: Hashable, directory: Path
) -> "Iterator[_Anchor | _Patched]":
    """The same versions, in which those that a patch of another cut leads to are rebuilt whole."""
    patches: list[_Patched] = []  # after the last version that is whole
    whole: _Anchor | None = None
    for number, state in enumerate(states):
        if isinstance(state, _Patched):
            patches.append(state)
            if state.cut == cut:
                yield state
                continue
            assert whole is not None  # a history starts from an anchor
            files = directory / f"rebuilt-{number}"
            shutil.copytree(whole.directory, files)
            weights = open_checkpoint(files, writable=True)
            for patch in patches:
                prove(patch.fetched, weights).write()
            state = _Anchor(files)
        whole, patches = state, []
        yield state


class _Patched:
    """A version that a patch leads to. Each segment is decoded when it is asked for.

    Some codecs decode several segments at once, of several tensors. The first of these to be asked for decodes all; the
    others are kept in a file until they are asked for.
    """

    def __init__(self, fetched: Fetched, kept: "_Kept") -> None:
        self.fetched = fetched
        self.tensors = {name: StudiedTensor(tensor.dtype, tensor.shape) for name, tensor in fetched.by_name().items()}
        self.cut: Hashable = tuple(sorted((entry.name, entry.boxes) for part in fetched.parts for entry in part.table))
        self.places: dict[str, list[Place]] = {}
        self._units: dict[tuple[str, Place], tuple[list[tuple[str, Place]], _Decode]] = {}
        for part in fetched.parts:
            for span, units in part.opened():
                at = 0
                for size in units.sizes.tolist():
                    keys: list[tuple[str, Place]] = [
                        (part.table[segment.tensor].name, segment.place) for segment in span[at : at + size]
                    ]
                    for name, place in keys:
                        self._units[name, place] = keys, partial(units.decode, np.arange(at, at + size))
                        self.places.setdefault(name, []).append(place)
                    at += size
        self._kept = kept
        self._lock = Lock()

    def after(self, name: str, place: Place, old: UIntArray | None) -> UIntArray:
        """The bits of a segment, a new array, from those of the version before. To be called once for each."""
        assert old is not None  # a history starts from an anchor
        keys, decode = self._units[name, place]
        if len(keys) == 1:
            changes = decode(OldReader(lambda _: old), None)[0].changes
        else:
            mine = (id(self), name, place)
            with self._lock:
                if mine not in self._kept:
                    every = (one for found in decode(OldReader(lambda _: old), None) for one in found.each())
                    for key, changes in zip(keys, every, strict=True):  # these codecs ask for no old bits
                        self._kept.put((id(self), *key), changes)
            changes = self._kept.take(mine)
        new = old.copy()
        cpu.scatter(new, *changes)
        return new


_Decode = Callable[[OldReader, None], list[Decoded]]  # a unit's, from the old bits


class _Kept:
    """Decoded changes in an unlinked file, until they are asked for."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="pulse-rl-")  # noqa: SIM115 - closed with this object
        self._places: dict[Hashable, tuple[int, int, np.dtype[Any]]] = {}  # offset, changes, dtype of the values
        self._end = 0
        self._lock = Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    def put(self, key: Hashable, changes: Changes) -> None:
        data = changes.indices.tobytes() + changes.values.tobytes()
        with self._lock:
            start, self._end = self._end, self._end + len(data)
        os.pwrite(self._file.fileno(), data, start)
        self._places[key] = start, len(changes.indices), changes.values.dtype

    def take(self, key: Hashable) -> Changes:
        start, count, kind = self._places.pop(key)
        data = os.pread(self._file.fileno(), count * (4 + kind.itemsize), start)
        return Changes(np.frombuffer(data, np.uint32, count), np.frombuffer(data, kind, count, 4 * count))
