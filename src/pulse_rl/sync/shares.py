"""Shares: what a rank holds and owns of the weights, by the plan that all ranks make (`share_plan`).

The plan is made once, and again when some rank holds other boxes. The digest counts an element of k copies k times at
its owner and −1 times at each other copy, so the sum over all ranks proves the copies too, with no message more.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from msgspec.structs import replace

from pulse_rl.group.ranks import Ranks
from pulse_rl.sync.share_plan import MAX_NBYTES, PRINT_NBYTES, SharePlan, describe, described, fingerprint_of, make_plan
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.box_sets import joined
from pulse_rl.weights.boxes import whole
from pulse_rl.weights.layout import Layout, TensorSpec, names_of, renamed
from pulse_rl.weights.pieces import Mosaic, Piece, Pieces, pieces_of, touching


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
                found[owner] = Pieces(here[0][0].dtype, here[0][0].shape, pieces)
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
        held[name] = bits_of_pieces(tensor, pieces)
        if mine := [piece._replace(times=1) for piece in pieces if piece.owned]:
            own[name] = _joined(bits_of_pieces(tensor, mine))
    if rank == 0:  # what has no elements is the first rank's
        own |= {name: _nothing(spec) for name, spec in plan.tensors.items() if not whole(spec.shape).size}
    return Share(plan, Layout(held, tensors.tied), Layout(sorted(own.items()), plan.tied))


def _joined(tensor: Bits) -> Bits:
    """The same elements, in fewer pieces if they are very many."""
    pieces = pieces_of(tensor)
    boxes = joined([piece.box for piece in pieces])
    if len(boxes) == len(pieces):
        return tensor
    return bits_of_pieces(tensor, [Piece(box, Mosaic(tensor, box)) for box in boxes])


def bits_of_pieces(tensor: Bits, pieces: list[Piece]) -> Bits:
    """A tensor like another one, of these pieces; a piece that is all of it stands for it."""
    if len(pieces) == 1 and pieces[0].times == 1 and pieces[0].box == whole(tensor.shape):
        return pieces[0].bits
    return Pieces(tensor.dtype, tensor.shape, pieces)


def _nothing(spec: TensorSpec) -> Bits:
    return Pieces(spec.dtype, spec.shape, [])
