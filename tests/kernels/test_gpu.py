"""The kernels of a CUDA device against those of the CPU and their naive twins: on the device, or emulated."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, field_of
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import coding
from pulse_rl.kernels.gpu import casts, changes, device, digests, moves, regions, spots
from pulse_rl.kernels.gpu.regions import TILE as UNITS_OF_A_TILE
from pulse_rl.weights.casts import cast_array
from tests import naive as reference
from tests.kernels import gpu_device
from tests.kernels.gpu_device import Held, a_device, memory_of, regions_of  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.usefixtures("a_device"),
    *([pytest.mark.gpu] if gpu_device.CUDA else []),
]

WIDTHS = [1, 2, 4, 8]
TILE = UNITS_OF_A_TILE * 8  # elements of 2 bytes


def random_bits(width: int, shape: Any, seed: int) -> NDArray[Any]:
    data = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)), width), np.uint8)
    return data.view(UINTS[width]).reshape(shape)


def with_changes(old: NDArray[Any], share: float, seed: int) -> NDArray[Any]:
    """A copy with one bit changed, also the highest and the lowest, in a share of the elements."""
    rng = np.random.default_rng(seed)
    flipped = (np.uint64(1) << rng.integers(0, 8 * old.itemsize, old.shape).astype(np.uint64)).astype(old.dtype)
    return np.where(rng.random(old.shape) < share, old ^ flipped, old)


@pytest.mark.parametrize(
    ("width", "n", "share"),
    [
        (1, 0, 0.5),
        (1, 1, 1.0),
        (1, 531, 0.1),
        (2, 7, 0.3),
        (2, TILE, 0.05),
        (2, TILE + 1, 0.2),
        (4, 150, 0.3),
        (8, 97, 0.2),
    ],
)
def test_one_array_gives_what_the_naive_twins_give(width: int, n: int, share: float) -> None:
    old = random_bits(width, n, n)
    new = with_changes(old, share, n + 1)
    where, naive = np.zeros(n + 2, np.uint32), np.zeros(n + 2, old.dtype)
    count = reference.find_changes(old, new, where, naive)
    where = where[:count]
    written = device.upload(old)
    live, target = (regions.regions_of([each]) for each in (written, device.upload(new)))
    indices, values = device.empty(count, np.uint32), device.empty(count, old.dtype)
    edges = changes.find(live, target, indices, values)
    assert device.download(edges).tolist() == [0, count]
    assert device.download(indices).tolist() == where.tolist()
    assert device.download(values).tolist() == naive[:count].tolist()
    replaced = device.empty(count, old.dtype)
    changes.gather_all(live, edges, indices, replaced)
    assert device.download(replaced).tolist() == old[where].tolist()
    seed, start = 0xFEDCBA9876543210, 2**40 + 3
    flat = digests.Flat(np.array([seed], np.uint64), np.array([start]), np.zeros(1, np.int64))
    assert device.download(digests.digest(live, flat))[0] == reference.digest_range(seed, start, old)
    delta = device.download(digests.delta(live, flat, edges, indices, replaced, values))[0]
    assert delta == reference.digest_delta(seed, start, where, old[where], new[where])
    changes.scatter_all(live, edges, indices, values)
    assert device.download(written).tolist() == new.tolist()


# Many tensors in one launch


def several(width: int, seed: int) -> list[NDArray[Any]]:
    """Empty, of one element, rows shorter and longer than 16 bytes, and of more than a tile: in one row, in many."""
    tile = 2 * TILE // width
    shapes = [(0,), (1,), (5, 3), (4, 33), (tile + 5,), (0,), (tile // 64 + 3, 64)]
    return [random_bits(width, shape, seed + i) for i, shape in enumerate(shapes)]


def held(bits: list[NDArray[Any]], *, shift: int) -> list[Held]:
    """In memory that begins `shift` elements after an address that 16 divides, and whose rows lie apart."""
    between = [0 if each.ndim == 1 else 128 if each.shape[1] == 64 else 3 * i for i, each in enumerate(bits)]
    return [Held(each, before=shift, between=apart) for each, apart in zip(bits, between, strict=True)]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_changes_of_many_tensors(width: int, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with the bits that they replace, read, written and read back, and digested: against each tensor's own."""
    old = several(width, 1)
    new = [with_changes(each, 0.15, i) for i, each in enumerate(old)]
    live, target = held(old, shift=shift), held(new, shift=0)
    expected = [np.flatnonzero(a.reshape(-1) != b.reshape(-1)) for a, b in zip(old, new, strict=True)]
    edges = np.concatenate([[0], np.cumsum([len(where) for where in expected])])
    indices, values, replaced = (device.empty(edges[-1], kind) for kind in (np.uint32, UINTS[width], UINTS[width]))
    found = changes.find(regions_of(live), regions_of(target), indices, values, replaced)
    assert device.download(found).tolist() == edges.tolist()
    assert device.download(indices).tolist() == np.concatenate(expected).tolist()
    after, before = ([each.reshape(-1)[where] for each, where in zip(s, expected, strict=True)] for s in (new, old))
    assert device.download(values).tolist() == np.concatenate(after).tolist()
    assert device.download(replaced).tolist() == np.concatenate(before).tolist()

    there = regions_of(live)
    gathered = device.empty(edges[-1], UINTS[width])
    changes.gather_all(there, found, indices, gathered)
    assert device.download(gathered).tolist() == np.concatenate(before).tolist()
    last = int(np.flatnonzero(np.diff(edges))[-1])
    assert device.download(changes.find_wrong(there, found, indices, values))[0] == last + 1
    flat = flat_of(live)
    base, delta = digests.digest(there, flat), digests.delta(there, flat, found, indices, replaced, values)
    assert device.download(base)[0] == digest_of(old, flat)
    for blocks in (1, 3):  # a block sums parts of tensors, and several
        monkeypatch.setattr(digests, "BLOCKS", blocks)
        assert device.download(digests.digest(there, flat))[0] == device.download(base)[0]
    changes.scatter_all(there, found, indices, values)
    assert [one.read().tolist() for one in live] == [each.reshape(-1).tolist() for each in new]
    assert device.download(changes.find_wrong(there, found, indices, values))[0] == 0
    assert digest_of(new, flat) == (int(device.download(base)[0]) + int(device.download(delta)[0])) % 2**64


def flat_of(live: list[Held]) -> digests.Flat:
    """Each is a box of a wider tensor, and begins somewhere in it."""
    count = np.arange(len(live))
    seeds = count.astype(np.uint64) * np.uint64(2**61 + 7)
    return digests.Flat(seeds, 100 * count, np.array([one.run for one in live]) + 11)


def digest_of(tensors: list[NDArray[Any]], flat: digests.Flat) -> int:
    total = 0
    for bits, seed, start, stride in zip(tensors, *flat, strict=True):
        rows = bits.reshape(1, -1) if bits.ndim == 1 else bits
        starts = start + stride * np.arange(len(rows))
        total += reference.digest_rows(int(seed), starts, rows.shape[1], rows.reshape(-1))
    return total % 2**64


def test_more_changes_than_there_is_place_for() -> None:
    """The first are written, and nothing after the place for them; the count is that of all."""
    old = random_bits(2, 300, 5)
    new = with_changes(old, 0.5, 6)
    where = np.flatnonzero(old != new)
    indices, values = Held(np.zeros(10, np.uint32), before=4), Held(np.zeros(10, np.uint16), before=8)
    one, other = (regions.regions_of([device.upload(each)]) for each in (old, new))
    edges = changes.find(one, other, indices.memory[4:], values.memory[8:])
    assert device.download(edges)[-1] == len(where) > 10
    assert indices.read().tolist() == where[:10].tolist()
    assert values.read().tolist() == new[where[:10]].tolist()


def test_states_that_do_not_match_are_refused() -> None:
    one = device.zeros(4, np.uint16)
    other, wider = device.zeros(5, np.uint16), device.zeros(4, np.uint32)
    for new in (other, wider):
        with pytest.raises(ValueError, match="bytes an element and of the same sizes"):
            changes.find(regions.regions_of([one]), regions.regions_of([new]), device.zeros(9, np.uint32), one)


def test_more_elements_than_an_index_can_count_are_refused() -> None:
    memory = memory_of([Held(np.zeros(2, np.uint16))])._replace(runs=np.array([1 << 32]))
    with pytest.raises(ValueError, match=r"fewer than 2\^32 elements, found one of 4294967296"):
        regions.Regions(memory, 2)


@pytest.mark.parametrize("shift", [0, 1])
def test_changes_of_weights_that_are_cast(shift: int) -> None:
    """A trainer's float32 against the bfloat16 published last: rows and tiles, with NaN among them."""
    rng = np.random.default_rng(shift)
    shapes = [(5, 3), (3, 17), (TILE + 9,), (1,), (TILE // 64 + 3, 64)]
    news = [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]
    news[0][0, 1] = np.nan
    cast = [cast_array(each.reshape(-1), "bfloat16").reshape(each.shape) for each in news]
    olds = [with_changes(each, 0.2, i) for i, each in enumerate(cast)]
    where = [np.flatnonzero(a.reshape(-1) != b.reshape(-1)) for a, b in zip(olds, cast, strict=True)]
    old = regions_of(held(olds, shift=shift))
    new = regions_of(held([each.view(np.uint32) for each in news], shift=2 * shift))
    count = sum(map(len, where))
    indices, values, replaced = (device.empty(count, kind) for kind in (np.uint32, np.uint16, np.uint16))
    edges = device.download(changes.find(old, new, indices, values, replaced, cast=True))
    assert edges.tolist() == np.concatenate([[0], np.cumsum([len(i) for i in where])]).tolist()
    assert device.download(indices).tolist() == np.concatenate(where).tolist()
    for found, states in ((values, cast), (replaced, olds)):
        expected = [each.reshape(-1)[i] for each, i in zip(states, where, strict=True)]
        assert device.download(found).tolist() == np.concatenate(expected).tolist()


# Casts, exponents and hot elements


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_casts_equal_those_of_the_cpu(shift: int) -> None:
    """Any bits, ties, subnormals, overflows to infinity, and NaN of both signs."""
    special = [
        0,
        1,
        0x7FFF,
        0x8000,
        0x8001,
        0x17FFF,
        0x18000,
        0x7F7FFFFF,
        0x7F7F8000,
        0x7F800000,
        0x7F800001,
        0x7FFFFFFF,
    ]
    bits = np.concatenate([special, np.array(special) | 1 << 31, random_bits(4, 130 - shift, 3)]).astype(np.uint32)
    values = Held(bits, before=shift)
    found = Held(np.zeros(len(bits), np.uint16), before=4)
    casts.cast(values.memory[shift:], found.memory[4:])
    assert found.read().tolist() == cast_array(bits.view(np.float32), "bfloat16").tolist()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64", "I16"])
def test_exponents_and_hot_elements_equal_those_of_the_cpu(dtype: str) -> None:
    field = field_of(dtype)
    width = {"F8_E4M3": 1, "F32": 4, "F64": 8}.get(dtype, 2)
    old = [random_bits(width, 200, 1), random_bits(width, (3, 70), 2), random_bits(width, 1, 3)]
    live = regions_of([Held(each, between=5 if each.ndim == 2 else 0) for each in old])
    for every in (1, 2):
        expected = coding.count_exponents(coding.memory_of(old), field, width, np.full(3, every))
        assert moves.count_exponents(live, field, np.full(3, every)).tolist() == expected.tolist()
    thresholds = np.array([field.exponents // 2, field.exponents, 0])
    hot = moves.find_hot(live, field, thresholds)
    exponents = [(each.reshape(-1).astype(np.uint64) & np.uint64(field.mask)) >> np.uint64(field.shift) for each in old]
    where = [np.flatnonzero(e < np.uint64(t)) for e, t in zip(exponents, thresholds, strict=True)]
    assert device.download(hot.edges).tolist() == np.concatenate([[0], np.cumsum([len(w) for w in where])]).tolist()
    assert device.download(hot.indices).tolist() == np.concatenate(where).tolist()
    of_hot = [e[w] for e, w in zip(exponents, where, strict=True)]
    assert device.download(hot.exponents).tolist() == np.concatenate(of_hot).tolist()


# Segments described in host memory, as patches use them


def spots_of(live: list[Held], flat: digests.Flat) -> cpu.Spots:
    addresses, _, runs, apart = np.array([one.lies for one in live], np.int64).T.copy()
    times = np.array([1, -1, 3, 0, 1, 2][: len(live)])
    itemsize = live[0].memory.itemsize
    places = addresses.view(np.uint64), apart // itemsize, flat.starts, flat.strides, runs
    return cpu.Spots(*places, flat.seeds, times)


@pytest.mark.parametrize("width", [1, 8])
def test_changes_of_segments_are_found_checked_and_written(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the naive twins; and what does not read back is noticed."""
    old = [each for each in several(width, 3) if each.size < 200]
    new = [with_changes(each, 0.3, i) for i, each in enumerate(old)]
    live, there = held(old, shift=1), held(new, shift=0)
    flat = flat_of(live)
    at, sizes = spots_of(live, flat), np.array([each.size for each in old])
    found = spots.find_in_spots(at, spots_of(there, flat), sizes, width, 2)  # more than that change
    expected = [np.flatnonzero(a.reshape(-1) != b.reshape(-1)) for a, b in zip(old, new, strict=True)]
    assert found.edges.tolist() == np.concatenate([[0], np.cumsum([len(where) for where in expected])]).tolist()
    assert found.indices.tolist() == np.concatenate(expected).tolist()
    after, before = ([each.reshape(-1)[where] for each, where in zip(s, expected, strict=True)] for s in (new, old))
    assert found.values.tolist() == np.concatenate(after).tolist()
    assert found.replaced.tolist() == np.concatenate(before).tolist()
    assert (digest_of(old, flat) + found.delta) % 2**64 == digest_of(new, flat)
    assert spots.digest_spots(at, sizes, width) == digest_of(old, flat)

    changed = np.diff(found.edges), found.indices, found.values
    gained = 0
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        of_one = digests.Flat._make(column[i : i + 1] for column in flat)
        gained += int(at.times[i]) * (digest_of([b], of_one) - digest_of([a], of_one))
    made = spots.Overwrites(at, *changed)
    assert made.delta() == gained % 2**64
    with monkeypatch.context() as patched:
        patched.setattr(spots, "scatter_all", lambda *_: None)
        assert made.write() == int(np.flatnonzero(changed[0])[-1])
    assert made.write() is None
    assert [one.read().tolist() for one in live] == [each.reshape(-1).tolist() for each in new]
