"""What a trainer contributes to a round: sparse sends (PULSELoCo), or its whole pseudo-gradient (DiLoCo)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pulse_rl.group.collectives import Group
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.loco import exchange
from pulse_rl.loco.exchange import Exchange, Fragment, Mean, Timings
from pulse_rl.loco.gate import Gate, Sends, cast, find_sends
from pulse_rl.loco.masters import Masters, MasterSegment
from pulse_rl.loco.payload import SharedSegment, ValueDtype, rounded
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


class SparseContribution:
    """The elements that pass the gate."""

    def __init__(self, masters: Masters, gate: Gate, value_dtype: ValueDtype, method: Exchange) -> None:
        self._masters = masters
        self._gate = gate
        self._value_dtype = value_dtype
        self._method = method

    def find(self) -> list[Sends] | NonFinite:
        def find(segment: MasterSegment) -> Sends | None:
            assert segment.residual is not None
            sends = find_sends(segment.shared, self._masters.live(segment), segment.residual, self._gate)
            return sends and sends._replace(values=rounded(sends.values, self._value_dtype))

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
        segments = [self._masters.segments[number] for number in fragment]
        shared = list(ordered_map(self._shared, segments))
        mine = Fragment([sends[number] for number in fragment], shared, self._gate, self._value_dtype)
        elements = sum(segment.size for segment in segments)
        method = exchange.choose(counts, elements) if self._method == "auto" else self._method
        run = exchange.split if method == "split" else exchange.gather
        return method, run(group, mine, timings)

    def _shared(self, segment: MasterSegment) -> SharedSegment:
        return SharedSegment(segment.shape, segment.start, segment.stop, cast(segment.shared, self._gate).copy())


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
        segments = [self._masters.segments[number] for number in fragment]
        ends = np.cumsum([segment.size for segment in segments]).tolist()
        gradient = np.empty(ends[-1], np.float32)
        for segment, end in zip(segments, ends, strict=True):
            loco.difference(segment.shared, self._masters.live(segment), gradient[end - segment.size : end])
        timings.spent("encode")
        mean = exchange.dense(group, gradient, timings)
        timings.sent_nbytes += gradient.nbytes
        timings.received_nbytes += 2 * gradient.nbytes * (group.size - 1) // group.size  # ranges, then their means
        return "dense", [
            Mean(None, mean[end - segment.size : end]) for segment, end in zip(segments, ends, strict=True)
        ]
