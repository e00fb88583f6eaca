"""Checkpoints as a source of a study."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.checkpoint.files import files_of, open_checkpoint
from pulse_rl.disk import map_file
from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.errors import PatchFormatError
from pulse_rl.study.results import Version
from pulse_rl.study.sources.base import Tensor, same_tensors
from pulse_rl.weights.bits import Bits


class _Place(NamedTuple):
    """Where the elements of a tensor lie."""

    file: Path
    offset: int  # bytes


class Files:
    """The tensors of one checkpoint, read from its files."""

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, _Place] = {}
        for file in files_of(path):
            try:
                header = safetensors_header.parse(map_file(file))
            except PatchFormatError as error:
                raise PatchFormatError(f"{file}: {error}") from None
            if twice := sorted(self.tensors.keys() & header.entries.keys()):
                raise ValueError(f"{file}: tensors that another shard holds too: {', '.join(twice[:8])}")
            for name, entry in header.entries.items():
                self.tensors[name] = Tensor(entry.dtype, tuple(entry.shape))
                self._places[name] = _Place(file, header.offset + entry.start)
        self.tensors = dict(sorted(self.tensors.items()))

    def read(self, name: str, start: int, stop: int) -> UIntArray:
        """The bits of the elements [start, stop)."""
        itemsize = self.tensors[name].itemsize
        file, offset = self._places[name]
        array = np.empty(stop - start, UINTS[itemsize])
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset + start * itemsize)
            view = array.view(np.uint8).data
            while view:
                taken = opened.readinto(view)
                if not taken:
                    raise PatchFormatError(f"{file}: it was cut off while it was read")
                view = view[taken:]
        return array


class Checkpoints:
    """Safetensors files, or directories of shards, in the order given.

    They are numbered by the last number in their names (checkpoint-500) where all have one and these rise; otherwise
    0, 1, 2, … Files of one name (checkpoint-500/model.safetensors) go by their directories'. Raises ValueError for
    fewer than two, and for names that differ in this number alone where it does not rise, BaseMismatchError where
    tensors differ, and what opening raises.
    """

    kind: Literal["checkpoints", "store"] = "checkpoints"

    def __init__(self, paths: Sequence[str | Path]) -> None:
        if len(paths) < 2:
            raise ValueError(f"expected two checkpoints at least, in training order, found {len(paths)}")
        self._paths = [Path(path) for path in paths]
        numbers = _numbers(_names(self._paths))
        self.location = " ".join(map(str, paths))
        self._files = [Files(path) for path in self._paths]
        self.tensors = self._files[0].tensors
        for path, files in zip(self._paths, self._files, strict=True):
            same_tensors(self.tensors, files.tensors, str(path))
        self.notes = []
        if numbers is None:
            numbers = list(range(len(paths)))
            self.notes.append("the names do not tell the training steps: taken to be one apart, the first after none")
        self.versions = tuple(
            Version(number=number, name=path.name) for number, path in zip(numbers, self._paths, strict=True)
        )

    def walk(self, name: str, start: int, stop: int) -> Iterator[UIntArray]:
        for files in self._files:
            yield files.read(name, start, stop)

    def pairs(self) -> Iterator[tuple[Mapping[str, Bits], Mapping[str, Bits]]]:
        for old, new in pairwise(self._paths):
            yield open_checkpoint(old), open_checkpoint(new)


def _names(paths: Sequence[Path]) -> list[str]:
    """What tells the checkpoints apart: the names of files and directories, or of the directories that hold them."""
    names = [path.stem if path.is_file() else path.name for path in paths]
    holders = [path.absolute().parent.name for path in paths]
    return holders if len(set(names)) == 1 < len(set(holders)) else names


def _numbers(names: Sequence[str]) -> list[int] | None:
    """The last number in each name, if every name has one and they rise.

    Raises ValueError if they do not, and the names have nothing else in which they differ: a shell lists
    checkpoint-1000 before checkpoint-500.
    """
    found = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    parts = [one.groups() for one in found if one]
    if len(parts) < len(names):
        return None
    numbers = [int(number) for _, number, _ in parts]
    if all(a < b for a, b in pairwise(numbers)):
        return numbers
    if len({(before, after) for before, _, after in parts}) == 1:
        first, second = next(place for place in pairwise(range(len(names))) if numbers[place[0]] >= numbers[place[1]])
        raise ValueError(f"expected checkpoints in training order, found {names[first]} before {names[second]}")
    return None
