"""Tensors and arrays as unsigned integers: what the rest of the library works on.

A `Bits` has one tensor's dtype (as safetensors spells it) and shape, and reads and writes its elements as unsigned
integers of the same width, addressed by flat row-major index. No float is ever compared: −0 and +0 differ, and a NaN
keeps its payload.

Host tensors (NumPy arrays, CPU torch tensors, memory-mapped files) are viewed without a copy, and a write goes to the
live tensor. Tensors on other devices are copied through the host, only the elements that are asked for. torch is
imported only for torch tensors.

Bits are read and written by a pool of threads, each of which would use its device's default stream. A tensor on a
device is therefore used on the stream that was the caller's when its Bits was made: reads come after all that the
caller had queued there, and what the caller queues next comes after the writes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray
from pulse_rl.errors import one_line
from pulse_rl.kernels import cpu
from pulse_rl.weights.casts import ARRAY_CASTS, CASTS, cast_array

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Bits(Protocol):
    """One tensor as unsigned integers, addressed by flat row-major index."""

    @property
    def dtype(self) -> str:
        """The safetensors name, as "BF16"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def itemsize(self) -> int:
        """Bytes per element: 1, 2, 4 or 8."""

    def read(self, start: int, stop: int) -> UIntArray:
        """The elements [start, stop), shape (stop − start,), contiguous; a view if possible."""

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        """The elements at start + indices, shape (k,), a copy."""

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        """Overwrite the elements at start + indices with values (k,). The caller has checked that they are in range."""

    def write(self, start: int, values: UIntArray) -> None:
        """Overwrite the elements [start, start + len(values))."""

    def view(self, slices: tuple[slice, ...]) -> Bits:
        """A part of the same memory, one slice for each dimension, as Bits of its own."""

    @property
    def contiguous(self) -> bool:
        """Whether runs of elements are read at full speed, as they lie one after another."""

    @property
    def writable(self) -> bool:
        """Whether every element can be written without changing another."""

    @property
    def storage(self) -> object:
        """Equal for two views of exactly the same memory (tied weights), different otherwise."""

    @property
    def extent(self) -> tuple[object, int, int]:
        """The memory that it may touch: device, first address, address after the last."""


class HostBits:
    """Bits over an array in host memory, of any strides.

    tensor: the torch tensor whose memory it is, if any. Writes are counted for it, as torch counts its own: then a
    backward pass whose forward pass saw the old bits raises torch's error, instead of wrong gradients.
    """

    __slots__ = ("_rows", "_tensor", "array", "dtype", "flat", "itemsize", "shape", "size")

    def __init__(self, dtype: str, array: UIntArray, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor
        self.dtype = dtype
        self.array = array
        self.shape: tuple[int, ...] = array.shape
        self.size = int(array.size)
        self.itemsize = int(array.itemsize)
        # None if the elements do not lie one after another in row-major order.
        self.flat: UIntArray | None = array.reshape(-1) if array.flags.c_contiguous else None
        self._rows: UIntArray | None = None  # the same memory as (rows, run), where that is possible

    @property
    def rows(self) -> UIntArray | None:
        """The elements as rows of one length and distance, as those of a part of a tensor are; None for others."""
        if self._rows is None and self.array.ndim > 1:
            self._rows = _as_rows(self.array)
        return self._rows

    def read(self, start: int, stop: int) -> UIntArray:
        if self.flat is not None:
            return self.flat[start:stop]
        if start == 0 and stop == self.size:
            return np.ascontiguousarray(self.array).reshape(-1)
        return self.array.flat[start:stop]

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        if self.flat is not None:
            values = np.empty(len(indices), UINTS[self.itemsize])
            cpu.gather(self.flat[start:], indices, values)
            return values
        if start == 0 and self.rows is not None:
            values = np.empty(len(indices), UINTS[self.itemsize])
            cpu.gather_rows(self.rows, indices, values)
            return values
        return self.array.flat[start + indices.astype(np.int64)]

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        if self.flat is not None:
            cpu.scatter(self.flat[start:], indices, values)
        elif start == 0 and self.rows is not None:
            cpu.scatter_rows(self.rows, indices, values)
        else:
            self.array.flat[start + indices.astype(np.int64)] = values
        self.count_write()

    def write(self, start: int, values: UIntArray) -> None:
        stop = start + len(values)
        if self.flat is not None:
            self.flat[start:stop] = values
        elif len(values) == self.size:
            self.array[...] = values.reshape(self.shape)
        else:
            self.array.flat[start:stop] = values
        self.count_write()

    def view(self, slices: tuple[slice, ...]) -> Bits:
        return HostBits(self.dtype, self.array[_index(slices)], self._tensor)  # of a 0-dim array a view, too

    def count_write(self) -> None:
        """Count a write for torch."""
        if self._tensor is not None and not self._tensor.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(self._tensor)

    @property
    def contiguous(self) -> bool:
        return self.flat is not None

    @property
    def writable(self) -> bool:
        return bool(self.array.flags.writeable) and not _expanded(self.shape, self.array.strides)

    @property
    def address(self) -> int:
        """The address of the first element."""
        return int(self.array.__array_interface__["data"][0])  # twice as fast as `ctypes.data`

    @property
    def storage(self) -> object:
        return ("host", self.address, self.shape, self.array.strides, self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        return ("host", *np.lib.array_utils.byte_bounds(self.array))


class TorchBits:
    """Bits over a torch tensor that is not in host memory, or that is cast as it is read.

    tensor: on any device, of any strides. cast: a torch dtype to read the elements as; then nothing can be written.
    Each read casts only what it returns, so no second copy of the tensor exists.
    """

    __slots__ = ("_cast", "_flat", "_on_stream", "_tensor", "_uint", "dtype", "itemsize", "shape", "size")

    def __init__(self, tensor: torch.Tensor, cast: torch.dtype | None = None) -> None:
        import torch

        self._cast = cast
        self._on_stream = _callers_stream(tensor.device)
        self.dtype, self.itemsize = _torch_dtype(cast or tensor.dtype)
        self._uint = getattr(torch, f"uint{8 * self.itemsize}")
        self._tensor = tensor.detach()
        if cast is None:
            # Integers that torch can index on every device: not the wider unsigned ones, nor some FP8 dtypes.
            name = "uint8" if self.itemsize == 1 else f"int{8 * self.itemsize}"
            self._tensor = self._tensor.view(getattr(torch, name))
        self._place(self._tensor)

    def _place(self, tensor: torch.Tensor) -> None:
        """Take this as the tensor's memory."""
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.size = tensor.numel()
        # None if the strides allow no flat view: then elements are indexed by coordinates. A flat copy would be a
        # second tensor, and writing it back would race with other threads' segments.
        self._flat: torch.Tensor | None = self._tensor.view(-1) if self._tensor.is_contiguous() else None

    def _bits(self, piece: torch.Tensor) -> UIntArray:
        if self._cast is not None:
            piece = piece.to(self._cast)
        array: UIntArray = piece.contiguous().view(self._uint).cpu().numpy()
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

    def read_into(self, memory: UIntArray, start: int, stop: int) -> UIntArray:
        """As `read`, into this memory where elements of a host tensor are cast, 8 bytes for each: its first bytes."""
        import torch

        if self._cast is None or self._flat is None or self._tensor.device.type != "cpu":
            return self.read(start, stop)
        values: UIntArray = memory.view(UINTS[self.itemsize])[: stop - start]
        with self._on_stream():
            torch.from_numpy(values).view(self._cast).copy_(self._flat[start:stop])
        return values

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
        return self._cast is None and not _expanded(self.shape, self._tensor.stride())

    def view(self, slices: tuple[slice, ...]) -> Bits:
        part = TorchBits.__new__(TorchBits)  # on the stream of the whole tensor, whoever asks for a part
        part._cast, part._on_stream, part._uint = self._cast, self._on_stream, self._uint
        part.dtype, part.itemsize = self.dtype, self.itemsize
        part._place(self._tensor[slices])
        return part

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


class ArrayCastBits:
    """Bits over a NumPy array of floats that is cast as it is read; nothing can be written.

    array: of any strides. cast: one of `ARRAY_CASTS`.
    """

    __slots__ = ("_cast", "_floats", "_source", "dtype", "itemsize", "shape", "size")

    writable = False

    def __init__(self, array: NDArray[Any], cast: str) -> None:
        self._source = HostBits(array.dtype.name, array.view(UINTS[array.itemsize]))
        self._floats, self._cast = array.dtype, cast
        self.dtype, self.itemsize = DTYPES[cast]
        self.shape, self.size = self._source.shape, self._source.size

    def read(self, start: int, stop: int) -> UIntArray:
        return cast_array(self._source.read(start, stop).view(self._floats), self._cast)

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        return cast_array(self._source.gather(start, indices).view(self._floats), self._cast)

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        raise TypeError("an array that is cast on reading cannot be written")

    def write(self, start: int, values: UIntArray) -> None:
        raise TypeError("an array that is cast on reading cannot be written")

    @property
    def contiguous(self) -> bool:
        return self._source.contiguous

    def view(self, slices: tuple[slice, ...]) -> Bits:
        return ArrayCastBits(self._source.array[_index(slices)].view(self._floats), self._cast)

    @property
    def storage(self) -> object:
        return (self._source.storage, self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        return self._source.extent


def _index(slices: tuple[slice, ...]) -> Any:
    """The index of a part of an array that is a view, also of an array without dimensions."""
    return (*slices, ...)


def mirrored(bits: Bits, memory: NDArray[np.uint8], start: int) -> HostBits:
    """The same view of other memory, which stands for that of a live tensor from the address `start` on."""
    if isinstance(bits, HostBits):
        address, strides = bits.array.__array_interface__["data"][0], bits.array.strides
    elif isinstance(bits, TorchBits):
        address, strides = bits.address, bits.strides
    else:
        raise TypeError(f"expected the bits of a live tensor, found {type(bits).__name__}")
    return HostBits(bits.dtype, np.ndarray(bits.shape, UINTS[bits.itemsize], memory, address - start, strides))


def _as_rows(array: UIntArray) -> UIntArray | None:
    """The same memory as (rows, run) in row-major order; None if no two strides describe it."""
    for split in range(array.ndim - 1, 0, -1):
        rows = array.view()
        try:
            rows.shape = (math.prod(array.shape[:split]), math.prod(array.shape[split:]))
        except AttributeError:  # it would take a copy
            continue
        return rows
    return None


def _expanded(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether several elements share one address, as in torch's expand and NumPy's broadcast_to."""
    return 0 not in shape and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))


def _torch_dtype(dtype: torch.dtype) -> tuple[str, int]:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {dtype} is not supported: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def as_bits(tensor: Any, cast: str | None = None) -> Bits:
    """View a tensor or a NumPy array as Bits, without a copy if it is in host memory. A Bits is returned as it is.

    cast: a torch dtype's name ("bfloat16"): floating-point tensors are read as if cast to it (rounded to nearest even,
    as torch does), others as they are.
    Raises TypeError for anything else, and for dtypes that are not in `DTYPES`.
    """
    if isinstance(tensor, np.ndarray | np.generic):
        array = np.asarray(tensor)
        name = array.dtype.name
        if name not in DTYPES or array.dtype.byteorder == ">":
            raise TypeError(f"dtype {array.dtype!r} is not supported: expected one of {', '.join(DTYPES)}")
        dtype, itemsize = DTYPES[name]
        if cast is not None and cast != name and name in CASTS:
            if cast not in ARRAY_CASTS:
                raise TypeError(f"cast={cast!r} needs torch tensors, found a NumPy array of {name}")
            return ArrayCastBits(array, cast)
        view = array.view(UINTS[itemsize])
        if isinstance(tensor, np.generic):
            view.flags.writeable = False  # a scalar is a value: a write would change a copy
        return HostBits(dtype, view)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        if isinstance(tensor, Bits):
            return tensor
        raise TypeError(f"expected a torch tensor or a NumPy array, found {type(tensor).__name__}")
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError("expected a tensor that holds data, found a lazy module's: run a forward pass first")
    try:
        return _torch_bits(tensor, cast)
    except RuntimeError as error:  # a tensor whose elements only its own class knows: nested, fake, functional
        raise TypeError(
            f"expected a tensor that holds data, found {type(tensor).__name__}: {one_line(error, 200)}"
        ) from None


def is_dtensor(tensor: object) -> bool:
    """Whether this is a tensor that torch.distributed has sharded over ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _torch_bits(tensor: torch.Tensor, cast: str | None) -> Bits:
    """`as_bits` of a torch tensor."""
    import torch

    if tensor.layout != torch.strided or tensor.is_nested or is_dtensor(tensor):
        raise TypeError(f"expected a dense, unsharded tensor, found {type(tensor).__name__} of layout {tensor.layout}")
    if getattr(tensor, "ds_numel", tensor.numel()) != tensor.numel():  # DeepSpeed's mark on a parameter
        raise TypeError(
            f"expected a whole tensor, found a parameter that DeepSpeed ZeRO stage 3 has partitioned, with "
            f"{tensor.numel()} of its elements: publish pulse_rl.integrations.deepspeed.shards(engine) on every rank"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("expected a tensor that holds its own bits, found a lazily conjugated or negated view")
    if tensor.device.type == "meta":
        raise TypeError("expected a tensor that holds data, found one on the meta device")
    if tensor.numel() and not tensor.data_ptr():  # other kinds without data raise RuntimeError here
        raise TypeError(f"expected a tensor that holds data, found {type(tensor).__name__} without memory")
    if cast is not None and tensor.is_floating_point():
        target = getattr(torch, cast, None)
        if not isinstance(target, torch.dtype):
            raise ValueError(f"cast: expected the name of a torch dtype, as 'bfloat16', found {cast!r}")
        if target != tensor.dtype:
            return TorchBits(tensor, target)
    if tensor.device.type != "cpu":
        return TorchBits(tensor)
    dtype, itemsize = _torch_dtype(tensor.dtype)
    array = tensor.detach().view(getattr(torch, f"uint{8 * itemsize}")).numpy()
    return HostBits(dtype, array, tensor)
