"""What a trainer contributes to a round: sparse sends (PULSELoCo), or its whole pseudo-gradient (DiLoCo)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError
from pulse_rl.group.collectives import Group
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.classes import classes_of
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import exchange, log8
from pulse_rl.loco.exchange import Exchange, Fragment, Timings
from pulse_rl.loco.gate import Sends, cast, find_sends
from pulse_rl.loco.masters import Masters, MasterSegment
from pulse_rl.loco.payload import NO_BITS, NO_CLASSES, Coding, Sent, SharedSegment, decode, in_order, limit, rounded
from pulse_rl.loco.sums import Mean
from pulse_rl.parallel import ordered_map


class NonFinite(NamedTuple):
    """A pseudo-gradient holds an infinity or NaN."""

    segment: int  # the number of the first segment that does


class Contribution(Protocol):
    """How one trainer takes part in the exchange of a round."""

    def find(self) -> list[Sends] | NonFinite:
        """What to send of each segment; an empty list means all of it."""

    def counts(self, sends: list[Sends]) -> list[int]:
        """How many elements of each fragment are sent."""

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        """Exchange a fragment; returns the method and the mean of each of its segments. counts: of each rank."""

    def limit(self, fragment: range) -> int:
        """The most bytes that a payload of a fragment may have."""

    def encode(self, fragment: range, sends: list[Sends]) -> bytes:
        """This trainer's payload of a fragment."""

    def add_up(
        self, fragment: range, payloads: Mapping[int, memoryview], sends: list[Sends], rank: int | None
    ) -> list[Mean]:
        """The mean of each segment of a fragment over payloads by rank, in rank order: as `exchange` adds up.

        rank: whose payload is that of these sends, which is not read; None for none. Raises ExchangeError with the rank
        whose payload cannot be read, and FloatingPointError for a mean that overflows.
        """

    def indices(self, fragment: range, rank: int, payload: memoryview) -> list[NDArray[np.uint32]]:
        """What a rank's payload sends of each segment; nothing where trainers keep no residual. Raises as `add_up`."""


class SparseContribution:
    """The elements that pass the gate."""

    def __init__(self, masters: Masters, coding: Coding, turn: int, method: Exchange) -> None:
        """turn: of this trainer's phases, see `log8`."""
        self._masters = masters
        self._coding = coding
        self._turn = turn
        self._method = method

    def find(self) -> list[Sends] | NonFinite:
        def find(segment: MasterSegment) -> Sends | None:
            assert segment.residual is not None
            gate, value_dtype, scale = self._coding
            state = segment.shared, self._masters.live(segment), segment.residual
            if value_dtype == "log8":
                seed = self._masters.seed(segment)
                return log8.find_sends(*state, gate, scale, seed=seed, start=segment.start, turn=self._turn)
            sends = find_sends(*state, gate, scale)
            return sends and sends._replace(values=rounded(sends.values, value_dtype))

        sends: list[Sends] = []
        for found in ordered_map(find, self._masters.segments):
            if found is None:
                return NonFinite(len(sends))
            sends.append(found)
        return sends

    def counts(self, sends: list[Sends]) -> list[int]:
        return [sum(len(sends[number].indices) for number in fragment) for fragment in self._masters.fragments]

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        mine = self._fragment(fragment, sends)
        elements = sum(segment.size for segment in mine.segments)
        auto = exchange.choose(counts, elements, self._coding.value_dtype)
        method = auto if self._method == "auto" else self._method
        run = exchange.split if method == "split" else exchange.gather
        return method, run(group, mine, timings)

    def limit(self, fragment: range) -> int:
        return limit([self._masters.segments[number].size for number in fragment])

    def encode(self, fragment: range, sends: list[Sends]) -> bytes:
        return self._fragment(fragment, sends).encode()

    def add_up(
        self, fragment: range, payloads: Mapping[int, memoryview], sends: list[Sends], rank: int | None
    ) -> list[Mean]:
        return exchange.add_up(payloads, self._fragment(fragment, sends), rank)

    def indices(self, fragment: range, rank: int, payload: memoryview) -> list[NDArray[np.uint32]]:
        read = self._fragment(fragment, [])
        with exchange.sent_by(rank):
            return [sent.indices for sent in decode(payload, read.segments, read.coding)]

    def _fragment(self, fragment: range, sends: list[Sends]) -> Fragment:
        """sends: of all segments; an empty list where none of them is used."""

        def prepare(number: int) -> tuple[SharedSegment, list[Sent]]:
            shared = self._shared(self._masters.segments[number])
            return shared, [in_order(sends[number], shared, self._coding)] if sends else []

        prepared = list(ordered_map(prepare, fragment))
        return Fragment([one for _, sent in prepared for one in sent], [shared for shared, _ in prepared], self._coding)

    def _shared(self, segment: MasterSegment) -> SharedSegment:
        gate, value_dtype, scale = self._coding
        bits, classes = NO_BITS, NO_CLASSES
        if value_dtype == "log8":
            classes = classes_of(segment.shared, segment.momentum, loco.GRIDS[gate], scale)
        else:
            bits = cast(segment.shared, gate).copy()
        return SharedSegment(segment.shape, segment.start, segment.shared, bits, classes)


class DenseContribution:
    """The whole float32 pseudo-gradient."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters

    def find(self) -> list[Sends] | NonFinite:
        for number, segment in enumerate(self._masters.segments):
            scratch = cpu.buffer("mean", segment.size, np.float32)
            if not loco.difference(segment.shared, self._masters.live(segment), scratch):
                return NonFinite(number)
        return []

    def counts(self, sends: list[Sends]) -> list[int]:
        return [sum(self._masters.segments[number].size for number in fragment) for fragment in self._masters.fragments]

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        gradient = self._gradient(fragment)
        timings.spent("encode")
        mean = exchange.dense(group, gradient, timings)
        timings.sent_nbytes += gradient.nbytes
        timings.received_nbytes += 2 * gradient.nbytes * (group.size - 1) // group.size  # ranges, then their means
        return "dense", self._by_segment(fragment, mean)

    def limit(self, fragment: range) -> int:
        return 4 * sum(self._masters.segments[number].size for number in fragment)

    def encode(self, fragment: range, sends: list[Sends]) -> bytes:
        return self._gradient(fragment).tobytes()

    def add_up(
        self, fragment: range, payloads: Mapping[int, memoryview], sends: list[Sends], rank: int | None
    ) -> list[Mean]:
        total = np.zeros(self.limit(fragment) // 4, np.float32)
        for sender, data in sorted(payloads.items()):
            total += self._gradient(fragment) if sender == rank else self._read(fragment, sender, data)
        total /= np.float32(len(payloads))
        return self._by_segment(fragment, total)

    def indices(self, fragment: range, rank: int, payload: memoryview) -> list[NDArray[np.uint32]]:
        return []

    def _read(self, fragment: range, rank: int, data: memoryview) -> F32:
        if len(data) != self.limit(fragment):
            raise ExchangeError(
                f"rank {rank}: payload: expected {self.limit(fragment)} bytes, found {len(data)}", ranks=(rank,)
            )
        values = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ExchangeError(
                f"rank {rank}: payload: expected finite values, found an infinity or NaN", ranks=(rank,)
            )
        return values

    def _gradient(self, fragment: range) -> F32:
        """The pseudo-gradient of a fragment."""
        gradient = np.empty(self.limit(fragment) // 4, np.float32)
        end = 0
        for segment in [self._masters.segments[number] for number in fragment]:
            end += segment.size
            loco.difference(segment.shared, self._masters.live(segment), gradient[end - segment.size : end])
        return gradient

    def _by_segment(self, fragment: range, mean: F32) -> list[Mean]:
        segments = [self._masters.segments[number] for number in fragment]
        ends = np.cumsum([segment.size for segment in segments]).tolist()
        return [Mean(None, mean[end - segment.size : end]) for segment, end in zip(segments, ends, strict=True)]
