"""The table of a patch: its tensors, which boxes of them it covers, and which further names are tied to them.

It is compressed JSON, made and read here. What is read is checked: names, dtypes, shapes and boxes within the limits.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
import zstandard

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import Count, decode_json
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import PatchFormatError
from pulse_rl.patch.segments import Entry, Table, names_of, numbers_of
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.box_sets import MAX_BOXES, disjoint
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.pieces import pieces_of

MAX_TABLE_NBYTES = 16 << 20  # 160,000 tensors of ordinary names; in memory it takes up to 17 times as much
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 41
TABLE_LEVEL = 19  # the table is a few KB and the same in every patch of a run: spend time, not bytes

_Boxes: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and sizes of each


# Tensors alike but for numbers in their names: the name with a * in place of each number, dtype, shape, boxes (none for
# all of it), and the numbers of each tensor.
_Row: TypeAlias = tuple[str, str, tuple[int, ...], _Boxes, list[tuple[Count, ...]]]


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[_Row]
    tied: dict[str, str]  # further name → the name of the tensor that stands for it


def entries_of(tensors: Mapping[str, Bits]) -> Table:
    """The table of these tensors: the boxes that this process owns of each; those that it owns nothing of are left out.

    tensors: in canonical order.
    """
    found = []
    for name, tensor in tensors.items():
        boxes = tuple(sorted(piece.box for piece in pieces_of(tensor) if piece.owned and piece.box.size))
        if not tensor.size:
            boxes = (whole(tensor.shape),)
        if boxes:
            found.append(Entry(name, tensor.dtype, tuple(tensor.shape), boxes))
    return Table(found)


def encode_table(table: Sequence[Entry], tied: Mapping[str, str]) -> bytes:
    """The table stream. Raises ValueError for a name that readers refuse."""
    safetensors_header.check_names([*(entry.name for entry in table), *tied])
    rows: dict[tuple[str, str, tuple[int, ...], tuple[Box, ...]], list[tuple[int, ...]]] = {}
    for name, dtype, shape, boxes in table:
        pattern, numbers = numbers_of(name)
        rows.setdefault((pattern, dtype, shape, boxes), []).append(numbers)
    tensors: list[_Row] = [
        (pattern, dtype, shape, [] if boxes == (whole(shape),) else [(box.offset, box.sizes) for box in boxes], numbers)
        for (pattern, dtype, shape, boxes), numbers in rows.items()
    ]
    encoded = msgspec.json.encode(_Table(tensors, dict(sorted(tied.items()))))
    if max(len(encoded), sum(len(row[0]) * len(row[4]) for row in tensors)) > MAX_TABLE_NBYTES:
        raise ValueError(
            f"tensor names: expected a table of at most {MAX_TABLE_NBYTES} bytes, found {len(encoded)}: "
            "too many tensors"
        )
    return _compressed(encoded)


@lru_cache(maxsize=2)
def _compressed(table: bytes) -> bytes:
    """Kept from patch to patch, because a run's tables are equal and take a few ms to compress."""
    return zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(table)


def read_table(stream: memoryview) -> tuple[Table, dict[str, str]]:
    """The tensors and their ties, checked: names in canonical order, supported dtypes, sizes within the limits.

    Equal streams may give the same objects, which are not to be modified.
    """
    data = decompress(stream, MAX_TABLE_NBYTES, "table")
    return next((kept for most, kept in KEPT if len(data) <= most), _read)(data)


def _read(data: bytes) -> tuple[Table, dict[str, str]]:
    table = decode_json(data, _Table, "broken table")
    count = sum(len(row[4]) for row in table.tensors)
    if count > MAX_TENSORS:
        raise PatchFormatError(f"table: expected at most {MAX_TENSORS} tensors, found {count}")
    if sum(len(row[0]) * len(row[4]) for row in table.tensors) > MAX_TABLE_NBYTES:
        raise PatchFormatError(f"table: expected names of at most {MAX_TABLE_NBYTES} bytes together, found more")
    named = [list(names_of(row[0], row[4])) for row in table.tensors]
    known = {name for some in named for name in some}
    if len(known) < count:  # before anything that takes longer: zstd makes a table of equal rows tiny
        raise PatchFormatError("table: expected each name once")
    total = 0
    entries = list[Entry]()
    for some, (pattern, dtype, shape, rows, numbers) in zip(named, table.tensors, strict=True):
        if (
            dtype not in ITEMSIZES
            or len(shape) > safetensors_header.MAX_DIMENSIONS
            or any(not 0 <= n <= MAX_ELEMENTS for n in shape)
        ):
            raise PatchFormatError(f"table: tensor {pattern!r} has an impossible dtype or shape: {dtype} {shape}")
        total += math.prod(shape) * len(numbers)
        if total > MAX_ELEMENTS:
            raise PatchFormatError(f"table: expected at most {MAX_ELEMENTS} elements, found more")
        boxes = tuple(Box(*row) for row in rows) or (whole(shape),)
        if rows:
            _check_boxes(pattern, shape, boxes)
        entries += [Entry(name, dtype, shape, boxes) for name in some]
    entries.sort()
    for name in [*known, *table.tied]:
        if not name or len(name.encode()) > safetensors_header.MAX_NAME_NBYTES:
            raise PatchFormatError(f"table: expected names of 1 to {safetensors_header.MAX_NAME_NBYTES} bytes")
    for alias, owner in table.tied.items():
        if alias in known or owner in table.tied:
            raise PatchFormatError(f"table: {alias!r} is tied to {owner!r}, which does not stand for it")
    return Table(entries), table.tied


# The tables of a run's patches are equal, part by part. A table takes up to 17 times as much in memory.
KEPT = ((1 << 19, lru_cache(maxsize=16)(_read)), (1 << 22, lru_cache(maxsize=2)(_read)))


def _check_boxes(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise PatchFormatError unless these are boxes of a tensor as a writer lists them."""
    if len(boxes) > MAX_BOXES:
        raise PatchFormatError(f"table: tensor {name!r}: expected at most {MAX_BOXES} boxes, found {len(boxes)}")
    if (
        any(len(box.offset) != len(shape) or len(box.sizes) != len(shape) for box in boxes)
        or any(min((*box.offset, *box.sizes), default=0) < 0 or not box.inside(whole(shape)) for box in boxes)
        or not disjoint(boxes)
    ):
        raise PatchFormatError(f"table: tensor {name!r}: expected disjoint boxes of a tensor of shape {list(shape)}")
    if any(a > b for a, b in zip(boxes, boxes[1:], strict=False)):
        raise PatchFormatError(f"table: tensor {name!r}: expected boxes in ascending order")
    if whole(shape).size and not all(box.size for box in boxes):
        raise PatchFormatError(f"table: tensor {name!r}: expected boxes that are not empty")
