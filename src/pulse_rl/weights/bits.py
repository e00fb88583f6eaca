"""Tensors and arrays as unsigned integers: what the rest of the library works on.

A `Bits` has one tensor's dtype (as safetensors spells it) and shape, and reads and writes its elements as unsigned
integers of the same width, addressed by flat row-major index. No float is ever compared: −0 and +0 differ, and a NaN
keeps its payload.

Host tensors (NumPy arrays, CPU torch tensors, memory-mapped files) are viewed without a copy, and a write goes to the
live tensor (`host_bits`). Tensors on other devices are copied through the host, only the elements that are asked for
(`torch_bits`). torch is imported only for torch tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray, torch_name
from pulse_rl.errors import one_line
from pulse_rl.weights import devices
from pulse_rl.weights.casts import ARRAY_CASTS, CASTS
from pulse_rl.weights.host_bits import ArrayCastBits, Counter, HostBits
from pulse_rl.weights.segments import segments
from pulse_rl.weights.torch_bits import TorchBits, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArrayCastBits",
    "Bits",
    "HostBits",
    "TorchBits",
    "as_bits",
    "differ",
    "is_dtensor",
    "is_flat",
    "lying_itemsize",
    "mirrored",
]


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


def differ(one: Bits, other: Bits) -> bool:
    """Whether two tensors of one size and width have different bits."""
    return any((one.read(*at) != other.read(*at)).any() for at in segments(one.size))


def lying_itemsize(bits: Bits) -> int | None:
    """Bytes of an element in host memory, where kernels read all elements one after another; None for other bits.

    Twice the tensor's own where they are float32, read as bfloat16.
    """
    if not isinstance(bits, HostBits | ArrayCastBits) or not bits.contiguous:
        return None
    return bits.stored_itemsize if bits.device is not None else None


def mirrored(bits: Bits, memory: NDArray[np.uint8], start: int) -> HostBits:
    """The same view of other memory, which stands for that of a live tensor from the address `start` on."""
    if isinstance(bits, HostBits):
        address, strides = bits.array.__array_interface__["data"][0], bits.array.strides
    elif isinstance(bits, TorchBits):
        address, strides = bits.address, bits.strides
    else:
        raise TypeError(f"expected the bits of a live tensor, found {type(bits).__name__}")
    return HostBits(bits.dtype, np.ndarray(bits.shape, UINTS[bits.itemsize], memory, address - start, strides))


def as_bits(tensor: Any, cast: str | None = None) -> Bits:
    """View a tensor or a NumPy array as Bits, without a copy if it is in host memory.

    A Bits without a cast stays as it is.

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
            return tensor if cast is None else _cast_bits(tensor, cast)
        raise TypeError(f"expected a torch tensor or a NumPy array, found {type(tensor).__name__}")
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError("expected a tensor that holds data, found a lazy module's: run a forward pass first")
    try:
        return _torch_bits(tensor, cast)
    except RuntimeError as error:  # a tensor whose elements only its own class knows: nested, fake, functional
        raise TypeError(
            f"expected a tensor that holds data, found {type(tensor).__name__}: {one_line(error, 200)}"
        ) from None


def _cast_bits(bits: Bits, cast: str) -> Bits:
    """Bits, such as those of a mapped file, read as if cast."""
    name = torch_name(bits.dtype)
    if name == cast or name not in CASTS:
        return bits
    if not isinstance(bits, HostBits) or name not in ("float16", "float32", "float64"):
        raise TypeError(f"cast={cast!r} needs torch tensors, found a file's {name}")
    return as_bits(bits.array.view(name), cast)


def is_dtensor(tensor: object) -> bool:
    """Whether this is a tensor that torch.distributed has sharded over ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flat(tensor: object) -> bool:
    """Whether FSDP1 has laid out a parameter in a flat one, or it is that: torch's mark on it."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _torch_bits(tensor: torch.Tensor, cast: str | None) -> Bits:
    """`as_bits` of a torch tensor."""
    import torch

    if tensor.layout != torch.strided or tensor.is_nested or is_dtensor(tensor):
        raise TypeError(f"expected a dense, unsharded tensor, found {type(tensor).__name__} of layout {tensor.layout}")
    size = tensor.numel()
    if getattr(tensor, "ds_numel", size) != size:  # DeepSpeed's mark on a parameter
        raise TypeError(
            f"expected a whole tensor, found a parameter that DeepSpeed ZeRO stage 3 has partitioned, with "
            f"{size} of its elements: publish pulse_rl.integrations.deepspeed.shards(engine) on every rank"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("expected a tensor that holds its own bits, found a lazily conjugated or negated view")
    if tensor.is_meta:
        raise TypeError("expected a tensor that holds data, found one on the meta device")
    if size and not tensor.data_ptr():  # other kinds without data raise RuntimeError here
        raise TypeError(f"expected a tensor that holds data, found {type(tensor).__name__} without memory")
    here = tensor.is_cpu and not devices.on_cuda(tensor)
    if cast is not None and tensor.is_floating_point():
        target = getattr(torch, cast, None)
        if not isinstance(target, torch.dtype):
            raise ValueError(f"cast: expected the name of a torch dtype, as 'bfloat16', found {cast!r}")
        if target != tensor.dtype:
            if here and cast in ARRAY_CASTS and tensor.dtype in (torch.float16, torch.float32, torch.float64):
                return ArrayCastBits(tensor.detach().numpy(), cast)  # as an array: in no second memory, and NaN alike
            return TorchBits(tensor, target)
    if not here:
        return TorchBits(tensor)
    return HostBits.of(tensor.detach(), torch_dtype(tensor.dtype)[0], Counter(tensor))
