"""A group of our own: the ranks of the caller's process group, connected once more over Gloo, for us alone.

So a background thread may use it while the caller's collectives run, NCCL's too. It differs from `Group` in what
happens when a rank is lost:

**Each rank hears from every other one**, where Gloo's own collectives go around a ring. The bytes are as many, W − 1
times a row, and a rank sees by itself whose connection has ended. It waits for all the others before it raises, so
that all who are left name the same ranks. A broadcast goes down a chain of ranks, so that none sends it twice.
**A rank that raises leaves, and says so** to all others: they learn it in their next call, and do not wait for their
timeout. Each later call on that rank raises the same error.

On the network a message is a status (int64) and the data. The status is 0, or of a rank that has left −1 − the rank
that it left for: then it comes alone. Gloo takes a message that is shorter than what
its receiver has room for. Bulk has no status, and follows a message that has one in each direction.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError
from pulse_rl.group.collectives import PLAIN, Bytes, Group, Wording, check_lengths, name_ranks, torch_errors, writable

if TYPE_CHECKING:
    import torch.distributed as dist

TIMEOUT_S = 1800.0  # torch's own default
CHUNK = 4 << 20  # bytes that a rank of the chain receives before it passes them on
_CONNECT_S = 300.0  # at most
_ATTEMPTS = 5  # of Gloo's to connect, each within the timeout that it is given
SHORT_NBYTES = 4 << 10  # of what is gathered, sent together with its length; what is left follows in a second message
_STATUS, _LENGTH = 8, 8  # bytes
_MESSAGE, _BULK = 0, 1  # Gloo's tags
_ROUNDING_S = 0.01  # Gloo counts whole milliseconds
_NOTHING: Bytes = np.empty(0, np.uint8)
# Groups that this process has left: their failure notices can still be received when their owner drops them.
_departed: deque[PrivateGroup] = deque(maxlen=4)


@dataclass(frozen=True, eq=False)
class _Transfer:
    """Data on its way to or from a rank."""

    rank: int
    data: Bytes  # the memory that Gloo reads or writes
    work: Any


class PrivateGroup(Group):
    """The ranks of a process group, connected over Gloo by `of`. One thread uses it at a time.

    timeout: seconds that a call waits for another rank.
    """

    def __init__(self, gloo: Any, rank: int, size: int, timeout: float, wording: Wording = PLAIN) -> None:
        super().__init__(gloo, rank, size, wording=wording)
        self._timeout = timeout
        self._left: tuple[str, Sequence[int]] | None = None  # why this rank has left: a message, the ranks at fault
        # Of a rank that leaves all of it is kept: the others may be sending to its memory.
        self._in_flight: set[_Transfer] = set()

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None = None, wording: Wording = PLAIN, *, timeout: float | None = None
    ) -> Self:
        """Connect the ranks of a process group once more. A collective of that group.

        process_group: None for torch's default group. timeout: seconds that this and each later call wait for another
        rank; None for torch's default, half an hour. Raises ExchangeError if there is no such group, this rank is not
        in it, or another one is lost.
        """
        callers = Group.of(process_group, wording)
        import torch
        import torch.distributed as dist

        seconds = TIMEOUT_S if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with torch_errors(wording):
            # A random name, rank 0's: a count of groups differs between ranks that are in different ones.
            name = torch.tensor([secrets.randbits(62)], device=callers.device)
            naming = dist.broadcast(name, group=process_group, group_src=0, async_op=True)
            if naming is not None:
                naming.wait(timedelta(seconds=seconds))
            left = max(0.1, deadline - time.monotonic())
            known = dist.distributed_c10d
            rendezvous = known._get_process_group_store(process_group or known._get_default_group())
            store = known.PrefixStore(f"pulse-rl/{int(name.item()):016x}", rendezvous)
            connect = timedelta(seconds=min(left, _CONNECT_S) / _ATTEMPTS)
            gloo = dist.ProcessGroupGloo(store, *callers.place, connect)
        group = cls(gloo, *callers.place, max(0.1, deadline - time.monotonic()), wording)
        group.gather_numbers([0])  # returns when all are connected
        group._timeout = seconds
        return group

    def leave(self, why: str) -> None:
        """Leave the group and say so: the others learn in their next call that this rank is lost.

        why: what each later call of this rank raises. Of a rank that has left already, the first reason stands.
        """
        if self._left is None:
            self._notify_peers(self.wording.with_advice(why), (self.rank,))

    def gather(self, data: bytes, limit: int, numbers: Sequence[int] | None = None) -> list[memoryview]:
        """As `Group.gather`. One message to each rank where all are short, and nothing is padded.

        numbers: the ranks that gather, in their order, where these are some only; the others make no call.
        """
        numbers = numbers or range(self.size)
        mine, short = np.frombuffer(data, np.uint8), min(limit, SHORT_NBYTES)
        row = np.concatenate([np.array([len(mine)], np.int64).view(np.uint8), mine[:short]])
        others = [rank for rank in numbers if rank != self.rank]
        with self._leaving_on_error():
            found = self._swap(dict.fromkeys(others, row), dict.fromkeys(others, _LENGTH + short))
            lengths = {rank: int(message[:_LENGTH].view(np.int64)[0]) for rank, message in found.items()}
            check_lengths({self.rank: len(mine), **lengths}, limit)
            rest = {rank: max(0, length - short) for rank, length in lengths.items()}
            more = {}
            if len(mine) > short or any(rest.values()):
                more = self._swap(dict.fromkeys(others, mine[short:]), rest)
        gathered = {self.rank: memoryview(data)}
        for rank, message in found.items():
            start = message[_LENGTH : _LENGTH + lengths[rank]]
            gathered[rank] = memoryview(np.concatenate([start, more[rank]]) if rest[rank] else start)  # type: ignore[arg-type]
        return [gathered[rank] for rank in numbers]

    def send(self, to: int, data: Bytes | bytes) -> None:
        """Send bytes to one rank, which receives as many. Returns when it has them."""
        with self._leaving_on_error():
            array = writable(data)
            self._agree_on_length(to, len(array))
            self._finish([self._start_bulk("send", to, array)])

    def receive(self, source: int, nbytes: int) -> Bytes:
        """The bytes, uint8, that one rank sends here."""
        with self._leaving_on_error():
            array = np.empty(nbytes, np.uint8)
            self._agree_on_length(source, nbytes)
            self._finish([self._start_bulk("recv", source, array)])
            return array

    def _agree_on_length(self, other: int, nbytes: int) -> None:
        mine = np.array([nbytes], np.int64)
        found = int(self._swap({other: mine.view(np.uint8)}, {other: mine.nbytes})[other].view(np.int64)[0])
        if found != nbytes:
            raise ExchangeError(f"rank {other} of {self.size}: expected {nbytes} bytes, found {found}", ranks=(other,))

    def _broadcast(self, source: int, array: NDArray[Any]) -> None:
        place, data = (self.rank - source) % self.size, array.view(np.uint8)
        above = (self.rank - 1) % self.size if place else None
        below = (self.rank + 1) % self.size if place < self.size - 1 else None
        with self._leaving_on_error():
            sent: list[_Transfer] = []
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                if above is not None:
                    self._swap({above: _NOTHING}, {above: 0})
                    self._finish([self._start_bulk("recv", above, chunk)])
                self._finish(sent)  # while the next chunk arrived
                if below is not None:
                    self._swap({below: _NOTHING}, {below: 0})
                    sent = [self._start_bulk("send", below, chunk)]
            self._finish(sent)

    def _gather(self, mine: NDArray[Any]) -> NDArray[Any]:
        pieces = [mine] * self.size
        return self._exchange(pieces, [len(mine)] * self.size) if len(mine) else mine

    def _all_to_all(self, mine: NDArray[Any], out: list[int], into: list[int]) -> NDArray[Any]:
        return self._exchange(np.split(mine, np.cumsum(out)[:-1]), into)

    def _exchange(self, pieces: Sequence[NDArray[Any]], into: Sequence[int]) -> NDArray[Any]:
        """Send pieces[r] to rank r; returns what each rank sent here, one after another. into: elements of each."""
        own = pieces[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._leaving_on_error():
            found = self._swap(
                {rank: pieces[rank].view(np.uint8) for rank in others},
                {rank: into[rank] * own.itemsize for rank in others},
            )
        return np.concatenate([own if rank == self.rank else found[rank].view(own.dtype) for rank in range(self.size)])

    def _swap(self, rows: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send a row to each of these ranks, and receive one of that size in bytes from each."""
        if self._left is not None:
            raise self._left_error()
        deadline = time.monotonic() + self._timeout
        found = {rank: np.zeros(_STATUS + size, np.uint8) for rank, size in sizes.items()}
        incoming, outgoing, late, blamed = {}, {}, dict[int, bool](), set[int]()
        for rank, row in rows.items():
            message = np.concatenate([np.zeros(_STATUS, np.uint8), row])
            try:
                incoming[rank] = self._start("recv", rank, found[rank], _MESSAGE)
                outgoing[rank] = self._start("send", rank, message, _MESSAGE)
            except RuntimeError:
                late[rank] = False
        for rank, transfer in incoming.items():
            self._wait(transfer, deadline, late)
            if rank in late:
                continue
            if status := int(found[rank][:_STATUS].view(np.int64)[0]):
                blamed.add(-1 - status)  # and the rank that has left receives nothing more
            else:
                self._wait(outgoing[rank], deadline, late)
        if late or blamed:
            self._leave(late, blamed)
        return {rank: message[_STATUS:] for rank, message in found.items()}

    def _start(self, kind: Literal["send", "recv"], rank: int, data: Bytes, tag: int) -> _Transfer:
        import torch

        transfer = _Transfer(rank, data, getattr(self.handle, kind)([torch.from_numpy(data)], rank, tag))
        self._in_flight.add(transfer)
        if kind == "send":
            self.sent_nbytes += data.nbytes
        return transfer

    def _start_bulk(self, kind: Literal["send", "recv"], rank: int, data: Bytes) -> _Transfer:
        try:
            return self._start(kind, rank, data, _BULK)
        except RuntimeError:
            self._leave({rank: False})

    def _wait(self, transfer: _Transfer, deadline: float, late: dict[int, bool]) -> None:
        """Wait for its end. If its rank is lost: late[rank] is whether it did not answer, rather than ended."""
        try:
            transfer.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:
            late.setdefault(transfer.rank, time.monotonic() > deadline - _ROUNDING_S)
        self._in_flight.discard(transfer)

    def _finish(self, transfers: Iterable[_Transfer]) -> None:
        deadline, late = time.monotonic() + self._timeout, dict[int, bool]()
        for transfer in transfers:
            self._wait(transfer, deadline, late)
        if late:
            self._leave(late)

    def _leave(self, late: Mapping[int, bool], blamed: Iterable[int] = ()) -> NoReturn:
        """Leave the group because of ranks that this one found lost (`_wait`), or of others' reasons to leave."""
        lost = sorted({rank for rank, is_late in late.items() if not is_late} | set(blamed))
        silent = sorted(late.keys() - set(lost))
        found = [f"{name_ranks(lost, self.size)} {'are' if len(lost) > 1 else 'is'} lost"] if lost else []
        if silent:
            found.append(f"{name_ranks(silent, self.size)} did not answer within {self._timeout:g} s")
        self._notify_peers(self.wording.with_advice("; ".join(found)), lost or silent)
        raise self._left_error() from None

    def _left_error(self) -> ExchangeError:
        assert self._left is not None
        return ExchangeError(self._left[0], ranks=self._left[1])

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Leave the group if this rank is interrupted, or has no memory, in the middle of a call."""
        try:
            yield
        except ExchangeError:
            raise
        except BaseException:
            self.leave(f"rank {self.rank} was interrupted in an earlier call")
            raise

    def _notify_peers(self, message: str, ranks: Sequence[int]) -> None:
        self._left = message, ranks
        _departed.append(self)
        status = np.array([-1 - ranks[0]], np.int64).view(np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                with suppress(RuntimeError):  # a rank that is gone
                    self._start("send", rank, status, _MESSAGE)
