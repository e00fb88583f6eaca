"""The kernels of the context codec, each compared with its naive twin; the range coder with exact arithmetic."""

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.codecs import model
from pulse_rl.dtypes import ITEMSIZES, UINTS, Field, field_of
from pulse_rl.kernels.cpu import coding, moves, rangecoder
from pulse_rl.kernels.cpu.context import Start, tables
from tests.codecs.fuzz_context import Segment, streams_of
from tests.codecs.test_context import segments
from tests.naive import context as reference

# The range coder


class Fraction:
    """An encoder that keeps every bit of the fraction in one Python integer, so that it never carries."""

    def __init__(self) -> None:
        self.low, self.width, self.words = 0, (1 << 64) - 1, 0
        self.ripple = 0  # the most bytes of 0xFF that one addition turned to 0
        self.states: dict[tuple[int, str, int], reference.Context] = {}

    def _narrow(self, start: int, width: int) -> None:
        written = self.low >> 64
        self.low, self.width = self.low + start, width
        if self.low >> 64 != written:
            self.ripple = max(self.ripple, (((written + 1) & -(written + 1)).bit_length() - 1) // 8)
        if self.width < 1 << 32:
            self.low, self.width, self.words = self.low << 32, self.width << 32, self.words + 1

    def bit(self, key: tuple[int, str, int], bit: int) -> None:
        state = self.states.setdefault(key, reference.Context())
        share = (self.width >> 20) * (state.p >> 12 | 1)
        self._narrow(0 if bit else share, share if bit else self.width - share)
        state.learn(bit)

    def number(self, kind: int, number: int) -> None:
        z = number + 1
        length = z.bit_length() - 1
        for j in range(length + 1):
            self.bit((kind, "length", j), int(j < length))
        if length:
            self.bit((kind, "top", length), z >> (length - 1) & 1)
        left = max(0, length - 1)
        while left:
            count = min(16, left)
            left -= count
            self._narrow((self.width >> count) * (z >> left & (1 << count) - 1), self.width >> count)

    def finish(self) -> bytes:
        """The shortest string of bytes in the range."""
        size = 8 + 4 * self.words
        for count in range(size + 1):
            unit = 1 << 8 * (size - count)
            value = -(-self.low // unit) * unit
            if value < self.low + self.width:
                return value.to_bytes(size, "big")[:count].rstrip(b"\0")
        raise AssertionError


def fraction_of(numbers: list[int], kinds: list[int]) -> tuple[bytes, int]:
    encoder = Fraction()
    for number, kind in zip(numbers, kinds, strict=True):
        encoder.number(kind, number)
    return encoder.finish(), encoder.ripple


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 40).flatmap(lambda k: st.integers(0, 2**k)), st.integers(0, 10)), max_size=60))
def test_numbers_equal_their_twins(pairs: list[tuple[int, int]]) -> None:
    """The fast encoder gives the bytes of exact arithmetic; the fast and the naive decoder give the numbers."""
    numbers, kinds = [n for n, _ in pairs], [k for _, k in pairs]
    coded = rangecoder.encode_numbers(np.array(numbers, np.int64), np.array(kinds, np.uint8))
    assert coded == fraction_of(numbers, kinds)[0]
    decoded = rangecoder.decode_numbers(memoryview(coded), np.array(kinds, np.uint8))
    assert decoded is not None
    assert decoded.tolist() == numbers
    head = reference.Head(coded)
    assert [head.number(kind) for kind in kinds] == numbers


def test_carries_ripple_through_bytes_already_written() -> None:
    """Numbers decoded from 61 00 … 00 01 keep the range around 61 00 … for long: its low end is 60 FF FF … until it
    passes that point, and the carry runs through all of these bytes. Compared with exact arithmetic."""
    kinds = np.zeros(60, np.uint8)
    longest = 0
    for first in range(1, 256):
        for zeros in (3, 6, 10, 15):
            stream = bytes([first, *bytes(zeros), 1, 77, 200, 5])
            numbers = rangecoder.decode_numbers(memoryview(stream), kinds)
            if numbers is None:
                continue
            coded = rangecoder.encode_numbers(numbers, kinds)
            exact, ripple = fraction_of(numbers.tolist(), kinds.tolist())
            assert coded == exact
            longest = max(longest, ripple)
    assert longest >= 8


def test_the_carry_of_the_last_bytes() -> None:
    """Numbers that end while the range is still around 61 00 …: the shortest string is that point itself."""
    for first in range(1, 256):
        stream = bytes([first, *bytes(20), 1])
        for count in range(1, 12):
            kinds = np.zeros(count, np.uint8)
            numbers = rangecoder.decode_numbers(memoryview(stream), kinds)
            if numbers is not None:
                coded = rangecoder.encode_numbers(numbers, kinds)
                assert coded == fraction_of(numbers.tolist(), kinds.tolist())[0]


@pytest.mark.parametrize("length", range(2, 41))
def test_the_upper_end_of_the_range_gives_the_largest_raw_bits(length: int) -> None:
    """Divisions round down, so the top of a range belongs to no raw value: it is read as the largest one."""
    encoder = Fraction()
    for j in range(length + 1):
        encoder.bit((0, "length", j), int(j < length))
    encoder.bit((0, "top", length), 1)
    stream = (encoder.low + encoder.width - 1).to_bytes(8 + 4 * encoder.words, "big")
    numbers = rangecoder.decode_numbers(memoryview(stream), np.zeros(2, np.uint8))
    assert numbers is not None
    head = reference.Head(stream)
    assert numbers.tolist() == [head.number(0), head.number(0)]
    assert numbers[0] == 2 ** (length + 1) - 2


# The other kernels


@settings(max_examples=200)
@given(st.lists(st.integers(0, 61).flatmap(lambda k: st.integers(2**k, 2 ** (k + 1))), min_size=1, max_size=20))
def test_log2_against_exact_arithmetic(values: list[int]) -> None:
    """⌊256 · log2(v)⌋ = the bits of v^256 below its leading one; or one less, where v lies just above a step.

    Finer ones begin with the same bits, and are near those of floats.
    """
    found = rangecoder.log2(np.array(values, np.int64)).tolist()
    finer = rangecoder.log2(np.array(values, np.int64), 16)
    assert (finer >> 8).tolist() == found
    assert np.abs(finer - 65536 * np.log2(np.array(values, np.float64))).max() < 2
    for value, log in zip(values, found, strict=True):
        exact = (value**256).bit_length() - 1
        assert exact - 1 <= log <= exact
        if value < 1 << 12:
            assert log == exact


@numba.njit  # type: ignore[untyped-decorator]
def find_hot(like: Any, segments: Any, mask: Any, most: Any, shift: Any, indices: Any, exponents: Any) -> Any:
    return moves.find_hot(like, segments[0], mask, most, shift, indices, exponents)


def hot_elements(old: Any, field: Field, threshold: int) -> list[tuple[int, int]]:
    """The hot elements that the kernel finds, and their exponents. threshold: 1 at least."""
    kind = old.dtype.type
    indices, exponents = np.empty(old.size, np.uint32), np.empty(old.size, np.uint16)
    segments = np.zeros(1, moves.SEGMENT)
    rows, run = old.shape if old.ndim == 2 else (1, old.size)
    for name, value in {"address": old.ctypes.data, "rows": rows, "run": run, "apart": old.strides[0]}.items():
        segments[name] = value
    most = kind((threshold << field.shift) - 1)
    count = find_hot(np.empty(0, kind), segments, kind(field.mask), most, kind(field.shift), indices, exponents)
    return list(zip(indices[:count].tolist(), exponents[:count].tolist(), strict=True))


def counted_exponents(old: Any, field: Field, every: int) -> list[int]:
    memory, itemsize = coding.memory_of([old]), old.itemsize
    return coding.count_exponents(memory, field, itemsize, np.array([every]))[0].tolist()  # type: ignore[no-any-return]


@settings(max_examples=150)
@given(segments(), st.floats(0, 1), st.sampled_from([1, 2, 16]))
def test_hot_elements_and_counts_equal_their_twins(segment: Segment, share: float, every: int) -> None:
    kind, bits = field_of(segment.dtype), 8 * segment.old.itemsize
    exponents = [reference.exponent(segment.dtype, bits, old) for old in segment.old.tolist()]
    assert kind.exponents == reference.exponents_of(segment.dtype, bits)
    for threshold in {1, round(share * kind.exponents), kind.exponents - 1, kind.exponents} - {0}:
        hot = [(i, e) for i, e in enumerate(exponents) if e < threshold]
        assert hot_elements(segment.old, kind, threshold) == hot
    counted = [e for i, e in enumerate(exponents) if i // 64 % every == 0]
    expected = np.bincount(counted, minlength=kind.exponents) * every
    assert counted_exponents(segment.old, kind, every) == expected.tolist()


@settings(max_examples=60)
@given(
    st.sampled_from(["F8_E4M3", "BF16", "F32", "F64", "I16"]), st.integers(1, 5), st.integers(64, 200), st.floats(0, 1)
)
def test_hot_elements_and_counts_in_rows_are_those_of_a_copy(dtype: str, rows: int, run: int, share: float) -> None:
    """Rows that lie apart, as those of a tile do."""
    kind, itemsize = field_of(dtype), ITEMSIZES[dtype]
    data = np.random.default_rng(run).integers(0, 256, rows * (run + 5) * itemsize, np.uint8)
    old = data.view(UINTS[itemsize]).reshape(rows, run + 5)[:, 3 : 3 + run]
    flat = old.flatten()
    for threshold in (1, max(1, round(share * kind.exponents)), kind.exponents):
        assert hot_elements(old, kind, threshold) == hot_elements(flat, kind, threshold)
    for every in (1, 2):
        assert counted_exponents(old, kind, every) == counted_exponents(flat, kind, every)


@settings(max_examples=150)
@given(segments())
def test_moves_equal_their_twins(segment: Segment) -> None:
    """Exponent, direction and size of every move; applying the moves to the old bits gives the new ones."""
    dtype, bits, kind = segment.dtype, 8 * segment.old.itemsize, field_of(segment.dtype)
    where = np.flatnonzero(segment.old != segment.new).astype(np.uint32)
    old, new = segment.old[where], segment.new[where]
    moved = moves.find_moves(old, new, kind)
    for j, (before, after) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        difference = (reference.order(dtype, bits, after) - reference.order(dtype, bits, before)) % (1 << bits)
        up = difference < 1 << (bits - 1)
        assert reference.unorder(dtype, bits, reference.order(dtype, bits, after)) == after
        assert int(moved.exponents[j]) == reference.exponent(dtype, bits, before)
        assert (bool(moved.ups[j]), int(moved.sizes[j])) == (up, difference if up else (1 << bits) - difference)
    values = moves.apply_moves(old, moved.ups, moved.sizes, kind)
    assert values.tolist() == new.tolist()


@settings(max_examples=100)
@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_merge_equals_sorting(first: set[int], second: set[int]) -> None:
    runs = np.array(sorted(first) + sorted(second), np.uint32)
    merged, values = np.empty_like(runs), np.empty(len(runs), np.uint16)
    sound = moves.merge_runs(runs, (runs * 3).astype(np.uint16), len(first), merged, values)
    assert sound == (not first & second)
    if sound:
        assert merged.tolist() == sorted(first | second)
        assert values.tolist() == [3 * index for index in merged.tolist()]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64", "I16"])
def test_segments_in_one_call_are_coded_where_they_lie(dtype: str) -> None:
    """Rows that lie apart, in both directions, memory that is not aligned, and flat memory, with few and with all
    elements hot: the streams are those of contiguous copies, one call for each, and decode to the changes."""
    field, itemsize = field_of(dtype), ITEMSIZES[dtype]
    rng = np.random.default_rng(itemsize)
    data = rng.integers(0, 256, itemsize * 6000 + 1, np.uint8)
    apart = data[:-1].view(UINTS[itemsize])[:1500].reshape(15, 100)
    olds = [
        apart[:, 7:80],
        apart[::-1, 20:],
        apart[3:4, 1:65],
        data[1:].view(UINTS[itemsize])[2000:2777],
        data[:-1].view(UINTS[itemsize])[3000:3100],
    ]
    starts = coding.starts_of([start_of(field, threshold) for threshold in (field.exponents // 2, field.exponents, 0)])
    strides = np.array([old.shape[-1] if old.ndim == 2 else 64 for old in olds])
    kind = coding.Kind(field, itemsize, strides, np.array([0, 0, 0, 5, 63]), np.array([0, 1, 0, 2, 0]))
    indices = [np.flatnonzero(rng.random(old.size) < 0.2).astype(np.uint32) for old in olds]
    before = [old.reshape(-1)[where] for old, where in zip(olds, indices, strict=True)]
    after = [bits ^ bits.dtype.type(3) for bits in before]
    edges = np.concatenate([[0], np.cumsum([len(where) for where in indices])])
    moved = moves.find_moves(np.concatenate(before), np.concatenate(after), field)
    changes = coding.SegmentMoves(edges, np.concatenate(indices), moved)
    memory = coding.memory_of(olds)
    streams = coding.encode_segments(memory, kind, starts, changes)
    counts = starts._replace(states=np.zeros_like(starts.states))
    coding.count_bits(memory, kind, counts, changes)

    one_by_one = starts._replace(states=np.zeros_like(starts.states))
    for number, old in enumerate(olds):
        copy = coding.memory_of([old.flatten()])
        mine = slice(*edges[number : number + 2])
        alone = coding.Kind(field, itemsize, *(each[number : number + 1] for each in kind[2:]))
        change = coding.SegmentMoves(edges[number : number + 2] - edges[number], indices[number], moved.at(mine))
        assert coding.encode_segments(copy, alone, starts, change) == [streams[number]]
        coding.count_bits(copy, alone, one_by_one, change)
        every = np.array([1])
        exponents = coding.count_exponents(memory.of(np.array([number])), field, itemsize, every)
        assert exponents.tolist() == [counted_exponents(old.flatten(), field, 1)]
    assert (counts.states == one_by_one.states).all()

    coded = [stream for stream in streams if stream is not None]
    assert len(coded) == len(olds)
    decoded = coding.decode_segments(streams_of(coded), memory, kind, starts, edges)
    assert not isinstance(decoded, int)
    assert decoded[0].tolist() == changes.indices.tolist()
    assert decoded[1].tolist() == np.concatenate(after).tolist()
    coded[3] = b""  # reads as zeros: a gap without end
    assert coding.decode_segments(streams_of(coded), memory, kind, starts, edges) == 3


def start_of(field: Field, threshold: int) -> Start:
    size = tables(field.exponents).size
    states = np.full(size, (1 << 31) << rangecoder.SEEN, np.int64)
    return Start(threshold, np.full(field.exponents, 1 << 13, np.int64), states)


@pytest.mark.parametrize("odds", [-64, -63, -1, 0, 1, 2, 3, 63, 64])
def test_probabilities(odds: int) -> None:
    """The table agrees with the document's formula and with floating point."""
    assert int(model.PROBABILITIES[odds + model.ODDS]) == reference.probability(odds)
    assert reference.probability(odds) == pytest.approx(2**32 / (1 + 2 ** (-odds / 4)), rel=1e-9, abs=1)
