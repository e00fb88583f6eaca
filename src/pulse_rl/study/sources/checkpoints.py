"""Checkpoints as a source: safetensors files, in training order.

Files are read, not mapped: pages of a mapping would count as memory of this process until the system reclaims them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pulse_rl.checkpoint.files import open_checkpoint, open_shards
from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.errors import CheckpointFormatError
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import StudiedTensor, check_same_model
from pulse_rl.weights.bits import Bits

UNNUMBERED = "the names do not give the training steps: versions are numbered 0, 1, 2, …, taken to be one step apart"


class _Location(NamedTuple):
    """Where the elements of a tensor lie."""

    file: Path
    offset: int  # bytes


class CheckpointReader:
    """The tensors of one checkpoint, read from its files."""

    def __init__(self, path: Path) -> None:
        tensors: dict[str, StudiedTensor] = {}
        self._locations: dict[str, _Location] = {}
        for shard in open_shards(path):
            for name, entry in shard.header.entries.items():
                tensors[name] = StudiedTensor(entry.dtype, tuple(entry.shape))
                self._locations[name] = _Location(shard.path, shard.header.offset + entry.start)
        self.tensors = dict(sorted(tensors.items()))

    def read(self, name: str, start: int, stop: int) -> UIntArray:
        """Read the bits of a run of a tensor. Raises CheckpointFormatError if the file has become shorter."""
        itemsize = self.tensors[name].itemsize
        file, offset = self._locations[name]
        array = np.empty(stop - start, UINTS[itemsize])
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset + start * itemsize)
            unread = array.view(np.uint8).data
            while unread:
                count = opened.readinto(unread)
                if not count:
                    raise CheckpointFormatError("the file was truncated while it was read", source=str(file))
                unread = unread[count:]
        return array


class Checkpoints:
    """Checkpoints to study: safetensors files, or directories of shards, in training order.

    A checkpoint's version is the last number in its name (checkpoint-500) where every name has one and these rise;
    otherwise versions are 0, 1, 2, … Files of one name (checkpoint-500/model.safetensors) are numbered by their
    directories.

    Args:
        paths: At least two files or directories.

    Raises:
        ValueError: Fewer than two paths; or names that differ in their last number alone, which does not rise.
        FileNotFoundError: No checkpoint at a path.
        CheckpointFormatError: A file is no safetensors file, or a directory's index is broken.
        BaseMismatchError: Tensors differ between checkpoints.

    Attributes:
        location: The paths, joined by spaces.
        versions: The version of each checkpoint.
        tensors: The dtype and shape of each tensor, by name.
        notes: What a reader of the report should know.
    """

    kind: Literal["checkpoints", "store"] = "checkpoints"

    def __init__(self, paths: Sequence[str | Path]) -> None:
        if isinstance(paths, str | Path):
            raise TypeError(f"paths: expected a list of checkpoints, found {str(paths)!r} alone")
        if len(paths) < 2:
            raise ValueError(f"expected at least two checkpoints, in training order, found {len(paths)}")
        self._paths = [Path(path) for path in paths]
        numbers = _numbers(_names(self._paths))
        self.location = " ".join(map(str, paths))
        self._readers = [CheckpointReader(path) for path in self._paths]
        self.tensors = self._readers[0].tensors
        for path, reader in zip(self._paths, self._readers, strict=True):
            check_same_model(self.tensors, reader.tensors, str(path))
        self.notes = [] if numbers else [UNNUMBERED]
        self.versions = tuple(
            Version(number=number, name=path.name)
            for number, path in zip(numbers or range(len(paths)), self._paths, strict=True)
        )

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        """Yield the bits of one segment of a tensor in every version, in order.

        Args:
            name: The tensor.
            start: The flat index of the segment's first element.
            stop: And of the one after its last.

        Yields:
            The bits, (stop − start,); the caller owns the array.
        """
        for reader in self._readers:
            yield reader.read(name, start, stop)

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        """Yield every two neighbouring versions whole, in order. To be called after all walks.

        Yields:
            Both versions' tensors by name, valid until the next pair.
        """
        for old, new in pairwise(self._paths):
            yield open_checkpoint(old), open_checkpoint(new)


def _names(paths: Sequence[Path]) -> list[str]:
    """The names by which the checkpoints differ: of files and directories, or of the directories that hold them."""
    names = [path.stem if path.is_file() else path.name for path in paths]
    parents = [path.absolute().parent.name for path in paths]
    return parents if len(set(names)) == 1 < len(set(parents)) else names


def _numbers(names: Sequence[str]) -> list[int] | None:
    """The last number in each name; None unless every name has one and they rise.

    Raises ValueError if the names differ in this number alone and it does not rise: a shell lists checkpoint-1000
    before checkpoint-500.
    """
    matches = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    parts = [match.groups() for match in matches if match]
    if len(parts) < len(names):
        return None
    numbers = [int(number) for _, number, _ in parts]
    if all(a < b for a, b in pairwise(numbers)):
        return numbers
    if len({(before, after) for before, _, after in parts}) == 1:
        first = next(i for i, (a, b) in enumerate(pairwise(numbers)) if a >= b)
        raise ValueError(f"expected checkpoints in training order, found {names[first]} before {names[first + 1]}")
    return None
