"""Bits over torch tensors that are not in host memory, or that are cast as they are read.

Bits are read and written by a pool of threads, each of which would use its device's default stream. A tensor on a
device is therefore used on the stream that was the caller's when its Bits was made: reads come after all that the
caller had queued there, and what the caller queues next comes after the writes.

torch is imported when the first is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, ITEMSIZES, UIntArray
from pulse_rl.kernels.cpu.loco import FORMATS
from pulse_rl.weights.devices import Cuda, device_of
from pulse_rl.weights.host_bits import Counter, count_writes, counted_by, expanded

if TYPE_CHECKING:
    import torch


class TorchBits:
    """Bits over a torch tensor that is not in host memory, or that is cast as it is read.

    tensor: on any device, of any strides. cast: a torch dtype to read the elements as; then nothing can be written.
    Each read casts only what it returns, so no second copy of the tensor exists. However an element is read, it has the
    same bits, those with which changes are found: also a NaN.

    device: the CUDA device, if its kernels reach the elements, also where these are cast; None otherwise.
    stored_itemsize: bytes of an element in memory.
    """

    __slots__ = (
        "_cast",
        "_flat",
        "_on_stream",
        "_tensor",
        "_uint",
        "device",
        "dtype",
        "itemsize",
        "shape",
        "size",
        "stored_itemsize",
    )

    def __init__(self, tensor: torch.Tensor, cast: torch.dtype | None = None) -> None:
        import torch

        self._cast = cast
        reached = cast is None or (tensor.dtype, cast) == (torch.float32, torch.bfloat16)
        self.device: Cuda | None = device_of(tensor) if reached else None
        self._on_stream = _callers_stream(tensor.device)
        self.stored_itemsize = tensor.itemsize
        self.dtype, self.itemsize = torch_dtype(cast or tensor.dtype)
        self._uint = getattr(torch, f"uint{8 * self.itemsize}")
        self._tensor = tensor.detach()
        if cast is None:
            self._tensor = self._tensor.view(_integers(self.itemsize))
        self._place(self._tensor)

    @classmethod
    def new(cls, dtype: str, shape: tuple[int, ...], device: Cuda, *, pinned: bool) -> TorchBits:
        """Bits over new memory that a device's kernels reach, of undefined contents.

        dtype: as safetensors spells it. pinned: the memory is the host's, pinned, and not the device's own.
        """
        import torch

        made = cls.__new__(cls)
        made._cast, made._on_stream, made.device = None, device.own_stream, device
        made.dtype, made.itemsize = dtype, ITEMSIZES[dtype]
        made.stored_itemsize, made._uint = made.itemsize, getattr(torch, f"uint{8 * made.itemsize}")
        made._place(device.empty(shape, _integers(made.itemsize), pinned=pinned))
        return made

    def copy_from(self, other: TorchBits) -> None:
        """Take the bits that another tensor of this device is read as. They are there when this returns."""
        assert self.device is not None
        with self.device.own_stream():
            self._tensor.copy_(other._read_as(other._tensor))
        self.device.wait()

    def _place(self, tensor: torch.Tensor) -> None:
        """Take this as the tensor's memory."""
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.size = tensor.numel()
        # None if the strides allow no flat view: then elements are indexed by coordinates. A flat copy would be a
        # second tensor, and writing it back would race with other threads' segments.
        self._flat: torch.Tensor | None = self._tensor.view(-1) if self._tensor.is_contiguous() else None

    def _read_as(self, piece: torch.Tensor) -> torch.Tensor:
        """Elements as they are read, as integers on their device."""
        if self._cast is None:
            return piece
        return _cast(piece, self._cast) if self.device is None else self.device.cast(piece)

    def _bits(self, piece: torch.Tensor) -> UIntArray:
        array: UIntArray = self._read_as(piece).contiguous().view(self._uint).cpu().numpy()
        return array

    def _at(self, index: torch.Tensor) -> torch.Tensor:
        """The elements at flat indices on the tensor's device."""
        import torch

        if self._flat is not None:
            return self._flat[index]
        return self._tensor[torch.unravel_index(index, self.shape)]

    def _index(self, start: int, indices: NDArray[np.uint32]) -> torch.Tensor:
        import torch

        return torch.from_numpy(start + indices.astype(np.int64)).to(self._tensor.device)

    def read(self, start: int, stop: int) -> UIntArray:
        import torch

        with self._on_stream():
            if self._flat is not None:
                return self._bits(self._flat[start:stop])
            if start == 0 and stop == self.size:  # as a tile is read: 20 times as fast as by coordinates
                return self._bits(self._tensor).reshape(-1)
            return self._bits(self._at(torch.arange(start, stop, device=self._tensor.device)))

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        with self._on_stream():
            return self._bits(self._at(self._index(start, indices)))

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        with self._on_stream():
            self._put(self._index(start, indices), values)

    def write(self, start: int, values: UIntArray) -> None:
        import torch

        stop = start + len(values)
        with self._on_stream():
            if self._flat is not None:
                self._put(slice(start, stop), values)
            else:
                self._put(torch.arange(start, stop, device=self._tensor.device), values)

    def _put(self, where: Any, values: UIntArray) -> None:
        import torch

        if self._cast is not None:
            raise TypeError("a tensor that is cast on reading cannot be written")
        # torch warns about read-only arrays, and decoded values are read-only: copy those.
        values = np.ascontiguousarray(values) if values.flags.writeable else values.copy()
        source = torch.from_numpy(values).view(self._tensor.dtype).to(self._tensor.device)
        # Inference tensors may be written in their own mode only.
        with torch.inference_mode() if self._tensor.is_inference() else torch.no_grad():
            if self._flat is not None:
                self._flat[where] = source
            else:
                self._tensor[torch.unravel_index(where, self.shape)] = source

    @property
    def contiguous(self) -> bool:
        return self._flat is not None

    @property
    def writable(self) -> bool:
        return self._cast is None and not expanded(self.shape, self._tensor.stride())

    def view(self, slices: tuple[slice, ...]) -> TorchBits:
        part = TorchBits.__new__(TorchBits)  # on the stream of the whole tensor, whoever asks for a part
        part._cast, part._on_stream, part._uint = self._cast, self._on_stream, self._uint
        part.device, part.stored_itemsize = self.device, self.stored_itemsize
        part.dtype, part.itemsize = self.dtype, self.itemsize
        part._place(self._tensor[slices])
        return part

    def count_write(self) -> None:
        """Count a write for torch."""
        count_writes(counted_by([self.counter]))

    @property
    def counter(self) -> Counter:
        """For which tensor writes are counted."""
        return Counter.to(self._tensor)

    @property
    def address(self) -> int:
        """The address of the first element."""
        return self._tensor.data_ptr()

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, as NumPy's."""
        return tuple(stride * self._tensor.element_size() for stride in self._tensor.stride())

    @property
    def storage(self) -> object:
        tensor = self._tensor
        return (str(tensor.device), tensor.data_ptr(), self.shape, tensor.stride(), self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        tensor = self._tensor
        last = sum((n - 1) * stride for n, stride in zip(self.shape, tensor.stride(), strict=True))
        return (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _callers_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What makes the device's stream that is current now current in any thread; nothing where there are no streams."""
    import torch

    module = torch.get_device_module(device)
    if not hasattr(module, "current_stream"):
        return nullcontext
    return partial(module.stream, module.current_stream(device))


def _integers(itemsize: int) -> torch.dtype:
    """Integers that torch can index on every device: not the wider unsigned ones, nor some FP8 dtypes."""
    import torch

    found: torch.dtype = getattr(torch, "uint8" if itemsize == 1 else f"int{8 * itemsize}")
    return found


def _cast(values: torch.Tensor, cast: torch.dtype) -> torch.Tensor:
    """The bits of floats in another dtype, as integers on their device: those of `cast_array`.

    torch casts, but a NaN gets other bits from each processor, and some, even its sign, depend on how many elements are
    cast at once.
    """
    import torch

    name, itemsize = str(cast).removeprefix("torch."), cast.itemsize
    bits = values.to(cast).view(_integers(itemsize))
    if name not in FORMATS:
        return bits
    asked = values if values.itemsize > 1 else values.float()  # torch knows no signs of FP8
    signs = asked.signbit().to(bits.dtype) << (8 * itemsize - 1)
    return torch.where(asked.isnan(), signs | int(FORMATS[name].nan), bits)


def torch_dtype(dtype: torch.dtype) -> tuple[str, int]:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {dtype} is not supported: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
