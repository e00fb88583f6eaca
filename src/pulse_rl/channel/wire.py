"""Bytes between the ranks of a channel: in buckets of a bounded size, and with one end for all.

Control goes over Gloo connections of our own, which name a lost rank at once. Bulk goes over them too, or, where the
caller's group is NCCL's, over that group by its device tensors. A rank that fails between two collectives goes on with
the collectives of the step, so that no other rank waits for it, and raises in the next `share`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from pulse_rl.group.collectives import Bytes, Group, Wording
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.sharing import share

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

WORDING = Wording(
    failed="the exchange of weights failed: a rank or the network is lost, or the ranks did not make the same calls",
    advice="Channel.version says what this rank's weights hold; after a lost rank, reconnect the ranks that are left",
)
ENOUGH_NBYTES = 1 << 20  # with fewer bytes a broadcast's time says nothing about the bandwidth


class Wire:
    """The ranks of a process group. Making one is a collective of that group.

    bucket_nbytes: the most that one message of bulk has. timeout: seconds that a call waits for another rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, bucket_nbytes: int, timeout: float | None) -> None:
        self._control = PrivateGroup.of(group, WORDING, timeout=timeout)
        import torch.distributed as dist

        self._bulk = Group.of(group, WORDING) if "nccl" in str(dist.get_backend(group)) else self._control
        self.rank, self.size = self._control.place
        self.bucket_nbytes = bucket_nbytes
        self.buckets = self.launches = 0  # messages of bulk, and the calls that carried them
        self.bulk_s = 0.0
        self.bandwidth: float | None = None  # bits per second of the last broadcast that was long enough
        self._failure: Exception | None = None  # of this rank, in a step that goes on
        self._agreed = False  # whether all ranks raise what this one raises

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent, with what it passed on and all control."""
        return self._control.sent_nbytes + (self._bulk.sent_nbytes if self._bulk is not self._control else 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of the channel. An error that only this rank knows of ends its connections: all others raise."""
        self._agreed, self._failure = False, None
        try:
            yield
        except BaseException:
            if not self._agreed:
                self._control.release()
            raise

    def count_anew(self) -> None:
        """Count bulk from here on."""
        self.buckets = self.launches = 0
        self.bulk_s = 0.0

    def share(self, what: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        """Run work on every rank and return what each found, by rank.

        Raises on all ranks if it fails on one, or if `attempt` has failed on one since the last time.
        """

        def do() -> T:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            return work()

        try:
            return share(self._control, what, do, kind)
        except BaseException:
            self._agreed = True
            raise

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error that every rank finds from the same shared results."""
        self._agreed = True
        raise error

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        """The bytes of every rank, by rank. limit: of one rank's."""
        return [bytes(found) for found in self._control.gather(data, limit)]

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do work between two collectives. After a failure, which `share` raises, it does nothing more."""
        if self._failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - raised in `share`
                self._failure = error
        return None

    def stream(
        self, source: int, nbytes: int, produce: Callable[[int], Bytes], consume: Callable[[Bytes], object]
    ) -> None:
        """Send bytes of one rank to all others, bucket by bucket. A collective.

        nbytes: known to all. produce: gives the next so many bytes, on the source. consume: takes a bucket elsewhere.
        """
        clock = time.perf_counter()
        for size in self._sizes(nbytes):
            found = self._bulk.broadcast(source, self._produced(source, produce, size), self.bucket_nbytes)
            self.buckets += 1
            self.launches += 1
            if self.rank != source:
                self.attempt(lambda found=found: consume(found))  # type: ignore[misc]
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
            if self.rank == source:
                data = self._produced(source, produce, size)
                for rank in receivers:
                    self._control.send(rank, data)
            elif self.rank in receivers:
                found = self._control.receive(source, size)
                self.attempt(lambda found=found: consume(found))  # type: ignore[misc]
            self.buckets += len(receivers)
            self.launches += len(receivers)
            self.gather(b"", 0)
        self.bulk_s += time.perf_counter() - clock

    def _sizes(self, nbytes: int) -> Iterator[int]:
        for start in range(0, nbytes, self.bucket_nbytes):
            yield min(self.bucket_nbytes, nbytes - start)

    def _produced(self, source: int, produce: Callable[[int], Bytes], size: int) -> Bytes:
        if self.rank != source:
            return np.empty(0, np.uint8)
        data = self.attempt(lambda: produce(size))
        return np.zeros(size, np.uint8) if data is None else data
