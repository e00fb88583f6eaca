"""Bytes between the ranks of a channel, in buckets of a bounded size.

Control goes over Gloo connections of our own, which name a lost rank at once. Bulk goes over them too, or, where the
caller's group is NCCL's, over that group by its device tensors. A rank that cannot give or take a bucket goes on with
the buckets of the step, so that no other rank waits for it, and fails in the next step (`Ranks.attempt`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

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
        self.buckets = self.launches = 0  # messages of bulk, and the calls that carried them
        self.bulk_s = 0.0
        self.bandwidth: float | None = None  # bits per second of the last broadcast that was long enough

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent, with what it passed on and all control."""
        return self._control.sent_nbytes + (self._bulk.sent_nbytes if self._bulk is not self._control else 0)

    def count_anew(self) -> None:
        """Count bulk from here on."""
        self.buckets = self.launches = 0
        self.bulk_s = 0.0

    def stream(
        self, source: int, nbytes: int, produce: Callable[[int], Bytes], consume: Callable[[Bytes], object]
    ) -> None:
        """Send bytes of one rank to all others, bucket by bucket. A collective.

        nbytes: known to all. produce: gives the next so many bytes, on the source. consume: takes a bucket elsewhere.
        """
        clock = time.perf_counter()
        for size in self._sizes(nbytes):
            found = self._broadcast(source, self._produced(source, produce, size))
            self.buckets += 1
            self.launches += 1
            if self.ranks.rank != source:
                self.ranks.attempt(partial(consume, found))
        seconds = time.perf_counter() - clock
        self.bulk_s += seconds
        if nbytes >= ENOUGH_NBYTES:
            self.bandwidth = 8 * nbytes / seconds

    def stream_to(
        self,
        receivers: Sequence[int],
        source: int,
        nbytes: int,
        produce: Callable[[int], Bytes],
        consume: Callable[[Bytes], object],
    ) -> None:
        """The same to certain ranks only. A collective: after each bucket all ranks meet, so that none waits long."""
        clock = time.perf_counter()
        for size in self._sizes(nbytes):
            if self.ranks.rank == source:
                data = self._produced(source, produce, size)
                for rank in receivers:
                    self._control.send(rank, data)
            elif self.ranks.rank in receivers:
                self.ranks.attempt(partial(consume, self._control.receive(source, size)))
            self.buckets += len(receivers)
            self.launches += len(receivers)
            self._control.gather(b"", 0)
        self.bulk_s += time.perf_counter() - clock

    def _broadcast(self, source: int, data: Bytes) -> Bytes:
        try:
            return self._bulk.broadcast(source, data, self.bucket_nbytes)
        except ExchangeError as error:
            self.ranks.leave(one_line(error))  # of the caller's group perhaps no other rank knows it
            raise

    def _sizes(self, nbytes: int) -> Iterator[int]:
        for start in range(0, nbytes, self.bucket_nbytes):
            yield min(self.bucket_nbytes, nbytes - start)

    def _produced(self, source: int, produce: Callable[[int], Bytes], size: int) -> Bytes:
        if self.ranks.rank != source:
            return np.empty(0, np.uint8)
        data = self.ranks.attempt(lambda: produce(size))
        return np.zeros(size, np.uint8) if data is None else data


def giving(data: bytes | Bytes) -> Callable[[int], Bytes]:
    """Give bytes, one after another."""
    view, at = np.frombuffer(data, np.uint8), 0

    def take(size: int) -> Bytes:
        nonlocal at
        at += size
        return view[at - size : at]

    return take
