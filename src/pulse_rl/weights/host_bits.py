"""Bits over NumPy arrays: host memory, viewed without a copy, or cast as it is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.weights.casts import cast_array
from pulse_rl.weights.devices import HOST, Host

if TYPE_CHECKING:
    import torch


class Counter:
    """For which torch tensor the writes to some memory are counted, as torch counts its own.

    Then a backward pass whose forward pass saw the old bits raises torch's error, instead of wrong gradients.
    tensor: it, or a weak reference to it.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor | ref[torch.Tensor]) -> None:
        self.tensor = tensor

    def of(self) -> torch.Tensor | None:
        """The tensor; None where it is gone."""
        return self.tensor() if isinstance(self.tensor, ref) else self.tensor


class HostBits:
    """Bits over an array in host memory, of any strides.

    counter: of writes; None where torch counts none.
    contiguous: whether the elements lie one after another in row-major order.
    """

    __slots__ = ("_address", "_held", "_rows", "contiguous", "counter", "dtype", "itemsize", "shape", "size")

    device = HOST

    def __init__(self, dtype: str, array: UIntArray, counter: Counter | None = None) -> None:
        self.dtype, self.counter = dtype, counter
        self.shape: tuple[int, ...] = array.shape
        self.size, self.itemsize = int(array.size), int(array.itemsize)
        self.contiguous = array.flags.c_contiguous
        self._held: UIntArray | torch.Tensor = array
        self._address: int | None = None
        self._rows: UIntArray | None = None  # the same memory as (rows, run), where that is possible

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: str, counter: Counter) -> HostBits:
        """Bits over a torch tensor without autograd's part.

        Kernels take its address. An array takes longer to make than all the rest, and is made when one is asked for.
        """
        made = cls.__new__(cls)
        made.dtype, made.counter = dtype, counter
        made.shape, made.size, made.itemsize = tuple(tensor.shape), tensor.numel(), tensor.itemsize
        made.contiguous = tensor.is_contiguous()
        made._held, made._address, made._rows = tensor, tensor.data_ptr(), None
        return made

    @property
    def array(self) -> UIntArray:
        """The elements."""
        if not isinstance(self._held, np.ndarray):
            self._held = self._held.view(getattr(sys.modules["torch"], f"uint{8 * self.itemsize}")).numpy()
        return self._held

    @property
    def flat(self) -> UIntArray | None:
        """The elements one after another in row-major order; None if they do not lie so."""
        return self.array.reshape(-1) if self.contiguous else None

    @property
    def rows(self) -> UIntArray | None:
        """The elements as rows of one length and distance, as those of a part of a tensor are; None for others."""
        if self._rows is None and self.array.ndim > 1:
            self._rows = _as_rows(self.array)
        return self._rows

    def read(self, start: int, stop: int) -> UIntArray:
        if (flat := self.flat) is not None:
            return flat[start:stop]
        if start == 0 and stop == self.size:
            return np.ascontiguousarray(self.array).reshape(-1)
        return self.array.flat[start:stop]

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        if (flat := self.flat) is not None:
            values = np.empty(len(indices), UINTS[self.itemsize])
            cpu.gather(flat[start:], indices, values)
            return values
        if start == 0 and self.rows is not None:
            values = np.empty(len(indices), UINTS[self.itemsize])
            cpu.gather_rows(self.rows, indices, values)
            return values
        return self.array.flat[start + indices.astype(np.int64)]

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        if (flat := self.flat) is not None:
            cpu.scatter(flat[start:], indices, values)
        elif start == 0 and self.rows is not None:
            cpu.scatter_rows(self.rows, indices, values)
        else:
            self.array.flat[start + indices.astype(np.int64)] = values
        self.count_write()

    def write(self, start: int, values: UIntArray) -> None:
        stop = start + len(values)
        if (flat := self.flat) is not None:
            flat[start:stop] = values
        elif len(values) == self.size:
            self.array[...] = values.reshape(self.shape)
        else:
            self.array.flat[start:stop] = values
        self.count_write()

    def unowned(self, counters: dict[int, Counter]) -> HostBits:
        """The same memory, which this does not keep from being freed, nor the tensor for which writes are counted.

        counters: gets, and has, one for each such tensor, by its id.
        """
        tensor = None if self.counter is None else self.counter.of()
        counter = None if tensor is None else counters.setdefault(id(tensor), Counter(ref(tensor)))
        return HostBits(self.dtype, array_at(self.array), counter)

    def view(self, slices: tuple[slice, ...]) -> HostBits:
        return HostBits(self.dtype, self.array[_index(slices)], self.counter)  # of a 0-dim array a view, too

    def count_write(self) -> None:
        """Count a write for torch."""
        if self.counter is not None:
            count_writes(counted_by([self.counter]))

    @property
    def writable(self) -> bool:
        return (not isinstance(self._held, np.ndarray) or self._held.flags.writeable) and (
            self.contiguous or not shares_elements(self.shape, self.array.strides, self.itemsize)
        )

    @property
    def address(self) -> int:
        """The address of the first element."""
        if self._address is None:
            self._address = int(self.array.__array_interface__["data"][0])  # twice as fast as `ctypes.data`
        return self._address

    @property
    def stored_itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self.itemsize

    @property
    def storage(self) -> object:
        return ("host", self.address, self.shape, None if self.contiguous else self.array.strides, self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        if self.contiguous:
            return ("host", self.address, self.address + self.size * self.itemsize)
        return ("host", *np.lib.array_utils.byte_bounds(self.array))


def counted_by(counters: Iterable[Counter]) -> list[torch.Tensor]:
    """The tensors for which they count."""
    return [tensor for tensor in map(Counter.of, counters) if tensor is not None]


def count_writes(tensors: list[torch.Tensor]) -> None:
    """Count a write to each for torch, which has not made it."""
    if not tensors:
        return
    increment = sys.modules["torch"].autograd.graph.increment_version
    try:
        increment(tensors)
    except RuntimeError:  # an inference tensor counts none; that it counts twice for those before does no harm
        increment([tensor for tensor in tensors if not tensor.is_inference()])


class ArrayCastBits:
    """Bits over floats in host memory that are cast as they are read; nothing can be written.

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

    def read_into(self, memory: UIntArray, start: int, stop: int) -> UIntArray:
        """As `read`, into this memory, 8 bytes for each element: its first bytes."""
        floats = self._source.read(start, stop).view(self._floats)
        return cast_array(floats, self._cast, memory.view(UINTS[self.itemsize]))

    @property
    def device(self) -> Host | None:
        """The host, if float32 is cast to bfloat16, for which there are kernels; None otherwise."""
        return HOST if self._floats == np.float32 and self._cast == "bfloat16" else None

    @property
    def address(self) -> int:
        """The address of the first element before the cast."""
        return self._source.address

    @property
    def stored_itemsize(self) -> int:
        """Bytes of an element in memory."""
        return self._source.itemsize

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        return cast_array(self._source.gather(start, indices).view(self._floats), self._cast)

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        raise TypeError("an array that is cast on reading cannot be written")

    def write(self, start: int, values: UIntArray) -> None:
        raise TypeError("an array that is cast on reading cannot be written")

    @property
    def contiguous(self) -> bool:
        return self._source.contiguous

    def unowned(self, counters: dict[int, Counter]) -> ArrayCastBits:
        """The same memory, which this does not keep from being freed."""
        return ArrayCastBits(array_at(self._source.array).view(self._floats), self._cast)

    def view(self, slices: tuple[slice, ...]) -> ArrayCastBits:
        return ArrayCastBits(self._source.array[_index(slices)].view(self._floats), self._cast)

    @property
    def storage(self) -> object:
        return (self._source.storage, self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        return self._source.extent


class _Memory:
    """Some memory, for NumPy."""

    def __init__(self, **interface: object) -> None:
        self.__array_interface__ = {"version": 3, **interface}


def array_in(data: tuple[int, bool], shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> UIntArray:
    """An array over memory that it does not keep from being freed. data: the address, and whether it is only read."""
    memory = _Memory(data=data, shape=shape, strides=strides, typestr=UINTS[itemsize].str)
    found: UIntArray = np.asarray(memory)
    return found


def array_at(array: UIntArray) -> UIntArray:
    """The same memory as another array, which this one does not keep from being freed."""
    return array_in(array.__array_interface__["data"], array.shape, array.strides, array.itemsize)


def _index(slices: tuple[slice, ...]) -> Any:
    """The index of a part of an array that is a view, also of an array without dimensions."""
    return (*slices, ...)


def _as_rows(array: UIntArray) -> UIntArray | None:
    """The same memory as (rows, run) in row-major order; None if no two strides describe it."""
    for split in range(array.ndim - 1, 0, -1):
        rows = _stride(array.shape[:split], array.strides[:split])
        run = _stride(array.shape[split:], array.strides[split:])
        if rows is not None and run is not None:
            shape = math.prod(array.shape[:split]), math.prod(array.shape[split:])
            return as_strided(array, shape, (rows, run))
    return None


def _stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The distance of elements that follow one another in row-major order; None if it is not always the same."""
    if 0 in shape:
        return 0
    longer = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1]
    if any(stride != n * inner for (_, stride), (n, inner) in pairwise(longer)):
        return None
    return longer[-1][1] if longer else strides[-1]


def shares_elements(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    """Whether elements have memory in common, as in torch's expand and unfold. step: of an element, as strides are."""
    if 0 in shape:
        return False
    longer, reach = sorted((abs(stride), n) for n, stride in zip(shape, strides, strict=True) if n > 1), 0
    for stride, n in longer:
        if stride < reach + step:
            break
        reach += (n - 1) * stride
    else:
        return False  # each dimension steps over all that those with shorter steps reach
    if longer[0][0] < step:
        return True
    addresses = np.zeros(1, np.int64)
    for stride, n in longer:
        addresses = np.add.outer(addresses, stride * np.arange(n)).reshape(-1)
    return bool((np.diff(np.sort(addresses)) < step).any())
