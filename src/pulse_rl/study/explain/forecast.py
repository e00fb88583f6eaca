"""Theory's prediction for each step of a study."""

from collections.abc import Mapping

import numpy as np

from pulse_rl.study import values
from pulse_rl.study.explain import theory
from pulse_rl.study.explain.theory import Reals
from pulse_rl.study.measure.tally import Tally
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.results import Prediction, Settings


class Forecast:
    """Theory applied to a timeline. Steps are named by their places in `Timeline.steps`."""

    def __init__(self, timeline: Timeline, settings: Settings) -> None:
        stride = timeline.stride
        bases = [timeline.numbers[base] for base, _ in timeline.steps]
        early = [min(base, theory.LONGEST) for base in bases]
        self._ends = [(base, base + stride) for base in early]  # optimizer steps before and after, as simulated
        self._positions = theory.simulate(
            settings.betas, [number for ends in self._ends for number in ends], settings.warmup
        )

        def factor(base: int) -> float:
            """The mean learning rate of a step, as a fraction of the full one."""
            return sum(theory.warmup_factor(settings.warmup, base + n + 1) for n in range(stride)) / stride

        self.lr = [settings.lr * factor(base) for base in bases]  # mean of each step
        # Of simulated positions. A warm-up may go on beyond what is simulated: moves are as much larger by then.
        self._scales = [settings.lr * (factor(base) / factor(few)) for base, few in zip(bases, early, strict=True)]
        last = [settings.lr * theory.warmup_factor(settings.warmup, base + stride) for base in bases]
        self._farthest = [
            np.array([lr * theory.farthest(settings.betas, base, base + stride)])
            for base, lr in zip(bases, last, strict=True)
        ]

    def chances(self, step: int, ulps: Reals) -> Reals:
        """P(change) in a step at each ULP: as Prediction.density, spread and highest, (3, E)."""
        before, after = self._masters(step)
        return np.stack(
            [
                theory.chances_centred(before, after, ulps),
                theory.chances_spread(after - before, ulps),
                theory.chances_spread(self._farthest[step], ulps),
            ]
        )

    def predict(self, step: int, tallies: Mapping[str, Tally], elements: int, move: float | None) -> Prediction:
        """The density of one step.

        tallies: by dtype. elements: of all dtypes. move: the mean size of the masters' moves, where it was measured.
        """
        before, after = self._masters(step)
        scale = None if move is None else move / float(np.abs(after - before).mean())
        changes, by_rate = np.zeros(3), 0.0
        for dtype, tally in tallies.items():
            if (ulps := values.ulps(dtype)) is not None:
                present = np.flatnonzero(tally.elements)
                counts, ulps = tally.elements[present], ulps[present]
                changes += self.chances(step, ulps) @ counts
                if scale is not None:
                    by_rate += float(theory.chances_centred(scale * before, scale * after, ulps) @ counts)
        density, spread, highest = (changes / max(1, elements)).tolist()
        return Prediction(
            lr=self.lr[step],
            density=density,
            spread=spread,
            highest=highest,
            by_rate=None if scale is None else by_rate / max(1, elements),
        )

    def _masters(self, step: int) -> tuple[Reals, Reals]:
        """Where the simulated masters are before and after a step, (SAMPLES,) each."""
        before, after = (self._scales[step] * self._positions[number].astype(np.float64) for number in self._ends[step])
        return before, after
