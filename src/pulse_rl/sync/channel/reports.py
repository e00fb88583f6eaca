"""What one send did, and what the cost model of SparseRL-Sync says that it should take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Sent: TypeAlias = Literal["none", "sparse", "dense", "both"]  # "both": some receivers needed all bits


@dataclass(frozen=True)
class Payload:
    """What the changes of one sender's part consist of.

    Attributes:
        changes: Elements that change.
        index_nbytes: Bytes of their positions as 32-bit integers.
        value_nbytes: Bytes of their new bits.
        coded_nbytes: Bytes of both, coded.
        coded_index_nbytes: Bytes of the coded positions; None for a codec that does not code them apart.
        index_bits: Entropy of a distance between two changes, bits per change.
        value_bits: Entropy of the new bits, bits per change.
    """

    changes: int
    index_nbytes: int
    value_nbytes: int
    coded_nbytes: int
    coded_index_nbytes: int | None
    index_bits: float
    value_bits: float


def entropy(counts: NDArray[np.int64]) -> float:
    """Bits per symbol of a distribution, given how often each symbol occurs."""
    total = int(counts.sum())
    if not total:
        return 0.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log2(shares)).sum())


@dataclass(frozen=True)
class Cost:
    """What sending one version takes, by the cost model of SparseRL-Sync.

    Attributes:
        nbytes: Bytes of the payload.
        buckets: Messages that carry it.
        seconds: bytes × 8 / bandwidth + buckets × bucket_s + launches × launch_s.
    """

    nbytes: int
    buckets: int
    seconds: float


@dataclass(frozen=True)
class ChannelReport:
    """What one send or receive did. All ranks report the same, but for seconds, `exchanged_nbytes` and `payload`.

    Attributes:
        version: The version.
        base: The version that the changes start from; None where a sender had none, as at first.
        digest: The digest of the version, 16 hex digits.
        sent: "sparse": the changes; "dense": all bits; "both": all bits to those who needed them, the changes to
            others; "none": every receiver held the version already, or channel only observes.
        dense_ranks: The receivers that were sent all bits.
        codec: The codec of the changes, of several senders with commas; None without changes to send.
        codec_reason: Why this codec; of a receiver None.
        elements: Elements of the model; tied tensors count once.
        changes: Elements whose bits differ from the base.
        density: changes / elements.
        full_nbytes: Bytes of the whole model's bits.
        payload_nbytes: Bytes of the version as it is broadcast: the changes of all senders, or all bits without a base.
        sent_nbytes: Bytes of bulk that all senders sent: payload_nbytes, and all bits for each of `dense_ranks` where
            others were sent changes. 0 if the channel only observes.
        exchanged_nbytes: Bytes that this rank has sent, with what it passed on to others and all control.
        reduction: full_nbytes / payload_nbytes.
        dense_tensors: Tensors that change and are sent with all their bits, as that is smaller; each sender counts.
        sparse_tensors: Tensors that change and were sent as changes.
        buckets: Messages of bulk.
        bucket_nbytes: The most bytes that one of them has.
        launches: Calls of collectives that carried them.
        validated: Whether every bit was compared with the senders'.
        observed: Whether nothing was sent, as the channel only observes.
        payload: What the changes of this rank consist of; None unless asked for by `statistics` or `observe`.
        find_s: Seconds of finding the changes, or of copying the first version; of a receiver, until all have done
            so, the counting of weights whose version was not known included.
        encode_s: Seconds of coding them.
        exchange_s: Seconds in which bulk was sent or received.
        prove_s: Seconds of decoding and proving.
        write_s: Seconds from the first element written until all were read back.
        validate_s: Seconds of comparing every bit, sending them included.
        total_s: Seconds of the call.
    """

    version: int
    base: int | None
    digest: str
    sent: Sent
    dense_ranks: tuple[int, ...]
    codec: str | None
    codec_reason: str | None
    elements: int
    changes: int
    density: float
    full_nbytes: int
    payload_nbytes: int
    sent_nbytes: int
    exchanged_nbytes: int
    reduction: float
    dense_tensors: int
    sparse_tensors: int
    buckets: int
    bucket_nbytes: int
    launches: int
    validated: bool
    observed: bool
    payload: Payload | None
    find_s: float
    encode_s: float
    exchange_s: float
    prove_s: float
    write_s: float
    validate_s: float
    total_s: float

    def cost(
        self,
        bandwidth: float,
        *,
        index_nbytes: int = 4,
        value_nbytes: int = 2,
        launch_s: float = 0.0,
        bucket_s: float = 0.0,
    ) -> tuple[Cost, Cost]:
        """Compute what the cost model of SparseRL-Sync says of this version: S bytes become S / X at sparsity 1 − 1/X.

        Args:
            bandwidth: Of the link, bits per second.
            index_nbytes: Bytes of a position, before coding: 4, or 2 for differences.
            value_nbytes: Bytes of a value.
            launch_s: Fixed seconds of a collective's call.
            bucket_s: Fixed seconds of a bucket.

        Returns:
            Of all bits, and of the changes as positions and values. `payload_nbytes` is what was measured.
        """

        def cost(nbytes: int) -> Cost:
            buckets = math.ceil(nbytes / self.bucket_nbytes)
            return Cost(nbytes, buckets, 8 * nbytes / bandwidth + buckets * (bucket_s + launch_s))

        return cost(self.full_nbytes), cost(self.changes * (index_nbytes + value_nbytes))
