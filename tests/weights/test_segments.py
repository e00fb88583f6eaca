"""Small segments are handed to threads together."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pulse_rl.weights import segments


@pytest.mark.parametrize("threads", [1, 3])
def test_small_segments_are_taken_together_and_their_results_come_in_order(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT", 4)
    monkeypatch.setattr("pulse_rl.parallel.threads", lambda: threads)
    sizes, handed = [5, 1, 1, 1, 1, 9, 2], []

    def note(function: Any, items: Iterable[Any]) -> Iterator[Any]:
        for several in items:
            handed.append([item for item, _ in several])
            yield function(several)

    assert list(segments.map_segments(str, range(7), sizes)) == list("0123456")
    monkeypatch.setattr(segments, "ordered_map", note)
    assert list(segments.map_segments(str, range(7), sizes)) == list("0123456")
    assert handed == [[0], [1, 2, 3, 4], [5], [6]]
    with pytest.raises(ValueError, match="shorter"):
        list(segments.map_segments(str, range(7), sizes[1:]))
