"""What the compilers make of the kernels for a CUDA device, on a machine without one: bench/gpu/assemble.py [sm_90]

It prints for each kernel its registers, the bytes that spill to memory, and its loads of 16 bytes. It needs Numba-CUDA
with NVVM and ptxas (`numba-cuda[cu13]` and `nvidia-cuda-nvcc`); ptxas is found on the PATH. Nothing runs: each launch
is replaced by the compilation of its kernel for the types of its arguments.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.typing.typeof import typeof

from pulse_rl.dtypes import UINTS, field_of
from pulse_rl.kernels.cpu import Spots, context
from pulse_rl.kernels.cpu import moves as cpu_moves
from pulse_rl.kernels.cpu.coding import Coded, Kind, Memory, memory_of, starts_of
from pulse_rl.kernels.gpu import bits, casts, changes, coding, device, digests, moves, regions, spots

ARCHITECTURE = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
CAPABILITY = divmod(int(ARCHITECTURE.removeprefix("sm_")), 10)

seen = set[object]()


def compile_only(kernel: Any, _blocks: int, _threads: int, *given: Any) -> None:
    """In place of a launch."""
    types = tuple(map(typeof, given))
    if (kernel, types) in seen:
        return
    seen.add((kernel, types))
    ptx, _ = cuda.compile(kernel.py_func, types, cc=CAPABILITY, abi="numba", device=False)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(ptx)
        command = ["ptxas", f"-arch={ARCHITECTURE}", "-v", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    name = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.py_func.__name__}"
    loads = ptx.count("ld.global.v2.u64")
    print(
        f"{name:20} {registers[1]:>4} registers {spilled[1]:>3} bytes spilled {loads:>3} loads of 16 bytes", flush=True
    )


def without_a_device() -> None:
    """Arrays are NumPy's, and what is computed is 1."""
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)
    replaced = {
        "launch": compile_only,
        "empty": np.zeros,
        "zeros": np.zeros,
        "upload": lambda array: array,
        "download": np.ones_like,
        "bits_of": lambda array: array.view(UINTS[array.itemsize]),
        "address_of": lambda array: array.ctypes.data,
    }
    for module in (device, regions, bits, casts, changes, digests, moves, coding, spots):
        vars(module).update({name: value for name, value in replaced.items() if name in vars(module)})


def assemble(dtype: str, width: int) -> None:
    """Compile every kernel for a dtype."""
    print(f"{dtype}:")
    old, indices, field = np.zeros(64, UINTS[width]), np.zeros(4, np.uint32), field_of(dtype)
    some = old[:4].copy()
    memory: Memory = memory_of([old])
    one = regions.Regions(memory, width)
    edges = changes.find(one, one, indices, some, some.copy())
    if dtype == "BF16":
        floats = np.zeros(64, np.float32)
        changes.find(one, regions.regions_of([floats]), indices, some, cast=True)
        casts.cast(floats, old)
    changes.gather_all(one, edges, indices, some)
    changes.scatter_all(one, edges, indices, some)
    changes.find_wrong(one, edges, indices, some)
    flat = digests.Flat(np.zeros(1, np.uint64), np.zeros(1, np.int64), np.ones(1, np.int64))
    digests.digest(one, flat)
    digests.delta(one, flat, edges, indices, some, some)
    length = np.ones(1, np.int64)
    where = Spots(memory.addresses, 64 * length, 0 * length, 64 * length, 64 * length, memory.addresses, length)
    written = spots.Overwrites(where, 4 * length, indices, some)
    written.delta()
    written.write()
    moves.find_moves(some, some, field)
    coding.count_exponents(memory, field, width, np.ones(1, np.int64))
    states = np.zeros(context.tables(field.exponents).size, np.int64)
    starts = starts_of([context.Start(1, np.zeros(field.exponents, np.int64), states)])
    kind = Kind(field, width, np.array([8]), np.array([0]), np.array([0]))
    changed = Coded(np.array([0, 4]), indices, cpu_moves.no_moves(4))
    coding.count_bits(memory, kind, starts, changed)
    coding.encode_segments(memory, kind, starts, changed)
    coding.decode_segments([memoryview(b"1")], memory, kind, starts, changed.edges)


if __name__ == "__main__":
    without_a_device()
    for dtype, width in (("BF16", 2), ("F32", 4)):
        assemble(dtype, width)
