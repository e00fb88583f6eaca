"""The mean of what all trainers send of a fragment: the same bits on every rank, by one of two methods.

**gather**: every rank gets every payload and adds them up itself, so (W − 1) · P come in, where P is a payload.
**split**: every rank gets what all send of one range of segments, adds that up, and all gather the means, so
(W − 1) / W · (P + U) come in, where U is the union of all payloads. By that formula split is better when
W > 1 + U / P. `choose` assumes that the ranks' sends are independent: of n elements rank r sends k_r, so the union has
n · (1 − Π(1 − k_r / n)); each of these takes the bits of a float32 value, each sent one those of its dtype. Both
methods add in rank order from +0 in float32 and divide by W once (`sums`), so they agree to the bit. What a round holds
are sends and means, both sparse.

Decoding and adding up can fail on one rank alone: so each such phase ends in one small report from every rank, and when
one cannot go on, none does (`fail_together`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np

from pulse_rl.errors import ExchangeError, FormatError, translate
from pulse_rl.group.collectives import Group
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import payload
from pulse_rl.loco.gate import cast
from pulse_rl.loco.payload import Coding, Decoder, Sent, SharedSegment
from pulse_rl.loco.sums import Mean, sum_of
from pulse_rl.parallel import ordered_map

Exchange: TypeAlias = Literal["auto", "gather", "split"]
EXCHANGES: tuple[str, ...] = get_args(Exchange)
FAILURE_CHARACTERS = 1000  # of an error's text, as one rank reports it to the others
FAILURE_NBYTES = 1 << 16
SENT_BITS = {"log8": 5, "bfloat16": 13, "float32": 29}  # about, of an element with its position: as measured


class Fragment(NamedTuple):
    """What one rank exchanges at once: what it sends of a run of segments, and how that is encoded."""

    sent: Sequence[Sent]  # of each segment
    segments: Sequence[SharedSegment]
    coding: Coding

    def only(self, numbers: range) -> "Fragment":
        """These segments alone."""
        return self._replace(sent=[self.sent[i] for i in numbers], segments=[self.segments[i] for i in numbers])

    def of_means(self, means: Sequence[Mean] = ()) -> "Fragment":
        """Means of the same segments: they are exchanged as float32, being no values of any narrower dtype."""
        gate = self.coding.gate
        segments = [each._replace(bits=cast(each.shared, gate).copy()) for each in self.segments]
        return Fragment([mean.sparse() for mean in means], segments, self.coding._replace(value_dtype="float32"))

    @property
    def limit(self) -> int:
        """The most bytes that a payload of these segments may have."""
        return payload.limit([segment.size for segment in self.segments])

    def encode(self) -> bytes:
        """What is sent as a payload; no bytes where there are no segments."""
        return payload.encode(self.sent, self.segments, self.coding) if self.segments else b""


class Timings:
    """Seconds by part and bytes of one round, added up as it goes on.

    clock: seconds, as time.perf_counter gives them. stalled: seconds in which the inner loop waited, for parts of a
    round or for all of it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._now = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self.stalled = 0.0
        self.start()

    def start(self) -> None:
        """Count time from now on."""
        self._begun = self._now()

    def spent(self, part: str) -> None:
        """Add the time since the last call to this part."""
        now = self._now()
        self.seconds[part] += now - self._begun
        self._begun = now


class Failure(msgspec.Struct, frozen=True):
    """Why a rank cannot go on, as it reports it to the others."""

    at_fault: tuple[int, ...]  # the ranks whose payload it could not read; itself for any other error
    error: str


def choose(counts: Sequence[int], elements: int, value_dtype: str) -> Literal["gather", "split"]:
    """The method with fewer bytes to receive, from each rank's number of sends and the number of elements."""
    payload = SENT_BITS[value_dtype] * sum(counts) / len(counts)
    union = SENT_BITS["float32"] * elements * (1 - float(np.prod([1 - count / elements for count in counts])))
    return "split" if payload and len(counts) > 1 + union / payload else "gather"


def gather(group: Group, fragment: Fragment, timings: Timings) -> list[Mean]:
    """Every rank gets every payload and adds up all segments."""
    with report_failure(group, lengths=1):
        mine = fragment.encode()
    timings.spent("encode")
    payloads = group.gather(mine, fragment.limit)
    timings.spent("exchange")
    timings.sent_nbytes += len(mine)
    timings.received_nbytes += sum(map(len, payloads)) - len(mine)
    with fail_together(group):
        means = add_up(dict(enumerate(payloads)), fragment, group.rank)
        timings.spent("decode")
    timings.spent("exchange")
    return means


def split(group: Group, fragment: Fragment, timings: Timings) -> list[Mean]:
    """Every rank adds up one range of segments, then all gather the means."""
    limit = fragment.limit
    ranges = owned(fragment.segments, group.size)
    own = fragment.only(ranges[group.rank])

    # 1. Each rank sends, of each range, its payload to the range's owner.
    with report_failure(group, lengths=group.size):
        outgoing = [fragment.only(numbers).encode() for numbers in ranges]
    timings.spent("encode")
    incoming = group.all_to_all(outgoing, limit)
    timings.spent("exchange")

    # 2. The owner adds up all payloads of its range, and encodes the means as one more payload.
    with fail_together(group):
        means = add_up(dict(enumerate(incoming)), own, group.rank)
        timings.spent("decode")
        encoded = own.of_means(means).encode()
        timings.spent("encode")

    # 3. All gather all means.
    gathered = group.gather(encoded, limit)
    timings.spent("exchange")
    timings.sent_nbytes += sum(map(len, outgoing)) - len(outgoing[group.rank]) + len(encoded)
    timings.received_nbytes += sum(map(len, incoming)) - len(incoming[group.rank])
    timings.received_nbytes += sum(map(len, gathered)) - len(encoded)

    # 4. Each rank decodes the others' means.
    with fail_together(group):
        by_range = [
            means if rank == group.rank else _decode_means(rank, gathered[rank], fragment.only(numbers))
            for rank, numbers in enumerate(ranges)
        ]
        timings.spent("decode")
    timings.spent("exchange")
    return [mean for each in by_range for mean in each]


def dense(group: Group, values: F32, timings: Timings) -> F32:
    """The mean of float32 values (k,) over all ranks, in rank order: DiLoCo's exchange.

    Each rank adds up a range and all gather the means, as a ring all-reduce does and with its bytes, but in an order
    that does not depend on who adds.
    """
    width = -(-len(values) // group.size)
    padded = np.zeros((group.size, width), np.float32)
    padded.reshape(-1)[: len(values)] = values
    timings.spent("encode")
    rows = group.all_to_all_floats(padded)
    timings.spent("exchange")
    total = np.zeros(width, np.float32)
    for row in rows:
        total += row
    total /= np.float32(group.size)
    timings.spent("decode")
    found = group.gather_floats(total).reshape(-1)[: len(values)]
    timings.spent("exchange")
    return found


@contextmanager
def report_failure(group: Group, lengths: int) -> Iterator[None]:
    """Run work of this rank that precedes a `gather` (1 length) or `all_to_all` (W): if it fails, they report it."""
    try:
        yield
    except Exception:
        group.report_failure(lengths)
        raise


@contextmanager
def fail_together(group: Group) -> Iterator[None]:
    """Run each rank's own work, without collectives; afterwards all know whether a rank failed. A collective.

    Raises what was raised here; on all other ranks ExchangeError with the ranks at fault: those whose payload could not
    be read, or the one that failed.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        mine = error
    failure = b""
    if mine is not None:
        at_fault = mine.ranks if isinstance(mine, ExchangeError) else (group.rank,)
        failure = msgspec.msgpack.encode(Failure(at_fault, f"{type(mine).__name__}: {mine}"[:FAILURE_CHARACTERS]))
    reports = group.gather(failure, FAILURE_NBYTES)
    if mine is not None:
        raise mine
    failures = {rank: _decode_failure(rank, report) for rank, report in enumerate(reports) if report}
    if failures:
        rank, found = next(iter(failures.items()))
        at_fault = tuple(sorted({fault for each in failures.values() for fault in each.at_fault}))
        raise group.rank_failed(rank, found.error, at_fault=at_fault)


def owned(segments: Sequence[SharedSegment], ranks: int) -> list[range]:
    """The segments that each rank adds up: runs of about equally many elements, some empty if segments are few."""
    sizes = np.array([segment.size for segment in segments])
    middles = np.cumsum(sizes) - sizes / 2
    owners = (middles * ranks / sizes.sum()).astype(np.int64)
    cuts = np.searchsorted(owners, np.arange(ranks + 1)).tolist()
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def sent_by(rank: int) -> AbstractContextManager[None]:
    """Decode a rank's bytes: whatever is wrong with them (header, codec, zstd) becomes ExchangeError with that rank."""
    return translate(
        FormatError,
        msgspec.DecodeError,
        to=lambda text: ExchangeError(f"rank {rank}: {text}", ranks=(rank,)),
    )


def add_up(payloads: Mapping[int, memoryview], mine: Fragment, rank: int | None) -> list[Mean]:
    """The mean of these segments over payloads by rank, added in rank order.

    rank: this one, whose sends need no decoding; None where they do not count. Raises ExchangeError with the rank whose
    payload cannot be read, and FloatingPointError for a mean that overflows.
    """
    if not mine.segments:
        return []
    decoders = {
        sender: [] if sender == rank else _open(sender, data, mine) for sender, data in sorted(payloads.items())
    }

    def add(number: int) -> Mean:
        total = sum_of(mine.segments[number], mine.coding)
        for sender, decode in decoders.items():
            with sent_by(sender):
                total.add(mine.sent[number] if sender == rank else decode[number]())
        return total.mean(len(decoders))

    return list(ordered_map(add, range(len(mine.segments))))


def _open(rank: int, data: memoryview, fragment: Fragment) -> list[Decoder]:
    with sent_by(rank):
        return payload.open_payload(data, fragment.segments, fragment.coding)


def _decode_means(rank: int, data: memoryview, part: Fragment) -> list[Mean]:
    """The means of the range that another rank added up."""
    if not part.segments:
        return []
    with sent_by(rank):
        means = part.of_means()
        return [Mean(*sends) for sends in payload.decode(data, means.segments, means.coding)]


def _decode_failure(rank: int, data: memoryview) -> Failure:
    with sent_by(rank):
        return msgspec.msgpack.decode(data, type=Failure)
