"""A fixed process group: collectives of numbers and byte strings between its ranks, on Gloo and NCCL alike.

Every call is a collective: all ranks make the same ones in the same order. When a rank is lost they raise
ExchangeError within the group's timeout (`init_process_group(timeout=…)`). Who belongs to a group is decided elsewhere.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError, require

if TYPE_CHECKING:
    import torch.distributed as dist

Bytes: TypeAlias = NDArray[np.uint8]
N = TypeVar("N", bound=np.generic)

_LENGTH, _ROW = 8, 64  # bytes of a message's length, and of what is sent together with it
_RELEASED: Any = object()  # instead of a process group; None would be torch's default one
_SHOWN = 16  # ranks in a message


class Wording(NamedTuple):
    """What the errors of a group say, in the words of its owner."""

    failed: str = (
        "the exchange between ranks failed: a rank or the network is lost, or the ranks did not make the same calls"
    )
    advice: str = ""  # how things stand after a failure, and what to do
    in_step: str | None = None  # the same where one rank's work has failed and none is lost; None for the advice

    def with_advice(self, what: str, why: str = "") -> str:
        """What happened, the advice, and in brackets why it happened."""
        return "".join([what, self.advice and f"; {self.advice}", why and f" ({why})"])

    def with_state(self, what: str) -> str:
        """What one rank's work has failed at, and how things stand."""
        return self.with_advice(what) if self.in_step is None else f"{what}; {self.in_step}"


PLAIN = Wording()


class RankPlace(NamedTuple):
    """A rank and how many there are."""

    rank: int
    size: int


def default_place() -> RankPlace | None:
    """This rank in torch's default process group; None where there is none. Imports nothing."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return RankPlace(dist.get_rank(), dist.get_world_size())


class Group:
    """A process group of torch; None is the default one. device: where its tensors are, as torch writes it.

    sent_nbytes: what this rank has sent, without what the transport adds. A row that is gathered goes to W − 1 ranks;
    what is broadcast is counted where it comes from, once.
    """

    def __init__(self, process_group: Any, rank: int, size: int, device: str = "cpu", wording: Wording = PLAIN) -> None:
        self.handle = process_group
        self.device = device
        self.rank = rank
        self.size = size
        self.wording = wording
        self.sent_nbytes = 0

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None, wording: Wording = PLAIN) -> Self:
        """A group that torch.distributed knows.

        Raises ExchangeError if there is none, or this rank is not in it, and TypeError for a DeviceMesh.
        """
        torch = require("torch", "torch")
        dist = torch.distributed
        if not dist.is_available() or not dist.is_initialized():
            raise ExchangeError(
                "there is no process group: call torch.distributed.init_process_group() first "
                "(for a single process too: world_size=1)"
            )
        if isinstance(process_group, dist.DeviceMesh):  # what FSDP2 is given
            names = process_group.mesh_dim_names or range(process_group.ndim)
            found, own = f"a DeviceMesh {tuple(process_group.shape)}", "mesh.get_group()"
            if process_group.ndim > 1:
                own = f"torch.distributed.group.WORLD for all ranks, or mesh.get_group({names[-1]!r}) for one dimension"
            raise TypeError(f"group: expected a process group, found {found}: give {own}")
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ExchangeError("group: this rank is not a member of it: give each rank a group that it is in")
        nccl = "nccl" in str(dist.get_backend(process_group))
        device = f"cuda:{torch.cuda.current_device()}" if nccl else "cpu"
        return cls(process_group, rank, dist.get_world_size(process_group), device, wording)

    @property
    def place(self) -> RankPlace:
        """This rank among those of the group."""
        return RankPlace(self.rank, self.size)

    def release(self) -> None:
        """Drop the process group: its connections end as soon as nothing refers to it."""
        self.handle = _RELEASED

    def gather_numbers(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """(W, k): the k numbers, int64, of each rank."""
        return self.gather_rows(np.array(numbers, np.int64))

    def gather_rows(self, values: NDArray[N]) -> NDArray[N]:
        """(W, k): the k values of each rank."""
        return self._gather(values).reshape(self.size, -1)

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        """The bytes of each rank. A second call of the network, padded to the longest, where one has more than 56.

        Raises ExchangeError if a rank has more than `limit` bytes.
        """
        mine = np.frombuffer(data, np.uint8)
        row = np.zeros(_ROW, np.uint8)
        row[:_LENGTH] = np.array([len(mine)], np.int64).view(np.uint8)
        row[_LENGTH : _LENGTH + len(mine)] = mine[: _ROW - _LENGTH]
        rows = self._gather(row).reshape(self.size, -1)
        lengths = np.ascontiguousarray(rows[:, :_LENGTH]).view(np.int64)[:, 0].tolist()
        check_lengths(dict(enumerate(lengths)), limit)
        rows, longest = rows[:, _LENGTH:], max(lengths)
        if longest > _ROW - _LENGTH:
            padded = np.zeros(longest, np.uint8)
            padded[: len(mine)] = mine
            rows = self._gather(padded).reshape(self.size, -1)
        return [memoryview(row[:length]) for row, length in zip(rows, lengths, strict=True)]  # type: ignore[arg-type]

    def all_to_all(self, data: Sequence[bytes], lengths: Sequence[int]) -> list[memoryview]:
        """Send data[r] to rank r; returns what each rank sent here, of which the bytes are known."""
        mine = np.frombuffer(b"".join(data), np.uint8).copy()
        found = self._all_to_all(mine, [len(piece) for piece in data], list(lengths))
        ends = np.cumsum(lengths).tolist()
        return [memoryview(found[end - n : end]) for end, n in zip(ends, lengths, strict=True)]  # type: ignore[arg-type]

    def all_to_all_rows(self, values: NDArray[N]) -> NDArray[N]:
        """Send values[r] of (W, k) to rank r; returns what each rank sent here, (W, k)."""
        width = [values.shape[1]] * self.size
        return self._all_to_all(values.reshape(-1), width, width).reshape(self.size, -1)

    def broadcast(self, source: int, data: Bytes | bytes | None, limit: int) -> Bytes:
        """The bytes of rank `source`, uint8, on all ranks. There it is `data` itself if that can be written to.

        Raises ExchangeError on all ranks if they are more than `limit`.
        """
        mine = writable(data) if data is not None and self.rank == source else np.empty(0, np.uint8)
        length = np.array([len(mine)], np.int64)
        self._broadcast(source, length)
        check_lengths({source: int(length[0])}, limit)
        found = mine if self.rank == source else np.empty(int(length[0]), np.uint8)
        if len(found):
            self._broadcast(source, found)
        return found

    def _gather(self, mine: NDArray[Any]) -> NDArray[Any]:
        import torch
        import torch.distributed as dist

        # Newer versions of torch warn about the older name.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with torch_errors(self.wording):
            tensor = torch.from_numpy(mine).to(self.device)
            found = torch.empty(self.size * len(tensor), dtype=tensor.dtype, device=self.device)
            if len(tensor):
                all_gather(found, tensor, group=self.handle)
                self.sent_nbytes += mine.nbytes * (self.size - 1)
            return found.cpu().numpy()

    def _all_to_all(self, mine: NDArray[Any], out: list[int], into: list[int]) -> NDArray[Any]:
        import torch
        import torch.distributed as dist

        with torch_errors(self.wording):
            tensor = torch.from_numpy(mine).to(self.device)
            found = torch.empty(sum(into), dtype=tensor.dtype, device=self.device)
            dist.all_to_all_single(found, tensor, into, out, group=self.handle)
            self.sent_nbytes += mine.nbytes - out[self.rank] * mine.itemsize
            return found.cpu().numpy()

    def _broadcast(self, source: int, array: NDArray[Any]) -> None:
        """Fill the array, (n,), with that of rank `source`."""
        import torch
        import torch.distributed as dist

        with torch_errors(self.wording):
            tensor = torch.from_numpy(array).to(self.device)
            dist.broadcast(tensor, group=self.handle, group_src=source)
            if self.rank == source:
                self.sent_nbytes += array.nbytes
            elif self.device != "cpu":
                array[:] = tensor.cpu().numpy()


def writable(data: Bytes | bytes) -> Bytes:
    """The bytes as a contiguous array that torch takes: itself, or a copy if it cannot be written to."""
    array = np.ascontiguousarray(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data)
    return array if array.flags.writeable else array.copy()


def name_ranks(ranks: Sequence[int], size: int) -> str:
    """ "rank 2 of 4", or "ranks 1, 2 of 4": at most 16 of them."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} of {size}"


def check_lengths(found: Mapping[int, int], limit: int) -> None:
    """Raise ExchangeError if a rank has more than `limit` bytes. found: by rank."""
    for rank, nbytes in found.items():
        if nbytes > limit:
            raise ExchangeError(
                f"rank {rank}: expected payloads of at most {limit} bytes, found {nbytes}", ranks=(rank,)
            )


@contextmanager
def torch_errors(wording: Wording) -> Iterator[None]:
    """Turn what torch.distributed raises into ExchangeError."""
    try:
        yield
    except RuntimeError as error:
        # The frames of torch.distributed hold the process group, and Gloo ends its connections only when nothing does.
        traceback.clear_frames(error.__traceback__)
        raise ExchangeError(wording.with_advice(wording.failed, _plain(str(error)))) from error


def _plain(text: str) -> str:
    """The first line of what torch.distributed raised, without the place in Gloo's source and its advice to developers.

    "[/…/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:4020: Connection reset by peer. This is typically …"
    """
    first = text.strip().partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is typically caused by")[0]
