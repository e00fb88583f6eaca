"""What a trainer contributes to a round: sparse sends (PULSELoCo), or its whole pseudo-gradient (DiLoCo)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.loco import exchange
from pulse_rl.loco.exchange import Exchange, Fragment, Mean, Timings
from pulse_rl.loco.gate import Gate, Sends, cast, find_sends
from pulse_rl.loco.group import Group
from pulse_rl.loco.masters import FlatSlice, Masters
from pulse_rl.loco.payload import Span, ValueDtype, rounded
from pulse_rl.parallel import ordered_map


class NonFinite(NamedTuple):
    """A pseudo-gradient holds an infinity or NaN."""

    slice: int  # the number of the first slice that does


class Contribution(Protocol):
    """How one trainer takes part in the exchange of a round."""

    def find(self) -> list[Sends] | NonFinite:
        """What to send of each slice; an empty list means all of it."""

    def counts(self, sends: list[Sends]) -> list[int]:
        """How many elements of each fragment are sent."""

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        """Exchange a fragment; returns the method and the mean of each of its slices. counts: of each rank."""


class SparseContribution:
    """The elements that pass the gate."""

    def __init__(self, masters: Masters, gate: Gate, value_dtype: ValueDtype, method: Exchange) -> None:
        self._masters = masters
        self._gate = gate
        self._value_dtype = value_dtype
        self._method = method

    def find(self) -> list[Sends] | NonFinite:
        def find(view: FlatSlice) -> Sends | None:
            assert view.residual is not None
            sends = find_sends(view.shared, self._masters.live(view), view.residual, self._gate)
            return sends and sends._replace(values=rounded(sends.values, self._value_dtype))

        sends: list[Sends] = []
        for found in ordered_map(find, self._masters.slices):
            if found is None:
                return NonFinite(len(sends))
            sends.append(found)
        return sends

    def counts(self, sends: list[Sends]) -> list[int]:
        return [sum(len(sends[number].indices) for number in fragment) for fragment in self._masters.fragments]

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        views = [self._masters.slices[number] for number in fragment]
        spans = list(ordered_map(self._span, views))
        mine = Fragment([sends[number] for number in fragment], spans, self._gate, self._value_dtype)
        method = exchange.choose(counts, sum(v.size for v in views)) if self._method == "auto" else self._method
        run = exchange.split if method == "split" else exchange.gather
        return method, run(group, mine, timings)

    def _span(self, view: FlatSlice) -> Span:
        return Span(view.shape, view.start, view.stop, cast(view.shared, self._gate).copy())


class DenseContribution:
    """The whole float32 pseudo-gradient."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters

    def find(self) -> list[Sends] | NonFinite:
        for number, view in enumerate(self._masters.slices):
            scratch = cpu.buffer("mean", view.size, np.float32)
            if not loco.difference(view.shared, self._masters.live(view), scratch):
                return NonFinite(number)
        return []

    def counts(self, sends: list[Sends]) -> list[int]:
        return [sum(self._masters.slices[number].size for number in fragment) for fragment in self._masters.fragments]

    def exchange(
        self, group: Group, fragment: range, sends: list[Sends], counts: Sequence[int], timings: Timings
    ) -> tuple[str, list[Mean]]:
        views = [self._masters.slices[number] for number in fragment]
        ends = np.cumsum([view.size for view in views]).tolist()
        gradient = np.empty(ends[-1], np.float32)
        for view, end in zip(views, ends, strict=True):
            loco.difference(view.shared, self._masters.live(view), gradient[end - view.size : end])
        timings.spent("encode")
        mean = exchange.dense(group, gradient, timings)
        timings.sent_nbytes += gradient.nbytes
        timings.received_nbytes += 2 * gradient.nbytes * (group.size - 1) // group.size  # ranges, then their sums
        return "dense", [Mean(None, mean[end - view.size : end]) for view, end in zip(views, ends, strict=True)]
