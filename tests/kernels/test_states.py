"""The kernels that compare and digest many segments at once, against their naive twins, wherever the segments lie."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.kernels import cpu
from pulse_rl.weights.casts import cast_array
from tests.kernels.test_kernels import DENSITIES, SEEDS, WIDTHS, random_bits, with_changes
from tests.naive import states as reference
from tests.naive.states import Segment

RUNS = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200])
SHAPES = st.lists(st.tuples(st.integers(1, 12), RUNS), min_size=1, max_size=5)


def laid_out(shapes: list[tuple[int, int]], elements: Any, gap: int) -> tuple[list[Any], Any, Any]:
    """Rows of segments in one memory, with a gap after each row. Returns them, their addresses and distances."""
    found, addresses, apart, at = [], [], [], 0
    for rows, run in shapes:
        distance = run + gap
        memory = elements[at : at + rows * distance]
        found.append(memory.reshape(rows, distance)[:, :run])
        addresses.append(memory.ctypes.data)
        apart.append(distance)
        at += rows * distance
    return found, np.array(addresses, np.uint64), np.array(apart, np.int64)


@settings(deadline=None, max_examples=150)
@given(WIDTHS, SHAPES, DENSITIES, SEEDS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_segments_are_compared_and_digested_as_by_their_twins(
    width: int, shapes: list[tuple[int, int]], density: float, seed: int, gap: int, other: int, more: int, cast: bool
) -> None:
    cast &= width == 2
    room = sum(rows * (run + 3) for rows, run in shapes)
    memory = random_bits(width, room, seed)
    old, addresses, apart = laid_out(shapes, memory, gap)
    wanted = [with_changes(rows.ravel(), density, seed + 1).reshape(rows.shape) for rows in old]
    target = random_bits(4 if cast else width, room, seed + 2)
    new, places, distance = laid_out(shapes, target, other)
    for rows, bits in zip(new, wanted, strict=True):
        rows[...] = bits.astype(np.uint32) << 16 if cast else bits  # bfloat16 with zeros below is float32
        bits[...] = cast_array(rows.ravel().view(np.float32), "bfloat16").reshape(rows.shape) if cast else bits
    runs = np.array([run for _, run in shapes], np.int64)
    rng = np.random.default_rng(seed)
    starts, roots = rng.integers(0, 1 << 40, len(shapes)), rng.integers(0, 1 << 63, len(shapes)).astype(np.uint64)
    how = (starts, runs + more, runs, roots, np.ones(len(shapes), np.int64))
    before, after = cpu.Spots(addresses, apart, *how), cpu.Spots(places, distance, *how)
    sizes = np.array([rows * run for rows, run in shapes], np.int64)
    found = cpu.find_in_spots(before, after, sizes, width, cast=cast)
    segments = [
        Segment(rows, int(root), int(start), int(run) + more)
        for rows, root, start, run in zip(old, roots, starts, runs, strict=True)
    ]
    indices, values, replaced, delta = reference.find_in_spots(segments, wanted)
    at = found.edges.tolist()
    assert [found.indices[a:b].tolist() for a, b in zip(at, at[1:], strict=False)] == indices
    assert (found.values.tolist(), found.replaced.tolist()) == (values, replaced)
    assert found.delta % 2**64 == delta
    assert cpu.digest_spots(before, sizes, width) % 2**64 == reference.digest_spots(segments)
