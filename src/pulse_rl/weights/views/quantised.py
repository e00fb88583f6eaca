"""The codes and scales of live weights, in memory: made once, and then kept up with what changes.

Of each block it is remembered how large its largest magnitude is, and which scale it has. A changed element raises the
first, or has its block looked through where the largest one became smaller; a block gets another scale, and all its
codes anew, only where that is due, and all blocks under a global scale where that changes. So keeping up costs what the
changes cost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from pulse_rl.weights.views.scales import Scales
from pulse_rl.weights.views.view import View

_STACK = (*(PLACE.names or ()),)[:10]


class _Part:
    """One piece of a quantised tensor.

    source: its bfloat16. codes: of its box's sizes, or half the columns. families: of its matrices, as `Scales` has
    them; one for all of them without global scales. numbers, shares: of its blocks and of these, among those of all
    parts, of which one comes before it.
    """

    def __init__(self, form: ViewFormat, source: Piece, blocks: Box, families: range, before: "_Part | None") -> None:
        self.source, self.box, self.blocks, self.families = source.bits, source.box, blocks, families
        first, share = before.ends if before is not None else (0, 0)
        self.ends: tuple[int, int] = first + blocks.size, share + len(families)
        self.numbers, self.shares = slice(first, self.ends[0]), slice(share, self.ends[1])
        self.codes = np.empty(form.code_box(source.box).sizes, np.uint8)
        self._grid, self._columns = form.grid(source.box.sizes), source.box.sizes[-1]
        self._how = form.table.how

    def _of(self, each: NDArray[Any]) -> NDArray[Any]:
        """What all parts have of each block, of this one's: (blocks down, blocks across)."""
        return each[self.numbers].reshape(-1, self.blocks.sizes[-1])

    def _runs(self) -> Iterator[tuple[int, int, NDArray[np.uint16]]]:
        """All rows, some at a time: the first, the one after the last, and their bits."""
        rows, step = self.box.size // self._columns, max(1, SEGMENT // self._columns)
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

    def quantise(self, scales: Scales) -> None:
        """Quantise all of it."""
        numbers = self._of(scales.numbers)
        families = np.repeat(self.families, len(numbers) // len(self.families))
        each, codes = scales.factors[families[:, None], numbers], self.codes.reshape(-1, self.codes.shape[-1])
        for start, stop, bits in self._runs():
            quantising.quantise(bits, self._grid, start, each, self._how, codes[start:stop])

    @property
    def by_family(self) -> list[tuple[int, slice]]:
        """The blocks that it has of each family."""
        step = self.blocks.size // len(self.families)
        firsts = range(self.numbers.start, self.numbers.stop, step)
        return [(family, slice(first, first + step)) for family, first in zip(self.families, firsts, strict=True)]

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
        return (*found, grid.rows, grid.columns, grid.height, self.families[0], int(len(self.families) > 1))

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
        self._shapes, self._tied = {name: bits.shape for name, bits in source.items()}, source.tied
        families: dict[tuple[str, int], range] = {}
        if self._form.has_global and not whole:
            raise ValueError(
                "expected all weights in one process, as matrices of several tensors share a global scale, found a "
                "part of them: take pulse.Fp4(format='mxfp4')"
            )
        for name in sorted(self._form.quantised(self._shapes, source.tied)):
            try:
                self._add(name, source[name], families)
            except ValueError as error:
                raise ValueError(f"tensor {name!r}: {error}") from None
        if whole:
            self._form.check_any(self._shapes, source.tied)
        self._scales = Scales(self._form, [share for part in self._parts for share in part.by_family])
        self._marks = np.zeros(len(self._scales.numbers), np.uint8)
        self._stacks = np.array([part.stack for part in self._parts], np.int64).reshape(-1, len(_STACK))
        self._ends = np.array([part.numbers.stop for part in self._parts], np.int64)
        found = [(name, bits) for name, bits in source.items() if name not in self._of]
        for name in self._of:
            found += self._quantised(name, source[name]).items()
        tied = dict[str, str]()
        for alias, name in source.tied.items():
            if name in self._of:
                tied |= zip(*(self._form.tensors(one, self._shapes[name]) for one in (alias, name)), strict=True)
            elif name in self._shapes:
                tied[alias] = name
        names = Counter([*(name for name, _ in found), *tied])
        if repeated := [name for name, times in names.items() if times > 1]:
            raise ValueError(
                f"expected other names than codes and scales get, found {repeated[0]!r}: ignore= leaves "
                "the tensor out whose they are"
            )
        self.layout = Layout(sorted(found), tied)

    def _add(self, name: str, bits: Bits, families: dict[tuple[str, int], range]) -> None:
        """families: those of all tensors with a global scale so far, and of each matrix of a stack its own."""
        if bits.dtype != "BF16":
            raise ValueError(f"expected bfloat16 to quantise, found {bits.dtype}: publish with cast='bfloat16'")
        begun, mine = len(self._parts), range(1)
        if self._form.has_global:
            count, first = prod(bits.shape[:-2]), max((one.stop for one in families.values()), default=0)
            mine = families.setdefault((self._form.family(name), count), range(first, first + count))
        for piece in pieces_of(bits):
            own = mine[piece.box.offset[0] :][: piece.box.sizes[0]] if len(mine) > 1 else mine
            blocks = self._form.blocks(piece.box, bits.shape)
            self._parts.append(_Part(self._form, piece, blocks, own, self._parts[-1] if self._parts else None))
        self._of[name] = range(begun, len(self._parts))

    def _quantised(self, name: str, bits: Bits) -> dict[str, Bits]:
        """The codes and the scales of a tensor."""
        form, made = self._form, self._form.tensors(name, bits.shape)
        found: dict[str, list[Piece]] = {key: [] for key in made}
        for piece, part in zip(pieces_of(bits), (self._parts[number] for number in self._of[name]), strict=True):
            # One scale for all has fewer dimensions than the blocks.
            scales, outer = part.blocks, Box(piece.box.offset[:-2], piece.box.sizes[:-2])
            if len(made[form.scale_name(name)][1]) != len(bits.shape):
                scales = Box(outer.offset or (0,), outer.sizes or (1,))
            overall = Box((*outer.offset, 0), (*outer.sizes, 1))
            held = [part.codes, self._scales.bits[part.numbers], self._scales.overall[part.shares]]
            for (key, (dtype, _)), box, each in zip(
                made.items(), (form.code_box(piece.box), scales, overall), held, strict=False
            ):
                found[key].append(Piece(box, HostBits(dtype, each.reshape(box.sizes)), piece.times))
        if not isinstance(bits, Pieces):
            return {key: pieces[0].bits for key, pieces in found.items()}
        return {key: Pieces(dtype, shape, found[key]) for key, (dtype, shape) in made.items()}

    def look(self) -> "Quantised":
        """Quantise all weights as they are now.

        Returns:
            Itself.
        """
        self._marks[:] = STALE
        self._measure(range(len(self._parts)))
        self._marks[:] = UNTOUCHED
        shares = [share for part in self._parts for share in part.by_family]
        self._scales.rescale_all({family for family, _ in shares})
        for family, blocks in shares:
            self._scales.rescale(family, blocks)
        _each(lambda part: part.quantise(self._scales), self._parts)
        return self

    def _in(self, families: set[int]) -> list[int]:
        """The parts that have matrices of some families."""
        return [at for at, part in enumerate(self._parts) if not families.isdisjoint(part.families)] if families else []

    def go_on(self, before: Mapping[str, Bits]) -> None:
        """Have sticky scales go on from those of the version before; before the first `look`.

        Of scales that the rule does not make, new ones are due.

        Args:
            before: The tensors of that version, of which these may be a part.
        """
        if self.view.scales == "plain":
            return
        for name, numbers in self._of.items():
            _, *keys = self._form.tensors(name, self._shapes[name])
            for number, *pieces in zip(numbers, *(pieces_of(self.layout[key]) for key in keys), strict=True):
                held = [place_view(before[key], piece.box) for key, piece in zip(keys, pieces, strict=True)]
                scales, *overall = [bits.read(0, bits.size) for bits in held]
                part = self._parts[number]
                for at, (family, blocks) in enumerate(part.by_family):
                    mine = slice(blocks.start - part.numbers.start, blocks.stop - part.numbers.start)
                    self._scales.go_on(family, blocks, scales[mine], overall[0][at : at + 1] if overall else None)

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
        anew = {number for mine in compress(numbers, [not each for each in plain]) for number in mine.tolist()}
        for number in anew:
            self._marks[self._parts[number].numbers] = STALE
        followed = list(ordered_map(self._touch, compress(given, plain)))
        loose = [np.arange(each.start, each.stop) for each in (self._parts[number].numbers for number in anew)]
        touched = np.concatenate([np.empty(0, np.int64), *loose, *(one.touched for one in followed)])
        of_families, unknown = self._scales.by_family(touched), {f for n in anew for f in self._parts[n].families}
        perhaps = [f for f, blocks in of_families if f in unknown or self._scales.may_change(f, blocks)]
        self._measure(self._holding(touched[self._marks[touched] == STALE]))
        anew.update(self._in(self._scales.rescale_all(perhaps)))
        for family, blocks in of_families:
            self._marks[blocks[self._scales.rescale(family, blocks)]] = RESCALED
        rescaled = self._holding(touched[self._marks[touched] == RESCALED])
        sizes = np.zeros(len(self._parts), np.int64)  # elements of blocks that have got another scale
        for number in rescaled:
            part = self._parts[number]
            count = int(np.count_nonzero(self._marks[part.numbers] == RESCALED))
            sizes[number] = min(part.box.size, count * part.block_size)
        for one in ordered_map(lambda one: self._requantise(one, sizes), followed):
            known = np.array([anew.isdisjoint(self._of[name]) for name in one.names])
            found += self._as_published(one.of(known)) if known.any() else []
        self._marks[touched] = UNTOUCHED
        _each(lambda part: part.quantise(self._scales), [self._parts[number] for number in anew])
        return found

    def _measure(self, numbers: Iterable[int]) -> None:
        """Find the largest magnitudes of the blocks of some parts that are STALE."""
        _each(lambda part: part.measure(self._marks, self._scales.largest), [self._parts[n] for n in numbers])

    def _as_published(self, one: SectionChanges) -> list[SectionChanges]:
        """Changes of codes, by the names and places of these. None where a place ends within a byte."""
        packed, places = self._form.packed, [self._form.code_box(place) for place in one.places]
        if any(place.offset[-1] % packed or place.sizes[-1] % packed for place in one.places):
            return []
        return [SectionChanges(tuple(map(self._form.code_name, one.names)), tuple(places), one.counts, one.changes)]

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
        seen, touched = quantising.touch(places, *one.changes, self._scales.largest, self._marks)
        return _Followed(one, places, parts.reshape(-1), seen, touched)

    def _requantise(self, one: _Followed, anew: NDArray[np.int64]) -> SectionChanges:
        """Write the codes of what was touched. anew: (parts,) elements of blocks with another scale."""
        (names, places, _, (indices, _)), numbers = one.changes, one.parts
        sizes = np.repeat([place.size for place in places], len(names))
        one.places["size"] = np.where(anew[numbers] > 0, sizes, 0)
        most = len(indices) + int(anew[np.unique(numbers)].sum())
        scales, how = self._scales, self._form.table.how
        counts, changed, codes = quantising.requantise(
            one.places, indices, one.seen, self._marks, scales.numbers, scales.factors, how, most
        )
        return SectionChanges(names, places, counts, Changes(changed, codes))

    def config(self) -> dict[str, Any]:
        """Describe it as checkpoints do.

        Returns:
            The `quantization_config` of a config.json.
        """
        return self._form.config(self._shapes, self._tied)

    def __getitem__(self, name: str) -> Bits:
        return self.layout[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def _each(function: Callable[[_Part], None], parts: Sequence[_Part]) -> None:
    for _ in ordered_map(function, parts):
        pass
