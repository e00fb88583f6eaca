"""The sweep: each version of a segment is compared with those 1, 2, 4, … 32 strides before.

Only the versions still needed for a comparison are held, so memory does not grow with the number of versions. Segments
are counted in parallel; their counts add up to those of a tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import BoundedSemaphore

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray, field_of
from pulse_rl.kernels.cpu.study import count_differing, count_exponents
from pulse_rl.parallel import ordered_map
from pulse_rl.study.measure.tally import Counts, Tally, empty_tally, tally
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.sources.base import StudySource
from pulse_rl.weights.segments import SEGMENT, segments

HELD_NBYTES = 128 << 20  # of versions, held by all threads together, unless a single thread needs more


@dataclass(frozen=True)
class Counted:
    """What was counted of one segment, or of several of one dtype."""

    steps: list[Tally]  # as Timeline.steps
    differing: Counts  # elements with other bits, (pairs,), as Timeline.pairs
    times: Counts  # elements by how often they changed in the longest chain of steps, (its length + 1,)
    returned: int  # elements that changed in that chain and have their first bits again at its end

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(
            [a + b for a, b in zip(self.steps, other.steps, strict=True)],
            self.differing + other.differing,
            self.times + other.times,
            self.returned + other.returned,
        )


def nothing_counted(timeline: Timeline, dtype: str) -> Counted:
    """The counts of no elements."""
    times = np.zeros(timeline.chain_steps + 1, np.int64)
    return Counted([empty_tally(dtype)] * len(timeline.steps), np.zeros(len(timeline.pairs), np.int64), times, 0)


def count_tensors(
    source: StudySource, timeline: Timeline, progress: Callable[[int, int], object] = lambda done, total: None
) -> Iterator[tuple[str, Counted]]:
    """Count every tensor, in canonical order.

    progress: called with the number of elements counted, and of all elements.
    """
    widest = max((tensor.itemsize for tensor in source.tensors.values()), default=1)
    slots = BoundedSemaphore(max(1, HELD_NBYTES // (timeline.held * SEGMENT * widest)))
    work = ((name, *run) for name, tensor in source.tensors.items() for run in segments(tensor.size))

    def count(item: tuple[str, int, int]) -> Counted:
        with slots:
            return count_segment(timeline, source.tensors[item[0]].dtype, source.walk(*item))

    counted = ordered_map(count, work)
    total, done = sum(tensor.size for tensor in source.tensors.values()), 0
    for name, tensor in source.tensors.items():
        sums = nothing_counted(timeline, tensor.dtype)
        for start, stop in segments(tensor.size):
            sums = sums + next(counted)
            done += stop - start
            progress(done, total)
        yield name, sums


def count_segment(timeline: Timeline, dtype: str, versions: Iterable[UIntArray]) -> Counted:
    """Count one segment. versions: its bits in each version, in order, (n,) each."""
    sweep = _Sweep(timeline, dtype)
    for place, bits in enumerate(versions):
        sweep.advance(place, bits)
    return Counted(sweep.steps, np.array(sweep.differing, np.int64), sweep.chain.times, sweep.chain.returned)


class _Sweep:
    """One pass over the versions of a segment. Versions are named by their places in the timeline."""

    def __init__(self, timeline: Timeline, dtype: str) -> None:
        self.steps: list[Tally] = []
        self.differing: list[int] = []
        self.chain = _Chain(timeline)
        self._timeline, self._dtype, self._kind = timeline, dtype, field_of(dtype)
        self._held: dict[int, UIntArray] = {}  # versions that later ones are compared with
        self._elements: dict[int, Counts] = {}  # by version that a step led to: its elements by exponent, (E,)

    def advance(self, place: int, bits: UIntArray) -> None:
        """The next version: compare it with earlier ones as the timeline says, then drop those no longer needed."""
        self._held[place] = bits
        self.chain.begin(place, bits)
        for k, base in self._timeline.bases[place].items():
            if k == 1:
                self._count_step(base, place)
            else:
                self.differing.append(count_differing(self._held[base], bits))
        self.chain.end(place, bits)
        self._held = {base: old for base, old in self._held.items() if self._timeline.last_use[base] > place}

    def _count_step(self, base: int, target: int) -> None:
        old, new = self._held[base], self._held[target]
        former = self._timeline.bases[base].get(1)  # the version a step before base
        elements = self._elements.pop(base, None)
        if elements is None:
            elements = count_exponents(old, self._kind)
        step, indices, self._elements[target] = tally(
            self._dtype, elements, None if former is None else self._held[former], old, new
        )
        self.steps.append(step)
        self.differing.append(len(indices))
        self.chain.count(target, indices)


class _Chain:
    """How often each element changes in the timeline's longest chain of steps."""

    def __init__(self, timeline: Timeline) -> None:
        self.times: Counts = np.zeros(timeline.chain_steps + 1, np.int64)
        self.returned = 0
        self._first, self._last = timeline.chain
        self._opening: UIntArray = np.empty(0)  # the bits of the chain's first version
        self._changes: NDArray[np.uint32] = np.empty(0, np.uint32)  # of each element since then

    def begin(self, place: int, bits: UIntArray) -> None:
        """At the chain's first version nothing has changed yet."""
        if place == self._first:
            self._opening, self._changes = bits, np.zeros(len(bits), np.uint32)
            self.times[0] = len(bits)

    def count(self, target: int, indices: NDArray[np.uint32]) -> None:
        """A step to target changed the elements at indices (k,): each moves to the next column of times."""
        if self._first < target <= self._last:
            before = self._changes[indices]
            leaving = np.bincount(before, minlength=len(self.times))
            self.times += np.roll(leaving, 1) - leaving  # nothing leaves the last column
            self._changes[indices] = before + 1

    def end(self, place: int, bits: UIntArray) -> None:
        """At the chain's last version: of the elements that changed, count those with their first bits."""
        if place == self._last:
            self.returned = int(self.times[1:].sum()) - count_differing(self._opening, bits)
