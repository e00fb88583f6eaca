"""What a round of PULSELoCo takes of a processor, and one of DiLoCo: `python -m bench.loco.cost [MILLIONS]`.

Rounds of four trainers, so many times 2^20 weights (default: 16), without a network. Weights are normally distributed;
in a round each moves by an amount that all trainers share and that stays, plus noise of each trainer and round. One of
the trainers is a PulseLoCo: its rounds are timed, in turns with those of a DiLoCo. The others have residuals, and make
the payloads that it reads. There are WARM rounds before, so that the outer momentum and the residuals are those of a
run that goes on. They also make the memory that later rounds use again, if the allocator returns none to the system:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 PULSE_THREADS=1 python -m bench.loco.cost

Times are the process's processor time, which counts no waiting for a core. A load of other work still makes memory
slow, for both alike; so the ratio is the median of each round's.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import pulse_rl as pulse
from pulse_rl.group.collectives import Group, N
from pulse_rl.kernels.cpu import loco as kernels
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import log8
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.members import FixedMembers
from pulse_rl.loco.outcome import Outcome

TRAINERS = 4
WARM, TIMED = 12, 7  # rounds
SHAPE = (2048, 512)  # of a tensor: one segment
DENSITIES = 0.005, 0.01, 0.02, 0.05, 0.10
STEADY = 0.5  # of how far a weight moves in a round, against the noise
HEAD = 5  # bytes before what a step of `Ranks` shares: that it has not failed, and the name of its work
PARTS = "gate", "encode", "decode", "outer"


class Echo(Group):
    """A group of this rank alone: what it sends is what all ranks send."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size)

    def gather_numbers(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        return np.tile(np.array(numbers, np.int64), (self.size, 1))

    def gather_rows(self, values: NDArray[N]) -> NDArray[N]:
        return np.tile(values, (self.size, 1))

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        return [memoryview(data)] * self.size

    def all_to_all_rows(self, values: NDArray[N]) -> NDArray[N]:
        return values


class Recorded(Echo):
    """A group whose other ranks send payloads that were made before."""

    others: list[bytes]

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        head, sent = data[:HEAD], crc32(b"encode what is sent").to_bytes(4, "little")
        if head != b"=" + sent:
            return super().gather(data, limit)
        return [memoryview(each) for each in (data, *(head + each for each in self.others))]


class Times(NamedTuple):
    """Of the timed rounds at one density."""

    density: float
    bits: float  # of a sent element
    pulse: list[dict[str, float]]  # seconds by part, of each round
    diloco: list[dict[str, float]]

    def lines(self, elements: int) -> str:
        """A row of a table: nanoseconds an element, medians."""

        def ns(rounds: list[float]) -> float:
            return statistics.median(rounds) / elements * 1e9

        totals = [[sum(one.values()) for one in rounds] for rounds in (self.pulse, self.diloco)]
        ratio = statistics.median(a / b for a, b in zip(*totals, strict=True))
        parts = [f"{ns([one[part] for one in self.pulse]):.1f}" for part in PARTS]
        cells = [f"{self.density:.1%}", *parts, *(f"{ns(each):.1f}" for each in totals), f"{ratio:.2f} ×"]
        return "| " + " | ".join([*cells, f"{self.bits:.2f}"]) + " |"


class Run:
    """One PulseLoCo, one DiLoCo, and the trainers that the first one meets."""

    def __init__(self, tensors: int, density: float) -> None:
        self._random = np.random.default_rng(0)
        theta = [self._random.normal(0, 0.03, SHAPE).astype(np.float32) for _ in range(tensors)]
        self._noise = self._random.normal(0, 1, SHAPE[0] * SHAPE[1]).astype(np.float32)
        self._steady = [self._random.normal(0, STEADY, self._noise.size).astype(np.float32) for _ in range(tensors)]
        self._group = Recorded(TRAINERS)
        self._loco = _context(pulse.PulseLoCo, theta, self._group, exchange="gather")
        self._dense = _context(pulse.DiLoCo, theta, Echo(TRAINERS))
        self._residuals = [[np.zeros_like(self._noise) for _ in theta] for _ in range(1, TRAINERS)]
        self._step = self._step_of(density)

    def times(self) -> Times:
        """Take all rounds, and time the last ones."""
        masters, found = self._loco._masters, Times(0, 0, [], [])
        sent = nbytes = 0
        for number in range(WARM + TIMED):
            self._group.others = [self._payload(rank) for rank in range(1, TRAINERS)]
            live = [self._live(each) for each in range(len(masters.segments))]
            _move(self._loco, live)
            _move(self._dense, live)
            seconds, outcome = _round(self._loco)
            plain, _ = _round(self._dense)
            if number >= WARM:
                sent, nbytes = sent + outcome.sent, nbytes + outcome.timings.sent_nbytes
                found.pulse.append(seconds)
                found.diloco.append(plain)
        return found._replace(density=sent / TIMED / masters.elements, bits=8 * nbytes / sent)

    def _live(self, number: int) -> F32:
        """A trainer's weights after its inner steps."""
        noise = np.roll(self._noise, self._random.integers(self._noise.size))
        moved: F32 = self._loco._masters.segments[number].shared - self._step * (self._steady[number] + noise)
        return moved

    def _payload(self, rank: int) -> bytes:
        """What another trainer sends in this round, of all segments."""
        loco, sends = self._loco, []
        masters = loco._masters
        for number, (segment, residual) in enumerate(zip(masters.segments, self._residuals[rank - 1], strict=True)):
            live, seed = self._live(number), masters.seed(segment)
            state = segment.shared, live, residual
            found = log8.find_sends(
                *state, loco.gate, loco.gate_scale, seed=seed, start=segment.start, turn=log8.turn_of(rank)
            )
            assert found is not None
            kernels.keep(*state, *found)
            sends.append(found)
        (whole,) = masters.fragments
        payload: bytes = loco._trainer.contribution.fragment(whole, sends).encode()
        return payload

    def _step_of(self, density: float) -> np.float32:
        """How far weights have to move for such a density: with phases, one that moves by u units is sent as often."""
        segment, steady = self._loco._masters.segments[0], self._steady[0]
        unit: NDArray[np.float32] = np.exp2(np.floor(np.log2(np.abs(segment.shared))) - 7) / self._loco.gate_scale
        low, high = 0.0, 1.0
        for _ in range(40):
            step = (low + high) / 2
            sent = np.minimum(np.abs(step * (steady + self._noise)) / unit, 1).mean()
            low, high = (low, step) if sent > density else (step, high)
        return np.float32(low)


def _context(kind: Any, theta: list[NDArray[np.float32]], group: Echo, **options: Any) -> Any:
    named = {f"w{number:04}": torch.from_numpy(each.copy()) for number, each in enumerate(theta)}  # sorted, as segments
    model = torch.nn.ParameterDict(named)
    context = kind(model, torch.optim.SGD(model.parameters(), lr=0.0), sync_every=8, **options)
    context._members = FixedMembers(group)
    return context


def _move(context: Any, live: list[F32]) -> None:
    with torch.no_grad():
        for parameter, values in zip(context._model.parameters(), live, strict=True):
            parameter.copy_(torch.from_numpy(values).view(SHAPE))


def _round(context: Any) -> tuple[dict[str, float], Outcome]:
    """One round of a context without a network: seconds by part."""
    timings = Timings(time.process_time)
    outcome = context._members.collect(context._trainer, timings)
    timings.start()
    context._trainer.commit(outcome, 0)
    timings.spent("outer")
    return {part: timings.seconds[part] for part in PARTS}, outcome


def main(millions: str = "16") -> None:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", f"file://{directory}/ranks", rank=0, world_size=1)
    torch.set_num_threads(1)
    tensors = int(millions)
    print("| density | gate | encode | decode | outer | together | DiLoCo | of DiLoCo's | bits |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for density in DENSITIES:
        print(Run(tensors, density).times().lines(tensors << 20), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
