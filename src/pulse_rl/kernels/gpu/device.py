"""Where the kernels of this room run, and how they reach memory: a CUDA device, or Numba's simulator on the CPU.

The simulator runs kernels as plain Python, one block at a time, if NUMBA_ENABLE_CUDASIM is set when Numba is imported.
It is for tests: its blocks have few threads, because each of them is a thread of Python.

A *device array* is a contiguous torch tensor of integers on the device, of which kernels see the bits, unsigned; in the
simulator it is a NumPy array. Live weights are reached by address, so that one launch reads many tensors: the caller
keeps them alive until the work is done. All work is queued on torch's current stream.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import ctypes
import sys
import threading
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS

SIMULATED = bool(cuda.config.ENABLE_CUDASIM)
cuda.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small tensors have few blocks
THREADS = 4 if SIMULATED else 256  # of a block whose threads work together
WARP = 2 if SIMULATED else 32  # of a block in which each thread works for itself

DeviceArray: TypeAlias = Any

# Memory by address


if SIMULATED:
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    _sharing = threading.Lock()

    def _shared_array(self, shape, dtype):
        """The array that the threads of a block share, by the line that makes it.

        In place of the simulator's, which gives two threads two arrays if both ask for it first.
        """
        frame = sys._getframe(1)
        line = frame.f_code, frame.f_lineno
        with _sharing:
            if line not in self._allocations:
                self._allocations[line] = np.empty(shape, dtype)
            return self._allocations[line]

    FakeCUDAShared.array = _shared_array

    def low_word(address):
        return np.uint64(ctypes.c_uint64.from_address(int(address)).value)

    def high_word(address):
        return np.uint64(ctypes.c_uint64.from_address(int(address) + 8).value)

    def _held(like, address):
        return getattr(ctypes, f"c_uint{8 * like.itemsize}").from_address(int(address))

    def load(like, address):
        return like.dtype.type(_held(like, address).value)

    def store(like, address, value):
        _held(like, address).value = int(value)

    def itemsize_of(like):
        return like.itemsize

    def barrier():
        threading.current_thread().syncthreads()  # type: ignore[attr-defined]

    def popcount(bits):
        return bits.bit_count()

else:
    from numba.cuda.extending import intrinsic

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

    @cuda.jit(device=True)
    def barrier():
        cuda.syncthreads()

    @cuda.jit(device=True)
    def popcount(bits):
        return cuda.popc(bits)


# Functions


def device(function: Any) -> Any:
    """A part of kernels. It does not use `cuda`, which the simulator provides to kernels alone."""
    return function if SIMULATED else cuda.jit(device=True)(function)


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


# Arrays and launches


def empty(size: int, dtype: Any) -> DeviceArray:
    """A device array of undefined contents."""
    if SIMULATED:
        return np.empty(size, dtype)
    import torch

    name = np.dtype(dtype).name
    # torch makes arrays of signed integers with every operation, of unsigned ones with few.
    made = torch.empty(size, dtype=getattr(torch, name.removeprefix("u") if name != "uint8" else name), device="cuda")
    return made.view(getattr(torch, name))


def zeros(size: int, dtype: Any) -> DeviceArray:
    """A device array of zeros."""
    if SIMULATED:
        return np.zeros(size, dtype)
    made = empty(size, dtype)
    made.view(sys.modules["torch"].uint8).zero_()
    return made


def example(itemsize: int) -> DeviceArray:
    """An array of this width, which says to a kernel how wide the elements are that it reads by address."""
    return empty(1, UINTS[itemsize])


def upload(array: Any) -> DeviceArray:
    """A copy on the device, or the array itself if it is there."""
    if SIMULATED or not isinstance(array, np.ndarray):
        return array
    import torch

    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).cuda()


def download(array: DeviceArray) -> NDArray[Any]:
    """A copy in host memory, when the work queued so far is done."""
    return np.array(array) if SIMULATED else array.cpu().numpy()


def bits_of(array: DeviceArray) -> DeviceArray:
    """The bits of a device array, which may also be of floats: unsigned integers of its width."""
    if SIMULATED:
        return array.view(f"<u{array.itemsize}")
    return array.detach().view(getattr(sys.modules["torch"], f"uint{8 * array.itemsize}"))


def address_of(array: DeviceArray) -> int:
    """The address of the first element."""
    return int(array.ctypes.data if SIMULATED else array.data_ptr())


class _View:
    """A tensor, as Numba takes it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # which keeps the memory
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": np.dtype(str(tensor.dtype).removeprefix("torch.")).str,
            "data": (tensor.data_ptr(), False),
        }


def _argument(value: Any) -> Any:
    """An argument of a kernel, as Numba takes it: device arrays also in tuples."""
    if isinstance(value, tuple):
        return type(value)._make(map(_argument, value))  # type: ignore[attr-defined]
    return cuda.as_cuda_array(_View(value)) if hasattr(value, "data_ptr") else value


_simulating = threading.Lock()  # the simulator runs one kernel at a time


def launch(kernel: Any, blocks: int, threads: int, *args: Any) -> None:
    """Queue a kernel on the caller's stream."""
    if blocks == 0:
        return
    if SIMULATED:
        with _simulating:
            kernel[blocks, threads](*args)
        return
    handle = sys.modules["torch"].cuda.current_stream().cuda_stream
    stream = cuda.external_stream(handle) if handle else cuda.default_stream()
    kernel[blocks, threads, stream](*map(_argument, args))
