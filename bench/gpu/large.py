"""Kernels on more than 2^32 elements, on the emulated device: python -m bench.gpu.large

Two regions are as long as one can be, 2^32 - 1 elements of 8 bits, and a short one lies between them. What is found and
digested is compared with what is known, and with the CPU's digest. It takes some ten minutes, and little memory: nobody
writes to most of it.
"""

import numpy as np
import torch

from bench.gpu import emulator
from pulse_rl.kernels import cpu
from pulse_rl.kernels.gpu import changes, device, digests
from pulse_rl.kernels.gpu.regions import regions_of

SIZE = (1 << 32) - 1
CHANGED = np.array([0, 5, (1 << 31) - 1, 1 << 31, (1 << 31) + 77, SIZE - 20_000, SIZE - 1])


def main() -> None:
    emulator.install()
    old, new = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    new[torch.from_numpy(CHANGED)] = torch.arange(1, 8, dtype=torch.uint8)
    states = [[state, state[:100], state] for state in (old, new)]
    before, after = map(regions_of, states)
    indices, values, replaced = (device.empty(64, kind) for kind in (np.uint32, np.uint8, np.uint8))
    edges = changes.find(before, after, indices, values, replaced)
    assert edges.tolist() == [0, 7, 9, 16]
    assert indices[:16].tolist() == [*CHANGED, 0, 5, *CHANGED]
    assert values[:16].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 1, 2, 3, 4, 5, 6, 7]
    print(f"found the changes in {int(before.sizes.sum()):,} elements")
    flat = digests.Flat(np.array([3, 4, 5], np.uint64), np.array([0, 7, 1 << 40]), np.zeros(3, np.int64))
    one, other = (int(device.download(digests.digest(regions, flat))[0]) for regions in (before, after))
    delta = digests.delta(before, flat, edges, indices[:16], replaced[:16], values[:16])
    parts = zip(flat.seeds.tolist(), flat.starts.tolist(), states[1], strict=True)
    expected = sum(cpu.digest_range(seed, start, state.numpy()) for seed, start, state in parts) % 2**64
    assert other == expected == (one + int(device.download(delta)[0])) % 2**64
    print("digested them")


if __name__ == "__main__":
    main()
