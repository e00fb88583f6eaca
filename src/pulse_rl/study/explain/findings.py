"""What the sums come to: steps, exponents, recurrence, and beside them what theory says."""

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from pulse_rl.study import values
from pulse_rl.study.explain import theory
from pulse_rl.study.measure.tally import Reals, Tally
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.measure.totals import Collected
from pulse_rl.study.results import Exponent, Prediction, Recurrence, Settings, Step, Visible

LEAST, MOST = 1, 8  # ULP in the mean: where moves are measured


class Forecast:
    """What theory says of each step of a timeline."""

    def __init__(self, timeline: Timeline, settings: Settings) -> None:
        stride = timeline.stride
        bases = [timeline.numbers[base] for base, _ in timeline.steps]
        early = [min(base, theory.LONGEST) for base in bases]
        self._spans = [(base, base + stride) for base in early]
        self._lr = settings.lr
        self._places = theory.walk(settings.betas, [number for span in self._spans for number in span], settings.warmup)
        paces = [[theory.pace(settings.warmup, base + n + 1) for n in range(stride)] for base, _ in self._spans]
        self.lr = [settings.lr * sum(each) / stride for each in paces]  # the mean of each step
        self._most = [
            np.array([settings.lr * each[-1] * theory.most(settings.betas, base, base + stride)])
            for base, each in zip(bases, paces, strict=True)
        ]

    def _walk(self, step: int) -> tuple[Reals, Reals]:
        """Where the simulated masters are before and after a step."""
        before, after = (self._lr * self._places[number].astype(np.float64) for number in self._spans[step])
        return before, after

    def chances(self, step: int, ulps: Reals) -> Reals:
        """P(change) at each ULP: as Prediction.density, spread and highest, (3, E)."""
        before, after = self._walk(step)
        began, spread = theory.began(before, after, ulps), theory.spread(after - before, ulps)
        return np.stack([began, spread, theory.spread(self._most[step], ulps)])

    def predict(self, step: int, tallies: Mapping[str, Tally], elements: int, move: float | None) -> Prediction:
        """The density of one step. tallies: by dtype; move: the mean size of the masters' moves, where it is known."""
        before, after = self._walk(step)
        stretch = None if move is None else move / float(np.abs(after - before).mean())
        found, by_rate = np.zeros(3), 0.0
        for dtype, one in tallies.items():
            if (ulps := values.ulps(dtype)) is not None:
                there = np.flatnonzero(one.elements)
                counts, ulps = one.elements[there], ulps[there]
                found += self.chances(step, ulps) @ counts
                if stretch is not None:
                    by_rate += float(theory.began(stretch * before, stretch * after, ulps) @ counts)
        density, spread, highest = (found / max(1, elements)).tolist()
        return Prediction(
            lr=self.lr[step],
            density=density,
            spread=spread,
            highest=highest,
            by_rate=None if stretch is None else by_rate / max(1, elements),
        )


def _move(tallies: Mapping[str, Tally]) -> float | None:
    """The mean size of the masters' moves, where it shows; None where it does not.

    Where moves are of a few ULP, |new − old| is about the move. Larger weights hide it, the more so while masters are
    near the middle of their cells; and smaller ones are no fair sample, for many are small because they move little.
    """
    elements, moved = 0, 0.0
    for dtype, one in tallies.items():
        if (ulps := values.ulps(dtype)) is not None:
            unit = ulps * one.elements
            shows = (one.moved >= LEAST * unit) & (one.moved <= MOST * unit)
            elements += int(one.elements[shows].sum())
            moved += float(one.moved[shows].sum())
    return moved / elements if elements else None


def steps_of(
    found: Collected,
    forecast: Forecast | None,
    codecs: Mapping[tuple[int, int], dict[str, int]],
    precisions: Mapping[tuple[int, int], dict[str, Visible]],
) -> list[Step]:
    """Every step. codecs, precisions: as Step has them, by the places of the step's versions."""
    timeline = found.timeline
    differing = dict(zip(timeline.pairs, found.differing.tolist(), strict=True))
    by_kind = {
        name: dict(zip(timeline.pairs, one.differing.tolist(), strict=True)) for name, one in found.kinds.items()
    }
    result = []
    for step, (base, target) in enumerate(timeline.steps):
        tallies = {dtype: seen.steps[step] for dtype, seen in found.by_dtype.items()}
        changes = differing[1, base]
        former = timeline.bases[base].get(1)
        before = None if former is None else differing[1, former]
        floating = sum(int(one.elements.sum()) for dtype, one in tallies.items() if values.ulps(dtype) is not None)
        moved = sum(float(one.moved.sum()) for one in tallies.values()) / max(1, floating)
        move = _move(tallies)
        result.append(
            Step(
                base=timeline.numbers[base],
                target=timeline.numbers[target],
                changes=changes,
                density=changes / max(1, found.elements),
                ups=sum(int(one.ups().sum()) for one in tallies.values()) / max(1, changes),
                mean_distance=sum(one.total_distance() for one in tallies.values()) / max(1, changes),
                again=sum(one.again for one in tallies.values()) / before if before else None,
                back=sum(one.back for one in tallies.values()) / before if before else None,
                kinds={name: by_kind[name][1, base] / max(1, one.elements) for name, one in found.kinds.items()},
                bounds=found.bounds(step),
                codecs=codecs.get((base, target), {}),
                precisions=precisions.get((base, target), {}),
                moved=moved,
                rate=move / forecast.lr[step] / timeline.stride if forecast and move is not None else None,
                prediction=forecast.predict(step, tallies, found.elements, move) if forecast else None,
            )
        )
    return result


def exponents_of(found: Collected, forecast: Forecast | None) -> tuple[tuple[int, ...], list[Exponent]]:
    """The largest distance in each column, and a row for each exponent that occurs."""
    rows, columns = [], 1
    for dtype, seen in sorted(found.by_dtype.items()):
        elements = np.stack([one.elements for one in seen.steps])
        changes = np.stack([one.by_exponent() for one in seen.steps]).sum(0)
        distances = sum((one.distances() for one in seen.steps[1:]), seen.steps[0].distances())
        columns = max(columns, 1 + int(np.flatnonzero(distances.any(0)).max(initial=0)))
        ups = np.stack([one.ups() for one in seen.steps]).sum(0)
        flipped = np.stack([one.sign_changes for one in seen.steps]).sum(0)
        moved = np.stack([one.moved for one in seen.steps]).sum(0)
        numbers, ulps = values.exponents(dtype), values.ulps(dtype)
        there = np.flatnonzero(elements.sum(0))
        chances = paces = None
        if forecast is not None and ulps is not None:
            weights = elements[:, there] / elements[:, there].sum(0)
            each = np.stack([forecast.chances(step, ulps[there]) for step in range(len(seen.steps))])
            chances = np.einsum("se,sce->ce", weights, each)  # steps, exponents, the three predictions
            paces = found.timeline.stride * np.array(forecast.lr) @ elements[:, there]  # how far r = 1 would have led
        for row, place in enumerate(there.tolist()):
            total = int(elements[:, place].sum())
            rows.append(
                Exponent(
                    dtype=dtype,
                    exponent=None if numbers is None else int(numbers[place]),
                    ulp=None if ulps is None else float(ulps[place]),
                    elements=total,
                    changes=int(changes[place]),
                    probability=int(changes[place]) / total,
                    distances=tuple(distances[place].tolist()),
                    sign_changes=int(flipped[place]),
                    ups=int(ups[place]),
                    predicted=None if chances is None else float(chances[0, row]),
                    spread=None if chances is None else float(chances[1, row]),
                    highest=None if chances is None else float(chances[2, row]),
                    rate=float(moved[place] / paces[row]) if paces is not None and paces[row] else None,
                )
            )
    cut = [replace(row, distances=row.distances[:columns]) for row in rows]
    return tuple(2**n for n in range(columns)), cut


def recurrence_of(found: Collected) -> Recurrence:
    """How often the same elements change."""
    timeline = found.timeline
    following = [(base, step) for step, (base, _) in enumerate(timeline.steps) if 1 in timeline.bases[base]]
    before = {target: step for step, (_, target) in enumerate(timeline.steps)}
    changed = again = back = 0
    expected = 0.0
    for seen in found.by_dtype.values():
        for base, step in following:
            former, one = seen.steps[before[base]], seen.steps[step]
            changed += former.changes
            again += one.again
            back += one.back
            # An element keeps its exponent, but for the few at the edge of a binade.
            expected += float(former.by_exponent() @ (one.by_exponent() / np.maximum(1, one.elements)))
    all_seen = list(found.by_dtype.values())
    return Recurrence(
        again=again / changed if changed else None,
        back=back / changed if changed else None,
        expected_again=expected / changed if changed else None,
        steps=timeline.run_steps,
        times=tuple(sum((seen.times for seen in all_seen), np.zeros(timeline.run_steps + 1, np.int64)).tolist()),
        returned=sum(seen.returned for seen in all_seen),
    )
