"""The codes and scales of live weights, in memory: made once, and then kept up with what changes.

Of each block it is remembered how large its largest magnitude is, and for which magnitude its scale was made. A changed
element raises the first, or has its block looked through where the largest one became smaller; a block gets another
scale, and all its codes anew, only where that is due. So keeping up costs what the changes cost.

With plain scales, a scale is that of the largest magnitude. With sticky ones it stays until that is above the magnitude
it was made for, or below `keep` of it. Of magnitudes with the same scale, the largest counts as the one that it was
made for: so the scales alone, as they were published, say how to go on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS
from pulse_rl.kernels.cpu import quantising
from pulse_rl.kernels.cpu.quantising import PLACE, RESCALED, STALE, UNTOUCHED
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes, SectionChanges
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of, place_view
from pulse_rl.weights.segments import SEGMENT
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.rules import INFINITY
from pulse_rl.weights.views.view import View

_NONE = np.uint16(0xFFFF)  # in place of a magnitude; as a float it is NaN


_STACK = (*(PLACE.names or ()),)[:8]


class _Part:
    """One piece of a quantised tensor.

    source: its bfloat16. codes: of its box's sizes. numbers: of its blocks, among those of all parts.
    """

    def __init__(self, form: ViewFormat, source: Piece, blocks: Box, first: int) -> None:
        self.source, self.box, self.blocks = source.bits, source.box, blocks
        self.numbers = slice(first, first + blocks.size)
        self.codes = np.empty(source.box.sizes, np.uint8)
        self._grid, self._columns = form.grid(source.box.sizes), source.box.sizes[-1]
        self._table = form.table

    def _of(self, each: NDArray[Any]) -> NDArray[Any]:
        """What all parts have of each block, of this one's: (blocks down, blocks across)."""
        return each[self.numbers].reshape(-1, self.blocks.sizes[-1])

    def _runs(self) -> Iterator[tuple[int, int, NDArray[np.uint16]]]:
        """All rows, some at a time: the first, the one after the last, and their bits."""
        rows, step = self.codes.size // self._columns, max(1, SEGMENT // self._columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            bits = self.source.read(start * self._columns, stop * self._columns)
            yield start, stop, bits.reshape(-1, self._columns)

    def measure(self, marks: NDArray[np.uint8], largest: NDArray[np.uint16]) -> None:
        """Find the largest magnitudes of its blocks that are STALE."""
        mine, found = self._of(marks), self._of(largest)
        found[mine == STALE] = 0
        for start, _, bits in self._runs():
            quantising.largest(bits, self._grid, start, mine, found)

    def quantise(self, made_for: NDArray[np.uint16]) -> None:
        """Quantise all of it."""
        factors, codes = self._table.factors[self._of(made_for)], self.codes.reshape(-1, self._columns)
        for start, stop, bits in self._runs():
            quantising.quantise(bits, self._grid, start, factors, self._table.how, codes[start:stop])

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return min(self._grid.rows, self.box.sizes[-2]) * min(self._grid.columns, self._columns)

    @property
    def stack(self) -> tuple[int, ...]:
        """The first columns of a PLACE in it; 0 for the source unless that is plain memory."""
        bits, grid = self.source, self._grid
        source = bits.address if isinstance(bits, HostBits) and bits.contiguous else 0
        found = source, self.codes.ctypes.data, self.numbers.start, self.blocks.sizes[-1], self._columns
        return (*found, grid.rows, grid.columns, grid.height)

    def place(self, place: Box) -> tuple[int, ...]:
        """The next columns of a PLACE in it."""
        offset = [a - b for a, b in zip(place.offset, self.box.offset, strict=True)]
        first = (offset[0] if len(offset) == 3 else 0) * self.box.sizes[-2] + offset[-2]
        return first, offset[-1], place.sizes[-2], place.sizes[-1]


class _Followed(NamedTuple):
    """A section whose changes are followed: what `quantising.touch` has found."""

    changes: SectionChanges
    places: NDArray[np.void]  # PLACE
    parts: NDArray[np.int64]  # (places,) the number of each one's part
    seen: quantising.Seen
    touched: NDArray[np.int64]  # blocks


class Quantised(Mapping[str, Bits]):
    """A view of live weights: what is quantised as codes and scales in memory, all else as it is in the weights.

    A mapping of names to tensors that can be published as it is. `look` brings it up to the weights; nothing else
    changes it.

    Args:
        view: What the view is.
        weights: A torch module, or a mapping of name to tensor, whose memory it goes on to read.
        whole: Whether these are all weights of a model, of which some can be quantised.

    Raises:
        ValueError: The view cannot quantise these weights.

    Attributes:
        view: As given.
        layout: The tensors by name, and which names are tied.
    """

    def __init__(self, view: View, weights: Any, *, whole: bool = True) -> None:
        source = layout(weights)
        self.view, self._form = view, ViewFormat(view)
        self._parts: list[_Part] = []
        self._of: dict[str, range] = {}  # the parts of each tensor
        for name, bits in source.items():
            if self._form.quantises(name, bits.shape):
                try:
                    self._add(name, bits)
                except ValueError as error:
                    raise ValueError(f"tensor {name!r}: {error}") from None
        if whole and not self._parts:
            raise ValueError(f"expected matrices to quantise, named ….weight, found none in {len(source)} tensors")
        blocks = self._parts[-1].numbers.stop if self._parts else 0
        self._largest, self._marks = np.zeros(blocks, np.uint16), np.zeros(blocks, np.uint8)
        self._scales = np.empty(blocks, UINTS[self._form.scale_itemsize])
        self._made_for: NDArray[np.uint16] | None = None  # the magnitude of each scale; None before the first
        self._stacks = np.array([part.stack for part in self._parts], np.int64).reshape(-1, len(_STACK))
        self._ends = np.array([part.numbers.stop for part in self._parts], np.int64)
        found = {name: bits for name, bits in source.items() if name not in self._of}
        for name in self._of:
            found |= self._quantised(name, source[name])
        self.layout = Layout(sorted(found.items()), source.tied)

    def _add(self, name: str, bits: Bits) -> None:
        if bits.dtype != "BF16":
            raise ValueError(f"expected bfloat16 to quantise, found {bits.dtype}: publish with cast='bfloat16'")
        begun = len(self._parts)
        for piece in pieces_of(bits):
            first = self._parts[-1].numbers.stop if self._parts else 0
            self._parts.append(_Part(self._form, piece, self._form.blocks(piece.box, bits.shape), first))
        self._of[name] = range(begun, len(self._parts))

    def _quantised(self, name: str, bits: Bits) -> dict[str, Bits]:
        """The codes and the scales of a tensor."""
        form, dtype = self._form, self._form.table.dtype
        scale_name, scale_shape = form.scale_name(name), form.scale_shape(bits.shape)
        codes, scales = [], []
        for piece, part in zip(pieces_of(bits), (self._parts[number] for number in self._of[name]), strict=True):
            # One scale for all has fewer dimensions than the blocks.
            place, flat = part.blocks, len(scale_shape) != len(bits.shape)
            place = Box(place.offset[:-2] or (0,), place.sizes[:-2] or (1,)) if flat else place
            codes.append(Piece(piece.box, HostBits(form.codes, part.codes), piece.times))
            own = HostBits(dtype, self._scales[part.numbers].reshape(place.sizes))
            scales.append(Piece(place, own, piece.times))
        if not isinstance(bits, Pieces):
            return {name: codes[0].bits, scale_name: scales[0].bits}
        return {
            name: Pieces(form.codes, 1, bits.shape, codes),
            scale_name: Pieces(dtype, form.scale_itemsize, scale_shape, scales),
        }

    def look(self) -> "Quantised":
        """Quantise all weights as they are now.

        Returns:
            Itself.
        """
        self._look(range(len(self._parts)))
        return self

    def _look(self, numbers: Iterable[int]) -> None:
        """Quantise some parts anew."""
        parts = [self._parts[number] for number in numbers]
        for part in parts:
            self._marks[part.numbers] = STALE
        _each(lambda part: part.measure(self._marks, self._largest), parts)
        for part in parts:
            self._marks[part.numbers] = UNTOUCHED
            self._rescale(part.numbers)
        _each(lambda part: part.quantise(self._scaled), parts)

    @property
    def _scaled(self) -> NDArray[np.uint16]:
        """What the scales were made for, after the first look."""
        assert self._made_for is not None
        return self._made_for

    def _rescale(self, blocks: slice | NDArray[np.int64]) -> NDArray[np.bool_]:
        """Give blocks the scales that are due. Returns which of them have got another one."""
        largest = self._largest[blocks]
        due = self._form.ranges[largest]
        if self._made_for is None:
            self._made_for = np.full(len(self._largest), _NONE, np.uint16)
        made_for = self._made_for[blocks]
        if self.view.scales == "sticky":
            wide, high = (_float(bits) for bits in (made_for, largest))
            stays = (high <= wide) & (high >= np.float32(self.view.keep) * wide)
            due = np.where(stays, made_for, due)
        self._made_for[blocks] = due
        self._scales[blocks] = self._form.table.scales[due]
        changed: NDArray[np.bool_] = due != made_for
        return changed

    def go_on(self, before: Mapping[str, Bits]) -> None:
        """Have sticky scales go on from those of the version before; before the first `look`.

        Of scales that the rule does not make, new ones are due.

        Args:
            before: The tensors of that version, of which these may be a part.
        """
        if self.view.scales == "plain":
            return
        known, which = np.unique(self._form.table.scales[:INFINITY], return_index=True)
        self._made_for = np.zeros(len(self._largest), np.uint16)
        for name, numbers in self._of.items():
            scales = self._form.scale_name(name)
            for number, piece in zip(numbers, pieces_of(self.layout[scales]), strict=True):
                held = place_view(before[scales], piece.box)
                found = held.read(0, held.size)
                at = np.minimum(np.searchsorted(known, found), len(known) - 1)
                self._made_for[self._parts[number].numbers] = np.where(
                    known[at] == found, self._form.ranges[which[at]], np.uint16(0)
                )

    def follow(self, changes: Iterable[SectionChanges]) -> list[SectionChanges]:
        """Quantise what has changed since the last look, and look at nothing else.

        What does not lie in host memory, one tensor's elements after another, is quantised anew.

        Args:
            changes: Of all that changed, the bits that the weights held before; of each tensor all places, in one
                section.

        Returns:
            Of what has changed in the view, but for scales and what is quantised anew, the bits that it held before.
        """
        found, given = list[SectionChanges](), list[SectionChanges]()
        for one in changes:
            quantised = np.array([name in self._of for name in one.names])
            if not quantised.all():
                found.append(one.of(~quantised))
            if quantised.any():
                given.append(one.of(quantised))
        numbers = [np.concatenate([self._of[name] for name in one.names]) for one in given]
        plain = [bool((self._stacks[mine, 0] > 0).all()) for mine in numbers]
        followed = list(ordered_map(self._touch, compress(given, plain)))
        touched = np.concatenate([np.empty(0, np.int64), *(one.touched for one in followed)])
        stale = touched[self._marks[touched] == STALE]
        _each(lambda part: part.measure(self._marks, self._largest), [self._parts[n] for n in self._holding(stale)])
        rescaled = touched[self._rescale(touched)]
        self._marks[rescaled] = RESCALED
        anew = np.zeros(len(self._parts), np.int64)  # elements of blocks that have got another scale
        for number in self._holding(rescaled):
            part = self._parts[number]
            blocks = int(np.count_nonzero(self._marks[part.numbers] == RESCALED))
            anew[number] = min(part.codes.size, blocks * part.block_size)
        found += ordered_map(lambda one: self._requantise(one, anew), followed)
        self._marks[touched] = UNTOUCHED
        for mine in compress(numbers, [not each for each in plain]):
            self._look(mine.tolist())
        return found

    def _holding(self, blocks: NDArray[np.int64]) -> list[int]:
        """The parts that some blocks are of."""
        held: list[int] = np.unique(np.searchsorted(self._ends, blocks, "right")).tolist()
        return held

    def _touch(self, one: SectionChanges) -> _Followed:
        """Find what changes touch. Sections do not share tensors."""
        firsts = [self._of[name] for name in one.names]
        of_one = [self._parts[number] for number in firsts[0]]  # all are cut alike
        held = [next(at for at, part in enumerate(of_one) if place.inside(part.box)) for place in one.places]
        geometry = np.array([of_one[at].place(place) for at, place in zip(held, one.places, strict=True)], np.int64)
        parts = np.array([numbers.start for numbers in firsts], np.int64) + np.array(held, np.int64)[:, None]
        places = np.zeros(parts.size, PLACE)
        for name, column in zip(_STACK, self._stacks[parts.reshape(-1)].T, strict=True):
            places[name] = column
        for at, name in enumerate(("first", "column", "rows", "width")):
            places[name] = np.repeat(geometry[:, at], len(one.names))
        places["end"] = np.cumsum(one.counts)
        places["begin"] = places["end"] - one.counts
        seen, touched = quantising.touch(places, *one.changes, self._largest, self._marks)
        return _Followed(one, places, parts.reshape(-1), seen, touched)

    def _requantise(self, one: _Followed, anew: NDArray[np.int64]) -> SectionChanges:
        """Write the codes of what was touched. anew: (parts,) elements of blocks with another scale."""
        (names, places, _, (indices, _)), numbers = one.changes, one.parts
        sizes = np.repeat([place.size for place in places], len(names))
        one.places["size"] = np.where(anew[numbers] > 0, sizes, 0)
        most = len(indices) + int(anew[np.unique(numbers)].sum())
        table = self._form.table
        counts, changed, codes = quantising.requantise(
            one.places, indices, one.seen, self._marks, self._scaled, table.factors, table.how, most
        )
        return SectionChanges(names, places, counts, Changes(changed, codes))

    def config(self) -> dict[str, Any]:
        """Describe it as checkpoints do.

        Returns:
            The `quantization_config` of a config.json.
        """
        scales = {self._form.scale_name(name) for name in self._of}
        return self._form.config({name: bits.shape for name, bits in self.layout.items() if name not in scales})

    def __getitem__(self, name: str) -> Bits:
        return self.layout[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def _float(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _each(function: Callable[[_Part], None], parts: Sequence[_Part]) -> None:
    for _ in ordered_map(function, parts):
        pass
