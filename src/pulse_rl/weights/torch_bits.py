"""Bits over torch tensors that are not in host memory, or that are cast as they are read.

Bits are read and written by a pool of threads, each of which would use its device's default stream. A tensor on a
device is therefore used on the stream that was the caller's when its Bits was made, or given again: reads come after
all that the caller had queued there, and what the caller queues next comes after the writes.

torch is imported when the first is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, ITEMSIZES, UINTS, UIntArray
from pulse_rl.kernels.cpu.loco import FORMATS
from pulse_rl.weights.captures import beside_captures
from pulse_rl.weights.devices import Cuda, device_of
from pulse_rl.weights.host_bits import Counter, shares_elements

if TYPE_CHECKING:
    import torch


MARKED_AT_ONCE = 1 << 24  # elements: of what is compared, a device's memory holds a copy


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
        "_memory",
        "_on_stream",
        "_stride",
        "_where",
        "address",
        "contiguous",
        "counter",
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
        self._on_stream: Callable[[], AbstractContextManager[object]] = CallersStream(tensor.device)
        self.stored_itemsize = tensor.itemsize
        self.dtype, self.itemsize = torch_dtype(cast or tensor.dtype)
        self.counter = Counter(tensor)
        self._take(_elements(tensor, cast))

    @classmethod
    def new(cls, dtype: str, shape: tuple[int, ...], device: Cuda, *, pinned: bool) -> TorchBits:
        """Bits over new memory that a device's kernels reach, of undefined contents.

        dtype: as safetensors spells it. pinned: the memory is the host's, pinned, and not the device's own.
        """
        made = cls.__new__(cls)
        made._cast, made._on_stream, made.device = None, device.own_stream, device
        made.dtype, made.itemsize = dtype, ITEMSIZES[dtype]
        made.stored_itemsize = made.itemsize
        tensor = device.empty(shape, _integers(made.itemsize), pinned=pinned)
        made.counter = Counter(tensor)
        made._take(tensor)
        return made

    def unowned(self, counters: dict[int, Counter], streams: dict[torch.device, CallersStream]) -> TorchBits | None:
        """The same memory, found through the tensor that a counter counts for, which may become another one of it.

        counters: by the ids of tensors; None is returned where this one has none. streams: gets, and has, one for each
        device.
        """
        tensor = self.counter.of()
        counter = counters.get(id(tensor))
        if tensor is None or counter is None:
            return None
        made = self._like()
        made.counter, made._on_stream = counter, streams.setdefault(tensor.device, CallersStream(tensor.device))
        made._describe(self._tensor)
        made._memory = partial(_elements_at, counter, self._cast, self.address, self.shape, self._stride)
        return made

    def _like(self) -> TorchBits:
        """Of the same dtype and device, on the same stream, and counted alike."""
        made = TorchBits.__new__(TorchBits)
        made._cast, made._on_stream, made.counter = self._cast, self._on_stream, self.counter
        made.device, made.stored_itemsize = self.device, self.stored_itemsize
        made.dtype, made.itemsize = self.dtype, self.itemsize
        return made

    def copy_from(self, other: TorchBits) -> None:
        """Take the bits that another tensor of this device is read as: queued, so the device is to be waited for."""
        assert self.device is not None
        with self.device.own_stream():
            self._tensor.copy_(other._read_as(other._tensor), non_blocking=True)

    def _take(self, tensor: torch.Tensor) -> None:
        """Take this as the tensor's memory, and keep it."""
        self._describe(tensor)
        self._memory: Callable[[], torch.Tensor] = lambda: tensor

    def _describe(self, tensor: torch.Tensor) -> None:
        """Note where the elements are. Asked once: a model may have ten thousands of tensors."""
        self.shape, self.size = tuple(tensor.shape), tensor.numel()
        self.address, self._stride, self._where = tensor.data_ptr(), tensor.stride(), str(tensor.device)
        # Other strides allow no flat view: then elements are indexed by coordinates. A flat copy would be a second
        # tensor, and writing it back would race with other threads' segments.
        self.contiguous = tensor.is_contiguous()

    @property
    def _tensor(self) -> torch.Tensor:
        """The elements: integers unless they are cast."""
        return self._memory()

    def _read_as(self, piece: torch.Tensor) -> torch.Tensor:
        """Elements as they are read, as integers on their device."""
        if self._cast is None:
            return piece
        return _cast(piece, self._cast) if self.device is None else self.device.cast(piece)

    def _bits(self, piece: torch.Tensor) -> UIntArray:
        found = self._read_as(piece).contiguous()
        array: UIntArray = (_to_pinned(found) if found.is_cuda else found.cpu()).numpy().view(UINTS[self.itemsize])
        return array

    def _at(self, index: torch.Tensor) -> torch.Tensor:
        """The elements at flat indices on the tensor's device."""
        import torch

        if self.contiguous:
            return self._tensor.view(-1)[index]
        return self._tensor[torch.unravel_index(index, self.shape)]

    def _index(self, start: int, indices: NDArray[np.uint32]) -> torch.Tensor:
        import torch

        return torch.from_numpy(start + indices.astype(np.int64)).to(self._where)

    def read(self, start: int, stop: int) -> UIntArray:
        import torch

        with self._on_stream():
            if self.contiguous:
                return self._bits(self._tensor.view(-1)[start:stop])
            if start == 0 and stop == self.size:  # as a tile is read: 20 times as fast as by coordinates
                return self._bits(self._tensor).reshape(-1)
            return self._bits(self._at(torch.arange(start, stop, device=self._where)))

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
            if self.contiguous:
                self._put(slice(start, stop), values)
            else:
                self._put(torch.arange(start, stop, device=self._where), values)

    def _put(self, where: Any, values: UIntArray) -> None:
        import torch

        if self._cast is not None:
            raise TypeError("a tensor that is cast on reading cannot be written")
        tensor = self._tensor
        if tensor.is_cuda:
            source = torch.empty(values.shape, dtype=tensor.dtype, pin_memory=True)
            held = source.numpy()
            held[...] = values.view(held.dtype)
        else:  # torch warns about read-only arrays, and decoded values are read-only: copy those
            values = np.ascontiguousarray(values) if values.flags.writeable else values.copy()
            source = torch.from_numpy(values).view(tensor.dtype)
        source = source.to(self._where, non_blocking=tensor.is_cuda)
        # Inference tensors may be written in their own mode only.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if self.contiguous:
                tensor.view(-1)[where] = source
            else:
                tensor[torch.unravel_index(where, self.shape)] = source

    @property
    def writable(self) -> bool:
        return self._cast is None and (self.contiguous or not shares_elements(self.shape, self._stride, 1))

    def view(self, slices: tuple[slice, ...]) -> TorchBits:
        part = self._like()  # on the stream of the whole tensor, whoever asks for a part
        part._memory = lambda: self._tensor[slices]
        part._describe(part._tensor)
        return part

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, as NumPy's."""
        return tuple(stride * self.stored_itemsize for stride in self._stride)

    @property
    def storage(self) -> object:
        return (self._where, self.address, self.shape, self._stride, self.dtype)

    @property
    def extent(self) -> tuple[object, int, int]:
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self._stride, strict=True))
        return (self._where, self.address, self.address + (last + 1) * self.stored_itemsize)


def write_all(pairs: Sequence[tuple[TorchBits, UIntArray]]) -> None:
    """Write whole tensors, each of which lies in one run of memory: with one copy to each device."""
    import torch

    alike: dict[tuple[Any, ...], list[tuple[torch.Tensor, UIntArray]]] = {}
    for bits, values in pairs:
        tensor = bits._tensor
        kind = bits._where, bits._on_stream, tensor.dtype, tensor.is_inference()
        alike.setdefault(kind, []).append((tensor.view(-1), values))
    for (where, on_stream, dtype, inference), several in alike.items():
        tensors, arrays = zip(*several, strict=True)
        with on_stream(), torch.inference_mode() if inference else torch.no_grad():
            there = torch.from_numpy(np.concatenate(arrays)).view(dtype).to(where)
            torch._foreach_copy_(tensors, torch.split(there, [len(array) for array in arrays]))


def any_marked(several: Sequence[TorchBits], mask: int, marked: int) -> bool:
    """Whether any element of tensors of one device and dtype has these bits under a mask. Waits for the device."""
    import torch

    with several[0]._on_stream():
        flat = [bits._tensor.reshape(-1) for bits in several]
        elements = flat[0] if len(flat) == 1 else torch.cat(flat)
        marks = [((part & mask) == marked).any() for part in torch.split(elements, MARKED_AT_ONCE)]
        return bool(torch.stack(marks).any())


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, when it is done. Into pinned memory, which torch keeps, a device copies several times as
    fast as into memory that the system has to bring first."""
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


class CallersStream:
    """Makes the device's stream that was current when it was asked last current in any thread."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, self._module = device, torch.get_device_module(device)
        self.ask()

    def ask(self) -> None:
        """Take the stream that is current now, if the device has streams."""
        has_streams = hasattr(self._module, "current_stream")
        self._stream = self._module.current_stream(self._device) if has_streams else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with beside_captures(), nullcontext() if self._stream is None else self._module.stream(self._stream):
            yield


def _elements(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.Tensor:
    """The elements of a tensor without autograd's part: integers unless they are cast."""
    tensor = tensor.detach()
    return tensor if cast is not None else tensor.view(_integers(tensor.itemsize))


def _elements_at(
    counter: Counter, cast: torch.dtype | None, address: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """The elements from an address on, in the memory of the tensor that the caller holds."""
    held = counter.of()
    assert held is not None, "the bits of weights are read while the caller holds them"
    tensor = _elements(held, cast)
    return tensor.as_strided(shape, stride, (address - tensor.untyped_storage().data_ptr()) // tensor.itemsize)


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


@cache  # asked of each tensor
def torch_dtype(dtype: torch.dtype) -> tuple[str, int]:
    """The name in safetensors, and the bytes of an element. Raises TypeError for a dtype that is not supported."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {dtype} is not supported: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
