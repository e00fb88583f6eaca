"""Segments: runs of a tensor that are compared, coded and applied independently, and so in parallel."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pulse_rl.parallel import batched, ordered_map

T = TypeVar("T")
R = TypeVar("R")

SEGMENT = 1 << 20  # elements: 2 MB of BF16, so that both sides of a comparison stay in the L2 and L3 caches


def segments(size: int) -> list[tuple[int, int]]:
    """Cut a tensor of `size` elements into ranges [start, stop) of at most SEGMENT elements."""
    return [(start, min(start + SEGMENT, size)) for start in range(0, size, SEGMENT)]


def map_segments(function: Callable[[T], R], items: Iterable[T], sizes: Iterable[int]) -> Iterator[R]:
    """As `ordered_map`, small segments together: to hand one over to a thread may take longer than its work.

    sizes: elements of each item. Raises ValueError if there are more items than sizes, or fewer.
    """

    def work(several: list[tuple[T, int]]) -> list[R]:
        return [function(item) for item, _ in several]

    for found in ordered_map(work, batched(zip(items, sizes, strict=True), lambda one: one[1], SEGMENT)):
        yield from found
