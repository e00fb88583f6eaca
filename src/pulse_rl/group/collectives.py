"""A fixed process group: collectives of numbers and byte strings between its ranks, on Gloo and NCCL alike.

Every call is a collective: all ranks make the same ones in the same order. When a rank is lost they raise
ExchangeError within the group's timeout (`init_process_group(timeout=…)`). Who belongs to a group is decided elsewhere
(`members`).
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError

# Newer versions of torch warn about the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_FAILED = -1  # in place of a length: this rank cannot go on
_RELEASED: Any = object()  # instead of a process group; None would be torch's default one


class Place(NamedTuple):
    """A rank and how many there are."""

    rank: int
    size: int


class Group:
    """A process group of torch; None is the default one."""

    def __init__(self, process_group: Any, rank: int, size: int, device: str | torch.device = "cpu") -> None:
        self.handle = process_group
        self._device = torch.device(device)
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None) -> Self:
        """A group that torch.distributed knows. Raises ExchangeError if there is none, or this rank is not in it."""
        if not dist.is_available() or not dist.is_initialized():
            raise ExchangeError(
                "the trainers have no process group: call torch.distributed.init_process_group() first "
                "(a single trainer too: world_size=1)"
            )
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ExchangeError("process_group: this rank is not a member of it: give each rank a group that it is in")
        nccl = "nccl" in str(dist.get_backend(process_group))
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        return cls(process_group, rank, dist.get_world_size(process_group), device)

    @property
    def place(self) -> Place:
        """This rank among those of the group."""
        return Place(self.rank, self.size)

    def release(self) -> None:
        """Drop the process group: its connections end as soon as nothing refers to it."""
        self.handle = _RELEASED

    def gather_numbers(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """(W, k): the k numbers, int64, of each rank."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        return self._gather(mine).reshape(self.size, -1)

    def gather_floats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """(W, k): the k values of each rank."""
        return self._gather(torch.from_numpy(values)).reshape(self.size, -1)

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        """The bytes of each rank, padded to the longest on the network.

        Raises ExchangeError if a rank has more than `limit` bytes, or failed (`report_failure`).
        """
        lengths = self.gather_numbers([len(data)])[:, 0]
        _check(lengths, limit)
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self._gather(torch.from_numpy(padded)).reshape(self.size, -1)
        return [memoryview(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]  # type: ignore[arg-type]

    def all_to_all(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        """Send data[r] to rank r; returns what each rank sent here. Raises ExchangeError as `gather` does."""
        table = self.gather_numbers([len(piece) for piece in data])
        _check(table, limit)
        lengths = table[:, self.rank]
        mine = torch.from_numpy(np.frombuffer(b"".join(data), np.uint8).copy())
        found = self._all_to_all(mine, [len(piece) for piece in data], lengths.tolist())
        ends = np.cumsum(lengths).tolist()
        return [memoryview(found[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)]  # type: ignore[arg-type]

    def all_to_all_floats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Send values[r] of (W, k) to rank r; returns what each rank sent here, (W, k)."""
        width = [values.shape[1]] * self.size
        return self._all_to_all(torch.from_numpy(values.reshape(-1)), width, width).reshape(self.size, -1)

    def report_failure(self, lengths: int) -> None:
        """Take part in `gather` (1 length) or `all_to_all` (W lengths) only to report that this rank cannot go on."""
        self.gather_numbers([_FAILED] * lengths)

    def _gather(self, mine: torch.Tensor) -> NDArray[Any]:
        with torch_errors():
            mine = mine.to(self._device)
            found = torch.empty(self.size * len(mine), dtype=mine.dtype, device=self._device)
            if len(mine):
                _all_gather(found, mine, group=self.handle)
            return found.cpu().numpy()

    def _all_to_all(self, mine: torch.Tensor, out: list[int], into: list[int]) -> NDArray[Any]:
        with torch_errors():
            found = torch.empty(sum(into), dtype=mine.dtype, device=self._device)
            dist.all_to_all_single(found, mine.to(self._device), into, out, group=self.handle)
            return found.cpu().numpy()


def _check(lengths: NDArray[np.int64], limit: int) -> None:
    for rank, row in enumerate(lengths.reshape(len(lengths), -1)):
        if row.min() <= _FAILED:
            raise rank_failed(rank, "its own error says why")
        if row.max() > limit:
            raise ExchangeError(
                f"rank {rank}: expected payloads of at most {limit} bytes, found {row.max()}", ranks=(rank,)
            )


def rank_failed(rank: int, why: str, *, at_fault: Sequence[int] = ()) -> ExchangeError:
    """The error that all others raise when one rank cannot go on. at_fault: by default that rank."""
    return ExchangeError(
        f"rank {rank} could not go on, so no rank does; the shared weights are those of the last whole round: start "
        f"the trainers again from their last checkpoint ({why})",
        ranks=at_fault or (rank,),
    )


@contextmanager
def torch_errors() -> Iterator[None]:
    """Turn what torch.distributed raises into ExchangeError."""
    try:
        yield
    except RuntimeError as error:
        # The frames of torch.distributed hold the process group, and Gloo ends its connections only when nothing does.
        traceback.clear_frames(error.__traceback__)
        first = str(error).strip().splitlines()[0]
        raise ExchangeError(
            "the exchange between trainers failed: a worker or the network is lost, or one took fewer inner steps than "
            "the others; the shared weights are those of the last whole round: start the trainers again from their "
            f"last checkpoint ({first})"
        ) from error
