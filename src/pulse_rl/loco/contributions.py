"""What a trainer contributes to a round: sparse sends (PULSELoCo), or its whole pseudo-gradient (DiLoCo).

Sends are found for all segments before anything is exchanged. A dense pseudo-gradient is computed when it is needed, a
fragment at a time, so that no copy of all of it is held.
"""

from collections.abc import Sequence

import numpy as np

from pulse_rl.group.collectives import Group
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.classes import classes_of
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import exchange, log8
from pulse_rl.loco.exchange import Exchange, Fragment, Timings
from pulse_rl.loco.gate import Sends, cast, find_sends
from pulse_rl.loco.masters import Masters, MasterSegment
from pulse_rl.loco.payload import NO_BITS, NO_CLASSES, Coding, Sent, SharedSegment, in_order, rounded
from pulse_rl.loco.sums import Mean
from pulse_rl.weights.segments import map_segments

NO_SENDS = Sends(np.empty(0, np.uint32), np.empty(0, np.float32))


class Contribution:
    """How one trainer takes part in the exchange of a round.

    turn: of this trainer's phases, see `log8`. `sends` are of all segments, as `find` gives them.
    """

    def __init__(self, masters: Masters, coding: Coding, turn: int, method: Exchange) -> None:
        self._masters = masters
        self._coding = coding
        self._turn = turn
        self._method = method
        self._dense = coding.value_dtype == "dense"

    def find(self) -> list[Sends]:
        """What to send of each segment; an empty list if all of it.

        Raises FloatingPointError for a pseudo-gradient with an infinity or NaN.
        """
        sends: list[Sends] = []
        segments = self._masters.segments
        each = map_segments(self._find, segments, self._masters.sizes)
        for segment, found in zip(segments, each, strict=True):
            if found is None:
                raise FloatingPointError(
                    f"expected finite numbers in the pseudo-gradient of {segment.name!r}, found an infinity or NaN"
                )
            sends.append(found)
        return [] if self._dense else sends

    def counts(self, sends: list[Sends]) -> list[int]:
        """How many elements of each fragment are sent."""
        sizes = [len(each.indices) for each in sends] or self._masters.sizes
        return [sum(sizes[number] for number in fragment) for fragment in self._masters.fragments]

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        """Exchange a fragment; returns the method and the mean of each of its segments. counts: of each rank."""
        mine = self.fragment(fragment, sends)
        if self._dense:
            return "dense", exchange.mean_of_dense(group, mine, timings)
        elements = sum(segment.size for segment in mine.segments)
        auto = exchange.choose(counts, elements, self._coding.value_dtype)
        method = auto if self._method == "auto" else self._method
        return method, exchange.mean_of_sparse(group, mine, method, timings)

    def fragment(self, numbers: range, sends: list[Sends] | None) -> Fragment:
        """A fragment of these segments. sends: None where what this trainer sends is not needed."""

        def prepare(number: int) -> tuple[SharedSegment, list[Sent]]:
            segment = self._masters.segments[number]
            shared = self._shared(segment)
            if sends is None:
                return shared, []
            return shared, [self._gradient(segment) if self._dense else in_order(sends[number], shared, self._coding)]

        sizes = self._masters.sizes[numbers.start : numbers.stop]
        prepared = list(map_segments(prepare, numbers, sizes))
        return Fragment([one for _, sent in prepared for one in sent], [shared for shared, _ in prepared], self._coding)

    def _find(self, segment: MasterSegment) -> Sends | None:
        gate, value_dtype, scale = self._coding
        live = self._masters.live(segment)
        if segment.residual is None:
            scratch = cpu.buffer("mean", segment.size, np.float32)
            return NO_SENDS if loco.difference(segment.shared, live, scratch) else None
        state = segment.shared, live, segment.residual
        if value_dtype == "log8":
            seed = self._masters.seed(segment)
            return log8.find_sends(*state, gate, scale, seed=seed, start=segment.start, turn=self._turn)
        sends = find_sends(*state, gate, scale)
        return sends and sends._replace(values=rounded(sends.values, value_dtype))

    def _shared(self, segment: MasterSegment) -> SharedSegment:
        gate, value_dtype, scale = self._coding
        bits, classes = NO_BITS, NO_CLASSES
        if value_dtype == "log8":
            classes = classes_of(segment.shared, segment.momentum, loco.GRIDS[gate], scale)
        elif not self._dense:
            bits = cast(segment.shared, gate).copy()
        return SharedSegment(segment.shape, segment.start, segment.shared, bits, classes)

    def _gradient(self, segment: MasterSegment) -> F32:
        gradient = np.empty(segment.size, np.float32)
        loco.difference(segment.shared, self._masters.live(segment), gradient)
        return gradient
