"""Shares: what each rank holds of the weights, who owns what several hold, and whether all of it is there.

All ranks say which boxes they hold of which tensor. The boxes of a tensor are cut where they overlap, into parts that
are each held by certain ranks; of these the one with the fewest bytes so far becomes the owner. So every element is
published once, and replicas (of HSDP, of norms, of whole models) spread the work over their ranks. Every
rank comes to the same plan by itself. It is made once, and again when some rank holds other boxes.

The digest counts an element of k copies k times at its owner and −1 times at each other copy, so the sum over all ranks
proves the copies too, with no message more.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from msgspec.structs import replace

from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import BaseMismatchError, ExchangeError, IntegrityError, shown
from pulse_rl.group.ranks import Ranks
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, differ
from pulse_rl.weights.box_sets import BoxSet, cut_apart, joined
from pulse_rl.weights.boxes import Box, Shape, whole
from pulse_rl.weights.layout import Layout, TensorSpec, names_of, renamed
from pulse_rl.weights.pieces import Mosaic, Piece, Pieces, pieces_like, pieces_of, place_view, touching

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
        self, what: str, ranks: Ranks, boxes: Sequence[Sequence[tuple[str, Box]]], held: Mapping[str, Bits], limit: int
    ) -> Iterator[tuple[str, Box, UIntArray]]:
        """Bring each rank the bits of the boxes that it needs, and return those of this one. A collective.

        what, limit: as of `Ranks.exchange`. boxes: with their tensors, of each rank. held: what this rank holds.
        """

        def owned(needed: Iterable[tuple[str, Box]]) -> bytes:
            mine = ((name, part) for name, box in needed for part, of in self.owners(name, box) if of == ranks.rank)
            views = (place_view(held[name], part) for name, part in mine)
            return b"".join(view.read(0, view.size).tobytes() for view in views)

        return self._put_together(boxes[ranks.rank], ranks.exchange(what, lambda: list(map(owned, boxes)), limit))

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


@dataclass(frozen=True)
class Share:
    """What this rank holds of the weights."""

    plan: SharePlan
    held: Layout  # all pieces
    own: Layout  # only those that this rank owns, each counted once: what it publishes

    def called(self, known: Container[str] | None, tied: Mapping[str, str]) -> "Share":
        """The same share under the names of a version, as `names_of` finds them; the same on all ranks."""
        last = self.__dict__.get("_last")  # a run asks for the same names at each version
        if last is None or last[0] != tied or last[1] != known:
            last = self.__dict__["_last"] = dict(tied), known, self._called(known, tied)
        found: Share = last[2]
        return found

    def _called(self, known: Container[str] | None, tied: Mapping[str, str]) -> "Share":
        plan = self.plan
        names, further = names_of(plan.tensors, plan.tied, known, tied)
        if further == plan.tied == self.held.tied and all(name == own for own, name in names.items()):
            return self
        specs = {name: TensorSpec(name, spec.dtype, spec.shape) for name, spec in renamed(plan.tensors, names).items()}
        parts = renamed(plan.parts, names)
        held, own = (Layout(renamed(layout, names), further) for layout in (self.held, self.own))
        return Share(SharePlan(specs, parts, further, plan.fingerprint), held, own)

    def counted(self, tied: Mapping[str, str]) -> Layout:
        """All pieces, where the ranks may hold separately what a version ties. tied: its further names.

        The n further tensors that are tied to one are its copies: it is counted n + 1 times, and each of them −1 times.
        """
        held, specs = self.held, self.plan.tensors
        further: dict[str, list[str]] = {}
        for alias, owner in tied.items():
            if alias in specs and owner in specs and specs[alias] == replace(specs[owner], name=alias):
                further.setdefault(owner, []).append(alias)
        if not further:
            return held
        found = dict(held)
        for owner, aliases in further.items():
            tensors = [(owner, len(aliases) + 1), *((alias, -1) for alias in aliases)]
            here = [(found.pop(name), copies) for name, copies in tensors if name in found]
            if here:
                pieces = [one._replace(times=copies * one.times) for bits, copies in here for one in pieces_of(bits)]
                found[owner] = pieces_like(here[0][0], pieces)
        return Layout(sorted(found.items()), held.tied)

    def without(self, copies: Mapping[str, str]) -> "Share":
        """The same share without some tensors, which count as tied. copies: their names → those they are tied to."""
        if not copies:
            return self
        plan = self.plan
        tied = {**{alias: copies.get(owner, owner) for alias, owner in plan.tied.items()}, **copies}
        specs = {name: spec for name, spec in plan.tensors.items() if name not in copies}
        parts = {name: found for name, found in plan.parts.items() if name not in copies}
        held, own = (
            Layout({name: bits for name, bits in found.items() if name not in copies}, tied)
            for found in (self.held, self.own)
        )
        return Share(SharePlan(specs, parts, tied, plan.fingerprint), held, own)

    def replicas(self, rank: int) -> dict[str, int]:
        """The digest of what this rank and others hold, for each set of such ranks, as "0,2".

        Raises IntegrityError if this rank holds a part twice, with different bits.
        """
        if not self.plan.parts:  # of one process, which holds each tensor whole
            return {}
        for name, tensor in self.held.items():
            for one, other in pairwise(pieces_of(tensor)):  # sorted, so the copies of a part follow each other
                if one.box == other.box and one.bits.storage != other.bits.storage and differ(one.bits, other.bits):
                    raise IntegrityError(
                        f"tensor {name!r}: rank {rank} holds the elements {list(one.box.sizes)} at "
                        f"{list(one.box.offset)} twice, with different bits: expected equal copies; give this part "
                        "once, or copy one to the other",
                        name=name,
                        ranks=(rank,),
                    )
        return {holders: digests.state_digest(layout) for holders, layout in self._replicated(rank).items()}

    def replica_digests(self, rank: int, holders: str) -> dict[str, int]:
        """The same of one set of ranks, for each tensor."""
        layout = self._replicated(rank)[holders]
        return {name: digests.state_digest({name: bits}) for name, bits in layout.items()}

    def _replicated(self, rank: int) -> dict[str, dict[str, Bits]]:
        """What this rank and others hold, for each set of such ranks."""
        sets: dict[tuple[int, ...], dict[str, list[Piece]]] = {}
        for name, parts in self.plan.parts.items():
            here = {piece.box: piece for piece in pieces_of(self.held[name])} if name in self.held else {}
            for part in parts if here else ():
                holders = tuple(dict.fromkeys(part.holders))
                if len(holders) > 1 and rank in holders:
                    sets.setdefault(holders, {}).setdefault(name, []).append(here[part.box]._replace(times=1))
        return {
            ",".join(map(str, holders)): {name: _pieces(self.held[name], pieces) for name, pieces in names.items()}
            for holders, names in sets.items()
        }


def share_of(
    ranks: Ranks,
    tensors: Layout,
    known: SharePlan | None = None,
    prints: Sequence[bytes | memoryview] | None = None,
) -> Share:
    """Agree who owns what. A collective.

    tensors: what this rank holds. known: the plan of the last time, which stands if every rank still holds the same.
    prints: every rank's `layout_fingerprint`, where they were exchanged already.
    Raises BaseMismatchError or ExchangeError on all ranks if a tensor is not complete, or its dtype or shape differs.
    """
    if ranks.size == 1 and not tensors.sharded:
        return whole_share(tensors)
    if prints is None:
        prints = ranks.gather(
            "compare what the ranks hold", lambda: layout_fingerprint(tensors, known), 2 * PRINT_NBYTES
        )
    fingerprint = blake3(b"".join(found[:PRINT_NBYTES] for found in prints)).digest(PRINT_NBYTES)
    if known is None or any(found[PRINT_NBYTES:] != fingerprint for found in prints):
        packed = ranks.gather("describe what the ranks hold", lambda: describe(tensors), MAX_NBYTES)
        known = make_plan(described(packed), fingerprint, ranks.numbers)
    return share_by(known, ranks.rank, tensors)


def layout_fingerprint(tensors: Layout, known: SharePlan | None) -> bytes:
    """The fingerprint of what this rank holds, and that of the plan that it knows.

    A rank that was interrupted may know another plan than the others: then all make it anew.
    """
    return fingerprint_of(tensors) + (known.fingerprint if known else bytes(PRINT_NBYTES))


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


def share_by(plan: SharePlan, rank: int, tensors: Layout) -> Share:
    """The share of a rank by a plan that stands. rank: its place among those of the plan."""
    # A layout that owns memory must not refer to itself: its memory would be freed late.
    return tensors.derived(_assigned, rank, plan) if tensors.unowned else _assigned(tensors, rank, plan)


def whole_share(tensors: Layout) -> Share:
    """The share of one process that holds whole tensors."""
    return tensors.derived(_whole_share) if tensors.unowned else _whole_share(tensors)


def _whole_share(tensors: Layout) -> Share:
    specs = {name: TensorSpec(name, bits.dtype, tuple(bits.shape)) for name, bits in tensors.items()}
    return Share(SharePlan(specs, {}, dict(tensors.tied), b""), tensors, tensors)


def taken(whole_tensors: Layout, own: Layout) -> Layout:
    """The same pieces as `own`, as views of whole tensors."""
    found: dict[str, Bits] = {}
    for name, tensor in own.items():
        source = whole_tensors[name]
        pieces = [piece._replace(bits=place_view(source, piece.box)) for piece in pieces_of(tensor) if piece.box.size]
        found[name] = _pieces(tensor, pieces) if tensor.size else tensor
    return Layout(found, own.tied)


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


def _assigned(tensors: Layout, rank: int, plan: SharePlan) -> Share:
    """What a rank holds and owns by a plan."""
    held: dict[str, Bits] = {}
    own: dict[str, Bits] = {}
    for name, tensor in tensors.items():
        if tensor.size == 0:
            held[name] = tensor
            continue
        here = [part for part in plan.parts[name] if rank in part.holders]
        unshared = [part.box for part in here if len(part.holders) == 1]
        if isinstance(tensor, Pieces) and [piece.box for piece in tensor.pieces] == unshared != [whole(tensor.shape)]:
            held[name], own[name] = tensor, _joined(tensor)  # the ordinary case: no replicas
            continue
        pieces = []
        for part in here:
            times = len(part.holders) if part.owner == rank else -1
            for box, bits, _ in touching(tensor, part.box):  # which lies in each of them
                view = bits if part.box == box else bits.view(part.box.slices(box))
                pieces.append(Piece(part.box, view, times))
                times = -1  # of further copies on this rank
        held[name] = _pieces(tensor, pieces)
        if mine := [piece._replace(times=1) for piece in pieces if piece.owned]:
            own[name] = _joined(_pieces(tensor, mine))
    if rank == 0:  # what has no elements is the first rank's
        own |= {name: _nothing(spec) for name, spec in plan.tensors.items() if not whole(spec.shape).size}
    return Share(plan, Layout(held, tensors.tied), Layout(sorted(own.items()), plan.tied))


def _joined(tensor: Bits) -> Bits:
    """The same elements, in fewer pieces if they are very many."""
    pieces = pieces_of(tensor)
    boxes = joined([piece.box for piece in pieces])
    if len(boxes) == len(pieces):
        return tensor
    return _pieces(tensor, [Piece(box, Mosaic(tensor, box)) for box in boxes])


def _pieces(tensor: Bits, pieces: list[Piece]) -> Bits:
    if len(pieces) == 1 and pieces[0].times == 1 and pieces[0].box == whole(tensor.shape):
        return pieces[0].bits
    return pieces_like(tensor, pieces)


def _nothing(spec: TensorSpec) -> Bits:
    return Pieces(spec.dtype, ITEMSIZES[spec.dtype], tuple(spec.shape), [])


def unequal_replicas(
    ranks: Ranks, found: Sequence[Mapping[str, int]], mine: Callable[[str], Mapping[str, int]]
) -> ExchangeError | None:
    """The error that names tensors whose copies differ between two ranks; None if all are equal. Then no collective.

    found: of each rank, as `Share.replicas`. mine: the same of this rank and one set of ranks, for each tensor.
    """
    differing = _differing(found)
    if differing is None:
        return None
    first, rank, holders = differing

    def here() -> bytes:
        return msgspec.json.encode(mine(holders) if ranks.rank in (first, rank) else {})

    said = ranks.gather("compare replicas by tensor", here, MAX_NBYTES)
    one, other = (decode_json(said[at], dict[str, int], "replicas") for at in (first, rank))
    names = [name for name in one if one[name] != other.get(name)]
    where = f" of {shown(names)}" if names else ""
    numbers = [ranks.numbers[one] for one in (first, rank)]
    all_of_them = ",".join(str(ranks.numbers[int(holder)]) for holder in holders.split(","))
    return ExchangeError(
        f"ranks {numbers[0]} and {numbers[1]} hold replicas of the same weights, with different bits{where}: expected "
        f"equal ones on ranks {all_of_them}",
        ranks=numbers,
    )


def _differing(found: Sequence[Mapping[str, int]]) -> tuple[int, int, str] | None:
    """Two ranks whose replicas differ, and all ranks that hold these."""
    for rank, sets in enumerate(found):
        for holders, digest in sets.items():
            first = int(holders.split(",")[0])
            if found[first].get(holders) != digest:
                return first, rank, holders
    return None
