"""What the exchange of a round gave, before any of a trainer's state is changed."""

from typing import NamedTuple

from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.report import LocoReport
from pulse_rl.loco.sums import Mean


class StateAfter(NamedTuple):
    """θ and momentum after a round, taken over from another trainer."""

    round: int  # rounds done
    theta: list[F32]  # of each segment
    momentum: list[F32]
    nbytes: int  # as it was received


class Outcome(NamedTuple):
    """What the exchange of a round gave."""

    workers: int  # whose mean it is
    sends: list[Sends]  # of this rank, by segment; empty where all elements are sent
    sent: int  # elements of this rank
    methods: list[str]  # of each fragment
    means: list[Mean]  # of each segment
    timings: Timings
    counted: bool = True  # whether what this trainer sent is in the mean; if not, all of it stays in the residual
    after: StateAfter | None = None  # in place of the means, where these cannot be had

    def report(self, round: int, elements: int, digest: str) -> LocoReport:
        """The report of this round, once it is committed."""
        timings = self.timings
        return LocoReport(
            round=round,
            workers=self.workers,
            elements=elements,
            sent=self.sent,
            density=self.sent / max(1, elements),
            exchange=self.methods[0] if len(set(self.methods)) == 1 else "mixed",  # type: ignore[arg-type]
            sent_nbytes=timings.sent_nbytes,
            received_nbytes=timings.received_nbytes,
            dense_nbytes=4 * elements,
            digest=digest,
            stalled_s=timings.stalled,
            counted=self.counted,
            **{f"{part}_s": timings.seconds[part] for part in ("gate", "encode", "exchange", "decode", "outer")},
        )
