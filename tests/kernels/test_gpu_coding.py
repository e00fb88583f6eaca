"""The `context` coder of a CUDA device against that of the CPU: the same bytes, and the same refusals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pulse_rl.codecs import model
from pulse_rl.codecs.base import OldBits, OldReader
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu import coding as cpu_coding
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu.coding import Kind, SegmentMoves
from pulse_rl.kernels.cpu.rangecoder import SLACK
from pulse_rl.kernels.gpu import coding, device
from pulse_rl.weights import devices
from tests.codecs.fuzz_context import Segment, encode_block, encoded, open_block, run_of, spec_of, streams_of
from tests.kernels import gpu_device
from tests.kernels.gpu_device import Held, a_device, memory_of  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.usefixtures("a_device"),
    *([pytest.mark.gpu] if gpu_device.CUDA else []),
]


class TheDevice(devices.Cuda):
    """Notes which functions of its coder are called."""

    def __init__(self) -> None:
        super().__init__(torch.device(device.PLACE))
        self.called: list[str] = []

    @contextmanager
    def coder(self) -> Iterator[devices.Coder]:
        with super().coder() as there:
            yield cast("devices.Coder", _Noted(there, self.called))


class _Noted:
    def __init__(self, coder: devices.Coder, called: list[str]) -> None:
        self._coder, self._called = coder, called

    def __getattr__(self, name: str) -> Any:
        self._called.append(name)
        return getattr(self._coder, name)


def unread(number: int) -> Any:
    raise AssertionError("no bits are to be read through the host")


class OnDevice:
    """Segments whose old bits lie on the device, each at another distance from 16 bytes.

    readable: whether they may also be read through the host.
    """

    def __init__(self, segments: Sequence[Segment], *, readable: bool = False) -> None:
        self.there = TheDevice()
        self._held = [Held(one.old, before=number) for number, one in enumerate(segments)]
        everywhere = [OldBits(memory_of([held]), self.there, np.ones(1, np.bool_)) for held in self._held]
        self.runs = [run_of(one)._replace(lying=lying) for one, lying in zip(segments, everywhere, strict=True)]
        if not readable:
            self.runs = [run._replace(old=OldReader(unread)) for run in self.runs]
        self._specs = list(map(spec_of, segments))

    def encode(self) -> bytes:
        return encode_block(self.runs)

    def decode(self, block: bytes) -> list[tuple[list[int], list[int]]]:
        old = OldBits(memory_of(self._held), self.there, np.ones(len(self.runs), np.bool_))
        reader = OldReader(lambda number: self.runs[number].old.one(0))
        decoded = open_block(block, self._specs).decode(np.arange(len(self.runs)), reader, old)
        return [(indices.tolist(), values.tolist()) for found in decoded for indices, values in found.each()]


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
def test_a_block_has_the_same_bytes_and_the_same_changes(dtype: str) -> None:
    listed = drifting(dtype)
    block = encoded(listed)
    here = OnDevice(listed)
    assert here.encode() == block.payload
    where = [np.flatnonzero(one.old != one.new) for one in listed]
    expected = [(indices.tolist(), one.new[indices].tolist()) for indices, one in zip(where, listed, strict=True)]
    assert here.decode(block.payload) == expected
    assert here.there.called == ["count_exponents", "count_bits", "encode_segments", "decode_segments"]


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
    changes = SegmentMoves(edges, np.concatenate(where), moves.find_moves(before, after, field))
    kind = Kind(field, 2, np.full(4, 80), np.arange(4) % 80, np.array([0, 1, 1, 0]))
    starts = cpu_coding.starts_of([model.blank(field)._replace(threshold=t).start() for t in (120, field.exponents)])
    streams = cpu_coding.encode_segments(cpu_coding.memory_of(rows), kind, starts, changes)
    assert coding.encode_segments(memory_of(held), kind, starts, changes) == streams
    coded = [stream for stream in streams if stream is not None]
    assert len(coded) == 4
    decoded = coding.decode_segments(streams_of(coded), memory_of(held), kind, starts, edges)
    assert not isinstance(decoded, int)
    assert decoded[0].tolist() == changes.indices.tolist()
    assert decoded[1].tolist() == after.tolist()
    coded[2] = bytes(len(coded[2]))  # every bit is a 1, and a number of steps has no end
    on_cpu = cpu_coding.decode_segments(streams_of(coded), cpu_coding.memory_of(rows), kind, starts, edges)
    assert coding.decode_segments(streams_of(coded), memory_of(held), kind, starts, edges) == on_cpu == 2


def test_a_batch_has_the_segments_whose_hot_elements_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose elements would not fit if all were hot are counted first."""
    field = field_of("BF16")
    listed = [segment("BF16", size, 10, 0.1, size) for size in (40, 70, 50)]
    held = [Held(one.old) for one in listed]
    kind = Kind(field, 2, np.full(3, 10), np.zeros(3, np.int64), np.array([0, 0, 1]))
    starts = cpu_coding.starts_of([model.blank(field)._replace(threshold=t).start() for t in (119, field.exponents)])
    hot = [int((((one.old & field.mask) >> field.shift) < 119).sum()) for one in listed[:2]]
    assert 0 < sum(hot) < 70
    others = [SLACK + 8 * starts.states.shape[1] + 4 * 10 + len(one.old) // 4 for one in listed]
    needed = sum(others[:2]) + 6 * sum(hot)
    for scratch, cuts in ((needed, [2, 3]), (needed - 1, [1, 2, 3]), (sum(others) + 6 * 160, [3])):
        monkeypatch.setattr(coding, "SCRATCH", scratch)
        assert [batch.stop for batch in coding._batches(memory_of(held), kind, starts)] == cuts


def test_a_stream_that_is_longer_than_foreseen_is_coded_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert OnDevice(listed).encode() == block.payload
    assert [len(sizes) for sizes in given] == [2, 1, 1]
    assert max(given[0]) < 8
    assert given[1:] == [[120], [120]]


def test_a_segment_of_noise_is_written_plain_for_which_the_host_reads_its_old_bits() -> None:
    rng = np.random.default_rng(2)
    old, new = rng.integers(0, 1 << 16, (2, 300), np.uint16)
    listed = [Segment("BF16", old, new, 50), segment("BF16", 100, 10, 0.1, 3)]
    block = encoded(listed)
    assert new.tobytes() in block.payload
    here = OnDevice(listed, readable=True)
    assert here.encode() == block.payload
    assert here.decode(block.payload)[0][1] == new[old != new].tolist()


def test_segments_that_lie_partly_elsewhere_are_read_and_coded_on_the_host() -> None:
    """One of three is not on the device as kernels need it, so that all are read."""
    listed = drifting("BF16")[:3]
    here = OnDevice(listed, readable=True)
    lying = here.runs[1].lying
    here.runs[1] = here.runs[1]._replace(lying=lying and lying._replace(usable=np.zeros(1, np.bool_)))
    assert here.encode() == encoded(listed).payload
    assert here.there.called == []


def test_a_stream_that_the_device_cannot_decode_is_refused() -> None:
    listed = drifting("BF16")[:2]
    block = bytearray(encoded(listed).payload)
    stream = len(block) - 12
    block[stream:] = bytes(12)  # every bit is a 1, and a number of steps has no end
    with pytest.raises(FormatError, match="does not hold"):
        OnDevice(listed).decode(bytes(block))
