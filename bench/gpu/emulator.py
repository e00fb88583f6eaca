"""A device that is this processor: kernels as Numba-CUDA compiles them, which LLVM translates for the host.

Numba-CUDA hands a kernel to the device's compiler in LLVM's language. Here the same text becomes code of the host. So
its types, widths and overflows are the device's, and blocks are as large as there. What this cannot show: speed, what
the device's own compiler makes of the text, and two blocks at once.

Blocks run one after another, in a random order. The threads of a block take turns, in a random order too: a thread runs
until it reaches a barrier or ends. Each thread has its own stack, and `swapcontext` of the C library switches stacks.
Shared memory holds garbage when a block begins.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import njit
from numba.cuda import compiler, dispatcher

from pulse_rl.kernels.gpu import device
from pulse_rl.weights import devices

CAPABILITY = 9, 0  # Hopper's
STACK_NBYTES = 1 << 18  # of a thread
MOST_THREADS = 1024
CONTEXT_NBYTES = 1 << 13  # a thread's registers: more than a ucontext_t takes
STACK_AT, STACK_SIZE_AT = 2, 4  # where a ucontext_t has them, in words
GARBAGE = 0xA5

# What the running thread finds in _known, 8 bytes each.
ARGUMENTS, OWN, SCHEDULER, ENDED, THREAD, THREADS, BLOCK, BLOCKS = range(8)
_known = np.zeros(8, np.int64)
_REGISTERS = {"tid.x": THREAD, "ntid.x": THREADS, "ctaid.x": BLOCK, "nctaid.x": BLOCKS}

_libc = ctypes.CDLL(None)
_getcontext, _makecontext, _swapcontext = _libc.getcontext, _libc.makecontext, _libc.swapcontext
_getcontext.argtypes = [ctypes.c_size_t]
_makecontext.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_makecontext.restype = None
_swapcontext.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


# A kernel's code


def _place(number: int) -> str:
    return f"inttoptr (i64 {_known.ctypes.data + 8 * number} to ptr)"


def _register(name: str) -> str:
    kind = f"define i32 @emulated.{name}() alwaysinline"
    if name not in _REGISTERS:  # of the dimensions y and z
        return f"{kind} {{ ret i32 {int(name.startswith('n'))} }}"
    return f"{kind} {{\n %found = load i32, ptr {_place(_REGISTERS[name])}\n ret i32 %found\n}}"


def _support(kernel: str, parameters: list[str]) -> str:
    """What a kernel's code needs beside it. parameters: its types."""
    loads = [
        f"%place.{number} = getelementptr i64, ptr %arguments, i64 {number}\n"
        f"%value.{number} = load {kind}, ptr %place.{number}"
        for number, kind in enumerate(parameters)
    ]
    given = ", ".join(f"{kind} %value.{number}" for number, kind in enumerate(parameters))
    registers = [f"{size}{where}.{axis}" for size in ("", "n") for where in ("tid", "ctaid") for axis in "xyz"]
    return "\n".join(
        [
            "declare i32 @swapcontext(i64, i64)",
            f"declare void @{kernel}({', '.join(parameters)})",
            *map(_register, registers),
            "define void @emulated.barrier() noinline {",  # a thread gives its turn back
            f"%own = load i64, ptr {_place(OWN)}",
            f"%scheduler = load i64, ptr {_place(SCHEDULER)}",
            "%done = call i32 @swapcontext(i64 %own, i64 %scheduler)",
            "ret void }",
            "define void @emulated.start() {",
            f"%arguments = load ptr, ptr {_place(ARGUMENTS)}",
            *loads,
            f"call void @{kernel}({given})",
            f"store i64 1, ptr {_place(ENDED)}",
            "call void @emulated.barrier()",
            "ret void }",
        ]
    )


def _for_the_host(text: str) -> str:
    """A module of Numba-CUDA's, with one kind of memory, and without the device's own instructions."""
    text = re.sub(r"^(target |!nvvm).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r" addrspace\(\d+\)", "", text).replace("addrspacecast", "bitcast")
    text = re.sub(r'@"llvm\.nvvm\.read\.ptx\.sreg\.([a-z.]+)"', r"@emulated.\1", text)
    return text.replace('@"llvm.nvvm.barrier0"', "@emulated.barrier")


class Code:
    """A kernel for arguments of some types."""

    def __init__(self, kernel: Any, kinds: tuple[Any, ...]) -> None:
        library, _ = compiler._compile_pyfunc_with_fixup(
            kernel.py_func,
            kinds,
            debug=None,
            lineinfo=False,
            device=False,
            fastmath=False,
            cc=CAPABILITY,
            opt=None,
            abi="numba",
            abi_info=None,
            forceinline=False,
            launch_bounds=None,
            lto=False,
        )
        own, *others = dict.fromkeys(map(str, library.modules))  # a function that two others call is there twice
        module = llvm.parse_assembly(_for_the_host(own))
        (entry,) = (each for each in module.functions if not each.is_declaration)
        for text in (*map(_for_the_host, others), _support(f'"{entry.name}"', [str(a.type) for a in entry.arguments])):
            module.link_in(llvm.parse_assembly(text))
        module.verify()
        # Optimizing takes longer than what it would save: a test launches a kernel a few times.
        machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # which keeps the code
        self._engine.finalize_object()
        self.start = self._engine.get_function_address("emulated.start")
        # The arrays that a block's threads share: addresses and sizes.
        found = re.findall(r'@"(_cudapy_smem_\d+)" = addrspace\(3\) global \[(\d+) x i(\d+)\]', own)
        addresses = [self._engine.get_global_value_address(name) for name, _, _ in found]
        nbytes = [int(count) * int(bits) // 8 for _, count, bits in found]
        self.shared = np.array([addresses, nbytes], np.int64)


# A launch


@njit
def _run_block(known, contexts, start, orders, ended):
    """Whether all threads came to the same number of barriers."""
    first, apart = np.int64(contexts.ctypes.data), contexts.strides[0]
    known[SCHEDULER] = first + apart * len(ended)
    for thread in range(len(ended)):
        _getcontext(first + apart * thread)
        contexts[thread, STACK_AT] = first + apart * thread + CONTEXT_NBYTES
        contexts[thread, STACK_SIZE_AT] = STACK_NBYTES
        _makecontext(first + apart * thread, start, 0)
        ended[thread] = False
    turn, left = known[BLOCK], len(ended)
    while left:
        began = left
        for thread in orders[turn % len(orders)]:
            if not ended[thread]:
                known[THREAD], known[OWN], known[ENDED] = thread, first + apart * thread, 0
                _swapcontext(known[SCHEDULER], known[OWN])
                ended[thread] = known[ENDED]
                left -= known[ENDED]
        if left and left < began:
            return False
        turn += 1
    return True


class Emulator:
    """A device that runs one block at a time."""

    def __init__(self) -> None:
        self._code: dict[Any, Code] = {}
        self._running = threading.Lock()
        self._contexts = np.empty((MOST_THREADS + 1, (CONTEXT_NBYTES + STACK_NBYTES) // 8), np.int64)
        self._random = np.random.default_rng(0)

    def queue(self, kernel: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
        """Run a kernel. Raises AssertionError if threads of a block meet a barrier that others do not come to."""
        kinds, words = device.kind_of(args), device.words_of(args)
        with self._running:
            if (kernel, kinds) not in self._code:
                self._code[kernel, kinds] = Code(kernel, kinds)
            code, arguments = (
                self._code[kernel, kinds],
                np.array([int(word) & (1 << 64) - 1 for word in words], np.uint64),
            )
            _known[[ARGUMENTS, THREADS, BLOCKS]] = arguments.ctypes.data, threads, blocks
            orders = np.array([self._random.permutation(threads) for _ in range(16)])
            contexts, ended = self._contexts[: threads + 1], np.empty(threads, np.bool_)
            for block in self._random.permutation(blocks):
                for address, nbytes in code.shared.T.tolist():
                    ctypes.memset(address, GARBAGE, nbytes)
                _known[BLOCK] = block
                if not _run_block(_known, contexts, code.start, orders, ended):
                    raise AssertionError(
                        f"{kernel.py_func.__name__}: expected all threads of block {block} to come to each barrier, "
                        "found some that had ended"
                    )


class _Stream:
    """All that is queued is done at once."""

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds."""
        return 1e3 * (other.at - self.at)


def _empty(self: devices.Cuda, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """In place of `Cuda.empty`: torch pins memory for a real device alone."""
    return torch.empty(shape, dtype=dtype)


EMULATOR = Emulator()


def replacements() -> Iterator[tuple[Any, str, object]]:
    """Modules, their names, and what these have to be for the library to find a device."""
    yield device, "PLACE", "cpu"
    yield device, "queue", EMULATOR.queue
    yield dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=CAPABILITY)
    yield devices, "on_cuda", lambda tensor: True
    yield devices.Cuda, "empty", _empty
    yield devices, "_are_there_kernels", lambda: True
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "stream", lambda stream: nullcontext()
    yield torch.cuda, "current_stream", _Stream


def install() -> None:
    """Have a device in this process, for the benchmark: all tensors lie on it."""
    for module, name, value in replacements():
        setattr(module, name, value)
    torch.cuda.Event = _Event  # type: ignore[misc, assignment]
    torch.cuda.synchronize = torch.cuda._sleep = lambda *_: None  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda *_: (1 << 40, 1 << 40)
