"""Byte strings and whole numbers between the ranks of a process group, on Gloo and NCCL alike.

Every call is a collective: all ranks make the same ones in the same order. A rank that is lost ends them with
ExchangeError within the group's timeout (`init_process_group(timeout=…)`).
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError, PatchFormatError

# Newer versions of torch warn of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """A process group; the default one if None is given. Raises ExchangeError if there is none."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ExchangeError(
                "the trainers have no process group: call torch.distributed.init_process_group() first "
                "(a single trainer too: world_size=1)"
            )
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ExchangeError("process_group: expected one that this rank is in, found one that it is not")
        self.size = dist.get_world_size(process_group)
        nccl = "nccl" in str(dist.get_backend(process_group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def gather_numbers(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """(W, k): the k numbers, int64, of each rank."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        return self._gather(mine).reshape(self.size, -1)

    def give_up(self, numbers: int) -> None:
        """Take part in `gather` (of 1 number) or `swap` (of W) only to say that this rank cannot go on."""
        self.gather_numbers([-1] * numbers)

    def gather_floats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """(W, k): the k values of each rank."""
        return self._gather(torch.from_numpy(values)).reshape(self.size, -1)

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        """The bytes of each rank, padded to the longest on the way.

        Raises PatchFormatError if any has over `limit`, ExchangeError if one gave up.
        """
        lengths = self.gather_numbers([len(data)])[:, 0]
        _check(lengths, limit)
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self._gather(torch.from_numpy(padded)).reshape(self.size, -1)
        return [memoryview(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]  # type: ignore[arg-type]

    def swap(self, data: Sequence[bytes], limit: int) -> list[memoryview]:
        """Send data[r] to rank r; returns what each rank sent here. Raises PatchFormatError as `gather` does."""
        table = self.gather_numbers([len(piece) for piece in data])
        _check(table, limit)
        lengths = table[:, self.rank]
        mine = torch.from_numpy(np.frombuffer(b"".join(data), np.uint8).copy())
        found = self._swap(mine, [len(piece) for piece in data], lengths.tolist())
        ends = np.cumsum(lengths).tolist()
        return [memoryview(found[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)]  # type: ignore[arg-type]

    def swap_floats(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Send values[r] of (W, k) to rank r; returns what each rank sent here, (W, k)."""
        width = [values.shape[1]] * self.size
        return self._swap(torch.from_numpy(values.reshape(-1)), width, width).reshape(self.size, -1)

    def _gather(self, mine: torch.Tensor) -> NDArray[Any]:
        with lost():
            mine = mine.to(self._device)
            found = torch.empty(self.size * len(mine), dtype=mine.dtype, device=self._device)
            if len(mine):
                _all_gather(found, mine, group=self._group)
            return found.cpu().numpy()

    def _swap(self, mine: torch.Tensor, out: list[int], into: list[int]) -> NDArray[Any]:
        with lost():
            found = torch.empty(sum(into), dtype=mine.dtype, device=self._device)
            dist.all_to_all_single(found, mine.to(self._device), into, out, group=self._group)
            return found.cpu().numpy()


def _check(lengths: NDArray[np.int64], limit: int) -> None:
    for rank, row in enumerate(lengths.reshape(len(lengths), -1)):
        if row.min() < 0:
            raise ExchangeError(could_not_go_on(rank, "its own error says why"))
        if row.max() > limit:
            raise PatchFormatError(f"rank {rank}: expected payloads of at most {limit} bytes, found {row.max()}")


def could_not_go_on(rank: int, why: str) -> str:
    """What the others are told of a rank whose error ended the round."""
    return (
        f"rank {rank} could not go on, so no rank does; the shared weights are those of the last whole round: start "
        f"the trainers again from their last checkpoint ({why})"
    )


@contextmanager
def lost() -> Iterator[None]:
    """What torch.distributed raises becomes ExchangeError."""
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
