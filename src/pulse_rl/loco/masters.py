"""What a trainer holds: θ as all trainers share it, the outer momentum, its own residual, and the live parameters.

All of it is float32, by tensor and in host memory; the live parameters may be on any device and are read and
written one segment at a time. While a round is exchanged in the background, a copy of the live parameters as they were
when it began is held too. Tensors are in canonical order (by name); a segment is at most 2^20 elements of one tensor,
here and in a payload; fragments are runs of segments that are exchanged together, so that what a round holds is
bounded.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.outcome import Outcome
from pulse_rl.parallel import sliced
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import Pieces
from pulse_rl.weights.segments import segments

FRAGMENT = 1 << 25  # elements: 128 MB of float32


class MasterSegment(NamedTuple):
    """The elements [start, stop) of one flattened parameter; arrays are views of the masters, (stop − start,)."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    shared: F32  # θ
    momentum: F32
    residual: F32 | None  # None for DiLoCo, which keeps nothing back

    @property
    def size(self) -> int:
        return self.stop - self.start


class Masters:
    """θ, momentum and residual of the trainable parameters of one trainer.

    parameters: name → parameter, each once. with_residual: whether there is a residual. Raises TypeError for a
    parameter that is not float32, or not a dense tensor in one piece; ValueError for parameters whose memory overlaps.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, with_residual: bool) -> None:
        self._live = _layout(parameters)
        self.whole = True  # False while another trainer's state is copied in: θ and momentum are then of no round
        self.shapes = {name: bits.shape for name, bits in self._live.items()}
        self.elements = self._live.elements
        self.theta = {name: np.empty(bits.size, np.float32) for name, bits in self._live.items()}
        self.momentum = {name: np.zeros(bits.size, np.float32) for name, bits in self._live.items()}
        self.residual = (
            {name: np.zeros(bits.size, np.float32) for name, bits in self._live.items()} if with_residual else {}
        )
        self.segments = [
            MasterSegment(
                name,
                bits.shape,
                start,
                stop,
                self.theta[name][start:stop],
                self.momentum[name][start:stop],
                self.residual[name][start:stop] if with_residual else None,
            )
            for name, bits in self._live.items()
            for start, stop in segments(bits.size)
        ]
        self.sizes = [segment.size for segment in self.segments]
        sizes = np.array(self.sizes, np.int64)
        self.fragments = [range(run.start, run.stop) for run in sliced(sizes, FRAGMENT)]
        self._seeds = {name: digests.seed(name, "F32", shape) for name, shape in self.shapes.items()}
        self._empty_digest = sum(digests.mix(self._seeds[name]) for name, bits in self._live.items() if not bits.size)
        self._frozen: dict[str, F32] = {}
        self.copy_from_live()

    def rebind(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Find the live parameters again: `model.to` and `parameter.data = …` give them other memory.

        Raises ValueError if names or shapes differ from those on creation, TypeError as on creation.
        """
        live = _layout(parameters)
        found = {name: bits.shape for name, bits in live.items()}
        if found != self.shapes:
            odd = sorted(n for n in found | self.shapes if found.get(n) != self.shapes.get(n))
            raise ValueError(
                "expected the trainable parameters that the model had when this context was made, found others: "
                f"{', '.join(odd[:8])} were added, removed or reshaped: make another context"
            )
        self._live = live

    def copy_from_live(self) -> None:
        """Set θ to the live parameters."""
        for segment in self.segments:
            segment.shared[:] = self.live(segment)

    def copy_to_live(self) -> None:
        """Set the live parameters to θ."""
        for segment in self.segments:
            self._write(segment)

    def equals_live(self) -> bool:
        """Whether θ has the live parameters' bits."""
        return all(
            np.array_equal(segment.shared.view(np.uint32), self.live(segment).view(np.uint32))
            for segment in self.segments
        )

    def freeze(self) -> None:
        """Copy the live parameters, 4 bytes each: `live` reads the copy until `thaw`, while they move on."""
        frozen = {name: np.empty(bits.size, np.float32) for name, bits in self._live.items()}
        for segment in self.segments:
            frozen[segment.name][segment.start : segment.stop] = self._read(segment)
        self._frozen = frozen

    def thaw(self) -> None:
        """Drop the copy that `freeze` made."""
        self._frozen = {}

    def live(self, segment: MasterSegment) -> F32:
        """The live parameters of a segment, or frozen ones; not to be written to."""
        if self._frozen:
            return self._frozen[segment.name][segment.start : segment.stop]
        return self._read(segment)

    def fold(self) -> None:
        """Move the inner steps since the last round into the residual, if there is one, and take them back.

        So nothing of them is lost if the others have gone on. Raises FloatingPointError for parameters that are not
        finite; nothing is changed then.
        """
        for segment in self.segments:
            if not np.isfinite(self.live(segment)).all():
                raise FloatingPointError(f"expected finite parameters, found an infinity or NaN in {segment.name!r}")
        nothing = np.empty(0, np.uint32), np.empty(0, np.float32)
        for segment in self.segments:
            if segment.residual is not None:
                loco.keep(segment.shared, self.live(segment), segment.residual, *nothing)
            self._write(segment)

    def begin_anew(self) -> None:
        """Go on from a θ and momentum that another trainer has given: the live parameters are θ, residuals empty."""
        for residual in self.residual.values():
            residual.fill(0)
        self.copy_to_live()

    def commit(self, number: int, outcome: Outcome, lr: float, mu: float) -> int:
        """Take a round's outer step on one segment; returns the digest of θ there.

        What this trainer sent is subtracted from the residual. θ and momentum move along the mean, or become those
        that another trainer gave. The live parameters become θ, and frozen ones θ − (frozen − live), which keeps the
        steps taken since `freeze`.
        """
        segment, after = self.segments[number], outcome.after
        if segment.residual is not None and outcome.sends:
            sends = outcome.sends[number]
            loco.keep(segment.shared, self.live(segment), segment.residual, sends.indices, sends.values)
        if after is None:
            mean = outcome.means[number].dense(segment.size)
            loco.outer(segment.shared, segment.momentum, mean, lr, mu)
        else:
            segment.shared[:], segment.momentum[:] = after.theta[number], after.momentum[number]
        self._write(segment)
        return self.digest_of(segment, segment.shared)

    def digest(self) -> str:
        """The digest of θ, as `pulse.digest` of the trainable parameters."""
        return self.total_digest([segment.shared for segment in self.segments])

    def momentum_digest(self) -> str:
        """Likewise of the momentum."""
        return self.total_digest([segment.momentum for segment in self.segments])

    def total_digest(self, values: Sequence[F32]) -> str:
        """The digest of these values of each segment, as if they were θ, 16 hex digits."""
        return self.total_of(map(self.digest_of, self.segments, values))

    def total_of(self, terms: Iterable[int]) -> str:
        """The digest of a state of which these are the digests of the segments."""
        return digests.to_hex(self._empty_digest + sum(terms))

    def digest_of(self, segment: MasterSegment, values: F32) -> int:
        """What these values of a segment add to a digest."""
        return cpu.digest_range(self.seed(segment), segment.start, values.view(np.uint32))

    def seed(self, segment: MasterSegment) -> int:
        """The digest's seed of a segment's tensor."""
        return self._seeds[segment.name]

    def _read(self, segment: MasterSegment) -> F32:
        values: F32 = self._live[segment.name].read(segment.start, segment.stop).view(np.float32)
        return values

    def _write(self, segment: MasterSegment) -> None:
        values = segment.shared
        if self._frozen:
            # In this order a parameter that has not moved gets θ's own bits: −0 − (+0) is −0, but −0 + (+0) is +0.
            values = self.live(segment)
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
    for name, bits in live.items():
        if isinstance(bits, Pieces) and bits.held < bits.size:
            raise TypeError(
                f"parameter {name!r}: expected all of its elements in each trainer's process, found a share of them, "
                "as FSDP and tensor parallelism give: let each trainer hold the whole model"
            )
    extents = sorted((bits.extent, name) for name, bits in live.items() if bits.size)
    odd = [name for name, bits in live.items() if not bits.writable]
    odd += [b for ((where, _, stop), _), ((there, start, _), b) in pairwise(extents) if where == there and start < stop]
    if odd:
        raise ValueError(
            f"parameters that share memory with another, or are expanded: {', '.join(odd[:8])}: writing one element "
            "would change others; give each parameter separate memory"
        )
    return live
