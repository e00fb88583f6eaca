"""The device that tests of `kernels.gpu` run on: CUDA where there is one, and the emulator of bench/gpu elsewhere."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("numba_cuda")
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.kernels.gpu import device
from pulse_rl.kernels.gpu.regions import Regions

CUDA = torch.cuda.is_available()


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        from bench.gpu import emulator

        for where, name, value in emulator.replacements():
            monkeypatch.setattr(where, name, value)


class Held:
    """Rows of elements in memory of the device, with other bits between and around them."""

    def __init__(self, bits: NDArray[Any], *, before: int = 0, between: int = 0) -> None:
        """bits: (n,) or (rows, run). before, between: elements before the first row, and between rows."""
        rows = bits.reshape(1, -1) if bits.ndim == 1 else bits
        self.rows, self.run = rows.shape
        self._before, self._apart = before, self.run + between
        memory = np.full(before + self.rows * self._apart, 0xA5, bits.dtype)
        self._in(memory)[...] = rows
        self._around = self._without(memory)
        self.memory = device.upload(memory)

    def _in(self, memory: NDArray[Any]) -> NDArray[Any]:
        return memory[self._before :].reshape(self.rows, self._apart)[:, : self.run]

    def _without(self, memory: NDArray[Any]) -> NDArray[Any]:
        around = memory.copy()
        self._in(around)[...] = 0
        return around

    @property
    def lies(self) -> tuple[int, int, int, int]:
        """Address, rows, elements in a row, and bytes from row to row."""
        itemsize = self.memory.itemsize
        address = self.memory.data_ptr() + self._before * itemsize
        return address, self.rows, self.run, self._apart * itemsize

    def read(self) -> NDArray[Any]:
        """The bits (n,), while what lies around them is as it was."""
        memory = device.download(self.memory)
        assert np.array_equal(self._without(memory), self._around)
        return self._in(memory).reshape(-1).copy()


def memory_of(held: list[Held]) -> MemoryRows:
    addresses, rows, runs, apart = np.array([one.lies for one in held], np.int64).T.copy()
    return MemoryRows(addresses.view(np.uint64), rows, runs, apart, held)


def regions_of(held: list[Held]) -> Regions:
    return Regions(memory_of(held), held[0].memory.itemsize)
