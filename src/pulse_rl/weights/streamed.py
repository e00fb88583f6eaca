"""Weights that come one tensor at a time, as trainers gather them: kept in a file while they are published.

A patch is coded by groups of tensors, and by tiles of each, in another order than the one in which they come. So their
bits, cast already, go to a file that is mapped into memory. Ties are not looked for: the memory of a tensor that is
gone may be the next one's.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.disk import temporary_directory
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box, Shape
from pulse_rl.weights.layout import as_tensor
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of
from pulse_rl.weights.segments import segments

ALIGNED = 64  # bytes, at which each piece begins


class _Kept(NamedTuple):
    """Where a tensor lies in the file."""

    dtype: str
    shape: Shape
    whole: bool
    places: list[tuple[Box, int, int]]  # of each piece: its box, how often the digest counts it, its first byte

    def bits(self, memory: NDArray[np.uint8]) -> Bits:
        kind = UINTS[ITEMSIZES[self.dtype]]
        pieces = [
            Piece(box, HostBits(self.dtype, np.ndarray(box.sizes, kind, memory, begins)), times)
            for box, times, begins in self.places
        ]
        return pieces[0].bits if self.whole else Pieces(self.dtype, self.shape, pieces)


def _write(file: BinaryIO, bits: Bits) -> _Kept:
    """Write what this process holds of a tensor."""
    places = []
    for piece in pieces_of(bits):
        begins = file.seek(-(-file.tell() // ALIGNED) * ALIGNED)
        for start, stop in segments(piece.bits.size):
            file.write(np.ascontiguousarray(piece.bits.read(start, stop)).data)
        places.append((piece.box, piece.times, begins))
    return _Kept(bits.dtype, bits.shape, not isinstance(bits, Pieces), places)


def _read(stream: Iterator[Any], cast: str | None, path: Path, read: dict[str, _Kept]) -> None:
    """Read a stream to its end into a file. read: gets where each tensor lies, by name."""
    with path.open("wb") as file:
        for item in stream:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
                raise TypeError(f"weights: expected an iterator of (name, tensor), found {type(item).__name__} in it")
            name, tensor = item
            if name in read:
                raise ValueError(f"weights: expected each name once, found {name!r} again")
            try:
                read[name] = _write(file, as_tensor(tensor, cast))
            except (TypeError, ValueError) as error:
                raise type(error)(f"tensor {name!r}: {error}") from None
            del item, tensor  # before the next one is made
        file.write(bytes(1))  # an empty file cannot be mapped


def keep(stream: Iterator[Any], cast: str | None, files: ExitStack) -> dict[str, Bits]:
    """Read a stream of (name, tensor) to its end, one at a time, into a file. Returns their bits, mapped from there.

    cast: as for `as_bits`. files: gets the file's directory, to be deleted. Raises TypeError or ValueError for what is
    no such pair, OSError where there is no room; it is read to its end then too.
    """
    read: dict[str, _Kept] = {}
    try:
        path = files.enter_context(temporary_directory()) / "bits"
        _read(stream, cast, path, read)
    except Exception:
        with suppress(Exception):
            deque(stream, maxlen=0)  # other ranks take part until its end, as it may gather
        raise
    memory = np.memmap(path, np.uint8, "r")
    return {name: kept.bits(memory) for name, kept in read.items()}
