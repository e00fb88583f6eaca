"""The codec `context` with its old bits on the device, against the same codec on one core of the CPU.

Blocks have as many segments as those of a patch with few changes. The bytes of the two are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from bench.gpu.bandwidth import DENSITIES, fitting
from bench.gpu.children import Keep
from bench.gpu.synthetic import State, changed, fill, shapes_of, state_like
from pulse_rl.codecs import context
from pulse_rl.codecs.base import OldBits, OldReader, SegmentChanges, SegmentSpec, run_of, specs_of
from pulse_rl.kernels.cpu.coding import Lies, memory_at
from pulse_rl.kernels.gpu import changes, coding, device
from pulse_rl.kernels.gpu.regions import regions_of
from pulse_rl.weights import devices
from pulse_rl.weights.changes import Changes

SEGMENT = 1 << 18  # elements: a tile of 512 · 512
BLOCK = 1024  # segments
PATIENCE_S = 20.0  # what coding the whole model may take
Block = tuple[bytes, list[bytes]]  # what its spans share, and its only span


class Timed(devices.Cuda):
    """The device, and the seconds that each function of its coder took."""

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


def segments_of(
    old: State, new: State, elements: int, there: devices.Cuda
) -> tuple[list[SegmentChanges], list[SegmentChanges]]:
    """Segments of the first tensors: with their old bits on the device, and with a copy in host memory."""
    on_gpu, on_cpu = list[SegmentChanges](), list[SegmentChanges]()
    for before, after in zip(old.tensors, new.tensors, strict=True):
        if elements <= 0:
            break
        row = before.shape[-1]
        flat, target = before.view(-1), after.view(-1)
        size = len(flat)
        elements -= size
        starts = range(0, size, SEGMENT)
        parts = [(flat[a : a + SEGMENT], target[a : a + SEGMENT]) for a in starts]
        cut = regions_of([one for one, _ in parts]), regions_of([one for _, one in parts])
        memory = device.empty(size, np.uint32), device.empty(size, np.uint16), device.empty(size, np.uint16)
        edges = device.download(changes.find(*cut, *memory))
        indices, values, replaced = (device.download(each[: edges[-1]]) for each in memory)
        host = device.download(flat).view("<u2")
        for number, a in enumerate(starts):
            mine = slice(edges[number], edges[number + 1])
            bits = host[a : a + SEGMENT]
            found = Changes(indices[mine], values[mine])
            spec = SegmentSpec("BF16", len(bits), len(found.indices), row, a % row)
            lies = Lies(int(cut[0].memory.addresses[number]), 1, len(bits), 2 * len(bits))
            part = SegmentChanges(spec, found, lambda bits=bits: bits, replaced[mine])  # type: ignore[misc]
            on_cpu.append(part)
            on_gpu.append(part._replace(lies=lies, device=there))
    return on_gpu, on_cpu


def blocks_of(parts: list[SegmentChanges]) -> list[list[SegmentChanges]]:
    return [parts[at : at + BLOCK] for at in range(0, len(parts), BLOCK)]


def encoded(parts: list[SegmentChanges]) -> list[Block]:
    """All segments, in blocks of one span."""
    codec = context.ContextCodec()
    return [codec.encode(list(map(run_of, block)), [len(block)]) for block in blocks_of(parts)]


def decoded(coded: list[Block], parts: list[SegmentChanges]) -> list[Changes]:
    """The changes of all segments."""
    found: list[Changes] = []
    for (head, (span,)), block in zip(coded, blocks_of(parts), strict=True):
        specs = specs_of([part.spec for part in block])
        (opened,) = context.ContextCodec().open(memoryview(head), specs, [len(block)])
        lies = [part.lies for part in block if part.lies is not None]
        old = OldBits(memory_at(lies, block), block[0].device) if len(lies) == len(block) else None
        units = opened(memoryview(span))
        reader = OldReader(lambda number, block=block: block[number].read())  # type: ignore[misc]
        decoded = units.decode(np.arange(len(block)), reader, old)
        found += [changes for each in decoded for changes in each.each()]
    return found


def clocked(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def measure_coder(elements: int, on_cpu: int, keep: Keep) -> None:
    """Encode and decode `on_cpu` elements on the device and on the CPU, then more of them on the device alone."""
    shapes = shapes_of(fitting(elements))
    old, new = (state_like(shapes, device.PLACE) for _ in range(2))
    fill(old, 1)
    for share in DENSITIES:
        changed(old, new, share, 5)
        coder = Coder(old, new, on_cpu)
        keep(f"{share:.2%}_against_a_core", coder.against_a_core)
        for together in (1, 4, 16):
            keep(f"{share:.2%}_quarter_{together}_coders_a_block", partial(coder.on_device, elements // 4, together))
        if coder.seconds_for(elements) < PATIENCE_S:
            keep(f"{share:.2%}_whole", partial(coder.on_device, elements, 16))


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
        on_gpu, on_cpu = segments_of(self._old, self._new, self._on_cpu, self._there)
        elements = sum(part.spec.size for part in on_cpu)
        decoded(encoded(on_cpu[:1]), on_cpu[:1])  # compiles
        encode_s, coded = clocked(lambda: encoded(on_cpu))
        decode_s, expected = clocked(lambda: decoded(coded, on_cpu))
        self._cpu_s = {"encode": encode_s / elements, "decode": decode_s / elements}
        compiled_s, found = clocked(lambda: encoded(on_gpu))
        assert found == coded
        same = zip(decoded(coded, on_gpu), expected, strict=True)
        assert all(a.indices.tolist() == b.indices.tolist() and a.values.tolist() == b.values.tolist() for a, b in same)
        return {"elements": elements, "cpu_encode_s": encode_s, "cpu_decode_s": decode_s, "first_encode_s": compiled_s}

    def on_device(self, elements: int, together: int) -> dict[str, object]:
        """How long the device takes, and how many cores of the CPU take as long. together: coders of a block."""
        coding.CODERS = together
        parts, _ = segments_of(self._old, self._new, elements, self._there)
        count = sum(part.spec.size for part in parts)
        self._there.taken = {}
        encode_s, coded = clocked(lambda: encoded(parts))
        decode_s, _ = clocked(lambda: decoded(coded, parts))
        self._device_s = (encode_s + decode_s) / count
        return {
            "elements": count,
            "changes": sum(part.spec.changed for part in parts),
            "nbytes": sum(len(head) + len(span) for head, (span,) in coded),
            "encode_s": encode_s,
            "decode_s": decode_s,
            "kernels_s": dict(self._there.taken),
            "encode_over_a_core": self._cpu_s["encode"] / (encode_s / count),
            "decode_over_a_core": self._cpu_s["decode"] / (decode_s / count),
        }
