"""The devices whose kernels reach the elements of tensors by address: the host, or a CUDA device.

Bits say on which device they lie. What is done to many segments at once, the kernels of that device do. Nothing of CUDA
is imported before a tensor on a CUDA device appears.

Kernels of a CUDA device run on a second stream, those of the coder on a few more. When a call takes weights (`layout`),
these wait for all that the caller has queued by then; what the caller queues afterwards, as the next forward pass,
overlaps. Each call waits until its own kernels are done, so the caller's stream never has to wait for them. Only the
write of a staged version runs on the caller's stream: it must not overtake what reads the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.errors import MissingExtraError, install_hint
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import Differences, Elements, Spots, coding
from pulse_rl.kernels.cpu.coding import Kind, MemoryRows, SegmentMoves, Starts, Streams, memory_from
from pulse_rl.logs import logger
from pulse_rl.weights.captures import beside_captures

if TYPE_CHECKING:
    import torch


log = logger(__name__)

# Calls that code at once. A call has some hundred segments, and a device has room for a thousand and more.
CODERS = 4


class Coder(Protocol):
    """What codes segments of the codec `context`, as `kernels.cpu.coding`, whose old bits lie on a device."""

    def count_exponents(
        self, memory: MemoryRows, field: Field, itemsize: int, every: NDArray[np.int64]
    ) -> NDArray[np.int32]: ...

    def count_bits(self, memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> None: ...

    def encode_segments(
        self, memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves
    ) -> list[bytes | None]: ...

    def decode_segments(
        self, streams: Streams, memory: MemoryRows, kind: Kind, starts: Starts, edges: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], UIntArray] | int: ...


class Host:
    """Host memory. Arguments and results as in `kernels.cpu.spots` and `states`."""

    spots_delta = staticmethod(cpu.spots_delta)
    digest = staticmethod(cpu.digest_spots)

    def copy_spots(self, spots: Spots, sizes: NDArray[np.int64], laid: Elements) -> MemoryRows:
        """A copy there of segments, as if they held the elements that are laid over them."""
        copy = cpu.copy_spots(spots, sizes, laid)
        return memory_from(copy.ctypes.data, np.cumsum(sizes) - sizes, sizes, copy.itemsize, copy)

    def write_spots(
        self, spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray
    ) -> int | None:
        return cpu.write_spots(spots, counts, indices, values)

    def prepare(
        self, spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray
    ) -> Callable[[], int | None]:
        """What calls `write_spots`, with all done beforehand that can be."""
        cpu.write_spots(spots.of([]), counts[:0], indices[:0], values[:0])  # loads the machine code
        return lambda: cpu.write_spots(spots, counts, indices, values)

    def find(
        self, old: Spots, new: Spots, sizes: NDArray[np.int64], itemsize: int, most: int, *, cast: bool
    ) -> Differences:
        """What differs between segments of two states, as `find_in_spots`. most: changes to make room for."""
        return cpu.find_in_spots(old, new, sizes, itemsize, cast=cast)

    def coder(self) -> AbstractContextManager[Coder]:
        """The coder of segments whose old bits lie there."""
        return nullcontext(coding)


HOST = Host()


class Cuda:
    """A CUDA device's memory."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream, *coders = (torch.cuda.Stream(device) for _ in range(1 + CODERS))  # type: ignore[no-untyped-call]
        self._coders: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
        for stream in coders:
            self._coders.put(stream)
        self._coding = threading.local()  # has `stream` in a thread that codes

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """The stream of this device's kernels is the current one, and its device. A thread that codes has its own."""
        import torch

        with beside_captures(), torch.cuda.stream(getattr(self._coding, "stream", self._stream)):
            yield

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """New memory that this device's kernels reach: its own or, pinned, the host's, which they read over PCIe."""
        import torch

        with self.own_stream():
            if pinned:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            return torch.empty(shape, dtype=dtype, device=self._device)

    def wait(self) -> None:
        """Wait until what is queued on the stream of this device's kernels is done."""
        with beside_captures():
            self._stream.synchronize()

    def follow(self) -> None:
        """Have kernels wait for what the caller has queued. No host waits."""
        import torch

        with beside_captures():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def spots_delta(
        self,
        spots: Spots,
        counts: NDArray[np.int64],
        indices: NDArray[np.uint32],
        values: UIntArray,
        laid: Elements | None = None,
        before: UIntArray | None = None,
    ) -> int:
        from pulse_rl.kernels.gpu.spots import Overwrites

        with self.own_stream():
            made = Overwrites(spots, counts, indices, values)
            if laid is None and before is None:
                return made.delta()
            held = made.held()
        if before is not None:
            before[:] = held
            held = before
        return cpu.spots_delta(spots, counts, indices, values, laid, held, reads=False)

    def copy_spots(self, spots: Spots, sizes: NDArray[np.int64], laid: Elements) -> MemoryRows:
        from pulse_rl.kernels.gpu.spots import copy_spots

        with self.own_stream():
            return copy_spots(spots, sizes, laid)

    def write_spots(
        self, spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray
    ) -> int | None:
        from pulse_rl.kernels.gpu.spots import Overwrites

        with self.own_stream():
            return Overwrites(spots, counts, indices, values).write()

    def prepare(
        self, spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray
    ) -> Callable[[], int | None]:
        import torch

        from pulse_rl.kernels.gpu.spots import Overwrites

        with self.own_stream():  # the changes are copied beside what is generated meanwhile
            made = Overwrites(spots, counts, indices, values)

        def write() -> int | None:
            # The caller's own stream, so that the elements are written after all that reads the old ones.
            with beside_captures(), torch.cuda.stream(torch.cuda.current_stream(self._device)):
                return made.write()

        return write

    @contextmanager
    def coder(self) -> Iterator[Coder]:
        from pulse_rl.kernels.gpu import coding

        self._coding.stream = stream = self._coders.get()  # waits while all are at work
        try:
            with self.own_stream():
                stream.wait_stream(self._stream)
                yield coding
        finally:
            del self._coding.stream
            self._coders.put(stream)

    def cast(self, values: torch.Tensor) -> torch.Tensor:
        """float32 as the bits of bfloat16 that `find` compares: new memory of int16. Queued on the current stream."""
        import torch

        from pulse_rl.kernels.gpu.casts import cast

        values = values.contiguous()
        bits = torch.empty(values.shape, dtype=torch.int16, device=values.device)
        cast(values, bits)
        return bits

    def find(
        self, old: Spots, new: Spots, sizes: NDArray[np.int64], itemsize: int, most: int, *, cast: bool
    ) -> Differences:
        from pulse_rl.kernels.gpu.spots import find_in_spots

        with self.own_stream():
            return find_in_spots(old, new, sizes, itemsize, most, cast=cast)

    def digest(self, spots: Spots, sizes: NDArray[np.int64], itemsize: int) -> int:
        """As `digest_spots`."""
        from pulse_rl.kernels.gpu.spots import digest_spots

        with self.own_stream():
            return digest_spots(spots, sizes, itemsize)


Device = Host | Cuda


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of a CUDA device. Tests that emulate one say so of some in host memory."""
    return tensor.is_cuda


def device_of(tensor: torch.Tensor) -> Cuda | None:
    """The CUDA device that a tensor lies on, if there are kernels for it; None otherwise."""
    return _device(tensor.device) if on_cuda(tensor) and _has_kernels() else None


_device = cache(Cuda)


def require_kernels() -> None:
    """Raise MissingExtraError unless there are kernels for CUDA devices."""
    if not _are_there_kernels():
        raise MissingExtraError(
            "kernels for a CUDA device need numba-cuda and a torch that is built with CUDA, which are not both "
            f"installed: {install_hint('gpu')}",
            name="numba_cuda",
            extra="gpu",
        )


def _are_there_kernels() -> bool:
    """Found out without loading Numba's part for CUDA."""
    if find_spec("torch") is None or find_spec("numba_cuda") is None:
        return False
    import torch

    return torch.version.cuda is not None


@cache
def _has_kernels() -> bool:
    """Whether there are kernels for CUDA devices. Says once if there are none, and what that means."""
    if _are_there_kernels():
        return True
    log.warning("tensors on a GPU are read through the host, as kernels for it are missing: %s", install_hint("gpu"))
    return False
