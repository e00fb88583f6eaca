"""The plan of shares: who holds and who owns what of the weights, which every rank makes of what all ranks describe.

The boxes of a tensor are cut where they overlap, into parts that are each held by certain ranks; of these the one with
the fewest bytes so far becomes the owner. So every element is published once, and replicas (of HSDP, of norms, of whole
models) spread the work over their ranks. Every rank comes to the same plan by itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import BaseMismatchError, ExchangeError, shown
from pulse_rl.group.ranks import Ranks
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.box_sets import BoxSet, cut_apart
from pulse_rl.weights.boxes import Box, Shape, whole
from pulse_rl.weights.layout import Layout, TensorSpec
from pulse_rl.weights.pieces import pieces_of, place_view

MAX_NBYTES = 64 << 20  # of what one rank says that it holds, as JSON
PRINT_NBYTES = 12  # of a fingerprint, which tells two of the same ranks apart

_Boxes: TypeAlias = list[tuple[Shape, Shape]]  # offset and sizes of each


class Description(msgspec.Struct):
    """What one rank holds."""

    tensors: list[tuple[str, str, Shape, _Boxes]]  # name, dtype, shape, boxes
    tied: dict[str, str]

    @property
    def names(self) -> set[str]:
        """The names of what it holds, tied ones too."""
        return {*(row[0] for row in self.tensors), *self.tied}

    @property
    def sharded(self) -> bool:
        """Whether the rank holds parts of tensors."""
        return any(
            [Box(*box) for box in boxes] != [whole(shape)] for _, _, shape, boxes in self.tensors if whole(shape).size
        )


class OwnedBox(NamedTuple):
    """A part of a tensor that certain ranks hold."""

    box: Box
    holders: tuple[int, ...]  # the rank of each copy, in ascending order
    owner: int


@dataclass(frozen=True)
class SharePlan:
    """Who holds and who owns what."""

    tensors: dict[str, TensorSpec]  # of the whole model, in canonical order
    parts: dict[str, list[OwnedBox]]  # of each tensor
    tied: dict[str, str]
    fingerprint: bytes  # of what every rank holds

    @cached_property
    def elements(self) -> int:
        """Of the whole model."""
        return sum(whole(spec.shape).size for spec in self.tensors.values())

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold some elements."""
        return any(len(set(part.holders)) > 1 for parts in self.parts.values() for part in parts)

    @cached_property
    def _sets(self) -> dict[str, BoxSet]:
        return {name: BoxSet([part.box for part in parts]) for name, parts in self.parts.items()}

    def owners(self, name: str, box: Box) -> Iterator[tuple[Box, int]]:
        """Cut a box of a tensor into what each rank owns of it, and say which rank that is."""
        for number in self._sets[name].touching(box):
            part = self.parts[name][number]
            common = part.box.intersect(box)
            if common is not None:
                yield common, part.owner

    def bring(
        self, what: str, ranks: Ranks, boxes: Sequence[Sequence[tuple[str, Box]]], held: Mapping[str, Bits]
    ) -> Iterator[tuple[str, Box, UIntArray]]:
        """Bring each rank the bits of the boxes that it needs, and return those of this one. A collective.

        what: as of `Ranks.exchange`. boxes: with their tensors, of each rank. held: what this rank holds.
        """
        most = max(sum(box.size * ITEMSIZES[self.tensors[name].dtype] for name, box in needed) for needed in boxes)

        def owned(needed: Iterable[tuple[str, Box]]) -> bytes:
            mine = ((name, part) for name, box in needed for part, of in self.owners(name, box) if of == ranks.rank)
            views = (place_view(held[name], part) for name, part in mine)
            return b"".join(view.read(0, view.size).tobytes() for view in views)

        return self._put_together(boxes[ranks.rank], ranks.exchange(what, lambda: list(map(owned, boxes)), most))

    def _put_together(
        self, boxes: Iterable[tuple[str, Box]], incoming: Sequence[memoryview]
    ) -> Iterator[tuple[str, Box, UIntArray]]:
        """The bits of some boxes, from what each rank has sent of them."""
        taken = [0] * len(incoming)
        for name, box in boxes:
            dtype = UINTS[ITEMSIZES[self.tensors[name].dtype]]
            array = np.empty(box.sizes, dtype)
            for common, owner in self.owners(name, box):
                nbytes = common.size * dtype.itemsize
                data = incoming[owner][taken[owner] : taken[owner] + nbytes]
                taken[owner] += nbytes
                array[common.slices(box)] = np.frombuffer(data, dtype).reshape(common.sizes)
            yield name, box, array

    @cached_property
    def all_names(self) -> dict[str, TensorSpec]:
        """Every name, tied ones too, → the tensor that stands for it. Not to be modified."""
        return {**self.tensors, **{alias: self.tensors[owner] for alias, owner in self.tied.items()}}

    @cached_property
    def nbytes(self) -> int:
        """Of the whole model."""
        return sum(whole(spec.shape).size * ITEMSIZES[spec.dtype] for spec in self.tensors.values())


def fingerprint_of(tensors: Layout) -> bytes:
    """The fingerprint of what a rank holds: equal as long as its share need not be agreed anew."""
    return tensors.derived(_fingerprint)


def _fingerprint(tensors: Layout) -> bytes:
    return blake3(_describe(tensors)).digest(PRINT_NBYTES)


def _describe(tensors: Layout) -> bytes:
    """What this rank holds, as JSON."""
    rows: list[tuple[str, str, Shape, _Boxes]] = [
        (name, bits.dtype, tuple(bits.shape), [(box.offset, box.sizes) for box, _, _ in pieces_of(bits) if box.size])
        for name, bits in tensors.items()
    ]
    return msgspec.json.encode(Description(rows, dict(sorted(tensors.tied.items()))))


def describe(tensors: Layout) -> bytes:
    """What this rank holds, for the other ranks."""
    return zstandard.ZstdCompressor(3).compress(_describe(tensors))


def described(packed: Sequence[bytes | memoryview]) -> list[Description]:
    """What each rank holds, as they describe it. Equal descriptions are read once."""
    read: dict[bytes, Description] = {}
    for data in map(bytes, packed):
        if data not in read:
            read[data] = decode_json(decompress(memoryview(data), MAX_NBYTES, "a share"), Description, "a share")
    return [read[bytes(data)] for data in packed]


def make_plan(said: Sequence[Description], fingerprint: bytes = b"", numbers: Sequence[int] = ()) -> SharePlan:
    """The plan from what each rank says that it holds. Raises BaseMismatchError or ExchangeError.

    numbers: of the ranks, in errors; () for their places in `said`.
    """
    numbers = numbers or range(len(said))
    specs: dict[str, TensorSpec] = {}
    held: dict[str, list[tuple[int, Box]]] = {}
    tied: dict[str, str] = {}
    for rank, (number, one) in enumerate(zip(numbers, said, strict=True)):
        for name, dtype, shape, boxes in one.tensors:
            spec = specs.setdefault(name, TensorSpec(name, dtype, shape))
            if spec != TensorSpec(name, dtype, shape):
                raise ExchangeError(
                    f"tensor {name!r}: expected {spec.dtype} {list(spec.shape)} on all ranks, found {dtype} "
                    f"{list(shape)} on rank {number}",
                    ranks=(number,),
                )
            held.setdefault(name, []).extend((rank, Box(*box)) for box in boxes)
        for alias, owner in one.tied.items():
            if tied.setdefault(alias, owner) != owner:
                raise ExchangeError(
                    f"tensor {alias!r} is tied to {tied[alias]!r}, but on rank {number} to {owner!r}", ranks=(number,)
                )
    if both := sorted(tied.keys() & specs.keys()):
        tying = [number for number, one in zip(numbers, said, strict=True) if both[0] in one.tied]
        raise ExchangeError(f"tensor {both[0]!r} is tied to {tied[both[0]]!r} on {_listed(tying)}, and on others not")
    load = [0] * len(said)
    parts: dict[str, list[OwnedBox]] = {}
    for name in sorted(specs):
        itemsize, all_of_it = ITEMSIZES[specs[name].dtype], whole(specs[name].shape)
        found = []
        having = [rank for rank, _ in held.get(name, ())]
        for box, copies in sorted(cut_apart([box for _, box in held.get(name, ())])):
            holders = tuple(sorted(having[copy] for copy in copies))
            least = min(holders, key=lambda rank: (load[rank], rank))
            load[least] += box.size * itemsize
            found.append(OwnedBox(box, holders, least))
        missing = all_of_it.size - sum(part.box.size for part in found)
        if missing:
            raise BaseMismatchError(
                f"tensor {name!r}: {missing} of its {all_of_it.size} elements are on no rank"
                f"{_elsewhere(name, said, numbers)}: expected shards that "
                + (
                    "make up the whole; give group=…, with all ranks that hold some"
                    if len(said) == 1
                    else "make up the whole; are the ranks of another dimension of the mesh missing in group=…?"
                ),
                missing=[name],
            )
        parts[name] = found
    return SharePlan({name: specs[name] for name in sorted(specs)}, parts, tied, fingerprint)


def _elsewhere(name: str, said: Sequence[Description], numbers: Sequence[int]) -> str:
    """Which ranks lack a tensor that others have, or which have it, whichever are fewer; "" if all have it.

    A rank has a tensor of which it holds an empty shard.
    """
    having: list[int] = []
    lacking: list[int] = []
    for number, one in zip(numbers, said, strict=True):
        (having if any(row[0] == name for row in one.tensors) else lacking).append(number)
    if not lacking:
        return ""
    if len(lacking) <= len(having):
        return f", and it is missing on {_listed(lacking)}"
    return f", and it is on {_listed(having)} only"


def _listed(ranks: Sequence[int]) -> str:
    """As "rank 2" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown(ranks)}"
