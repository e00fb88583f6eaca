"""Where the kernels of this room run, and how they reach memory: a CUDA device.

A *device array* is a contiguous torch tensor of integers on the device, of which kernels see the bits, unsigned. Live
weights are reached by address, so that one launch reads many tensors: the caller keeps them alive until the work is
done. All work is queued on torch's current stream.

Tests have no device. They replace PLACE and `queue`: `bench/gpu/emulator.py` runs what Numba compiles on the CPU.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from math import prod
from threading import Lock
from types import FunctionType
from typing import Any, TypeAlias

import numba_cuda
import numpy as np
import torch
from cuda import core
from llvmlite import ir
from numba import cuda
from numba.core.dispatcher import Dispatcher
from numba.cuda import types
from numba.cuda.dispatcher import _Kernel
from numba.cuda.extending import intrinsic
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.typing.typeof import typeof
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS
from pulse_rl.kernels.cpu import compiled

THREADS = 256  # of a block whose threads work together
PLACE = "cuda"  # where device arrays lie, as torch names it

DeviceArray: TypeAlias = Any

# Memory by address


_GLOBAL = 1  # the address space of device memory, and of pinned host memory that the device can read


def _word(number: int) -> Any:
    @intrinsic
    def word(typingctx: Any, address: Any) -> Any:
        pair = ir.VectorType(ir.IntType(64), 2)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = builder.load(builder.inttoptr(args[0], pair.as_pointer(_GLOBAL)))
            loaded.align = 16
            return builder.extract_element(loaded, ir.Constant(ir.IntType(32), number))

        return address(address), codegen

    return word


# Halves of 16 bytes that are aligned. The compiler makes one load of both.
low_word, high_word = _word(0), _word(1)


def _pointer(builder: Any, like: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(like.dtype.bitwidth).as_pointer(_GLOBAL))


@intrinsic
def load(typingctx: Any, like: Any, address: Any) -> Any:
    """The element at an address, of the dtype of `like`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, like, args[1]))

    return like.dtype(like, address), codegen


@intrinsic
def store(typingctx: Any, like: Any, address: Any, value: Any) -> Any:
    """Set the element at an address to a value of the dtype of `like`, and return it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, like, args[1]))
        return args[2]

    return like.dtype(like, address, like.dtype), codegen


@intrinsic
def _itemsize(typingctx: Any, like: Any, zero: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(args[1].type, like.dtype.bitwidth // 8)

    return zero(like, zero), codegen


@cuda.jit(device=True)
def itemsize_of(like):
    """Bytes an element: a constant, which the array's own attribute is not."""
    return _itemsize(like, np.int64(0))


# Functions


device = cuda.jit(device=True)  # a part of kernels


class _Cache(compiled.Cache):
    """Of a kernel for devices."""

    def _target(self, codegen: Any) -> object:
        return codegen.magic_tuple(), numba_cuda.__version__

    def _rebuilt(self, target_context: Any, kept: Any) -> Any:
        return _Kernel._rebuild(**kept)

    def _codegen(self, result: Any) -> Any:
        return result._codelibrary.codegen

    def _reduced(self, result: Any) -> Any:
        return result._reduce_states()


def kernel(function: Any) -> Any:
    """Compile a function at its first launch with arguments of some types, or find its machine code on disk."""
    made = cuda.jit(function)
    made._cache = _Cache(function)
    return made


_twins: dict[Any, Any] = {}


def twin(function: Any) -> Any:
    """The part of kernels that has the source of a CPU kernel, and of all that this one calls.

    So the coder and the formulas stand in one place. It must not use intrinsics.
    """
    if function not in _twins:
        source = function.py_func
        names = dict(source.__globals__)
        for name in source.__code__.co_names:
            if isinstance(names.get(name), Dispatcher):
                names[name] = twin(names[name])
        _twins[function] = device(FunctionType(source.__code__, names, source.__name__))
    return _twins[function]


@device
def add_together(shared, total, value):
    """Add the values of the block's threads to total[0]. shared: (THREADS,) uint64."""
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if thread < half:
            shared[thread] += shared[thread + half]
        cuda.syncthreads()
        half //= 2
    if thread == 0:
        cuda.atomic.add(total, 0, shared[0])


# Arrays and launches


def empty(size: int, dtype: Any) -> DeviceArray:
    """A device array of undefined contents."""
    name = np.dtype(dtype).name
    # torch makes arrays of signed integers with every operation, of unsigned ones with few.
    made = torch.empty(size, dtype=getattr(torch, name.removeprefix("u") if name != "uint8" else name), device=PLACE)
    return made.view(getattr(torch, name))


def zeros(size: int, dtype: Any) -> DeviceArray:
    """A device array of zeros."""
    made = empty(size, dtype)
    made.view(torch.uint8).zero_()
    return made


def example(itemsize: int) -> DeviceArray:
    """An array of this width, which says to a kernel how wide the elements are that it reads by address."""
    return empty(1, UINTS[itemsize])


def upload(array: Any) -> DeviceArray:
    """A copy on the device, or the array itself if it is there."""
    if not isinstance(array, np.ndarray):
        return array
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(PLACE, copy=True)


def download(array: DeviceArray) -> NDArray[Any]:
    """A copy in host memory, when the work queued so far is done."""
    copy: NDArray[Any] = array.to("cpu", copy=True).numpy()
    return copy


def bits_of(array: DeviceArray) -> DeviceArray:
    """The bits of a device array, which may also be of floats: unsigned integers of its width."""
    return array.detach().view(getattr(torch, f"uint{8 * array.itemsize}"))


def kind_of(argument: Any) -> Any:
    """The type of a kernel's argument, as Numba calls it; a plain tuple is taken for the arguments of a kernel."""
    if isinstance(argument, torch.Tensor):
        return types.Array(from_dtype(np.dtype(str(argument.dtype).removeprefix("torch."))), argument.dim(), "C")
    if isinstance(argument, tuple):
        kinds = tuple(map(kind_of, argument))
        return kinds if type(argument) is tuple else types.BaseTuple.from_types(kinds, type(argument))
    return typeof(argument)


def _short_kind(argument: Any) -> Any:
    """It differs where kinds differ, and takes less time to find and to compare."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim()
    if isinstance(argument, tuple):
        return type(argument), *map(_short_kind, argument)
    return type(argument)


def words_of(argument: Any) -> list[Any]:
    """What a kernel is given for an argument. Of an array: two zeros, elements, itemsize, address, shape, strides."""
    if isinstance(argument, torch.Tensor):
        itemsize, shape = argument.itemsize, argument.shape
        strides = [itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return [0, 0, argument.numel(), itemsize, argument.data_ptr(), *shape, *strides]
    if isinstance(argument, tuple):
        return [word for part in argument for word in words_of(part)]
    return [argument]


_compiled: dict[Any, Any] = {}
_loading = Lock()  # Numba has none: two threads that load the same kernel break it


def queue(kernel: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
    """Queue a kernel as a call in Numba-CUDA does, which takes some 20 microseconds more for each array."""
    known = kernel, _short_kind(args)
    with _loading:
        if known not in _compiled:
            _compiled[known] = kernel.compile(kind_of(args))
        function = _compiled[known]._codelibrary.get_cufunc().kernel  # of the current device
    stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    core.launch(stream, core.LaunchConfig(grid=blocks, block=threads), function, *words_of(args))


def launch(kernel: Any, blocks: int, threads: int, *args: Any) -> None:
    """Queue a kernel on the caller's stream."""
    if blocks:
        queue(kernel, blocks, threads, args)
