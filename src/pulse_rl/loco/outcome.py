"""What a round gave: its outcome, before any of a trainer's state is changed, and its report, once it is committed."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.sums import Mean


@dataclass(frozen=True)
class LocoReport:
    """One round of one trainer. Bytes and seconds are this rank's own.

    Attributes:
        round: The round's number, from 1.
        workers: Trainers whose mean it is.
        elements: Trainable parameters, tied ones once.
        sent: How many of them this rank sent.
        density: sent / elements.
        exchange: How the bytes went; "mixed" if not all fragments went alike, "dense" for DiLoCo, "store" for both
            over an object store.
        sent_nbytes: Bytes of this rank's payloads, each counted once however many ranks receive it; in a split, with
            the means that it sends.
        received_nbytes: Bytes of the other ranks' payloads.
        dense_nbytes: Bytes of the whole float32 pseudo-gradient: what one rank of DiLoCo sends.
        gate_s: Seconds to find what to send.
        encode_s: Seconds to encode it.
        exchange_s: Seconds on the network, waiting for the other ranks included.
        decode_s: Seconds to decode the payloads and add them up.
        outer_s: Seconds of the outer step and of θ's digest.
        stalled_s: Seconds in which no inner step could be taken: without overlap the whole round, with overlap its
            begin and its end, and what they wait for.
        digest: θ after the round, 16 hex digits: the same on all ranks.
        counted: Whether what this rank sent is in the mean. Only with a StoreGroup a round can end without it: then all
            of it stays in the residual.
    """

    round: int
    workers: int
    elements: int
    sent: int
    density: float
    exchange: Literal["gather", "split", "mixed", "dense", "store"]
    sent_nbytes: int
    received_nbytes: int
    dense_nbytes: int
    gate_s: float
    encode_s: float
    exchange_s: float
    decode_s: float
    outer_s: float
    stalled_s: float
    digest: str
    counted: bool = True

    @property
    def total_s(self) -> float:
        """Seconds of all parts of the round."""
        return self.gate_s + self.encode_s + self.exchange_s + self.decode_s + self.outer_s

    @property
    def reduction(self) -> float:
        """dense_nbytes / sent_nbytes: how many times fewer bytes than DiLoCo sends."""
        return self.dense_nbytes / max(1, self.sent_nbytes)


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
