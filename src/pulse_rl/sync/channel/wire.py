"""Bytes between the ranks of a channel, in buckets of a bounded size.

Control goes over Gloo connections of our own, which name a lost rank at once. Bulk goes over them too, or, where the
caller's group is NCCL's, over that group by its device tensors. A rank that cannot give or take a bucket goes on with
the buckets of the step, so that no other rank waits for it, and fails in the next step (`Ranks.attempt`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pulse_rl.errors import ExchangeError, one_line
from pulse_rl.group.collectives import Bytes, Group, Wording
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.ranks import Ranks

if TYPE_CHECKING:
    import torch.distributed as dist

WORDING = Wording(
    failed="the exchange of weights failed: a rank or the network is lost, or the ranks did not make the same calls",
    advice="Channel.version says what this rank's weights hold; after a lost rank, reconnect the ranks that are left",
)
ENOUGH_NBYTES = 1 << 20  # with fewer bytes a broadcast's time says nothing about the bandwidth


# Gives the next so many bytes, or takes a bucket of them.
Flow: TypeAlias = Callable[[Any], Any]


class Wire:
    """The ranks of a process group, and bulk between them. Making one is a collective of that group.

    bucket_nbytes: the most that one message of bulk has. timeout: seconds that a call waits for another rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, bucket_nbytes: int, timeout: float | None) -> None:
        self._control = PrivateGroup.of(group, WORDING, timeout=timeout)
        import torch.distributed as dist

        self._bulk = Group.of(group, WORDING) if "nccl" in str(dist.get_backend(group)) else self._control
        self.ranks = Ranks(self._control)
        self.bucket_nbytes = bucket_nbytes
        self.buckets = 0  # messages of bulk
        self.bulk_s = 0.0
        self.bandwidth: float | None = None  # bits per second of the last broadcast that was long enough

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent, with what it passed on and all control."""
        return self._control.sent_nbytes + (self._bulk.sent_nbytes if self._bulk is not self._control else 0)

    def count_anew(self) -> None:
        """Count bulk from here on."""
        self.buckets = 0
        self.bulk_s = 0.0

    def stream(self, source: int, nbytes: int, flow: Flow | None, to: Sequence[int] | None = None) -> None:
        """Send bytes of one rank to all others, bucket by bucket. A collective.

        nbytes: known to all. flow: on the source, gives the next so many bytes; elsewhere takes a bucket. None: zeros
        are given, what arrives is dropped. to: certain ranks only; then all ranks meet after each bucket, so that none
        waits long.
        """
        clock, me = time.perf_counter(), self.ranks.rank
        for start in range(0, nbytes, self.bucket_nbytes):
            size = min(self.bucket_nbytes, nbytes - start)
            data = self._given(flow, size) if me == source else np.empty(0, np.uint8)
            if to is None:
                data = self._broadcast(source, data)
                self.buckets += 1
            else:
                for rank in to if me == source else ():
                    self._control.send(rank, data)
                if me in to:
                    data = self._control.receive(source, size)
                self.buckets += len(to)
            if me != source and flow is not None and len(data):
                self.ranks.attempt(partial(flow, data))
            if to is not None:
                self._control.gather(b"", 0)
        seconds = time.perf_counter() - clock
        self.bulk_s += seconds
        if to is None and nbytes >= ENOUGH_NBYTES:
            self.bandwidth = 8 * nbytes / seconds

    def _given(self, flow: Flow | None, size: int) -> Bytes:
        data: Bytes | None = self.ranks.attempt(partial(flow, size)) if flow is not None else None
        return np.zeros(size, np.uint8) if data is None else data

    def _broadcast(self, source: int, data: Bytes) -> Bytes:
        try:
            return self._bulk.broadcast(source, data, self.bucket_nbytes)
        except ExchangeError as error:
            self.ranks.leave(one_line(error))  # of the caller's group perhaps no other rank knows it
            raise


def giving(chunks: Iterable[Bytes]) -> Flow:
    """Give the bytes of some arrays, one after another."""
    rest, following = np.empty(0, np.uint8), iter(chunks)

    def take(size: int) -> Bytes:
        nonlocal rest
        found, at = np.empty(size, np.uint8), 0
        while at < size:
            if not len(rest):
                rest = next(following)
            n = min(size - at, len(rest))
            found[at : at + n], rest = rest[:n], rest[n:]
            at += n
        return found

    return take
