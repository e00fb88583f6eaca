"""What the exchange of a round gave, before any of a trainer's state is changed."""

from typing import NamedTuple

from pulse_rl.loco.exchange import Mean, Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.report import LocoReport


class Outcome(NamedTuple):
    """What the exchange of a round gave."""

    workers: int  # whose mean it is
    sends: list[Sends]  # of this rank, by segment; empty where all elements are sent
    sent: int  # elements of this rank
    methods: list[str]  # of each fragment
    means: list[Mean]  # of each segment
    timings: Timings
    counted: bool = True  # whether what this trainer sent is in the mean; if not, all of it stays in the residual

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
