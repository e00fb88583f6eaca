"""study: a source in, a report out."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from pulse_rl.study.explain.findings import exponents_of, recurrence_of, steps_of
from pulse_rl.study.explain.forecast import Forecast
from pulse_rl.study.explain.theory import LONGEST
from pulse_rl.study.measure.patches import Patches
from pulse_rl.study.measure.sweep import count_tensors
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.measure.totals import Totals
from pulse_rl.study.results import Report, Settings
from pulse_rl.study.sources.base import StudySource
from pulse_rl.version import __version__

WIDE = (
    "most elements are float32 and counted as they are stored, where nearly all change: what is published with "
    "cast='bfloat16' is BF16 under precision"
)
TOO_FAR = f"no prediction: versions are more than {LONGEST:,} steps apart, if their numbers are steps"

Progress = Callable[[int, int, str], object]  # (done, total, of which part)


def study(
    source: StudySource,
    settings: Settings | None = None,
    *,
    codecs: bool = True,
    progress: Progress = lambda done, total, part: None,
) -> Report:
    """Measure how sparse the steps of a run are, exactly, on its stored bits, and compare with theory.

    Reads every version once, and once more for the codecs. Up to 34 versions of a segment are held per thread, never a
    whole version; with `codecs`, the two checkpoints of a step are mapped and its patches are in memory.

    Args:
        source: What to study: `Checkpoints` or `Stored`.
        settings: Adam's learning rate and betas, for predictions. Default: none are known, nothing is predicted.
        codecs: Whether to code every step with every codec and cast it to lower precisions; this takes longest.
        progress: Called with the amount done, the total, and what is counted: "study" (elements) or "codecs" (pairs of
            versions). Default: not called.

    Returns:
        The report.

    Raises:
        ValueError: Settings with which Adam cannot run.
        PulseError: The source cannot be read.
    """
    if isinstance(source, str | Path):
        raise TypeError(f"source: expected Checkpoints([…]) or Stored(…), found {str(source)!r} alone")
    if settings is not None:
        check_settings(settings)
    begun = time.perf_counter()
    timeline = Timeline([version.number for version in source.versions])
    totals = Totals(timeline)
    for name, counted in count_tensors(source, timeline, lambda done, total: progress(done, total, "study")):
        totals.add(name, source.tensors[name], counted)
    seconds = time.perf_counter() - begun
    near = timeline.stride <= LONGEST
    forecast = Forecast(timeline, settings) if settings and near else None
    patches = Patches()
    if codecs:
        patches.measure(source, timeline, lambda done, total: progress(done, total, "codecs"))
    distances, exponents = exponents_of(totals, forecast)
    return Report(
        pulse_rl=__version__,
        source=source.kind,
        location=source.location,
        versions=source.versions,
        stride=timeline.stride,
        elements=totals.elements,
        full_nbytes=sum(tensor.size * tensor.itemsize for tensor in source.tensors.values()),
        settings=settings,
        spans=totals.spans(),
        steps=tuple(steps_of(totals, forecast, patches.sizes, patches.precisions)),
        tensors=tuple(totals.tensors),
        kinds=tuple(sorted(totals.groups(totals.kinds), key=lambda group: -group.elements)),
        depths=tuple(sorted(totals.groups(totals.depths), key=lambda group: _depth(group.name))),
        distances=distances,
        exponents=tuple(exponents),
        recurrence=recurrence_of(totals),
        notes=(*source.notes, *_uneven(timeline), *([] if near else [TOO_FAR]), *_wide(source), *patches.notes()),
        seconds=seconds,
    )


def check_settings(settings: Settings) -> None:
    """Raise ValueError for a learning rate or betas with which Adam cannot run."""
    if not 0 < settings.lr < math.inf:
        raise ValueError(f"lr: expected more than 0, found {settings.lr}")
    if not (0 <= settings.betas[0] < 1 and 0 < settings.betas[1] < 1):
        raise ValueError(f"betas: expected two numbers from 0 to below 1, the second above 0, found {settings.betas}")


def _depth(name: str) -> float:
    return int(name) if name.isdecimal() else math.inf


def _wide(source: StudySource) -> list[str]:
    """A note where the weights are the trainer's, and not what it would publish."""
    tensors = source.tensors.values()
    wide = sum(tensor.size for tensor in tensors if tensor.dtype == "F32")
    return [WIDE] if 2 * wide > sum(tensor.size for tensor in tensors) else []


def _uneven(timeline: Timeline) -> list[str]:
    """A note where some neighbouring versions are no step."""
    pairs = len(timeline.numbers) - 1
    apart = pairs - len(timeline.steps)
    if not apart:
        return []
    return [
        f"{apart} of {pairs} neighbouring versions are not {timeline.stride} apart, the commonest distance: they "
        "make no step"
    ]
