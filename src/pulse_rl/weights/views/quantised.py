"""The codes and scales of live weights, in memory: made once, and then kept up with what changes.

Of each block it is remembered how large its largest magnitude is, and for which magnitude its scale was made. A changed
element raises the first, or has its block looked through where the largest one became smaller; a block gets another
scale, and all its codes anew, only where that is due. So keeping up costs what the changes cost.

With plain scales, a scale is that of the largest magnitude. With sticky ones it stays until that is above the magnitude
it was made for, or below `keep` of it. Of magnitudes with the same scale, the largest counts as the one that it was
made for: so the scales alone, as they were published, say how to go on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels.cpu import quantising
from pulse_rl.kernels.cpu.quantising import BlockGrid
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of, place_view
from pulse_rl.weights.segments import SEGMENT
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.fp8 import Fp8
from pulse_rl.weights.views.rules import INFINITY


class _Part:
    """One piece of a quantised tensor.

    source: its bfloat16. codes: of its box's sizes. scales: of those of its blocks.
    """

    def __init__(self, form: ViewFormat, source: Piece, blocks: Box) -> None:
        self._form, self._table, self._columns = form, form.table, source.box.sizes[-1]
        self.source, self.box = source.bits, source.box
        self._grid = form.grid(source.box.sizes)
        self.codes = np.empty(source.box.sizes, np.uint8)
        self.scales = np.empty(blocks.sizes, UINTS[form.scale_itemsize])
        down = self.scales.size // blocks.sizes[-1]
        self._largest = np.zeros((down, blocks.sizes[-1]), np.uint16)
        self._made_for: NDArray[np.uint16] | None = None  # the magnitude of each scale; None before the first

    def _rows(self, start: int, stop: int) -> NDArray[np.uint16]:
        return self.source.read(start * self._columns, stop * self._columns).reshape(-1, self._columns)

    def _runs(self) -> Iterator[tuple[int, int]]:
        rows, step = self.codes.size // self._columns, max(1, SEGMENT // self._columns)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    @property
    def _matrix(self) -> NDArray[np.uint8]:
        return self.codes.reshape(-1, self._columns)

    def look(self) -> None:
        """Quantise all of it."""
        self._largest[...] = 0
        for start, stop in self._runs():
            quantising.largest(self._rows(start, stop), self._grid, start, self._largest)
        self._rescale()
        factors = self._factors()
        for start, stop in self._runs():
            rows = self._rows(start, stop)
            quantising.quantise(rows, self._grid, start, factors, self._table.how, self._matrix[start:stop])

    def _factors(self) -> NDArray[np.float32]:
        assert self._made_for is not None
        return self._table.factors[self._made_for]

    def _rescale(self) -> NDArray[np.int64]:
        """Give blocks the scales that are due. Returns which have got another one, (k, 2)."""
        due = self._form.ranges[self._largest]
        if self._made_for is not None and self._form.fp8.scales == "sticky":
            wide = self._made_for.astype(np.uint32) << 16, self._largest.astype(np.uint32) << 16
            made_for, largest = (bits.view(np.float32) for bits in wide)
            stays = (largest <= made_for) & (largest >= np.float32(self._form.fp8.keep) * made_for)
            due = np.where(stays, self._made_for, due)
        changed = np.argwhere(due != self._made_for) if self._made_for is not None else np.empty((0, 2), np.int64)
        self._made_for = due
        self.scales.reshape(due.shape)[...] = self._table.scales[due]
        return changed

    def go_on(self, scales: UIntArray) -> None:
        """Take these scales as those of the version before; of ones that the rule does not make, new ones are due."""
        if self._form.fp8.scales == "plain":
            return
        known, which = np.unique(self._table.scales[:INFINITY], return_index=True)
        at = np.minimum(np.searchsorted(known, scales.reshape(-1)), len(known) - 1)
        made_for = self._form.ranges[which[at]]
        made_for[known[at] != scales.reshape(-1)] = 0
        self._made_for = made_for.reshape(self._largest.shape)

    def _flat(self, place: Box, indices: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Where elements of a part of the tensor lie in this piece."""
        offset = [a - b for a, b in zip(place.offset, self.box.offset, strict=True)]
        across = np.unravel_index(indices.astype(np.int64), place.sizes)
        moved = tuple(at + begin for at, begin in zip(across, offset, strict=True))
        return np.ravel_multi_index(moved, self.box.sizes).astype(np.uint32)

    def follow(self, changes: Sequence[tuple[Box, Changes]]) -> None:
        """Quantise what has changed: the places in which the indices count, and the bits before."""
        flat = np.concatenate([self._flat(place, old.indices) for place, old in changes])
        before = np.concatenate([old.values for _, old in changes])
        new, stale = self.source.gather(0, flat), np.zeros(self._largest.shape, np.bool_)
        quantising.touch(flat, before, new, self._grid, self._columns, self._largest, stale)
        for down, across in np.argwhere(stale).tolist():
            self._largest[down, across] = 0
            for start, stop, some in self._block(down, across):
                block = np.ascontiguousarray(self._rows(start, stop)[:, some])
                quantising.largest(block, self._alone, 0, self._largest[down : down + 1, across : across + 1])
        anew = self._rescale()
        factors = self._factors()
        for down, across in anew.tolist():
            factor = factors[down : down + 1, across : across + 1]
            for start, stop, some in self._block(down, across):
                block = np.ascontiguousarray(self._rows(start, stop)[:, some])
                codes = np.empty(block.shape, np.uint8)
                quantising.quantise(block, self._alone, 0, factor, self._table.how, codes)
                self._matrix[start:stop, some] = codes
        quantising.requantise(flat, new, self._grid, self._columns, factors, self._table.how, self._matrix)

    @property
    def _alone(self) -> BlockGrid:
        """The grid of one block that is read alone."""
        return BlockGrid(self._grid.rows, self._grid.columns, self._grid.rows)

    def _block(self, down: int, across: int) -> Iterator[tuple[int, int, slice]]:
        """The rows and columns of a block, some rows at a time."""
        rows, columns, height = self._grid
        matrix, row = divmod(down, -(-height // rows))
        begin = matrix * height + row * rows
        end = matrix * height + min((row + 1) * rows, height)
        step = max(1, SEGMENT // self._columns)
        for start in range(begin, end, step):
            yield start, min(start + step, end), slice(across * columns, (across + 1) * columns)


class Quantised(Mapping[str, Bits]):
    """A view of live weights: what is quantised as codes and scales in memory, all else as it is in the weights.

    A mapping of names to tensors that can be published as it is. `look` brings it up to the weights; nothing else
    changes it.

    Args:
        fp8: What the view is.
        weights: A torch module, or a mapping of name to tensor, whose memory it goes on to read.
        whole: Whether these are all weights of a model, of which some can be quantised.

    Raises:
        ValueError: The view cannot quantise these weights.

    Attributes:
        fp8: As given.
        layout: The tensors by name, and which names are tied.
    """

    def __init__(self, fp8: Fp8, weights: Any, *, whole: bool = True) -> None:
        source = layout(weights)
        self.fp8, self._form = fp8, ViewFormat(fp8)
        self._parts: dict[str, list[_Part]] = {}
        found: dict[str, Bits] = {}
        for name, bits in source.items():
            if not self._form.quantises(name, bits.shape):
                found[name] = bits
                continue
            if bits.dtype != "BF16":
                raise ValueError(
                    f"tensor {name!r}: expected bfloat16 to quantise, found {bits.dtype}: publish with cast='bfloat16'"
                )
            try:
                self._add(name, bits, found)
            except ValueError as error:
                raise ValueError(f"tensor {name!r}: {error}") from None
        if whole and not self._parts:
            raise ValueError(f"expected matrices to quantise, named ….weight, found none in {len(source)} tensors")
        self.layout = Layout(sorted(found.items()), source.tied)

    def _add(self, name: str, bits: Bits, found: dict[str, Bits]) -> None:
        form, shape = self._form, bits.shape
        scale_name, scale_shape = form.scale_name(name), form.scale_shape(shape)
        pieces = [(piece, form.blocks(piece.box, shape)) for piece in pieces_of(bits)]
        parts = self._parts[name] = [_Part(form, piece, blocks) for piece, blocks in pieces]
        if not isinstance(bits, Pieces):
            found[name] = HostBits("F8_E4M3", parts[0].codes)
            found[scale_name] = HostBits(form.table.dtype, parts[0].scales.reshape(scale_shape))
            return
        codes, scales = [], []
        for (piece, blocks), part in zip(pieces, parts, strict=True):
            codes.append(Piece(piece.box, HostBits("F8_E4M3", part.codes), piece.times))
            # One scale for all has fewer dimensions than the blocks.
            place = (
                blocks if len(scale_shape) == len(shape) else Box(blocks.offset[:-2] or (0,), blocks.sizes[:-2] or (1,))
            )
            scales.append(Piece(place, HostBits(form.table.dtype, part.scales.reshape(place.sizes)), piece.times))
        found[name] = Pieces("F8_E4M3", 1, shape, codes)
        found[scale_name] = Pieces(form.table.dtype, form.scale_itemsize, scale_shape, scales)

    def look(self) -> "Quantised":
        """Quantise all weights as they are now.

        Returns:
            Itself.
        """
        for _ in ordered_map(_Part.look, [part for parts in self._parts.values() for part in parts]):
            pass
        return self

    def go_on(self, before: Mapping[str, Bits]) -> None:
        """Have sticky scales go on from those of the version before; before the first `look`.

        Args:
            before: The tensors of that version, of which these may be a part.
        """
        for name, parts in self._parts.items():
            scales = self._form.scale_name(name)
            for part, piece in zip(parts, pieces_of(self.layout[scales]), strict=True):
                held = place_view(before[scales], piece.box)
                part.go_on(held.read(0, held.size))

    def follow(self, changes: Iterable[tuple[str, Box, Changes]]) -> None:
        """Quantise what has changed since the last look, and look at nothing else.

        Args:
            changes: Of each part of a tensor that changed, its name and place, and the bits that it held before.
        """
        found: dict[_Part, list[tuple[Box, Changes]]] = {}
        for name, place, old in changes:
            if len(old.indices) and name in self._parts:
                part = next(part for part in self._parts[name] if place.inside(part.box))
                found.setdefault(part, []).append((place, old))
        for _ in ordered_map(lambda item: item[0].follow(item[1]), found.items()):
            pass

    def config(self) -> dict[str, Any]:
        """Describe it as checkpoints do.

        Returns:
            The `quantization_config` of a config.json.
        """
        scales = {self._form.scale_name(name) for name in self._parts}
        return self._form.config({name: bits.shape for name, bits in self.layout.items() if name not in scales})

    def __getitem__(self, name: str) -> Bits:
        return self.layout[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)
