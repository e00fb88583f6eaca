"""Parts of an object: neighbours by one request, several requests at once; the whole object where need be.

A request costs time and bytes cost time, so ranges with little between them are read together. What is read for
nothing is bounded twice: by the gap between two neighbours, and by a share of all that was asked for.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from pulse_rl.errors import CannotReadRangeError, StoreError
from pulse_rl.parallel import at_once
from pulse_rl.store.base import Store, up_to

GAP_NBYTES = 32 << 10  # about what a request costs: 10 ms at 25 Mbit/s
SPARE = 1 / 16
REQUEST_NBYTES = 8 << 20  # neighbours are not joined beyond this size, so that a large part goes by several requests
REQUESTS_AT_ONCE = 8


def is_empty(start: int, stop: int) -> bool:
    """Whether a range has no bytes. Raises ValueError if it is none."""
    if not 0 <= start <= stop:
        raise ValueError(f"expected a range of bytes, 0 ≤ start ≤ stop, found {start} to {stop}")
    return start == stop


def whole_range(store: Store, name: str, start: int, stop: int, found: memoryview) -> memoryview:
    """Return what a store has sent for a range. Raises StoreError if it is not of the range's size."""
    if len(found) != stop - start:
        raise wrong_size(store, name, start, stop, len(found))
    return found


class WrongSizeError(StoreError):
    """A range has another size than was asked for: the store is at fault, or the object ends early.

    Whoever reads the object whole then learns which, by its size and hash.
    """


def wrong_size(store: Store, name: str, start: int, stop: int, found: int) -> WrongSizeError:
    """The error of a range of `found` bytes."""
    return WrongSizeError(
        f"cannot read {name} in {store.url}: expected {stop - start} bytes from byte {start} on, found {found}",
        url=store.url,
        name=name,
    )


def cannot_read_range(store: Store, name: str) -> CannotReadRangeError:
    """The error of a store that reads objects only whole."""
    return CannotReadRangeError(
        f"cannot read a part of {name} in {store.url}: it sends objects only whole", url=store.url, name=name
    )


def read_range(store: Store, name: str, start: int, stop: int, *, most: int | None = None) -> memoryview:
    """Read a range from any store. most: as of `read_ranges`. Raises as `RangedStore.read_range`."""
    if getattr(store, "read_ranges", None) is not None:
        return read_ranges(store, name, [(start, stop)], most=most)[0]
    read: Callable[[str, int, int], memoryview] | None = getattr(store, "read_range", None)
    if is_empty(start, stop):
        return memoryview(b"")
    if read is None:
        raise cannot_read_range(store, name)
    return whole_range(store, name, start, stop, read(name, start, stop))


def read_ranges(
    store: Store,
    name: str,
    ranges: Sequence[tuple[int, int]],
    *,
    gap: int = GAP_NBYTES,
    spare: float = SPARE,
    most: int | None = None,
) -> list[memoryview]:
    """Read several ranges of an object, up to 8 requests at once.

    ranges: (start, stop) of each, in any order; they may overlap.
    gap: bytes; ranges that lie further apart are never read by one request. spare: of the bytes in all ranges, the
    share that may be read between them at most. The narrowest gaps are read first.
    most: the most bytes that the object may have, which is as much as a cache takes of it; None for as many as fit.

    From a store that reads objects only whole, the object is read once, up to the last byte that is needed. A store
    that has a method of this name reads them its own way.
    Returns the bytes of each range, as views of what the requests brought. Raises as `RangedStore.read_range`.
    """
    own: Callable[..., list[memoryview]] | None = getattr(store, "read_ranges", None)
    if own is not None:
        return own(name, ranges, gap=gap, spare=spare, most=most)
    wanted = [(start, stop) for start, stop in ranges if not is_empty(start, stop)]
    requests = plan_requests(wanted, gap, spare)
    try:
        bodies = at_once(lambda one: read_range(store, name, *one), requests, REQUESTS_AT_ONCE, "pulse-range")
    except CannotReadRangeError:
        last = max(stop for _, stop in wanted)
        front = memoryview(up_to(store.stream(name), last - 1))  # which is left early, and not downloaded to its end
        requests, bodies = [(0, last)], [whole_range(store, name, 0, last, front)]
    return cut_ranges(ranges, requests, bodies)


def cut_ranges(
    ranges: Sequence[tuple[int, int]], requests: list[tuple[int, int]], bodies: list[memoryview]
) -> list[memoryview]:
    """The bytes of each range, from what the planned requests brought."""
    starts = [start for start, _ in requests]

    def cut(start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        at = bisect_right(starts, start) - 1
        return bodies[at][start - starts[at] : stop - starts[at]]

    return [cut(start, stop) for start, stop in ranges]


def plan_requests(ranges: Sequence[tuple[int, int]], gap: int, spare: float) -> list[tuple[int, int]]:
    """The requests that bring these ranges, sorted; none overlaps another. Arguments as of `read_ranges`."""
    runs: list[tuple[int, int]] = []  # of ranges that overlap
    for start, stop in sorted(ranges):
        if runs and start < runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    left = spare * sum(stop - start for start, stop in runs)
    bridged = set()
    for width, after in sorted((runs[at][0] - runs[at - 1][1], at) for at in range(1, len(runs))):
        if width > min(gap, left):
            break
        left -= width
        bridged.add(after)
    requests: list[tuple[int, int]] = []
    for at, (start, stop) in enumerate(runs):
        if at in bridged and stop - requests[-1][0] <= REQUEST_NBYTES:
            requests[-1] = (requests[-1][0], stop)
        else:
            requests.append((start, stop))
    return requests
