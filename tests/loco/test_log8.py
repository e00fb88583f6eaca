"""Values as logarithms: the kernels against their twins, what is kept back, payloads, and that nothing comes late."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.dtypes import DTYPES, UINTS
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu import classes, loco
from pulse_rl.kernels.cpu import sends as streams
from pulse_rl.kernels.cpu.classes import Places
from pulse_rl.loco import log8, payload
from pulse_rl.loco.gate import GATES, Sends, cast
from pulse_rl.loco.payload import NO_BITS, Coding, SharedSegment
from tests.kernels.test_loco import SEEDS, SIZES, state
from tests.loco.test_payload import DOCUMENT, SCALE, decoded, encoded, golden, refusals, same, sealed, trained
from tests.naive import loco as reference
from tests.naive import sends as naive


def sends_of(shared: Any, live: Any, residual: Any, gate: str, scale: float, turn: int = 0) -> Sends:
    found = log8.find_sends(shared, live, residual, gate, scale, seed=5, start=3, turn=turn)
    assert found is not None
    return found


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(GATES), SCALE, st.integers(0, 2**32 - 1))
def test_kernels_equal_their_twins(n: int, seed: int, gate: str, scale: float, turn: int) -> None:
    shared, live, residual = state(n, seed)
    codes = np.empty((2, n), np.int8)
    first = seed % 2**32
    grid = loco.GRIDS[gate]
    assert loco.log8(shared, live, residual, grid, scale, first, turn, codes[0])
    assert reference.log8(shared, live, residual, gate, scale, first, turn, codes[1])
    assert codes[0].tolist() == codes[1].tolist()

    sent = codes[0] != 0
    cells = np.empty(n, UINTS[DTYPES[gate][1]])
    loco.cast(shared, loco.FORMATS[gate], cells)
    values = np.empty((2, sent.sum()), np.float32)
    loco.log8_values(codes[0][sent], shared[sent], grid, scale, values[0])
    reference.log8_values(codes[0][sent], cells[sent], gate, scale, values[1])
    assert values[0].tobytes() == values[1].tobytes()
    again = np.empty(len(values[0]), np.int8)
    loco.log8_codes(values[0], shared[sent], grid, scale, again)
    assert again.tolist() == codes[0][sent].tolist()


@pytest.mark.parametrize("gate", GATES)
def test_every_code_of_every_cell_comes_back(gate: str) -> None:
    width = DTYPES[gate][1]
    cells = np.arange(0, 1 << 8 * width, 37 if width == 2 else 1).astype(UINTS[width])
    shared = torch.from_numpy(cells).view(getattr(torch, gate)).float().numpy()
    for scale in (1.0, 7.0):
        for code in (1, 2, 3, 4, 5, 50, 127):
            codes = np.full(len(cells), code, np.int8)
            values = log8.to_values(codes, shared, gate, scale)
            finite = np.isfinite(values)
            assert (values[finite] > 0).all()
            assert (log8.to_codes(values[finite], shared[finite], gate, scale) == code).all()
            assert (log8.to_codes(-values[finite], shared[finite], gate, scale) == -code).all()


@pytest.mark.parametrize("gate", GATES)
def test_a_cell_is_as_wide_as_what_the_value_rounds_to(gate: str) -> None:
    """Each upper half of float32 with the lower halves that decide a rounding, but for what rounds to infinity."""
    upper = np.arange(0x7F80, dtype=np.uint32) << 16
    lower = [0, 1, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xE000, 0xEFFF, 0xF000, 0xF001, 0xFFFF]
    values = np.concatenate([upper | low for low in lower]).view(np.float32)
    values[::2] *= -1
    values = values[np.isfinite(torch.from_numpy(values).to(getattr(torch, gate)).float().numpy())]
    codes = cast(values, gate)
    widths = {code: np.float32(float(reference.width(code, gate))) for code in np.unique(codes).tolist()}
    found = log8.to_values(np.ones(len(values), np.int8), values, gate, 1.0)
    assert found.tolist() == [widths[code] for code in codes.tolist()]


@settings(max_examples=100)
@given(SIZES, SEEDS, st.sampled_from(GATES), SCALE)
def test_what_is_kept_is_what_is_not_sent(n: int, seed: int, gate: str, scale: float) -> None:
    """To one rounding of float32, and to a unit or a quarter of s, unless s exceeds the largest code."""
    shared, live, residual = state(n, seed)
    s = residual + (shared - live)
    found = sends_of(shared, live, residual, gate, scale)
    kept = residual.copy()
    loco.keep(shared, live, kept, found.indices, found.values)
    sent = np.zeros(n, np.float64)
    sent[found.indices] = found.values
    error = np.abs(s.astype(np.float64) - sent - kept)
    assert (error <= 2.0**-24 * np.abs(kept)).all()
    units = np.array([float(reference.width(code, gate)) for code in cast(shared, gate)]) / scale
    assert (np.abs(kept) <= np.maximum(units * (1 + 1e-6), 0.25 * np.abs(s))).all()


def test_nothing_comes_late_on_average() -> None:
    """Elements that move steadily, by far less than a unit a round: what was sent is what they moved, without a delay.

    The published gate is half a cell late; here the mean over the elements is right after any round, and each element
    is within a unit. Also for elements that all lie in the middle of their cells, as of a model in BF16.
    """
    n, moved = 1 << 14, np.float32(2.0**-12)  # a cell of 0.5 is 2^-8 wide: a sixteenth
    shared = np.full(n, 0.5, np.float32)
    residual, total = np.zeros(n, np.float32), np.zeros(n, np.float64)
    for done in range(1, 41):
        found = sends_of(shared, shared - moved, residual, "bfloat16", 1.0)
        loco.keep(shared, shared - moved, residual, found.indices, found.values)
        total[found.indices] += found.values
        assert abs(total.mean() / (done * float(moved)) - 1) < 0.35 / done**0.5 + 0.01
        assert np.abs(total - done * float(moved)).max() <= 2.0**-8
        assert 0.04 < len(found.indices) / n < 0.085


def test_the_ranks_cross_at_other_places() -> None:
    assert [log8.turn_of(rank) for rank in range(4)] == [0, 1 << 31, 1 << 30, 3 << 30]
    assert log8.turn_of_name("a") != log8.turn_of_name("b")
    n = 1 << 12
    shared, residual = np.full(n, 0.5, np.float32), np.zeros(n, np.float32)
    live = shared - np.float32(2.0**-10)  # a quarter of a unit
    crossed = [
        set(sends_of(shared, live, residual, "bfloat16", 1.0, log8.turn_of(r)).indices.tolist()) for r in range(4)
    ]
    assert len(set.union(*crossed)) == n == sum(map(len, crossed))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["live", "residual", "shared"])
def test_nan_and_infinity_are_found(broken: float, where: str) -> None:
    shared, live, residual = state(77, 1)
    {"live": live, "residual": residual, "shared": shared}[where][40] = broken
    assert log8.find_sends(shared, live, residual, "bfloat16", 7.0, seed=0, start=0, turn=0) is None


def test_parameters_of_zero_move() -> None:
    """Of zero-initialized tensors the cell has no width to speak of: the largest code reaches all the same."""
    shared, residual = np.zeros(100, np.float32), np.zeros(100, np.float32)
    live = np.full(100, 1e-5, np.float32)
    found = sends_of(shared, live, residual, "bfloat16", 7.0)
    assert len(found.indices) == 100
    assert np.allclose(found.values, -1e-5, rtol=0.21)


GOLDEN = """
    13622df3b00eacde666d54f83dd4d05908000000feffffff0300000001000000060000000200
    00001c07795c44022312
"""


def test_golden_bytes() -> None:
    """Read and written as they are for ever, and shown in docs/loco.md."""
    segments, places = golden()
    units = [[1.0, -2.0, 6.0], [-4.0]]
    widths = [[2.0**-9, 2.0**-7, 2.0**-6], [2.0**-6]]  # of the cells of −0.25, 1, 3 and 2
    sends = [
        one._replace(values=(np.array(count) * np.array(width) / 8).astype(np.float32))
        for one, count, width in zip(places, units, widths, strict=True)
    ]
    coding, pinned = Coding("bfloat16", "log8", 8.0), bytes.fromhex(GOLDEN)
    assert encoded(sends, segments, coding) == pinned
    assert same(decoded(pinned, segments, coding), sends)
    assert "".join(GOLDEN.split()) in "".join(DOCUMENT.read_text(encoding="utf-8").split())


def test_a_sent_element_takes_few_bits() -> None:
    """Of a million weights at a density of 5 %: under 7 bits, its position included; 4 times fewer than as float32."""
    coding = Coding("bfloat16", "log8", 7.0)
    segments, sends = trained([(1024, 1024)], 4e-7, 1, coding)
    sent = len(sends[0].indices)
    assert 0.02 < sent / 2**20 < 0.1
    assert 8 * len(encoded(sends, segments, coding)) / sent < 7


def test_readers_of_other_dtypes_refuse() -> None:
    coding = Coding("bfloat16", "log8", 7.0)
    segments, sends = trained([(40, 64)], 1e-4, 3, coding)
    nothing = [Sends(np.empty(0, np.uint32), np.empty(0, np.float32))]
    with_bits = [segment._replace(bits=cast(segment.shared, "bfloat16").copy()) for segment in segments]
    for each in (sends, nothing):
        data = memoryview(encoded(each, segments, coding))
        for other in ("float32", "bfloat16"):
            with pytest.raises(FormatError):
                payload.open_payload(data, segments, Coding("bfloat16", other))
            with pytest.raises(FormatError):
                payload.open_payload(
                    memoryview(payload.encode(each, with_bits, Coding("bfloat16", other))), segments, coding
                )


def test_a_damaged_payload_is_refused_or_in_range() -> None:
    """Cuts and flipped bits; and a sender that hashes nonsense: FormatError and no other, or values of the format."""
    coding = Coding("float8_e4m3fn", "log8", 7.0)
    segments, sends = trained([(40, 64), (300,)], 1e-2, 3, coding)
    data = encoded(sends, segments, coding)
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        for broken in (bytes(bad), data[:at]):
            with pytest.raises(FormatError):
                payload.open_payload(memoryview(broken), segments, coding)
    assert refusals(data, segments, coding, 600) > 50


@settings(max_examples=80)
@given(st.integers(1, 300), SEEDS, st.sampled_from(GATES), st.sampled_from([0.0, 0.02, 0.5, 1.0]), st.integers(1, 127))
def test_streams_are_those_of_their_twin(n: int, seed: int, gate: str, density: float, largest: int) -> None:
    """Written and read; and what is read of other bytes, cut and changed."""
    random = np.random.default_rng(seed)
    shared = (random.normal(0, 0.03, n) * random.choice([0, 1, 1e-3, 1e-8], n)).astype(np.float32)
    momentum = (random.normal(0, 1e-4, n) * random.choice([0, 1, 100], n)).astype(np.float32)
    found = classes.classes_of(shared, momentum, loco.GRIDS[gate], 7.0)
    expected = naive.classes_of(cast(shared, gate), momentum, gate, 7.0)
    assert found.each.tolist() == expected
    by_class = sorted(range(n), key=lambda i: (expected[i] % naive.SIGN, i))
    assert classes.order(found).tolist() == by_class

    indices = np.flatnonzero(random.random(n) < density).astype(np.uint32)
    sizes = np.where(
        random.random(len(indices)) < 0.1, largest, np.minimum(random.geometric(0.7, len(indices)), largest)
    )
    codes = (sizes * random.choice([-1, 1], len(indices))).astype(np.int8)
    sent = classes.arrange(found, indices, codes)
    against = [codes[i] * (-1 if found.each[indices[i]] >= naive.SIGN else 1) for i in range(len(indices))]
    places = [by_class.index(i) for i in indices.tolist()]
    assert list(zip(*(each.tolist() for each in sent), strict=True)) == sorted(zip(places, against, strict=True))
    data = streams.encode(found, sent)
    assert data == naive.encode(expected, naive.Sent(indices.tolist(), codes.tolist()))
    other = bytearray(data)
    if data:
        other[random.integers(len(data))] ^= 1 << random.integers(8)
    any_code = np.full(classes.CLASSES, 127)
    for each in (data, bytes(other), data[:-1], data + b"\0"):
        read = streams.decode(memoryview(each), found, len(indices), any_code)
        twin = naive.decode(each, expected, len(indices)) if len(indices) else None if each else naive.Sent([], [])
        assert (read is None) == (twin is None)
        if read is not None and twin is not None:
            again = dict(zip(twin.indices, twin.codes, strict=True))
            assert [by_class[place] for place in read.places] == list(again)
            moves = [-code if found.each[i] >= naive.SIGN else code for i, code in again.items()]
            assert read.moves.tolist() == moves
        if each == data:
            assert twin is not None
            assert dict(zip(*twin, strict=True)) == dict(zip(indices.tolist(), codes.tolist(), strict=True))


def test_what_is_rare_takes_few_bits_and_what_is_odd_no_more_than_the_limit() -> None:
    """A lone send of a large segment, and gaps, runs and sizes that mislead what was learned."""
    widths = np.ones(256, np.float32)
    lone = classes.counted(np.zeros(1 << 20, np.uint8), widths)
    assert len(streams.encode(lone, Places(np.array([1 << 19], np.uint32), np.array([5], np.int8)))) < 16
    random, n = np.random.default_rng(0), 1 << 12
    mixed = (random.integers(0, classes.CLASSES, n) | random.integers(0, 2, n) << 7).astype(np.uint8)
    for each in (mixed, np.zeros(n, np.uint8)):
        found = classes.counted(each, widths)
        for period in (1, 2, 3, 25, 400):
            indices = np.flatnonzero(np.arange(n) // period % 2 == 0).astype(np.uint32)
            codes = np.where(np.arange(len(indices)) % 2, 127, -1).astype(np.int8)
            sent = classes.arrange(found, indices, codes)
            data = streams.encode(found, sent)
            assert len(data) + 8 <= 7 * len(indices) + 3072
            read = streams.decode(memoryview(data), found, len(indices), np.full(classes.CLASSES, 127))
            assert read is not None
            assert [each.tolist() for each in read] == [each.tolist() for each in sent]


def test_signs_that_the_momentum_foretells_take_few_bits() -> None:
    """Of 16,384 sends: a bit less each where nearly all go with the momentum than where half do."""
    random, n = np.random.default_rng(0), 1 << 18
    of_elements = classes.counted((random.integers(0, 2, n) << 7).astype(np.uint8), np.ones(256, np.float32))
    indices = np.arange(0, n, 16, dtype=np.uint32)
    along = np.where(of_elements.each[indices], -1, 1).astype(np.int8)
    either = random.choice([-1, 1], len(indices)).astype(np.int8)
    sent = [classes.arrange(of_elements, indices, codes) for codes in (along, either)]
    sizes = [8 * len(streams.encode(of_elements, each)) / len(indices) for each in sent]
    assert sizes[1] - sizes[0] > 0.9


def test_a_code_that_no_sender_makes_is_refused() -> None:
    """One of more than 127, which a stream can hold; and of weights of 2^110 the largest, which would be 2^165."""
    coding, zeros = Coding("bfloat16", "log8", 1.0), np.zeros(64, np.float32)
    for shared, code, fine in ((0.03, 127, True), (0.03, 128, False), (2.0**110, 3, True), (2.0**110, 127, False)):
        theta = np.full(64, shared, np.float32)
        found = classes.classes_of(theta, zeros, loco.GRIDS["bfloat16"], 1.0)
        segments = [SharedSegment((64,), 0, theta, NO_BITS, found)]
        stream = naive.encode(
            naive.classes_of(cast(theta, "bfloat16"), zeros, "bfloat16", 1.0), naive.Sent([7], [-code])
        )
        counts = np.array([1, len(stream)], "<u4").tobytes()
        data = sealed(payload.LENGTHS.pack(len(stream), payload.LOG8) + counts + stream)
        with nullcontext() if fine else pytest.raises(FormatError, match="expected 1 finite sends of 64 elements"):
            (one,) = decoded(data, segments, coding)
            assert one.indices.tolist() == [7]
            assert (
                one.values.tolist() == log8.to_values(np.array([-code], np.int8), theta[:1], "bfloat16", 1.0).tolist()
            )
