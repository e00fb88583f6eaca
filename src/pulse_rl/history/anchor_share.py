"""What one process holds of an anchor, read from its files by ranges: the headers first, then the rows of its boxes.

Rows are read as they lie in the files. Where a box has short rows, as a range of columns has, what lies between them is
read with them, since a request for each would take longer.

Parts of a file cannot be compared with its hash. What was read is proved by the digest: that of all processes together.
Headers are not: who finds other tensors in them than expected calls `prove_files` before saying so.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.disk import map_file
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.errors import CheckpointFormatError, IntegrityError, StoreError
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import fetch_patch
from pulse_rl.history.reading import Reading
from pulse_rl.log.objects import ObjectRef, fetch_parts, limit_of
from pulse_rl.observers import LongWork
from pulse_rl.store.base import Store
from pulse_rl.store.cache import drop_cached
from pulse_rl.store.ranges import plan_requests, read_ranges
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.boxes import whole as whole_box
from pulse_rl.weights.layout import Layout, TensorSpec
from pulse_rl.weights.pieces import pieces_of, with_bits

FRONT_NBYTES = 64 << 10  # read of each file first: the length of its header, and of most models all of it
SHORT_NBYTES = 64 << 10  # rows that are shorter are read together with what lies between them
READ_NBYTES = 8 << 20  # by one request
AT_ONCE_NBYTES = 64 << 20  # in memory at a time


class AnchorTensor(NamedTuple):
    """One tensor of an anchor."""

    file: ObjectRef
    start: int  # of its first byte in the file
    spec: TensorSpec


def read_headers(store: Store, anchor: Manifest) -> tuple[dict[str, AnchorTensor], int]:
    """Where each tensor of an anchor lies, and how many bytes were read to learn it.

    Raises IntegrityError for files that are no checkpoint, and StoreError.
    """
    found: dict[str, AnchorTensor] = {}
    nbytes = 0
    for ref in anchor.anchor:
        if not ref.name.endswith(".safetensors"):
            continue
        front = _read_header(store, ref)
        nbytes += len(front)
        try:
            header = safetensors_header.parse(front, ref.name, nbytes=ref.nbytes)
        except CheckpointFormatError as error:
            drop_cached(store, ref.name)  # it may be a transfer's fault
            raise IntegrityError(str(error), name=ref.name) from None
        for name, (dtype, shape, start, _) in header.entries.items():
            if name in found:
                reason = f"{ref.name}: expected each tensor in one file, found {name!r} again"
                raise IntegrityError(reason, name=ref.name)
            found[name] = AnchorTensor(ref, header.offset + start, TensorSpec(name, dtype, shape))
    return dict(sorted(found.items())), nbytes


def _read_header(store: Store, file: ObjectRef) -> memoryview:
    """The first bytes of a file, as many as its header takes; fewer where the header is impossible."""
    (front,) = read_ranges(store, file.name, [(0, min(FRONT_NBYTES, file.nbytes))], most=file.nbytes)
    length = int.from_bytes(front[:8], "little") if len(front) >= 8 else 0
    if len(front) < 8 + length <= min(file.nbytes, safetensors_header.MAX_HEADER_NBYTES):
        (front,) = read_ranges(store, file.name, [(0, 8 + length)], most=file.nbytes)
    return front


def prove_files(store: Store, anchor: Manifest) -> None:
    """Read an anchor's files whole. Raises IntegrityError or StoreError unless they are those that it promises."""
    for ref in anchor.anchor:
        deque(fetch_parts(store, ref), maxlen=0)


def tensors_of(history: History, manifest: Manifest, *, proved: bool = False) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of a version's tensors, tied names left out: from its anchor's headers, or its patch.

    proved: read all of either, whose hashes prove them. Raises IntegrityError, PatchFormatError or StoreError.
    """
    try:
        anchor = history.read(manifest.anchor_sequence)
        stored, _ = read_headers(history.store, anchor)
        if proved:
            prove_files(history.store, anchor)
        return {name: one.spec for name, one in stored.items()}
    except (IntegrityError, StoreError):  # pruned, or damaged
        if manifest.patch is None:
            raise
    return fetch_patch(history.store, manifest.patch, limit_of(manifest.full_nbytes)).by_name()


def names_where_ties_differ(reading: Reading, manifest: Manifest, ties: Mapping[str, str]) -> list[str] | None:
    """The names of a version's tensors, where some of these ties are not the version's own; None else. A collective.

    ties: of weights, the same on all ranks. Raises as `tensors_of`.
    """
    if {*ties, *ties.values()} <= {*manifest.tied, *manifest.tied.values()}:
        return None  # the ordinary case: the manifest names them
    return reading.lead("look up the names", lambda: list(tensors_of(reading.history, manifest)), list[str])


def read_share(store: Store, stored: Mapping[str, AnchorTensor], wanted: Layout, directory: Path) -> tuple[Layout, int]:
    """Read boxes of an anchor's tensors into a file of a directory, a few MB at a time.

    wanted: the tensors as pieces; their memory is not looked at. Returns the same pieces in the file, which can be
    written, and how many bytes were read. Raises StoreError, CannotReadRangeError too, and OSError.
    """
    places: dict[tuple[str, Box], int] = {}  # where in the file each piece begins
    nbytes = at = 0
    total = sum(one.size * one.itemsize for one in wanted.values())
    with (directory / "share").open("wb") as file, LongWork("the download of a share of an anchor", total) as work:
        # By file and place, and the widest elements first, so that all are aligned.
        names = sorted(wanted, key=lambda name: (-wanted[name].itemsize, stored[name].file.name, stored[name].start))
        for name in names:
            for piece in pieces_of(wanted[name]):
                places[name, piece.box] = at
                for parts, read in _read_box(store, stored[name], piece.box) if piece.box.size else ():
                    nbytes += read
                    for part in parts:
                        at += file.write(part)
                    work.advance(sum(map(len, parts)))
    data = map_file(directory / "share", writable=True) if at else memoryview(bytearray())

    def bits(name: str, box: Box) -> HostBits:
        dtype, start = UINTS[wanted[name].itemsize], places[name, box]
        raw = data[start : start + box.size * dtype.itemsize]
        return HostBits(wanted[name].dtype, np.frombuffer(raw, dtype).reshape(box.sizes))

    return _with_bits(wanted, bits), nbytes


def _with_bits(wanted: Layout, bits: Callable[[str, Box], Bits]) -> Layout:
    """The same pieces in other memory. bits: those of a box of a tensor."""

    def moved(name: str) -> Bits:
        return with_bits(wanted[name], lambda piece: bits(name, piece.box))

    return Layout({name: moved(name) for name in wanted})


def _read_box(store: Store, stored: AnchorTensor, box: Box) -> Iterator[tuple[list[memoryview], int]]:
    """The bytes of a box in row-major order, some at a time, and how many were read for them."""
    itemsize, file = ITEMSIZES[stored.spec.dtype], stored.file
    rows = box.positions(stored.spec.shape)
    starts, run = stored.start + rows.starts * itemsize, rows.run * itemsize
    if len(starts) == 1 or run >= SHORT_NBYTES:
        ranges = [
            (at, min(at + READ_NBYTES, int(start) + run))
            for start in starts
            for at in range(int(start), int(start) + run, READ_NBYTES)
        ]
        per_read = max(1, AT_ONCE_NBYTES // min(run, READ_NBYTES))
        for first in range(0, len(ranges), per_read):
            some = ranges[first : first + per_read]
            read = sum(stop - start for start, stop in some)
            yield read_ranges(store, file.name, some, most=file.nbytes, gap=0), read
        return
    first = 0
    while first < len(starts):
        last = int(np.searchsorted(starts, starts[first] + AT_ONCE_NBYTES - run, "right"))
        some = [(int(start), int(start) + run) for start in starts[first:last]]
        read = sum(stop - start for start, stop in plan_requests(some, SHORT_NBYTES, math.inf))
        yield read_ranges(store, file.name, some, most=file.nbytes, gap=SHORT_NBYTES, spare=math.inf), read
        first = last


def cut(whole: Layout, wanted: Layout) -> Layout:
    """The same pieces as wanted, as views of whole tensors."""
    return _with_bits(wanted, lambda name, box: whole[name].view(box.slices(whole_box(tuple(whole[name].shape)))))
