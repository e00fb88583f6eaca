"""The `context` coder of a CUDA device against that of the CPU: the same bytes, and the same refusals."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import gpu_device  # before anything that uses numba.cuda
import numpy as np
import pytest
from fuzz_context import Segment, decode, encoded
from gpu_device import Held, fast_switches, memory_of  # noqa: F401 - a fixture
from numpy.typing import NDArray

from pulse_rl.codecs import context as codec
from pulse_rl.codecs import model
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.kernels.cpu import coding as cpu_coding
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu.coding import Coded, Kind, Memory, Starts
from pulse_rl.kernels.gpu import coding

pytestmark = [
    pytest.mark.usefixtures("fast_switches"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if gpu_device.CUDA else []),
]


def lifted(memory: Memory, itemsize: int) -> Memory:
    """The segments of host memory, on the device: rows apart, and each at another distance from 16 bytes."""
    held = []
    for s, (address, rows, run, apart) in enumerate(zip(*memory[:4], strict=True)):
        assert rows == 1 or apart == run * itemsize
        bits = np.frombuffer(ctypes.string_at(int(address), int(rows * run * itemsize)), UINTS[itemsize])
        held.append(Held(bits, before=s))
    return memory_of(held)


class OnDevice:
    """What the codec `context` takes from `cpu.coding`, with the functions that read old bits on the device."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu_coding, name)

    def count_exponents(self, memory: Memory, field: Any, itemsize: int, every: NDArray[np.int64]) -> Any:
        self.called.append("count_exponents")
        return coding.count_exponents(lifted(memory, itemsize), field, itemsize, every)

    def count_bits(self, memory: Memory, kind: Kind, starts: Starts, changes: Coded) -> None:
        self.called.append("count_bits")
        coding.count_bits(lifted(memory, kind.itemsize), kind, starts, changes)

    def encode_segments(self, memory: Memory, kind: Kind, starts: Starts, changes: Coded) -> list[bytes | None]:
        self.called.append("encode_segments")
        return coding.encode_segments(lifted(memory, kind.itemsize), kind, starts, changes)

    def decode_segments(self, streams: Sequence[memoryview], memory: Memory, kind: Kind, *rest: Any) -> Any:
        self.called.append("decode_segments")
        return coding.decode_segments(streams, lifted(memory, kind.itemsize), kind, *rest)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], OnDevice]:
    """From the call on, the codec codes on the device."""

    def begin() -> OnDevice:
        there = OnDevice()
        monkeypatch.setattr(codec, "coding", there)
        return there

    return begin


def segment(dtype: str, size: int, row: int, share: float, seed: int) -> Segment:
    """Of weights that drift by a few steps; most of them, of many dtypes, of any bits."""
    rng = np.random.default_rng(seed)
    if dtype == "BF16":
        old = (rng.normal(0, 0.02, size).astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        old = rng.integers(0, 256, size * ITEMSIZES[dtype], np.uint8).view(UINTS[ITEMSIZES[dtype]])
    new = old.copy()
    where = rng.random(size) < share
    new[where] += rng.choice([1, 1, 1, 3, 17, -1, -2], size)[where].astype(old.dtype)
    return Segment(dtype, old, new, row, seed % row)


def drifting(dtype: str) -> list[Segment]:
    """Segments of one row, of many, and of one element; one that changes everywhere."""
    sizes = [(110, 30, 0.06), (65, 500, 0.2), (1, 1, 1.0), (20, 7, 1.0)]
    return [segment(dtype, *each, seed) for seed, each in enumerate(sizes)]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "I8"])
def test_a_block_has_the_same_bytes_and_the_same_changes(dtype: str, on_device: Callable[[], OnDevice]) -> None:
    listed = drifting(dtype)
    block = encoded(listed)
    there = on_device()
    assert encoded(listed).payload == block.payload
    where = [np.flatnonzero(one.old != one.new) for one in listed]
    assert decode(block) == [(i.tolist(), one.new[i].tolist()) for i, one in zip(where, listed, strict=True)]
    assert there.called[:3] == ["count_exponents", "count_bits", "encode_segments"]
    assert set(there.called[3:]) == {"decode_segments"}


@pytest.mark.parametrize("scratch", [1, coding.SCRATCH])
def test_segments_are_coded_in_batches(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two classes, in rows that lie apart: as many at once as there is memory for, but at least one."""
    monkeypatch.setattr(coding, "SCRATCH", scratch)
    field = field_of("BF16")
    listed = [segment("BF16", 2 * 64 if seed == 1 else 30 + seed, 80, 0.1, seed) for seed in range(4)]
    rows = [one.old.reshape(2, 64) if seed == 1 else one.old for seed, one in enumerate(listed)]
    held = [Held(each, between=9 if each.ndim == 2 else 0) for each in rows]
    where = [np.flatnonzero(one.old != one.new).astype(np.uint32) for one in listed]
    before = np.concatenate([one.old[i] for one, i in zip(listed, where, strict=True)])
    after = np.concatenate([one.new[i] for one, i in zip(listed, where, strict=True)])
    edges = np.concatenate([[0], np.cumsum([len(i) for i in where])])
    changes = Coded(edges, np.concatenate(where), moves.find_moves(before, after, field))
    kind = Kind(field, 2, np.full(4, 80), np.arange(4) % 80, np.array([0, 1, 1, 0]))
    starts = cpu_coding.starts_of([model.blank(field)._replace(threshold=t).start() for t in (120, field.exponents)])
    streams = cpu_coding.encode_segments(cpu_coding.memory_of(rows), kind, starts, changes)
    assert coding.encode_segments(memory_of(held), kind, starts, changes) == streams
    views = [memoryview(stream) for stream in streams if stream is not None]
    assert len(views) == 4
    decoded = coding.decode_segments(views, memory_of(held), kind, starts, edges)
    assert not isinstance(decoded, int)
    assert decoded[0].tolist() == changes.indices.tolist()
    assert decoded[1].tolist() == after.tolist()
    views[2] = memoryview(bytes(len(views[2])))  # every bit is a 1, and a number of steps has no end
    on_cpu = cpu_coding.decode_segments(views, cpu_coding.memory_of(rows), kind, starts, edges)
    assert coding.decode_segments(views, memory_of(held), kind, starts, edges) == on_cpu == 2


def test_a_stream_that_is_longer_than_foreseen_is_coded_again(
    monkeypatch: pytest.MonkeyPatch, on_device: Callable[[], OnDevice]
) -> None:
    listed = [segment("BF16", 60, 20, 0.3, seed) for seed in range(2)]
    block = encoded(listed)
    monkeypatch.setattr(coding, "STREAM_NBYTES", 0)
    monkeypatch.setattr(coding, "CHANGE_NBYTES", 0)
    given: list[list[int]] = []
    coded = coding._coded

    def noted(batch: Any, changed: Any, most: NDArray[np.int64]) -> list[bytes | None]:
        given.append(most.tolist())
        return coded(batch, changed, most)

    monkeypatch.setattr(coding, "_coded", noted)
    on_device()
    assert encoded(listed).payload == block.payload
    assert [len(sizes) for sizes in given] == [2, 1, 1]
    assert max(given[0]) < 8
    assert given[1:] == [[120], [120]]


def test_a_segment_of_noise_is_plain(on_device: Callable[[], OnDevice]) -> None:
    rng = np.random.default_rng(2)
    old, new = rng.integers(0, 1 << 16, (2, 300), np.uint16)
    listed = [Segment("BF16", old, new, 50), segment("BF16", 100, 10, 0.1, 3)]
    block = encoded(listed)
    assert new.tobytes() in block.payload
    on_device()
    assert encoded(listed).payload == block.payload
