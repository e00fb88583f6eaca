"""What a trainer holds: θ as all trainers share it, the outer momentum, its own residual, and the live parameters.

All of it is float32, by tensor and in host memory; the live parameters may be on any device and are read and
written a segment at a time. While a round is under way beside further inner steps, a copy of them as they were at its
begin is held, too. Tensors are in canonical order (by name), segments are at most 2^20 elements of one
tensor, and fragments are runs of segments that are exchanged together, so that what a round holds is bounded.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.gate import Sends
from pulse_rl.weights import digests
from pulse_rl.weights.digests import mix
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.segments import segments

FRAGMENT = 1 << 25  # elements: 128 MB of float32


class Segment(NamedTuple):
    """A piece of one tensor; the arrays are views."""

    name: str
    shape: tuple[int, ...]  # of its tensor
    start: int  # its first element there, flat
    stop: int
    shared: F32  # θ
    momentum: F32
    residual: F32 | None  # None: nothing is kept (DiLoCo)

    @property
    def size(self) -> int:
        return self.stop - self.start


class Masters:
    """θ, momentum and residual of the trainable parameters of one trainer.

    parameters: name → parameter, each once. kept: whether there is a residual. Raises TypeError for a parameter that
    is not float32, and for one that is sharded or otherwise no dense tensor; ValueError for parameters whose memory
    overlaps.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, kept: bool) -> None:
        self._live = _layout(parameters)
        self.shapes = {name: bits.shape for name, bits in self._live.items()}
        self.elements = self._live.elements
        self.theta = {name: np.empty(bits.size, np.float32) for name, bits in self._live.items()}
        self.momentum = {name: np.zeros(bits.size, np.float32) for name, bits in self._live.items()}
        self.residual = {name: np.zeros(bits.size, np.float32) for name, bits in self._live.items()} if kept else {}
        self.segments = [
            Segment(
                name,
                bits.shape,
                start,
                stop,
                self.theta[name][start:stop],
                self.momentum[name][start:stop],
                self.residual[name][start:stop] if kept else None,
            )
            for name, bits in self._live.items()
            for start, stop in segments(bits.size)
        ]
        self.fragments: list[range] = []  # of numbers of segments
        first, held = 0, 0
        for number, segment in enumerate(self.segments):
            held += segment.size
            if held > FRAGMENT and number > first:
                self.fragments.append(range(first, number))
                first, held = number, segment.size
        if self.segments:
            self.fragments.append(range(first, len(self.segments)))
        self._seeds = {name: digests.seed(name, "F32", shape) for name, shape in self.shapes.items()}
        self.empty_digest = sum(mix(self._seeds[name]) for name, bits in self._live.items() if not bits.size)
        self._frozen: dict[str, F32] = {}
        self.take()

    def follow(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Look where the live parameters are now: `model.to` and `parameter.data = …` give them other memory.

        Raises ValueError if they are others or of another shape, TypeError as on creation.
        """
        live = _layout(parameters)
        found = {name: bits.shape for name, bits in live.items()}
        if found != self.shapes:
            odd = sorted(n for n in found | self.shapes if found.get(n) != self.shapes.get(n))
            raise ValueError(
                "expected the trainable parameters that the model had when this context was made, found others: "
                f"{', '.join(odd[:8])} came, went or changed their shape: make another context"
            )
        self._live = live

    def take(self) -> None:
        """θ becomes what the live parameters are."""
        for segment in self.segments:
            segment.shared[:] = self.live(segment)

    def equal(self) -> bool:
        """Whether θ has the live parameters' bits."""
        return all(
            np.array_equal(segment.shared.view(np.uint32), self.live(segment).view(np.uint32))
            for segment in self.segments
        )

    def put(self) -> None:
        """The live parameters become θ."""
        for segment in self.segments:
            self._write(segment)

    def freeze(self) -> None:
        """Until `thaw`, `live` is what the live parameters are now, while they move on: 4 bytes a parameter."""
        frozen = {name: np.empty(bits.size, np.float32) for name, bits in self._live.items()}
        for segment in self.segments:
            frozen[segment.name][segment.start : segment.stop] = self._read(segment)
        self._frozen = frozen

    def thaw(self) -> None:
        """Forget what `freeze` kept."""
        self._frozen = {}

    def live(self, segment: Segment) -> F32:
        """The live parameters of a segment; not to be written to."""
        return self._frozen_part(segment) if self._frozen else self._read(segment)

    def commit(self, segment: Segment, sends: Sends | None, gradient: F32, lr: float, mu: float) -> int:
        """Take the outer step on a segment: residual, momentum, θ and the live parameters; returns θ's digest there.

        sends: what this trainer sent, to be taken from the residual. gradient: the mean over all trainers, (n,).
        The live parameters become θ, and frozen ones θ − (frozen − live): what they moved by since then is on top.
        """
        if segment.residual is not None and sends is not None:
            loco.keep(segment.shared, self.live(segment), segment.residual, sends.indices, sends.values)
        loco.outer(segment.shared, segment.momentum, gradient, lr, mu)
        self._write(segment)
        return self._digest(segment, segment.shared)

    def digest(self) -> int:
        """The digest of θ: as `pulse.digest` of the trainable parameters."""
        own = sum(self._digest(segment, segment.shared) for segment in self.segments)
        return (self.empty_digest + own) & digests.MASK

    def momentum_digest(self) -> int:
        """Likewise of the momentum."""
        return sum(self._digest(segment, segment.momentum) for segment in self.segments) & digests.MASK

    def _digest(self, segment: Segment, values: F32) -> int:
        return cpu.digest_range(self._seeds[segment.name], segment.start, values.view(np.uint32))

    def _read(self, segment: Segment) -> F32:
        values: F32 = self._live[segment.name].read(segment.start, segment.stop).view(np.float32)
        return values

    def _frozen_part(self, segment: Segment) -> F32:
        return self._frozen[segment.name][segment.start : segment.stop]

    def _write(self, segment: Segment) -> None:
        values = segment.shared
        if self._frozen:
            # In this order a parameter that has not moved gets θ's own bits: −0 − (+0) is −0, but −0 + (+0) is +0.
            values = self._frozen_part(segment)
            np.subtract(values, self._read(segment), out=values)
            np.subtract(segment.shared, values, out=values)
        self._live[segment.name].write(segment.start, values.view(np.uint32))


def _layout(parameters: Mapping[str, torch.nn.Parameter]) -> Layout:
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"parameter {name!r}: expected float32, found {parameter.dtype}: in a narrower dtype the "
                "pseudo-gradient would hold rounding error; keep float32 masters and compute under autocast"
            )
    live = layout(parameters)
    extents = sorted((bits.extent, name) for name, bits in live.items() if bits.size)
    odd = [name for name, bits in live.items() if not bits.writable]
    odd += [b for ((where, _, stop), _), ((there, start, _), b) in pairwise(extents) if where == there and start < stop]
    if odd:
        raise ValueError(
            f"expected parameters with memory of their own, found {', '.join(odd[:8])} in that of another or expanded: "
            "what is written to one element would change others"
        )
    return live
