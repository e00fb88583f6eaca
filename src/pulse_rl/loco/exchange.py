"""The mean of what all trainers send of a fragment: the same bits on every rank, by one of two methods.

**gather**: every rank gets every payload and adds them up itself, so (W − 1) · P come in, where P is a payload.
**split**: every rank gets what all send of one range of segments, adds that up, and all gather the means, so
(W − 1) / W · (P + U) come in, where U is the union of all payloads. By that formula split is better when
W > 1 + U / P. `choose` assumes that the ranks' sends are independent: of n elements rank r sends k_r, so the union has
n · (1 − Π(1 − k_r / n)); each of these takes the bits of a float32 value, each sent one those of its dtype. Both
methods add in rank order from +0 in float32 and divide by W once (`sums`), so they agree to the bit. What a round holds
are sends and means, both sparse.

Encoding, decoding and adding up can fail on one rank alone: so each is the work of a step of `Ranks`, and when one
cannot go on, none does.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np

from pulse_rl.errors import ExchangeError, FormatError, translate
from pulse_rl.group.collectives import Group
from pulse_rl.group.ranks import Ranks
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import payload
from pulse_rl.loco.gate import Sends, cast
from pulse_rl.loco.payload import Coding, Decoder, Sent, SharedSegment
from pulse_rl.loco.sums import Mean, mean_of
from pulse_rl.weights.segments import map_segments

Exchange: TypeAlias = Literal["auto", "gather", "split"]
EXCHANGES: tuple[str, ...] = get_args(Exchange)
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
    def sizes(self) -> list[int]:
        """The elements of each segment."""
        return [segment.size for segment in self.segments]

    @property
    def limit(self) -> int:
        """The most bytes that a payload of these segments may have."""
        return payload.limit(self.sizes)

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

    def received(self, data: Sequence[memoryview], own: int) -> None:
        """Count what came from the other ranks, and the time since the last call as "exchange"."""
        self.received_nbytes += sum(map(len, data)) - len(data[own])
        self.spent("exchange")

    def spent(self, part: str) -> None:
        """Add the time since the last call to this part."""
        now = self._now()
        self.seconds[part] += now - self._begun
        self._begun = now


def choose(counts: Sequence[int], elements: int, value_dtype: str) -> Literal["gather", "split"]:
    """The method with fewer bytes to receive, from each rank's number of sends and the number of elements."""
    payload = SENT_BITS[value_dtype] * sum(counts) / len(counts)
    union = SENT_BITS["float32"] * elements * (1 - float(np.prod([1 - count / elements for count in counts])))
    return "split" if payload and len(counts) > 1 + union / payload else "gather"


def mean_of_sparse(
    group: Group, fragment: Fragment, method: Literal["gather", "split"], timings: Timings
) -> list[Mean]:
    """The mean of each segment of a fragment over what all ranks send. A collective."""
    ranks, limit, split = Ranks(group), fragment.limit, method == "split"
    everything = range(len(fragment.segments))
    ranges = owned(fragment.segments, group.size) if split else [everything] * group.size
    own = fragment.only(ranges[group.rank])

    # 1. Each rank sends its payload of each range to the range's owner; where all add up everything, to all.
    def encode() -> list[bytes]:
        data = [fragment.only(numbers).encode() for numbers in (ranges if split else [everything])]
        timings.spent("encode")
        timings.sent_nbytes += sum(map(len, data)) - (len(data[group.rank]) if split else 0)
        return data

    if split:
        incoming = ranks.exchange("encode what is sent", encode, limit)
    else:
        incoming = ranks.gather("encode what is sent", lambda: encode()[0], limit)
    timings.received(incoming, group.rank)

    # 2. The owner adds up all payloads of its range, and encodes the means as one more payload, which all gather.
    def add() -> tuple[list[Mean], bytes]:
        means = add_up(dict(enumerate(incoming)), own, group.rank)
        timings.spent("decode")
        encoded = own.of_means(means).encode() if split else b""
        timings.spent("encode")
        return means, encoded

    means, gathered = ranks.do_and_gather("add up what was sent", add, limit)
    timings.sent_nbytes += len(gathered[group.rank])
    timings.received(gathered, group.rank)
    if not split:
        return means

    # 3. Each rank decodes the others' means.
    def decode() -> list[Mean]:
        by_range = [
            means if rank == group.rank else _decode_means(rank, gathered[rank], fragment.only(numbers))
            for rank, numbers in enumerate(ranges)
        ]
        timings.spent("decode")
        return [mean for each in by_range for mean in each]

    found = ranks.do("decode the means", decode)
    timings.spent("exchange")
    return found


def mean_of_dense(group: Group, fragment: Fragment, timings: Timings) -> list[Mean]:
    """As `mean_of_sparse` of a dense fragment."""
    mean = dense(group, [np.asarray(each) for each in fragment.sent], timings)
    timings.sent_nbytes += mean.nbytes
    timings.received_nbytes += 2 * mean.nbytes * (group.size - 1) // group.size  # ranges, then their means
    ends = np.cumsum([segment.size for segment in fragment.segments])
    return [Mean(None, part) for part in np.split(mean, ends[:-1])]


def dense(group: Group, parts: Sequence[F32], timings: Timings) -> F32:
    """The mean of float32 values over all ranks, in rank order: DiLoCo's exchange. parts: (k,) in all.

    Each rank adds up a range and all gather the means, as a ring all-reduce does and with its bytes, but in an order
    that does not depend on who adds.
    """
    size = sum(map(len, parts))
    width = -(-size // group.size)
    padded = np.zeros((group.size, width), np.float32)
    np.concatenate(parts, out=padded.reshape(-1)[:size])
    timings.spent("encode")
    rows = group.all_to_all_rows(padded)
    timings.spent("exchange")
    total = np.zeros(width, np.float32)
    for row in rows:
        total += row
    total /= np.float32(group.size)
    timings.spent("decode")
    found = group.gather_rows(total).reshape(-1)[:size]
    timings.spent("exchange")
    return found


def owned(segments: Sequence[SharedSegment], ranks: int) -> list[range]:
    """The segments that each rank adds up: runs of about equally many elements, some empty if segments are few."""
    sizes = np.array([segment.size for segment in segments])
    middles = np.cumsum(sizes) - sizes / 2
    owners = (middles * ranks / sizes.sum()).astype(np.int64)
    cuts = np.searchsorted(owners, np.arange(ranks + 1)).tolist()
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def add_up(payloads: Mapping[int, memoryview], mine: Fragment, rank: int | None) -> list[Mean]:
    """The mean of these segments over payloads by rank, added in rank order.

    rank: this one, whose sends need no decoding; None where they do not count. Raises ExchangeError with the rank whose
    payload cannot be read, and FloatingPointError for a mean that overflows.
    """
    if not mine.segments:
        return []
    decoders: list[Sequence[Decoder]] = [
        [partial(_held, sent) for sent in mine.sent] if sender == rank else open_from(sender, payloads[sender], mine)
        for sender in sorted(payloads)
    ]

    def add(number: int) -> Mean:
        return mean_of([one[number] for one in decoders], mine.segments[number], mine.coding)

    return list(map_segments(add, range(len(mine.segments)), mine.sizes))


def open_from(rank: int, data: memoryview, fragment: Fragment) -> list[Decoder]:
    """As `payload.open_payload`; whatever is wrong (header, codec, zstd) becomes an ExchangeError with the rank."""
    named: ContextDecorator = translate(
        FormatError,
        msgspec.DecodeError,
        to=lambda text: ExchangeError(f"rank {rank}: {text}", ranks=(rank,)),
    )
    return [named(decode) for decode in named(payload.open_payload)(data, fragment.segments, fragment.coding)]


def _held(sent: Sent) -> Sent:
    return sent


def _decode_means(rank: int, data: memoryview, part: Fragment) -> list[Mean]:
    """The means of the range that another rank added up."""
    if not part.segments:
        return []
    sends = map_segments(lambda decode: decode(), open_from(rank, data, part.of_means()), part.sizes)
    return [Mean(each.indices, each.values) for each in sends if isinstance(each, Sends)]
