"""What one round did."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LocoReport:
    """One round of one trainer; bytes and seconds are this rank's."""

    round: int  # from 1
    workers: int
    elements: int  # trainable parameters, tied ones once
    sent: int  # of them, how many this rank sent
    density: float  # sent / elements
    exchange: Literal["gather", "split", "mixed", "dense"]  # mixed: not the same for all fragments
    sent_nbytes: (
        int  # this rank's payloads, each counted once however many receive it; in a split, the sums it sends too
    )
    received_nbytes: int  # payloads of the others
    dense_nbytes: int  # the float32 pseudo-gradient, whole: what one rank of DiLoCo sends
    gate_s: float  # finding what to send
    encode_s: float
    exchange_s: float  # on the network, waiting for the others included
    decode_s: float  # and adding up
    outer_s: float  # the outer step, and θ's digest
    stalled_s: float  # in which no inner step could be taken: with overlap, the two ends and what they wait for
    digest: str  # of θ after the round, 16 hexadecimal digits: the same on all ranks

    @property
    def total_s(self) -> float:
        """Seconds of all that a round does."""
        return self.gate_s + self.encode_s + self.exchange_s + self.decode_s + self.outer_s

    @property
    def reduction(self) -> float:
        """dense_nbytes / sent_nbytes."""
        return self.dense_nbytes / max(1, self.sent_nbytes)
