"""The verb: study a source."""

import math
import time
from collections.abc import Callable, Mapping

from pulse_rl import __version__
from pulse_rl.codecs.choose import CODECS
from pulse_rl.patch.encode import encode
from pulse_rl.study.explain.findings import Forecast, exponents_of, recurrence_of, steps_of
from pulse_rl.study.explain.theory import LONGEST
from pulse_rl.study.measure.precision import SOURCES, together, visible
from pulse_rl.study.measure.sweep import survey
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.measure.totals import Collected
from pulse_rl.study.results import Report, Settings, Version, Visible
from pulse_rl.study.sources.base import Source
from pulse_rl.weights.bits import Bits

TOO_FAR = f"versions lie more than {LONGEST:,} steps apart, if their numbers are steps: nothing is predicted"
NAMED = 8  # tensors in a note

Progress = Callable[[int, int, str], object]  # (done, in all, of what)


def study(
    source: Source,
    settings: Settings | None = None,
    *,
    codecs: bool = True,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Measure how sparse the steps of a source are, exactly, on its bits.

    settings: of the optimizer, for predictions, where they are known. codecs: code every step with every codec and cast
    it to lower precisions, too. Reads every version once, and once more for the codecs. Holds up to 34 versions of a
    segment a thread and no whole one, but for a codec's patch and, in files, what the source holds; with codecs, the
    two checkpoints of a step are mapped. Raises ValueError for settings that are none, and what reading the
    source raises.
    """
    if settings is not None:
        check(settings)
    begun = time.perf_counter()
    timeline = Timeline([version.number for version in source.versions])
    found = Collected(timeline)
    for name, seen in survey(source, timeline, lambda done, total: progress(done, total, "study")):
        found.add(name, source.tensors[name], seen)
    seconds = time.perf_counter() - begun
    near = timeline.stride <= LONGEST
    forecast = Forecast(timeline, settings) if settings and near else None
    whole = _Whole()
    if codecs:
        whole.read(source, timeline, progress)
    distances, exponents = exponents_of(found, forecast)
    return Report(
        pulse_rl=__version__,
        source=source.kind,
        location=source.location,
        versions=source.versions,
        stride=timeline.stride,
        elements=found.elements,
        full_nbytes=sum(tensor.size * tensor.itemsize for tensor in source.tensors.values()),
        settings=settings,
        spans=found.spans(),
        steps=tuple(steps_of(found, forecast, whole.sizes, whole.precisions)),
        tensors=tuple(found.tensors),
        kinds=tuple(sorted(found.groups(found.kinds), key=lambda group: -group.elements)),
        depths=tuple(sorted(found.groups(found.depths), key=lambda group: _depth(group.name))),
        distances=distances,
        exponents=tuple(exponents),
        recurrence=recurrence_of(found),
        notes=(*source.notes, *_left_out(timeline, source.versions), *([] if near else [TOO_FAR]), *whole.notes()),
        seconds=seconds,
    )


def check(settings: Settings) -> None:
    """Raise ValueError for a learning rate or betas with which Adam cannot run."""
    if not 0 < settings.lr < math.inf:
        raise ValueError(f"lr: expected more than 0, found {settings.lr}")
    if not (0 <= settings.betas[0] < 1 and 0 < settings.betas[1] < 1):
        raise ValueError(f"betas: expected two numbers from 0 to below 1, the second above 0, found {settings.betas}")


def _depth(name: str) -> float:
    return int(name) if name.isdecimal() else math.inf


def _left_out(timeline: Timeline, versions: tuple[Version, ...]) -> list[str]:
    apart = len(versions) - 1 - len(timeline.steps)
    if not apart:
        return []
    return [
        f"{apart} of {len(versions) - 1} neighbouring versions are not {timeline.stride} apart, the commonest "
        "distance: what lies between them counts for no single step"
    ]


class _Whole:
    """What takes both versions of a step whole, by the places of these."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[int, int], dict[str, int]] = {}  # bytes of the patch by codec
        self.precisions: dict[tuple[int, int], dict[str, Visible]] = {}
        self._infinite: set[str] = set()  # tensors that are left out of precisions in some steps

    def read(self, source: Source, timeline: Timeline, progress: Progress) -> None:
        wanted = frozenset(timeline.steps)
        for base, (old, new) in enumerate(source.pairs()):
            progress(base, len(timeline.numbers) - 1, "codecs")
            if (base, base + 1) in wanted:
                before, after = timeline.numbers[base], timeline.numbers[base + 1]
                patches = encode(old, new, base=before, target=after, codecs=list(CODECS.values()))
                self.sizes[base, base + 1] = {patch.header.codec: len(patch.data) for patch in patches}
                self.precisions[base, base + 1] = self._seen(source, old, new)

    def _seen(self, source: Source, old: Mapping[str, Bits], new: Mapping[str, Bits]) -> dict[str, Visible]:
        found = []
        for name in (name for name, tensor in source.tensors.items() if tensor.dtype in SOURCES):
            try:
                found.append(visible(old[name], new[name]))
            except FloatingPointError:
                self._infinite.add(name)
        return together(found) if found else {}

    def notes(self) -> list[str]:
        names = sorted(self._infinite)
        if not names:
            return []
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return [
            "with an infinity or NaN before or after a step, which has no scale, a tensor is left out of what other "
            f"precisions would see of it: {', '.join(names[:NAMED])}{more}"
        ]
