"""What the compilers make of the kernels for a CUDA device, without a device: python -m bench.gpu.assemble [sm_90]

It prints for each kernel its registers, the bytes that spill to memory, and its loads of 16 bytes. It needs Numba-CUDA
with NVVM and ptxas (`numba-cuda[cu13]` and `nvidia-cuda-nvcc`); ptxas is found on the PATH. The emulator runs what is
compiled.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

from bench.gpu import emulator
from pulse_rl.dtypes import UINTS, field_of
from pulse_rl.kernels.cpu import Spots, context, moves
from pulse_rl.kernels.cpu.coding import Kind, SegmentMoves, Streams, starts_of
from pulse_rl.kernels.gpu import casts, changes, coding, device, digests, regions, spots

ARCHITECTURE = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
CAPABILITY = divmod(int(ARCHITECTURE.removeprefix("sm_")), 10)

seen = set[object]()


def queue(kernel: Any, blocks: int, threads: int, args: tuple[Any, ...]) -> None:
    """In place of `device.queue`: compile a kernel for the device, and emulate it."""
    kinds = device.kind_of(args)
    if (kernel, kinds) not in seen:
        seen.add((kernel, kinds))
        print_code(kernel, kinds)
    emulator.EMULATOR.queue(kernel, blocks, threads, args)


def print_code(kernel: Any, kinds: tuple[Any, ...]) -> None:
    ptx, _ = cuda.compile(kernel.py_func, kinds, cc=CAPABILITY, abi="numba", device=False)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(ptx)
        command = ["ptxas", f"-arch={ARCHITECTURE}", "-v", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)  # as of a ptxas that is older than NVVM
    said = done.stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    name = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.py_func.__name__}"
    loads = ptx.count("ld.global.v2.u64")
    print(
        f"{name:20} {registers[1]:>4} registers {spilled[1]:>3} bytes spilled {loads:>3} loads of 16 bytes", flush=True
    )


def assemble(dtype: str, width: int) -> None:
    """Every kernel for a dtype, of 64 elements of which 4 change."""
    print(f"{dtype}:")
    field, where = field_of(dtype), np.array([3, 8, 40, 63], np.uint32)
    before = np.random.default_rng(0).integers(0, 1 << 16, 64).astype(UINTS[width])
    after = before.copy()
    after[where] += 1
    old, new, indices = device.upload(before), device.upload(after), device.upload(where)
    some, others = device.upload(before[where]), device.upload(after[where])
    one, other = regions.regions_of([old]), regions.regions_of([new])
    edges = changes.find(one, other, indices, others, some)
    if dtype == "BF16":
        floats = device.upload(np.ones(64, np.float32))
        changes.find(one, regions.regions_of([floats]), indices, others, cast=True)
        casts.cast(floats, device.empty(64, np.uint16))
    changes.gather_all(one, edges, indices, some)
    changes.scatter_all(one, edges, indices, some)
    changes.find_wrong(one, edges, indices, some)
    flat = digests.Flat(np.zeros(1, np.uint64), np.zeros(1, np.int64), np.ones(1, np.int64))
    digests.digest(one, flat)
    digests.delta(one, flat, edges, indices, some, others)
    length = np.ones(1, np.int64)
    lie = Spots(one.memory.addresses, 64 * length, 0 * length, 64 * length, 64 * length, one.memory.addresses, length)
    written = spots.Overwrites(lie, 4 * length, where, after[where])
    written.delta()
    written.write()
    moved = moves.find_moves(before[where], after[where], field)
    coding.count_exponents(one.memory, field, width, length)
    states = np.zeros(context.tables(field.exponents).size, np.int64)
    starts = starts_of([context.Start(field.exponents, np.zeros(field.exponents, np.int64), states)])
    kind = Kind(field, width, np.array([8]), np.array([0]), np.array([0]))
    changed = SegmentMoves(np.array([0, 4]), where, moved)
    coding.count_bits(one.memory, kind, starts, changed)
    coding.encode_segments(one.memory, kind, starts, changed)
    streams = Streams(np.frombuffer(b"1", np.uint8), np.array([0]), np.array([1]))
    coding.decode_segments(streams, one.memory, kind, starts, changed.edges)


if __name__ == "__main__":
    emulator.install()
    device.queue = queue
    for dtype, width in (("BF16", 2), ("F32", 4)):
        assemble(dtype, width)
