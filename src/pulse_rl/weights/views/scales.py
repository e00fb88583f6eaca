"""The scales of all blocks of a view: which one is due to each, and which one it has.

With plain scales, a scale is that of the largest magnitude. With sticky ones it stays until that is above the magnitude
it was made for, or below `keep` of it. Of magnitudes with the same scale, the largest counts as the one that it was
made for: so the scales alone, as they were published, say how to go on.

With NVFP4, matrices that share a global scale are a *family*, and the global scale says what those of blocks are. When
it changes, they all begin anew. It cannot change unless a block changes that has, or had, the largest magnitude of the
family. Without global scales all blocks are one family.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.rules import RuleTable, global_table, rule_table, widen


class Scales:
    """The scales of all blocks of a view.

    shares: of each matrix its family and its blocks, in order; without global scales, any runs of blocks.

    largest: (blocks,) the largest magnitudes, as `rescale` finds them. bits: (blocks,) the scales, as they are stored;
    numbers: (blocks,) which one of its family's table each is. factors: (families, scales) of all tables. overall:
    (matrices,) the global scales.
    """

    def __init__(self, form: ViewFormat, shares: Sequence[tuple[int, slice]]) -> None:
        self._form, blocks = form, shares[-1][1].stop if shares else 0
        self._family_of = np.array([family for family, _ in shares], np.int64)
        self._ends = np.array([some.stop for _, some in shares], np.int64)
        families = int(self._family_of.max(initial=0)) + 1
        self._blocks: list[list[slice]] = [[] for _ in range(families)]
        for family, some in shares:
            self._blocks[family].append(some)
        self._tables, self._largest = [form.table] * families, np.zeros(families, np.uint16)
        self._globals = np.zeros(families, np.uint16)
        self.largest, self.bits = np.zeros(blocks, np.uint16), np.empty(blocks, UINTS[ITEMSIZES[form.table.dtype]])
        self.numbers = np.full(blocks, form.table.none)
        # As many as a table of E4M3 scales can have.
        self.factors = np.zeros((families, 256 if form.has_global else len(form.table.factors)), np.float32)
        for family in range(families):
            self._take(family, global_table().none)
        self.overall = np.empty(len(shares), UINTS[4])

    def by_family(self, blocks: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Some blocks, those of each family by themselves."""
        if not self._form.has_global:
            return [(0, blocks)]
        families = self._family_of[np.searchsorted(self._ends, blocks, "right")]
        order = np.argsort(families, kind="stable")
        found, starts = np.unique(families[order], return_index=True)
        return list(zip(found.tolist(), np.split(blocks[order], starts[1:]), strict=True)) if len(found) else []

    def may_change(self, family: int, blocks: NDArray[np.int64]) -> bool:
        """Whether the global scale of a family may, after these blocks have changed.

        The largest magnitude of a block that is to be looked for is at least what it is and what it was.
        """
        return self._form.has_global and bool(self.largest[blocks].max() >= self._largest[family])

    def rescale_all(self, families: Iterable[int]) -> set[int]:
        """Give families the global scales that are due, and their blocks new ones where these change.

        Returns the families whose global scale has changed.
        """
        table, changed = global_table(), set[int]()
        for family in families if self._form.has_global else ():
            self._largest[family] = max(self.largest[some].max() for some in self._blocks[family])
            mine = slice(family, family + 1)
            due = self._due(table, self._largest[mine], self._globals[mine])
            if due[0] != self._globals[family]:
                self._take(family, due[0])
                for some in self._blocks[family]:
                    self.numbers[some] = self._tables[family].none
                    self.rescale(family, some)
                changed.add(family)
        self.overall[:] = table.scales[self._globals[self._family_of]]
        return changed

    def _take(self, family: int, number: np.uint16) -> None:
        """Take a global scale."""
        table = rule_table(self._form.key, int(global_table().widest[number]))
        self._globals[family], self._tables[family] = number, table
        self.factors[family, : len(table.factors)] = table.factors

    def rescale(self, family: int, blocks: slice | NDArray[np.int64]) -> NDArray[np.bool_]:
        """Give blocks of a family the scales that are due. Returns which of them have got another one."""
        table, held = self._tables[family], self.numbers[blocks]
        due = self._due(table, self.largest[blocks], held)
        self.numbers[blocks], self.bits[blocks] = due, table.scales[due]
        changed: NDArray[np.bool_] = due != held
        return changed

    def _due(self, table: RuleTable, largest: NDArray[np.uint16], held: NDArray[np.uint16]) -> NDArray[np.uint16]:
        due: NDArray[np.uint16] = table.numbers[largest]
        if self._form.view.scales == "plain":
            return due
        wide, high = map(widen, (table.widest[held], largest))
        with np.errstate(invalid="ignore"):  # NaN
            stays = (high <= wide) & (high >= np.float32(self._form.view.keep) * wide)
        return np.where(stays, held, due)

    def go_on(self, family: int, blocks: slice, scales: UIntArray, overall: UIntArray | None) -> None:
        """Have these scales, as they were published, before the first are made.

        overall: the global scale (1,), where there is one.
        """
        if overall is not None:
            self._take(family, global_table().numbers_of(overall)[0])
        self.numbers[blocks] = self._tables[family].numbers_of(scales)
