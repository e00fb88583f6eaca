"""The pass: every version of a segment after the other, each compared with those 1, 2, 4, … 32 strides before.

So many versions of a segment are held and no more: memory does not grow with the number of versions. Segments run in
parallel, and what is counted of them adds up to what is counted of a tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import BoundedSemaphore

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray, field
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu.study import count_differing
from pulse_rl.parallel import ordered_map
from pulse_rl.study.measure.tally import Tally, nothing, tally
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.sources.base import Source
from pulse_rl.weights.segments import SEGMENT, segments

RING_NBYTES = 128 << 20  # that all threads hold of versions together, unless one needs more


@dataclass(frozen=True)
class Seen:
    """What was counted of one segment, or of several of one dtype."""

    steps: list[Tally]  # as Timeline.steps
    differing: NDArray[np.int64]  # elements with other bits, (pairs,), as Timeline.pairs
    times: NDArray[np.int64]  # elements by how often they changed in the longest run, (its steps + 1,)
    returned: int  # of those that changed in it, the ones that have their first bits again at its end

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(
            [a + b for a, b in zip(self.steps, other.steps, strict=True)],
            self.differing + other.differing,
            self.times + other.times,
            self.returned + other.returned,
        )


def unseen(timeline: Timeline, dtype: str) -> Seen:
    """What is counted of no elements."""
    times = np.zeros(timeline.run_steps + 1, np.int64)
    return Seen([nothing(dtype)] * len(timeline.steps), np.zeros(len(timeline.pairs), np.int64), times, 0)


def look(timeline: Timeline, dtype: str, versions: Iterable[UIntArray]) -> Seen:
    """Count everything of one segment: its bits in each version, in order, (n,) each."""
    kind = field(dtype)
    held: dict[int, UIntArray] = {}
    elements: dict[int, NDArray[np.int64]] = {}  # by exponent, of versions that steps have led to
    steps: list[Tally] = []
    differing: list[int] = []
    first, last = timeline.run
    opening: UIntArray = np.empty(0)  # the first version of the run
    often: NDArray[np.uint32] = np.empty(0, np.uint32)  # how often each element has changed since
    times, returned = np.zeros(timeline.run_steps + 1, np.int64), 0
    for place, bits in enumerate(versions):
        held[place] = bits
        if place == first:
            opening, often = bits, np.zeros(len(bits), np.uint32)
            times[0] = len(bits)
        for k, base in timeline.bases[place].items():
            old = held[base]
            if k > 1:
                differing.append(count_differing(old, bits))
                continue
            if base not in elements:
                elements[base] = moves.count_exponents(old, kind, 1)
            former = timeline.bases[base].get(1)
            counted, indices, elements[place] = tally(
                dtype, elements.pop(base), None if former is None else held[former], old, bits
            )
            steps.append(counted)
            differing.append(len(indices))
            if first < place <= last:
                before = often[indices]
                moving = np.bincount(before, minlength=len(times))
                times += np.roll(moving, 1) - moving  # the last column has none to leave it
                often[indices] = before + 1
        if place == last:
            returned = int(times[1:].sum()) - count_differing(opening, bits)
        held = {base: old for base, old in held.items() if timeline.last_use[base] > place}
    return Seen(steps, np.array(differing, np.int64), times, returned)


def survey(
    source: Source, timeline: Timeline, progress: Callable[[int, int], object] = lambda done, total: None
) -> Iterator[tuple[str, Seen]]:
    """Count everything of every tensor, in canonical order.

    progress: called with the elements that are done, and how many there are.
    """
    widest = max((tensor.itemsize for tensor in source.tensors.values()), default=1)
    room = BoundedSemaphore(max(1, RING_NBYTES // (timeline.held * SEGMENT * widest)))
    work = [(name, start, stop) for name, tensor in source.tensors.items() for start, stop in segments(tensor.size)]

    def each(item: tuple[str, int, int]) -> Seen:
        with room:
            return look(timeline, source.tensors[item[0]].dtype, source.walk(*item))

    found = ordered_map(each, work)
    total, done = sum(tensor.size for tensor in source.tensors.values()), 0
    for name, tensor in source.tensors.items():
        seen = unseen(timeline, tensor.dtype)
        for start, stop in segments(tensor.size):
            seen = seen + next(found)
            done += stop - start
            progress(done, total)
        yield name, seen
