"""The codec `context` with its old bits on the device, against the same codec on one core of the CPU.

The codec asks `cpu.coding` for four functions. Here it asks `gpu.coding`, which has the same four, and codes all
segments of a block in one batch. The bytes of the two are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from synthetic import State

from pulse_rl.codecs import context
from pulse_rl.codecs.base import SegmentChanges, SegmentSpec
from pulse_rl.kernels.cpu import coding as cpu_coding
from pulse_rl.kernels.cpu.coding import Lies, memory_at
from pulse_rl.kernels.gpu import changes, coding, device
from pulse_rl.kernels.gpu.regions import regions_of
from pulse_rl.weights.changes import Changes

SEGMENT = 1 << 18  # elements: a tile of 512 · 512


@contextmanager
def on_device() -> Iterator[dict[str, float]]:
    """The codec codes on the device. Yields the seconds that each of its functions took."""
    taken: dict[str, float] = {}

    def timed(name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begin = time.perf_counter()
            result = getattr(coding, name)(*given)  # it waits for its results
            taken[name] = taken.get(name, 0) + time.perf_counter() - begin
            return result

        return call

    names = ("count_exponents", "count_bits", "encode_segments", "decode_segments")
    replaced = SimpleNamespace(**vars(cpu_coding) | {name: timed(name) for name in names})
    codec = vars(context)
    held = codec["coding"], codec["BATCH"]
    codec["coding"], codec["BATCH"] = replaced, 1 << 62
    try:
        yield taken
    finally:
        codec["coding"], codec["BATCH"] = held


def segments_of(old: State, new: State, elements: int) -> tuple[list[SegmentChanges], list[SegmentChanges]]:
    """Segments of the first tensors: with their old bits on the device, and with a copy in host memory."""
    on_gpu, on_cpu = list[SegmentChanges](), list[SegmentChanges]()
    for before, after in zip(old.tensors, new.tensors, strict=True):
        if elements <= 0:
            break
        row = before.shape[-1]
        flat: Any = before.view(-1)
        target: Any = after.view(-1)
        if device.SIMULATED:
            flat, target = (each.numpy().view("<u2") for each in (flat, target))
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
            on_gpu.append(SegmentChanges(spec, found, lambda bits=bits: bits, replaced[mine], lies))  # type: ignore[misc]
            on_cpu.append(SegmentChanges(spec, found, lambda bits=bits: bits, replaced[mine]))  # type: ignore[misc]
    return on_gpu, on_cpu


def decoded(head: bytes, spans: Sequence[bytes], parts: Sequence[SegmentChanges]) -> list[Changes]:
    """All segments of a block of one span."""
    (opened,) = context.ContextCodec().open(memoryview(head), [part.spec for part in parts], [len(parts)])
    lies = [part.lies for part in parts if part.lies is not None]
    memory = memory_at(lies, parts) if len(lies) == len(parts) else None
    units = opened(memoryview(spans[0]))
    return units.decode(range(len(parts)), [part.read for part in parts], memory)


def clocked(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def measure_coder(old: State, new: State, elements: int, on_cpu: int) -> dict[str, object]:
    """Encode and decode a block of this many elements on the device, and one of `on_cpu` elements on both."""
    codec = context.ContextCodec()
    gpu_parts, cpu_parts = segments_of(old, new, min(on_cpu, elements))
    cpu_elements = sum(part.spec.size for part in cpu_parts)
    codec.encode(cpu_parts[:1], [1])  # compiles
    cpu_encode_s, (head, spans) = clocked(lambda: codec.encode(cpu_parts, [len(cpu_parts)]))
    cpu_decode_s, expected = clocked(lambda: decoded(head, spans, cpu_parts))
    with on_device():
        again = codec.encode(gpu_parts, [len(gpu_parts)])  # compiles, too
        assert again == (head, spans)
        same = zip(decoded(head, spans, gpu_parts), expected, strict=True)
        assert all(a.indices.tolist() == b.indices.tolist() and a.values.tolist() == b.values.tolist() for a, b in same)
    parts, _ = segments_of(old, new, elements)
    count = sum(part.spec.size for part in parts)
    with on_device() as encoding:
        encode_s, (head, spans) = clocked(lambda: codec.encode(parts, [len(parts)]))
    with on_device() as decoding:
        decode_s, _ = clocked(lambda: decoded(head, spans, parts))
    return {
        "elements": count,
        "changes": sum(part.spec.changed for part in parts),
        "nbytes": len(head) + len(spans[0]),
        "encode_s": encode_s,
        "encode_kernels_s": encoding,
        "decode_s": decode_s,
        "decode_kernels_s": decoding,
        "cpu_elements": cpu_elements,
        "cpu_encode_s": cpu_encode_s,
        "cpu_decode_s": cpu_decode_s,
        "encode_over_a_core": cpu_encode_s / cpu_elements / (encode_s / count),
        "decode_over_a_core": cpu_decode_s / cpu_elements / (decode_s / count),
    }
