"""Where the tensors of a framework lie, asked of each through the C functions that DLPack defines.

`__dlpack_c_exchange_api__` of a type of tensors is a table of such functions; torch has one from 2.10 on. One of them
tells the address, device, dtype, shape and strides of a tensor in one call, and takes no part in its life.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pulse_rl.kernels.cpu.arrays import buffer
from pulse_rl.kernels.cpu.compiled import kernel

MAJOR = 1  # of DLPack: a later one may lay the table out anew
WORDS = 3  # of a tensor, before its shape and strides: address, device (kind, number), dimensions and dtype
USUAL = 6  # dimensions of a tensor at most, on average


@cache
def asker(kind: type) -> int | None:
    """The address of a type's function that describes a tensor, `dltensor_from_py_object_no_sync`; None without one."""
    table = getattr(kind, "__dlpack_c_exchange_api__", None)
    if table is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The version, 2 × 4 bytes; the table of an older version; 5 functions, of which it is the fourth.
    words = ctypes.cast(pointer(table, b"dlpack_exchange_api"), ctypes.POINTER(ctypes.c_uint64))
    return int(words[5]) or None if words[0] & 0xFFFFFFFF == MAJOR else None


@intrinsic
def _ask(typingctx: Any, function: Any, tensor: Any, answer: Any) -> Any:
    """Have a tensor described in memory for an answer, a DLTensor. Returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer, pointer]).as_pointer()
        one, other = (builder.inttoptr(arg, pointer) for arg in args[1:])
        status = builder.call(builder.inttoptr(args[0], kind), [one, other])
        failed = builder.icmp_signed("!=", status, ir.Constant(ir.IntType(32), 0))
        with builder.if_then(failed, likely=False):
            context.get_python_api(builder).err_clear()
        return builder.not_(failed)

    return types.boolean(types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def _word(typingctx: Any, address: Any, index: Any) -> Any:
    """The uint64 at an index from an address on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(base, [args[1]]))

    return types.uint64(types.uint64, types.int64), codegen


@partial(kernel, nogil=False)
def _describe(function, tensors, count, answer, words):
    at = np.int64(0)
    for i in range(count):
        if not _ask(function, _word(tensors, i), answer):
            return np.int64(-1)
        dimensions = np.int64(_word(answer, 2) & np.uint64(0xFFFFFFFF))
        shape, strides, offset = _word(answer, 3), _word(answer, 4), _word(answer, 5)
        if at + WORDS + 2 * dimensions > words.shape[0] or (dimensions > 0 and (shape == 0 or strides == 0)):
            return np.int64(-1)
        words[at], words[at + 1], words[at + 2] = _word(answer, 0) + offset, _word(answer, 1), _word(answer, 2)
        for d in range(dimensions):
            words[at + WORDS + 2 * d] = _word(shape, d)
            words[at + WORDS + 2 * d + 1] = _word(strides, d)
        at += WORDS + 2 * dimensions
    return at


def describe(function: int, tensors: Sequence[Any]) -> bytes | None:
    """The address, device, dtype, shape and strides of each tensor; None where one of them has none of these.

    function: as `asker` finds it for their type.
    """
    objects, answer = np.fromiter(tensors, object, len(tensors)), np.empty(6, np.uint64)  # a DLTensor, of 48 bytes
    at, to = (np.uint64(array.__array_interface__["data"][0]) for array in (objects, answer))
    room = (WORDS + 2 * USUAL) * len(tensors)
    words = buffer("words", room, np.uint64)[:room]
    size = int(_describe(np.uint64(function), at, np.int64(len(objects)), to, words))
    return words[:size].tobytes() if size >= 0 else None
