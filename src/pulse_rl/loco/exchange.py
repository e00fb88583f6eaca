"""The mean of what all trainers send of a fragment: the same bits on every rank, by either of two ways.

**gather**: every rank gets every payload and adds them up itself, so (W − 1) · P come in, where P is a payload.
**split**: every rank gets what all send of its own range of segments, adds that up, and all gather the sums, so
(W − 1) / W · (P + U) come in, where U is the union of all payloads. By that formula the split is better when
W > 1 + U / P. `choose` takes k_r sends of rank r, of n elements, for independent: U = n · (1 − Π(1 − k_r / n)). Both
ways add in rank order from +0 in float32 and divide by W once, so they agree to the bit. A dense copy exists only of
the segment that is being added up; what a round holds are sends and means, both sparse.

What a rank does with the payloads it got is its own, and may fail there alone: so each such part ends in one number
from every rank, and where one cannot go on, none does (`together`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError, FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import payload
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.group import Group, could_not_go_on
from pulse_rl.loco.payload import Span
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.changes import find_changes

Exchange: TypeAlias = Literal["auto", "gather", "split"]
EXCHANGES: tuple[str, ...] = get_args(Exchange)
ACCOUNT = 4000  # bytes of what a rank that cannot go on tells the others
EXPONENT = np.uint32(0x7F800000)  # of an infinity or NaN, all ones


class BrokenPayloadError(FormatError):
    """A payload that cannot be read. rank: whose it is."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class BlamedError(ExchangeError):
    """Another rank could not read this one's payload."""


class Mean(NamedTuple):
    """The mean pseudo-gradient of one segment: sparse, or dense where that is smaller."""

    indices: NDArray[np.uint32] | None  # (k,); None: values are all (n,)
    values: F32

    def dense(self, size: int) -> F32:
        """All of it, (size,). Scratch: good until this thread's next call."""
        if self.indices is None:
            return self.values
        found: F32 = cpu.buffer("mean", size, np.float32)[:size]
        found.fill(0)
        found[self.indices] = self.values
        return found


class Work:
    """Seconds by part and bytes of one round, as they add up.

    stalled: seconds of the inner loop, which waits for parts of a round or for all of it.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sent = 0
        self.received = 0
        self.stalled = 0.0
        self.start()

    def start(self) -> None:
        """Time counts from now on."""
        self._clock = time.perf_counter()

    def spent(self, part: str) -> None:
        """The time since the last call went into this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._clock
        self._clock = now


def choose(counts: Sequence[int], elements: int) -> Literal["gather", "split"]:
    """The way with fewer bytes to receive, from each rank's number of sends of so many elements."""
    mean = sum(counts) / len(counts)
    union = elements * (1 - float(np.prod([1 - count / elements for count in counts])))
    return "split" if mean and len(counts) > 1 + union / mean else "gather"


def gather(
    group: Group, sends: Sequence[Sends], spans: Sequence[Span], gate: str, value_dtype: str, work: Work
) -> list[Mean]:
    """Every rank gets every payload."""
    with _own(group, 1):
        mine = payload.encode(sends, spans, gate, value_dtype)
    work.spent("encode")
    found = group.gather(mine, payload.limit(spans))
    work.spent("exchange")
    work.sent += len(mine)
    work.received += sum(map(len, found)) - len(mine)
    with together(group):
        means = _means(group, found, sends, spans, gate, value_dtype)
        work.spent("decode")
    work.spent("exchange")
    return means


def split(
    group: Group, sends: Sequence[Sends], spans: Sequence[Span], gate: str, value_dtype: str, work: Work
) -> list[Mean]:
    """Every rank adds up its own range of segments."""
    ranges = owned(spans, group.size)
    with _own(group, group.size):
        pieces = [
            payload.encode([sends[i] for i in r], [spans[i] for i in r], gate, value_dtype) if r else b""
            for r in ranges
        ]
    work.spent("encode")
    limit = payload.limit(spans)
    found = group.swap(pieces, limit)
    work.spent("exchange")
    own = ranges[group.rank]
    mine, reduced = [spans[i] for i in own], b""
    with together(group):
        if own:
            sums = _means(group, found, [sends[i] for i in own], mine, gate, value_dtype)
            work.spent("decode")
            sparse = [_sparse(mean) for mean in sums]
            reduced = payload.encode(sparse, mine, gate)
        work.spent("encode")
    gathered = group.gather(reduced, limit)
    work.spent("exchange")
    work.sent += sum(map(len, pieces)) - len(pieces[group.rank]) + len(reduced)
    work.received += sum(map(len, found)) - len(found[group.rank]) + sum(map(len, gathered)) - len(reduced)
    means: list[Mean] = []
    with together(group):
        for rank, r in enumerate(ranges):
            if rank == group.rank:
                means += sums if own else []
            elif r:
                with _blamed(rank):
                    decoders = payload.open_payload(gathered[rank], [spans[i] for i in r], gate)
                    means += ordered_map(lambda decode: Mean(*decode()), decoders)
        work.spent("decode")
    work.spent("exchange")
    return means


def dense(group: Group, values: F32, work: Work) -> F32:
    """The mean of float32 values (k,) over all ranks, in rank order: the dense baseline's exchange.

    Each rank adds up a range and all gather the sums, as a ring all-reduce does and with its bytes, but in an order
    that does not depend on who adds.
    """
    width = -(-len(values) // group.size)
    padded = np.zeros((group.size, width), np.float32)
    padded.reshape(-1)[: len(values)] = values
    work.spent("encode")
    rows = group.swap_floats(padded)
    work.spent("exchange")
    total = np.zeros(width, np.float32)
    for row in rows:
        total += row
    total /= np.float32(group.size)
    work.spent("decode")
    found = group.gather_floats(total).reshape(-1)[: len(values)]
    work.spent("exchange")
    return found


@contextmanager
def _own(group: Group, numbers: int) -> Iterator[None]:
    """Work of this rank alone, before a `gather` or `swap`: where it fails the others learn of it there."""
    try:
        yield
    except Exception:
        group.give_up(numbers)
        raise


@contextmanager
def together(group: Group) -> Iterator[None]:
    """Each rank does its own work, without collectives; then all know whether one could not. A collective.

    Raises what was raised here, and ExchangeError, naming the rank and its error, on all ranks that were fine; on one
    whose payload was broken it is a BlamedError.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        mine = error
    blamed = mine.rank if isinstance(mine, BrokenPayloadError) else -1
    account = f"{blamed} {type(mine).__name__}: {mine}"[: ACCOUNT // 4].encode() if mine else b""
    told = [bytes(one).decode(errors="replace") for one in group.gather(account, ACCOUNT)]
    if mine is not None:
        raise mine
    failed = [(rank, *one.partition(" ")) for rank, one in enumerate(told) if one]
    for rank, accused, _, why in failed:
        if accused == str(group.rank):
            raise BlamedError(could_not_go_on(rank, why))
    for rank, _, _, why in failed:
        raise ExchangeError(could_not_go_on(rank, why))


def owned(spans: Sequence[Span], ranks: int) -> list[range]:
    """Which segments each rank adds up: runs of about equally many elements, some empty if there are few segments."""
    middles = np.cumsum([span.size for span in spans]) - np.array([span.size for span in spans]) / 2
    owners = (middles * ranks / sum(span.size for span in spans)).astype(np.int64)
    cuts = np.searchsorted(owners, np.arange(ranks + 1)).tolist()
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _means(
    group: Group,
    payloads: Sequence[memoryview],
    sends: Sequence[Sends],
    spans: Sequence[Span],
    gate: str,
    value_dtype: str,
) -> list[Mean]:
    """Add up these segments' payloads of all ranks, in rank order; this rank's own sends need no decoding."""
    opened: list[list[Callable[[], Sends]] | None] = []
    for rank, data in enumerate(payloads):
        with _blamed(rank):
            opened.append(None if rank == group.rank else payload.open_payload(data, spans, gate, value_dtype))

    def add(number: int) -> Mean:
        size = spans[number].size
        total: F32 = cpu.buffer("total", size, np.float32)[:size]
        total.fill(0)
        for rank, decoders in enumerate(opened):
            with _blamed(rank):
                loco.add(total, *(sends[number] if decoders is None else decoders[number]()))
        np.divide(total, np.float32(group.size), out=total)
        changes = find_changes(np.zeros(size, np.uint32), total.view(np.uint32))
        if (changes.values & EXPONENT == EXPONENT).any():
            raise FloatingPointError("expected sums that float32 can hold, found an infinity in a mean pseudo-gradient")
        if 2 * len(changes.indices) > size:
            return Mean(None, total.copy())
        return Mean(changes.indices, changes.values.view(np.float32))

    return list(ordered_map(add, range(len(spans))))


@contextmanager
def _blamed(rank: int) -> Iterator[None]:
    """A payload that is broken says whose it is."""
    try:
        yield
    except FormatError as error:
        raise BrokenPayloadError(rank, f"rank {rank}: {error}") from error


def _sparse(mean: Mean) -> Sends:
    if mean.indices is None:
        return Sends(np.arange(len(mean.values), dtype=np.uint32), mean.values)
    return Sends(mean.indices, mean.values)
