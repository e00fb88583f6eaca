"""The codec `context` with its old bits on the device, against the same codec on one core of the CPU.

Blocks have as many segments as those of a patch with few changes. The bytes of the two are compared. What the host does
for the device, it does on as many cores as blocks are coded at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from bench.gpu.bandwidth import DENSITIES, fitting
from bench.gpu.children import Keep, Options
from bench.gpu.synthetic import State, changed, fill, shapes_of, state_like
from pulse_rl.codecs import context
from pulse_rl.codecs.base import OldBits, OldReader, Run, Specs, cut
from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.coding import joined_memory, memory_of
from pulse_rl.kernels.gpu import changes, device
from pulse_rl.kernels.gpu.regions import regions_of
from pulse_rl.parallel import at_once
from pulse_rl.weights import devices
from pulse_rl.weights.changes import Changes

SEGMENT = 1 << 18  # elements: a tile of 512 · 512
BLOCK = 1024  # segments
PATIENCE_S = 4.0  # what coding the whole model may take
Block = tuple[bytes, list[bytes]]  # what its spans share, and its only span


class Timed(devices.Cuda):
    """The device, and the seconds that each function of its coder took, summed over threads."""

    def __init__(self) -> None:
        super().__init__(torch.device(device.PLACE))
        self.taken: dict[str, float] = {}

    @contextmanager
    def coder(self) -> Iterator[devices.Coder]:
        def call(name: str, *given: Any) -> Any:
            begin = time.perf_counter()
            result = getattr(there, name)(*given)  # it waits for its results
            self.taken[name] = self.taken.get(name, 0) + time.perf_counter() - begin
            return result

        names = ("count_exponents", "count_bits", "encode_segments", "decode_segments")
        with super().coder() as there:
            yield cast("devices.Coder", SimpleNamespace(**{name: partial(call, name) for name in names}))


def runs_of(old: State, new: State, elements: int, there: devices.Cuda) -> tuple[list[Run], list[Run]]:
    """The first tensors, cut into segments: with their old bits on the device, and with a copy in host memory."""
    on_gpu, on_cpu = list[Run](), list[Run]()
    for before, after in zip(old.tensors, new.tensors, strict=True):
        if elements <= 0:
            break
        row = before.shape[-1]
        flat, target = before.view(-1), after.view(-1)
        size = len(flat)
        elements -= size
        starts = np.arange(0, size, SEGMENT)
        cut_old, cut_new = (regions_of([one[a : a + SEGMENT] for a in starts.tolist()]) for one in (flat, target))
        memory = device.empty(size, np.uint32), device.empty(size, np.uint16), device.empty(size, np.uint16)
        edges = device.download(changes.find(cut_old, cut_new, *memory))
        indices, values, replaced = (device.download(each[: edges[-1]]) for each in memory)
        host = device.download(flat).view("<u2")
        sizes = cut_old.sizes
        copied = memory_of([host[a : a + SEGMENT] for a in starts.tolist()])
        specs = Specs("BF16", sizes, np.diff(edges), np.full_like(sizes, row), starts % row)
        read = OldReader(partial(_part, host))
        found, usable = Changes(indices, values), np.ones(len(sizes), np.bool_)
        run = Run(specs, edges, found, replaced, read, OldBits(copied, devices.HOST, usable))
        on_cpu.append(run)
        on_gpu.append(run._replace(lying=OldBits(cut_old.memory, there, usable)))
    return on_gpu, on_cpu


def _part(bits: UIntArray, number: int) -> UIntArray:
    return bits[number * SEGMENT : (number + 1) * SEGMENT]


def _read(block: list[Run], number: int) -> UIntArray:
    """The old bits of a segment of a block."""
    for run in block:
        if number < run.segments:
            break
        number -= run.segments
    return run.old.one(number)


def blocks_of(runs: list[Run]) -> Iterator[list[Run]]:
    left = sum(run.segments for run in runs)
    return cut(runs, [min(BLOCK, left - at) for at in range(0, left, BLOCK)])


def encoded(runs: list[Run]) -> list[Block]:
    """All segments, in blocks of one span. Of a device a few blocks at once, as a publisher codes them."""

    def encode(block: list[Run]) -> Block:
        return context.ContextCodec().encode(block, [sum(run.segments for run in block)])

    return at_once(encode, list(blocks_of(runs)), _most(runs), "bench-block")


def decoded(coded: list[Block], runs: list[Run]) -> list[Changes]:
    """The changes of all segments, those of a run of a block together."""

    def decode(one: tuple[Block, list[Run]]) -> list[Changes]:
        (head, (span,)), block = one
        count = sum(run.segments for run in block)
        (opened,) = context.ContextCodec().open(memoryview(head), [run.specs for run in block], [count])
        lying = list(map(_lying, block))
        memory = joined_memory([one.memory for one in lying])
        old = OldBits(memory, lying[0].device, np.concatenate([one.usable for one in lying]))
        reader = OldReader(partial(_read, block))
        return [each.changes for each in opened([memoryview(span)]).decode(np.arange(count), reader, old)]

    blocks = list(zip(coded, blocks_of(runs), strict=True))
    return list(chain(*at_once(decode, blocks, _most(runs), "bench-block")))


def _most(runs: list[Run]) -> int:
    """Blocks that are coded at once."""
    return 1 if _lying(runs[0]).device is devices.HOST else devices.CODERS


def _lying(run: Run) -> OldBits:
    assert run.lying is not None
    return run.lying


def clocked(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def measure_coder(options: Options, keep: Keep) -> None:
    """Encode and decode some elements on the device and on the CPU, then more of them on the device alone."""
    elements = options.elements
    shapes = shapes_of(fitting(elements))
    old, new = (state_like(shapes, device.PLACE) for _ in range(2))
    fill(old, 1)
    for share in DENSITIES:
        changed(old, new, share, 5)
        coder = Coder(old, new, options.cpu_elements)
        keep(f"{share:.2%}_against_a_core", coder.against_a_core)
        keep(f"{share:.2%}_quarter", partial(coder.on_device, elements // 4))
        if coder.seconds_for(elements) < PATIENCE_S:
            keep(f"{share:.2%}_whole", partial(coder.on_device, elements))


class Coder:
    """The changes of two versions, coded."""

    def __init__(self, old: State, new: State, on_cpu: int) -> None:
        self._old, self._new, self._on_cpu = old, new, on_cpu
        self._there = Timed()
        self._cpu_s = dict[str, float]()  # of the CPU for an element
        self._device_s = math.inf  # of the device for an element, both ways

    def seconds_for(self, elements: int) -> float:
        return elements * self._device_s

    def against_a_core(self) -> dict[str, object]:
        """The same bytes, and the same changes from them."""
        on_gpu, on_cpu = runs_of(self._old, self._new, self._on_cpu, self._there)
        elements = sum(int(run.specs.sizes.sum()) for run in on_cpu)
        one = [on_cpu[0].at(0, 1)]
        decoded(encoded(one), one)  # compiles
        encode_s, coded = clocked(lambda: encoded(on_cpu))
        decode_s, expected = clocked(lambda: decoded(coded, on_cpu))
        self._cpu_s = {"encode": encode_s / elements, "decode": decode_s / elements}
        compiled_s, found = clocked(lambda: encoded(on_gpu))
        assert found == coded
        same = zip(decoded(coded, on_gpu), expected, strict=True)
        assert all(a.indices.tolist() == b.indices.tolist() and a.values.tolist() == b.values.tolist() for a, b in same)
        return {"elements": elements, "cpu_encode_s": encode_s, "cpu_decode_s": decode_s, "first_encode_s": compiled_s}

    def on_device(self, elements: int) -> dict[str, object]:
        """How long the device takes, and how many cores of the CPU take as long."""
        runs, _ = runs_of(self._old, self._new, elements, self._there)
        count = sum(int(run.specs.sizes.sum()) for run in runs)
        self._there.taken = {}
        encode_s, coded = clocked(lambda: encoded(runs))
        decode_s, _ = clocked(lambda: decoded(coded, runs))
        self._device_s = (encode_s + decode_s) / count
        return {
            "elements": count,
            "changes": sum(int(run.specs.changed.sum()) for run in runs),
            "nbytes": sum(len(head) + len(span) for head, (span,) in coded),
            "encode_s": encode_s,
            "decode_s": decode_s,
            "kernels_s": dict(self._there.taken),
            "encode_over_a_core": self._cpu_s["encode"] / (encode_s / count),
            "decode_over_a_core": self._cpu_s["decode"] / (decode_s / count),
        }
