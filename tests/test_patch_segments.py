"""The segments of a patch in order: iteration, slices and what changes, against access one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl.patch.segments import Entry, Segments, groups_of
from pulse_rl.weights.boxes import Box, whole

TABLE = [
    Entry("empty", "BF16", (0, 3), (Box((0, 0), (0, 3)),)),
    Entry("layers.0.w", "BF16", (1024, 512), (whole((1024, 512)),)),
    Entry("layers.1.w", "BF16", (1024, 512), (whole((1024, 512)),)),
    Entry("layers.10.w", "BF16", (1024, 512), (Box((0, 0), (256, 512)), Box((700, 0), (20, 512)))),
    Entry("norm", "F32", (7,), (whole((7,)),)),
    Entry("scalar", "I64", (), (whole(()),)),
]


@pytest.fixture(scope="module", params=[1, 2])
def segments(request: pytest.FixtureRequest) -> Segments:
    table = TABLE if request.param == 2 else [entry._replace(boxes=(whole(entry.shape),)) for entry in TABLE]
    groups = groups_of(table, format_version=request.param)
    counts = np.random.default_rng(0).integers(0, 3, len(Segments(table, groups)), np.uint32)
    return Segments(table, groups, counts)


@given(st.data())
def test_iteration_gives_what_access_gives(segments: Segments, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(segments)))
    part = segments[start : data.draw(st.integers(start, len(segments)))]
    expected = [part[number] for number in range(len(part))]
    assert list(part) == expected
    assert list(part.changing()) == [(tensor, place) for tensor, place, spec in expected if spec.changed]


def test_segments_are_consecutive(segments: Segments) -> None:
    with pytest.raises(ValueError, match="consecutive"):
        segments[::2]
