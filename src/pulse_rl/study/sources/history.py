"""The versions of a history as a source of a study: its anchors and patches, walked segment by segment.

What is fetched lies in files: the first anchor, or one after a gap, and every patch. A walk decodes the patches'
pieces of one segment, one after the other, each with the bits that the one before has led to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Literal

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.codecs.base import Piece
from pulse_rl.disk import map_file
from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import VersionNotFoundError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.restore import Effort, load_anchor, prove, unpack
from pulse_rl.history.trail import link_of, state_of
from pulse_rl.kernels.cpu import elements as cpu
from pulse_rl.patch.format import Patch, Segment
from pulse_rl.patch.overlay import Overlay, Replaced
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import Tensor, same_tensors
from pulse_rl.study.sources.checkpoints import Files
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout


class Stored:
    """The versions of a history, as far as they can be come to from an anchor, over one patch after the other.

    directory: an empty one for the files. progress: called with the versions fetched, and how many there are.
    Every object is proved by its hash, anchors by their digests too, and patches must lead from digest to digest.
    Raises VersionNotFoundError for fewer than two versions, IntegrityError or StoreError where the history is damaged,
    BaseMismatchError where tensors differ.
    """

    kind: Literal["checkpoints", "store"] = "store"

    def __init__(
        self, history: History, directory: Path, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> None:
        self.location = history.store.url
        self.notes: list[str] = []
        self._states: list[_Anchor | _Decoded] = []
        found: list[Manifest] = []
        manifests = history.manifests()
        for done, manifest in enumerate(manifests):
            progress(done, len(manifests))
            step = link_of(manifest)
            if step is not None and found and step.base == found[-1].sequence:
                path = directory / f"{manifest.sequence}.patch"
                path.write_bytes(history.fetch(step.ref))
                self._states.append(_Decoded(unpack(map_file(path), step, state_of(found[-1]))))
            elif manifest.anchor:
                files = directory / str(manifest.sequence)
                files.mkdir()
                load_anchor(history, manifest, files, Effort())
                self._states.append(_Anchor(files))
            else:
                self.notes.append(f"version {manifest.version} is left out: nothing leads there from an anchor")
                continue
            found.append(manifest)
        if len(found) < 2:
            raise VersionNotFoundError(f"{self.location}: expected two versions at least, found {len(found)}")
        self.versions = tuple(Version(number=m.version, name=f"version {m.version}") for m in found)
        self.tensors: dict[str, Tensor] = self._states[0].tensors
        for state, version in zip(self._states, self.versions, strict=True):
            same_tensors(self.tensors, state.tensors, f"{self.location}: {version.name}")

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        bits: UIntArray | None = None
        for state in self._states:
            bits = state.read(name, start, stop) if isinstance(state, _Anchor) else state.after(name, start, bits)
            yield bits

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        weights = self._opened(0)
        for number, state in enumerate(self._states[1:], 1):
            if isinstance(state, _Anchor):
                before, weights = weights, self._opened(number)
                yield before, weights
                continue
            application = prove(state.patch, weights, Effort())
            past = Overlay(Replaced(name, start, old) for name, _, start, old in application.replaced())
            application.write()
            yield past.over(weights), weights

    def _opened(self, number: int) -> Layout:
        """The weights of an anchor, to be patched in its files."""
        state = self._states[number]
        assert isinstance(state, _Anchor)  # the first version is one
        return open_checkpoint(state.directory, writable=True)


class _Anchor(Files):
    """A version that stands alone."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory


class _Decoded:
    """A version behind a patch, of which each segment is decoded when it is asked for.

    What can only be decoded together is decoded at the first of its segments; what of it is not yet asked for is
    kept. That is about 1 MB a patch at most: the codecs that do so close their blocks there.
    """

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.tensors = {tensor.name: Tensor(tensor.dtype, tensor.shape) for tensor in patch.tensors}
        self._pieces: dict[tuple[str, int], tuple[Sequence[Segment], Piece]] = {}
        for pieced in patch.pieces():
            self._pieces.update((self._key(segment), pieced) for segment in pieced[0])
        self._kept: dict[tuple[str, int], Changes] = {}
        self._lock = Lock()

    def after(self, name: str, start: int, old: UIntArray | None) -> UIntArray:
        """The bits of a segment, a new array, from those of the version before. To be called once for each."""
        assert old is not None  # a history starts from an anchor
        together, piece = self._pieces[name, start]
        if len(together) == 1:
            changes = piece.decode([lambda: old])[0]
        else:
            with self._lock:
                if (name, start) not in self._kept:
                    decoded = piece.decode([])  # these codecs ask for no old bits
                    self._kept.update(zip(map(self._key, together), decoded, strict=True))
                changes = self._kept.pop((name, start))
        new = old.copy()
        cpu.scatter(new, *changes)
        return new

    def _key(self, segment: Segment) -> tuple[str, int]:
        return self.patch.tensors[segment.tensor].name, segment.start
