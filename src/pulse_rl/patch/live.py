"""Which live memory stands behind the tensors of a patch or a version, and what of it is shared.

A tensor is written to every live tensor that is tied to it. Live weights may also be tied where the patch is not, or
overlap in part, as slices of a fused weight do: `shared_memory` and `overlapping` find out, and `SharedMemory` whether
a patch gives the same memory different bits. Nothing here writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import BaseMismatchError
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.boxes import Box, Positions
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.layout import OF_PATCH, Derives, HasLayout, Layout, Sides, compare_layouts, derived
from pulse_rl.weights.overlap import pairs
from pulse_rl.weights.pieces import pieces_of

Copies = Sequence[Bits]  # the live tensors behind one name: the first stands for it, the others are tied copies


class Live(Derives, dict[str, Copies]):
    """The live tensors behind each name of a version."""


class PlainPieces(NamedTuple):
    """All pieces of live tensors, by their addresses. They lie in plain memory of one device."""

    addresses: NDArray[np.int64]
    ends: NDArray[np.int64]
    names: list[str]  # of their tensors
    counters: NDArray[np.object_]  # of writes to them, each once, and None
    counted: NDArray[np.int64]  # (pieces,) which of these is a piece's
    device: Device


def each_alone(tensors: Mapping[str, Bits]) -> Live:
    """Live tensors that are tied to no other."""
    return Live((name, [bits]) for name, bits in tensors.items())


def resolve(
    tensors: Mapping[str, HasLayout],
    tied: Mapping[str, str],
    weights: Layout,
    sides: Sides = OF_PATCH,
    *,
    written: bool = True,
    everywhere: Mapping[str, HasLayout] | None = None,
) -> Live:
    """Find the live tensors behind each name.

    tensors: what is expected, by name. tied: further names → the name that stands for them. sides: how an error speaks
    of both. written: whether they are to be written. everywhere: the tensors of the whole model by every name, where
    this process holds a share of them; both have the version's names already. Raises BaseMismatchError that lists what
    is missing, unexpected or of another shape, and ValueError for a live tensor that cannot be written.
    """
    return weights.derived(_resolved, tensors, tied, sides, written, everywhere)


def _resolved(
    weights: Layout,
    tensors: Mapping[str, HasLayout],
    tied: Mapping[str, str],
    sides: Sides,
    written: bool,
    everywhere: Mapping[str, HasLayout] | None,
) -> Live:
    """As `resolve`."""
    if everywhere is None:
        weights = weights.called(tensors, tied)
    live: Mapping[str, HasLayout] = weights.all_names() if everywhere is None else everywhere
    # A tied name may be absent here (as in a checkpoint), or be a second name of the same memory.
    expected = {**tensors, **{alias: tensors[owner] for alias, owner in tied.items() if alias in live}}
    compare_layouts(expected, live, sides)
    found = by_name(weights, tied)
    for name, copies in found.items():
        if written and not all(bits.writable for bits in copies):
            raise ValueError(
                f"tensor {name!r} is read-only, or its elements share memory (an expanded view): "
                "expected weights that can be written"
            )
    return found


def by_name(weights: Layout, tied: Mapping[str, str]) -> Live:
    """Live tensors under the names of a version, each with its tied copies in other memory.

    tied: further names → the name that stands for them, as the version has them.
    """
    live = weights.all_names()
    found = {name: [bits] for name, bits in live.items() if name not in tied}
    for alias, owner in tied.items():
        if alias in live and owner in found and live[alias].storage != found[owner][0].storage:
            found[owner].append(live[alias])
    return Live(found)


def live_digest(live: Mapping[str, Copies]) -> int:
    """Digest live weights in full. Raises BaseMismatchError if a tied copy differs from its original."""
    total = digests.state_digest({name: copies[0] for name, copies in live.items() if len(copies) == 1})
    for name, copies in live.items():
        if len(copies) > 1:
            found = {digests.state_digest({name: bits}) for bits in copies}
            if len(found) > 1:
                raise tied_differ(name)
            total += found.pop()
    return total & digests.MASK


def tied_differ(name: str) -> BaseMismatchError:
    """The error for a tied copy that has other bits than the tensor that it is tied to."""
    return BaseMismatchError(f"a tensor tied to {name!r} differs from it in these weights")


def _memories(copies: Copies) -> Iterator[Bits]:
    """The memory of some tensors, piece by piece."""
    for tensor in copies:
        yield from (piece.bits for piece in pieces_of(tensor) if piece.bits.size)


def plain_pieces(live: Mapping[str, Copies]) -> PlainPieces | None:
    """None unless all are plain memory of one device, and no tensor has copies."""
    held = [(name, piece.bits) for name, copies in live.items() for bits in copies for piece in pieces_of(bits)]
    found = [
        (bits.address, name, bits) for name, bits in held if isinstance(bits, HostBits | TorchBits) and bits.contiguous
    ]
    if len(found) < len(held) or any(len(copies) > 1 for copies in live.values()):
        return None
    device, *more = {bits.device for _, _, bits in found} or {HOST}
    if device is None or more:
        return None
    found.sort(key=itemgetter(0))
    addresses = np.array([address for address, _, _ in found], np.int64)
    ends = addresses + np.array([bits.size * bits.stored_itemsize for _, _, bits in found], np.int64)
    counted = [bits.counter for _, _, bits in found]  # asked once: some make a new one for each who asks
    counters = {counter: number for number, counter in enumerate(dict.fromkeys(counted))}
    return PlainPieces(
        addresses,
        ends,
        [name for _, name, _ in found],
        np.fromiter(counters, object, len(counters)),
        np.array([counters[counter] for counter in counted], np.int64),
        device,
    )


def apart(live: Mapping[str, Copies]) -> bool:
    """Whether no two tensors share memory, as far as their addresses tell: all lies one after another."""
    pieces = derived(live, plain_pieces)
    return pieces is not None and bool((pieces.ends[:-1] <= pieces.addresses[1:]).all())


def shared_memory(live: Mapping[str, Copies]) -> list[tuple[str, str]]:
    """Pairs of tensors that are the same memory in the live weights; empty in the ordinary case."""
    if apart(live):
        return []
    owners: dict[object, str] = {}
    found = []
    for tensor, copies in live.items():
        for bits in copies:
            owner = owners.setdefault(bits.storage, tensor) if any(_memories([bits])) else tensor
            if owner != tensor:
                found.append((owner, tensor))
    return found


def overlapping(live: Mapping[str, Copies]) -> bool:
    """Whether any tensors overlap in memory without being the same (a fused weight and slices of it)."""
    if apart(live):
        return False
    distinct = {bits.storage: bits for copies in live.values() for bits in _memories(copies)}
    return any(pairs(list(distinct.values())))


def overlaps(live: Mapping[str, Copies]) -> Iterator[list[tuple[str, Box, Bits]]]:
    """The live tensors that overlap without being the same, in groups that share no memory with each other.

    Of sharded ones, the pieces: of each tensor's name, the box of the piece and its memory.
    """
    distinct = {
        bits.storage: (name, box, bits)
        for name, copies in live.items()
        for copy in copies
        for box, bits, _ in pieces_of(copy)
        if bits.size
    }
    found = list(distinct.values())
    groups: dict[int, list[int]] = {}  # by each of their members
    for one, other in pairs([bits for _, _, bits in found]):
        first, second = groups.setdefault(one, [one]), groups.setdefault(other, [other])
        if first is not second:
            first += second
            groups |= dict.fromkeys(second, first)
    for group in {id(group): group for group in groups.values()}.values():
        yield [found[number] for number in group]


class SharedMemory:
    """Tensors of a patch that are the same memory in the live weights: the patch must change both alike.

    What a patch does to a tensor is summed up as one number, the digest's gain under a common seed. False if there are
    none, which is the ordinary case.
    """

    def __init__(self, live: Mapping[str, Copies]) -> None:
        self._pairs = derived(live, shared_memory)
        self._sums = {name: 0 for pair in self._pairs for name in pair}
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, name: str, at: Positions, before: Changes, after: UIntArray) -> None:
        """Count changes of a tensor. May be called on any thread."""
        if name in self._sums:
            delta = digests.delta(0, at, before.indices, before.values, after)
            with self._lock:
                self._sums[name] += delta

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def differing(self) -> Iterator[tuple[str, str]]:
        """The pairs that were changed differently."""
        for one, other in self._pairs:
            if (self._sums[one] - self._sums[other]) & digests.MASK:
                yield one, other
