"""The versions of a history as a source: its anchors and patches, walked segment by segment.

The anchors and every patch are downloaded into files. A walk decodes one segment of one patch after the other, each
onto the bits of the version before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Literal

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.codecs.base import Unit
from pulse_rl.disk import map_file
from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import VersionNotFoundError
from pulse_rl.history.fetch import fetch, limit_of
from pulse_rl.history.follow import Effort, prove
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import Fetched, check_promised
from pulse_rl.history.restore import load_anchor
from pulse_rl.history.trail import link_of, state_of
from pulse_rl.kernels import cpu
from pulse_rl.patch.format import Patch, Segment, unpack
from pulse_rl.patch.overlay import Overlay, Replaced
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import Tensor, check_same_model
from pulse_rl.study.sources.checkpoints import CheckpointReader
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout


class Stored:
    """The versions of a history to study: every one that an anchor, or the patch after another version, gives.

    Anchors and patches are downloaded into files. Every object is checked against its hash, an anchor against its
    digest too, and every patch must lead from the digest of one version to that of the next.

    Args:
        history: The history.
        directory: An empty directory, for the files; they are needed as long as the source is.
        progress: Called with the number of versions fetched, and of all versions. Default: not called.

    Raises:
        VersionNotFoundError: Fewer than two versions can be had.
        IntegrityError: The history is damaged.
        StoreError: The store cannot be read, or an object is missing.
        BaseMismatchError: Tensors differ between versions.

    Attributes:
        location: The store's URL.
        versions: The versions.
        tensors: The dtype and shape of each tensor, by name.
        notes: Which versions were left out, and why.
    """

    kind: Literal["checkpoints", "store"] = "store"

    def __init__(
        self, history: History, directory: Path, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> None:
        self.location = history.store.url
        self.notes: list[str] = []
        self._states: list[_Anchor | _Patched] = []
        found: list[Manifest] = []
        manifests = history.manifests()
        for done, manifest in enumerate(manifests):
            progress(done, len(manifests))
            link = link_of(manifest)
            if link is not None and found and link.base_sequence == found[-1].sequence:
                path = directory / f"{manifest.sequence}.patch"
                path.write_bytes(fetch(history.store, link.ref, limit_of(manifest.full_nbytes)))
                fetched = Fetched([unpack(map_file(path))], link.ref.nbytes, (link.ref.name,))
                check_promised(fetched, link, state_of(found[-1]), manifest.tied)
                self._states.append(_Patched(fetched.first))
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
        self.tensors: dict[str, Tensor] = self._states[0].tensors
        for state, version in zip(self._states, self.versions, strict=True):
            check_same_model(self.tensors, state.tensors, f"{self.location}: {version.name}")

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        """Yield the bits of a tensor's elements in every version, in order.

        Args:
            name: The tensor.
            start: Its first element.
            stop: The element after its last; at most one segment further.

        Yields:
            The bits, (stop − start,); the caller owns the array.
        """
        bits: UIntArray | None = None
        for state in self._states:
            bits = state.read(name, start, stop) if isinstance(state, _Anchor) else state.after(name, start, bits)
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
            application = prove(Fetched([state.patch], 0, ()), weights, Effort())
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


class _Patched:
    """A version that a patch leads to. Each segment is decoded when it is asked for.

    Some codecs decode several segments at once. The first of these to be asked for decodes all; the others are kept
    until they are asked for. That is at most about 1 MB per patch: these codecs close their blocks there.
    """

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.tensors = {tensor.name: Tensor(tensor.dtype, tensor.shape) for tensor in patch.tensors}
        self._pieces: dict[tuple[str, int], tuple[Sequence[Segment], Unit]] = {}
        for pieced in patch.units():
            self._pieces.update((self._key(segment), pieced) for segment in pieced[0])
        self._kept: dict[tuple[str, int], Changes] = {}
        self._lock = Lock()

    def after(self, name: str, start: int, old: UIntArray | None) -> UIntArray:
        """The bits of a segment, a new array, from those of the version before. To be called once for each."""
        assert old is not None  # a history starts from an anchor
        segments, piece = self._pieces[name, start]
        if len(segments) == 1:
            changes = piece.decode([lambda: old])[0]
        else:
            with self._lock:
                if (name, start) not in self._kept:
                    decoded = piece.decode([])  # these codecs ask for no old bits
                    self._kept.update(zip(map(self._key, segments), decoded, strict=True))
                changes = self._kept.pop((name, start))
        new = old.copy()
        cpu.scatter(new, *changes)
        return new

    def _key(self, segment: Segment) -> tuple[str, int]:
        return self.patch.table[segment.tensor].name, segment.place
