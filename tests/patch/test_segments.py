"""The segments of a patch in order: columns, slices and what changes, against a list of them."""

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import memory_of
from pulse_rl.patch.scan import rows_of
from pulse_rl.patch.segments import Entry, Segments, groups_of, names_of, numbers_of
from pulse_rl.patch.targets import locate, spots_of, targets
from pulse_rl.weights.bits import Bits, HostBits, as_bits
from pulse_rl.weights.boxes import Box, Positions, whole
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST
from pulse_rl.weights.pieces import Piece, Pieces, Shard, join, pieces_of, place_view
from tests.patch.tools import listed

TABLE = [
    Entry("empty", "BF16", (0, 3), (Box((0, 0), (0, 3)),)),
    Entry("layers.0.w", "BF16", (1024, 512), (whole((1024, 512)),)),
    Entry("layers.1.w", "BF16", (1024, 512), (whole((1024, 512)),)),
    Entry("layers.10.w", "BF16", (1024, 512), (Box((0, 0), (256, 512)), Box((700, 0), (20, 512)))),
    Entry("norm", "F32", (7,), (whole((7,)),)),
    Entry("scalar", "I64", (), (whole(()),)),
]


@pytest.fixture(scope="module")
def segments() -> Segments:
    counts = np.random.default_rng(0).integers(0, 3, len(Segments(TABLE)), np.uint32)
    return Segments(TABLE, counts)


@given(st.data())
def test_columns_are_those_of_a_list(segments: Segments, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(segments)))
    part = segments[start : data.draw(st.integers(start, len(segments)))]
    expected = listed(segments)[part.numbers.start : part.numbers.stop]
    assert listed(part) == expected
    rows = [(specs.dtype, *row) for specs in part.specs() for row in zip(*specs[1:], strict=True)]
    assert rows == [spec for _, _, spec in expected]
    assert segments.sizes()[part.numbers].tolist() == [spec.size for _, _, spec in expected]
    assert segments.tensors()[part.numbers].tolist() == [tensor for tensor, _, _ in expected]
    assert list(part.changing()) == [(tensor, place) for tensor, place, spec in expected if spec.changed]


def test_segments_are_consecutive(segments: Segments) -> None:
    with pytest.raises(ValueError, match="consecutive"):
        segments[::2]


@pytest.mark.parametrize("name", ["layers.{}.w", "block_{}/w", "t{}", "mlp.experts.fc1.weight{}", "{}"])
def test_tensors_whose_names_differ_in_a_number_are_one_group(name: str) -> None:
    """Wherever the number stands: one tensor by itself costs as much as hundreds in a group."""
    table = [Entry(name.format(number), "BF16", (8, 8), (whole((8, 8)),)) for number in (0, 7, 10, 123)]
    (group,) = groups_of(table)
    assert [table[tensor].name for tensor in group.tensors] == [entry.name for entry in table]


@given(st.lists(st.sampled_from(["0", "00", "1", "7", "12", "*", ".", "x", "_", "1234567890123456789"])).map("".join))
def test_a_pattern_and_its_numbers_give_the_name(name: str) -> None:
    pattern, numbers = numbers_of(name)
    assert list(names_of(pattern, [numbers])) == [name]
    assert "*" in name or not any(digit in pattern for digit in "0123456789")


def whole_segments(tensors: dict[str, Bits]) -> Segments:
    table = [Entry(name, bits.dtype, tuple(bits.shape), (whole(bits.shape),)) for name, bits in tensors.items()]
    return Segments(table, np.ones(len(Segments(table)), np.uint32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.int64])
def test_spots_are_where_views_of_the_segments_lie(dtype: type) -> None:
    """Of whole tensors and of shards, in tiles of columns, of rows and of a few dimensions: `locate` and `spots_of`
    give the address that the view itself has."""
    memory: UIntArray = np.zeros((2048, 512), dtype)
    tensors: dict[str, Bits] = {
        "a": as_bits(memory),
        "b": join(
            [
                Shard(memory[:1024], shape=(2048, 512), offset=(0, 0)),
                Shard(memory[1024:], shape=(2048, 512), offset=(1024, 0)),
            ]
        ),
        "c": as_bits(memory.reshape(64, 32, 512)),
        "d": as_bits(memory[0, :100]),
        "e": as_bits(memory[7, 8]),
    }
    segments = whole_segments(tensors)
    live = {name: [bits] for name, bits in tensors.items()}
    spots, windows, _ = spots_of(segments, range(len(tensors)), live, ())
    assert (windows.runs == cpu.WHOLE).all()
    lies = locate(live, segments.table, HOST)
    lying, usable = lies.old.memory, lies.old.usable
    for number, segment in enumerate(listed(segments)):
        entry = segments.table[segment.tensor]
        view = place_view(tensors[entry.name], segment.place)
        expected = memory_of([rows_of(tensors[entry.name], segment.place)])
        at, rows_at = segment.place.positions(entry.shape), tuple(int(column[number]) for column in lying[:4])
        if len(set(np.diff(at.starts).tolist())) > 1:  # rows of several distances
            assert spots.addresses[number] == 0
            assert not usable[number]
            continue
        assert isinstance(view, HostBits)
        assert spots.addresses[number] == expected.addresses[0] == view.address
        assert spots.seeds[number] == segment.tensor
        assert spots.starts[number] == at.starts[0]
        assert spots.runs[number] == at.run
        if len(at.starts) > 1:
            assert spots.strides[number] == at.starts[1] - at.starts[0]
        assert usable[number]
        _, rows, run, _ = rows_at
        if rows > 1:  # else the distance of rows says nothing
            assert rows_at == tuple(int(column[0]) for column in expected[:4])
        assert rows * run == segment.spec.size


def test_memory_that_is_not_plain_has_no_spots() -> None:
    """Strided, reversed, shorter than its dtype, tied to other memory, left out."""
    flat = np.zeros(512 * 512, np.int16)
    square, wide = flat.reshape(512, 512), np.zeros((512, 1024), np.int16)
    tensors: dict[str, list[Bits]] = {
        "strided": [as_bits(wide[:, ::2])],
        "reversed": [as_bits(square[::-1])],
        "other": [as_bits(square.view(np.uint16))],
        "tied": [as_bits(square), as_bits(wide[:, :512].copy())],
        "left out": [as_bits(square)],
        "nowhere": [],
    }
    table = [Entry(name, "I16", (512, 512), (whole((512, 512)),)) for name in tensors]
    segments = Segments(table)
    spots, windows, _ = spots_of(segments, [0] * len(table), tensors, {"left out"})
    assert not spots.addresses.any()
    where = [segments.table[tensor].name == "nowhere" for tensor, _, _ in listed(segments)]
    assert [*(windows.rows == 0)] == where


PARTS = st.tuples(st.integers(0, 500), st.integers(1, 512), st.integers(0, 500), st.integers(1, 512))


@settings(deadline=None, max_examples=30)
@given(PARTS, st.integers(0, 99))
def test_parts_of_segments_have_spots_where_they_lie(part: tuple[int, int, int, int], seed: int) -> None:
    """A box that holds parts of segments: what is left of their changes, and where, as `targets` gives it."""
    shape, (top, height, left, width) = (512, 512), part
    box = Box((top, left), (min(height, 512 - top), min(width, 512 - left)))
    live: dict[str, list[Bits]] = {
        "w": [Pieces("I16", shape, [Piece(box, as_bits(np.zeros(box.sizes, np.int16)), -1)])]
    }
    table = [Entry("w", "I16", shape, (whole(shape),))]
    segments = Segments(table)
    spots, windows, _ = spots_of(segments, [7], live, ())
    (piece,) = pieces_of(live["w"][0])
    assert isinstance(piece.bits, HostBits)
    random = np.random.default_rng(seed)
    for number, (_, place, spec) in enumerate(listed(segments)):
        indices = np.flatnonzero(random.random(spec.size) < 0.01).astype(np.uint32)
        values = random.integers(0, 1 << 16, len(indices), np.uint16)
        counts, own, new = cpu.windowed(windows.of(np.array([number])), np.array([len(indices)]), indices, values)
        found = targets(live["w"][0], place)
        assert len(found) == (windows.rows[number] > 0)
        assert (spots.addresses[number] > 0) == bool(found)
        for target in found:
            expected = target.own(place, Changes(indices, values))
            assert own.tolist() == expected.indices.tolist()
            assert new.tolist() == expected.values.tolist()
            assert spots.times[number] == -1
            run = spots.runs[number]
            flat = place_positions(target.positions(shape), own)
            assert (spots.starts[number] + own // run * spots.strides[number] + own % run).tolist() == flat
            at = spots.addresses[number] + 2 * (own // run * spots.apart[number] + own % run).astype(np.uint64)
            rows, columns = np.divmod(np.array(flat), 512)
            local = (rows - box.offset[0]) * box.sizes[1] + columns - box.offset[1]
            assert at.tolist() == [piece.bits.address + 2 * int(one) for one in local]
        assert counts.tolist() == [len(own)]


def place_positions(at: Positions, indices: UIntArray) -> list[int]:
    """The flat positions of elements of a place."""
    found: list[int] = (at.starts[indices // at.run] + indices % at.run).tolist()
    return found


def test_addresses_keep_their_memory() -> None:
    old = np.zeros(64, np.uint16)
    held = weakref.ref(old)
    memory = memory_of([old])
    del old
    assert held() is not None
    del memory
    assert held() is None
