"""Measurements that need both versions of a step whole: the patch by each codec, and other precisions.

The sweep cannot do this, as it sees one segment of one tensor at a time.
"""

from collections.abc import Callable, Mapping

from pulse_rl.codecs.choose import CODECS
from pulse_rl.patch.encode import encode
from pulse_rl.study.measure.precision import SOURCES, merge_visible, visible
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.results import Visible
from pulse_rl.study.sources.base import StudySource
from pulse_rl.weights.bits import Bits

LISTED = 8  # tensors in a note


class Patches:
    """Sizes of patches and visible changes, by the places of a step's versions. Empty until `measure` is called."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[int, int], dict[str, int]] = {}  # bytes of the whole patch, by codec
        self.precisions: dict[tuple[int, int], dict[str, Visible]] = {}
        self._not_finite: set[str] = set()  # tensors left out of precisions in some step

    def measure(self, source: StudySource, timeline: Timeline, progress: Callable[[int, int], object]) -> None:
        """Code every step with every codec, and cast both its versions to other precisions.

        progress: called with the number of pairs of versions done, and of all pairs.
        """
        steps = frozenset(timeline.steps)
        for base, (old, new) in enumerate(source.pairs()):
            progress(base, len(timeline.numbers) - 1)
            step = base, base + 1
            if step in steps:
                before, after = timeline.numbers[base], timeline.numbers[base + 1]
                patches = encode(old, new, base=before, target=after, codecs=list(CODECS.values()))
                self.sizes[step] = {patch.header.codec: len(patch.data) for patch in patches}
                self.precisions[step] = self._visible(source, old, new)

    def _visible(self, source: StudySource, old: Mapping[str, Bits], new: Mapping[str, Bits]) -> dict[str, Visible]:
        found = []
        for name in (name for name, tensor in source.tensors.items() if tensor.dtype in SOURCES):
            try:
                found.append(visible(old[name], new[name]))
            except FloatingPointError:
                self._not_finite.add(name)
        return merge_visible(found) if found else {}

    def notes(self) -> list[str]:
        """What a reader of the report should know."""
        names = sorted(self._not_finite)
        if not names:
            return []
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return [
            "other precisions: a tensor with an infinity or NaN before or after a step has no scale and is left out of "
            f"that step: {', '.join(names[:LISTED])}{more}"
        ]
