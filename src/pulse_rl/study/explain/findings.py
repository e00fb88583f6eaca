"""Findings from totals: the steps, exponents and recurrence of a report, with theory's predictions."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pulse_rl.study import values
from pulse_rl.study.explain.forecast import Forecast
from pulse_rl.study.measure.tally import Counts, Reals, Tally
from pulse_rl.study.measure.totals import Totals
from pulse_rl.study.results import Exponent, Recurrence, StepStudy, Visible

LEAST, MOST = 1, 8  # ULP: mean moves from which the size of the masters' moves is measured


# -- steps -----------------------------------------------------------------------------------------------------


def steps_of(
    totals: Totals,
    forecast: Forecast | None,
    codecs: Mapping[tuple[int, int], dict[str, int]],
    precisions: Mapping[tuple[int, int], dict[str, Visible]],
) -> list[StepStudy]:
    """Every step. codecs, precisions: as StepStudy has them, by the places of the step's versions."""
    timeline = totals.timeline
    differing = dict(zip(timeline.pairs, totals.differing.tolist(), strict=True))
    by_kind = {
        name: dict(zip(timeline.pairs, members.differing.tolist(), strict=True))
        for name, members in totals.kinds.items()
    }
    result = []
    for step, (base, target) in enumerate(timeline.steps):
        tallies = {dtype: counted.steps[step] for dtype, counted in totals.by_dtype.items()}
        changes = differing[1, base]
        former = timeline.bases[base].get(1)
        changes_before = None if former is None else differing[1, former]
        floating = sum(int(tally.elements.sum()) for dtype, tally in tallies.items() if values.ulps(dtype) is not None)
        move = _mean_move(tallies)
        result.append(
            StepStudy(
                base=timeline.numbers[base],
                target=timeline.numbers[target],
                changes=changes,
                density=changes / max(1, totals.elements),
                ups=sum(int(tally.ups().sum()) for tally in tallies.values()) / max(1, changes),
                mean_distance=sum(tally.total_distance() for tally in tallies.values()) / max(1, changes),
                again=sum(tally.again for tally in tallies.values()) / changes_before if changes_before else None,
                back=sum(tally.back for tally in tallies.values()) / changes_before if changes_before else None,
                kinds={name: by_kind[name][1, base] / max(1, of.elements) for name, of in totals.kinds.items()},
                bounds=totals.bounds(step),
                codecs=codecs.get((base, target), {}),
                precisions=precisions.get((base, target), {}),
                moved=sum(float(tally.moved.sum()) for tally in tallies.values()) / max(1, floating),
                rate=move / forecast.lr[step] / timeline.stride if forecast and move is not None else None,
                prediction=forecast.predict(step, tallies, totals.elements, move) if forecast else None,
            )
        )
    return result


def _mean_move(tallies: Mapping[str, Tally]) -> float | None:
    """The mean size of the masters' moves, measured where the bits show it; None if they do nowhere.

    Where moves are a few ULP, |new − old| is about the move. Larger weights hide it, the more so while masters are near
    the middle of their cells. Smaller ones are no fair sample: many are small because they move little.
    """
    elements, moved = 0, 0.0
    for dtype, tally in tallies.items():
        if (ulps := values.ulps(dtype)) is not None:
            one_ulp = ulps * tally.elements
            shows = (tally.moved >= LEAST * one_ulp) & (tally.moved <= MOST * one_ulp)
            elements += int(tally.elements[shows].sum())
            moved += float(tally.moved[shows].sum())
    return moved / elements if elements else None


# -- exponents -------------------------------------------------------------------------------------------------


def exponents_of(totals: Totals, forecast: Forecast | None) -> tuple[tuple[int, ...], list[Exponent]]:
    """The largest distance in each column, and a row for each exponent that occurs, by dtype."""
    tables = {dtype: _sum_steps(counted.steps) for dtype, counted in sorted(totals.by_dtype.items())}
    columns = max((1 + int(np.flatnonzero(one.distances.any(0)).max(initial=0)) for one in tables.values()), default=1)
    rows = []
    for dtype, table in tables.items():
        theory = _theory(forecast, totals.timeline.stride, table, values.ulps(dtype))
        rows += _rows(dtype, table, theory, columns)
    return tuple(2**n for n in range(columns)), rows


class _Table(NamedTuple):
    """Counts at each exponent of one dtype, summed over steps; (E,) unless noted."""

    by_step: Counts  # elements, (steps, E)
    changes: Counts
    ups: Counts
    sign_changes: Counts
    moved: Reals  # sum of |new − old|
    distances: Counts  # changes, (E, DISTANCES)

    @property
    def present(self) -> Counts:
        """The exponents that occur."""
        return np.flatnonzero(self.by_step.any(0))


class _Theory(NamedTuple):
    """Theory's figures at each exponent, (E,)."""

    chances: Reals  # mean over elements of P(change), as Forecast.chances: (3, E)
    unit_moves: Reals  # sum of the moves if r were 1 for every element; divides `_Table.moved`


def _sum_steps(steps: list[Tally]) -> _Table:
    """Add up the steps of one dtype."""
    return _Table(
        by_step=np.stack([step.elements for step in steps]),
        changes=np.stack([step.by_exponent() for step in steps]).sum(0),
        ups=np.stack([step.ups() for step in steps]).sum(0),
        sign_changes=np.stack([step.sign_changes for step in steps]).sum(0),
        moved=np.stack([step.moved for step in steps]).sum(0),
        distances=sum((step.distances() for step in steps[1:]), steps[0].distances()),
    )


def _theory(forecast: Forecast | None, stride: int, table: _Table, ulps: Reals | None) -> _Theory | None:
    """Theory's figures for a table; None without a learning rate, or for whole numbers."""
    if forecast is None or ulps is None:
        return None
    present, elements = table.present, table.by_step
    chances = np.zeros((3, len(ulps)))
    if present.size:
        weights = elements[:, present] / elements[:, present].sum(0)
        by_step = np.stack([forecast.chances(step, ulps[present]) for step in range(len(elements))])
        chances[:, present] = np.einsum("se,sce->ce", weights, by_step)  # steps, exponents, the three predictions
    return _Theory(chances, stride * np.array(forecast.lr) @ elements)


def _rows(dtype: str, table: _Table, theory: _Theory | None, columns: int) -> list[Exponent]:
    """A row for each exponent that occurs. columns: of distances."""
    numbers, ulps = values.exponents(dtype), values.ulps(dtype)
    rows = []
    for e in table.present.tolist():
        elements, changes = int(table.by_step[:, e].sum()), int(table.changes[e])
        chances = [None] * 3 if theory is None else theory.chances[:, e].tolist()
        rows.append(
            Exponent(
                dtype=dtype,
                exponent=None if numbers is None else int(numbers[e]),
                ulp=None if ulps is None else float(ulps[e]),
                elements=elements,
                changes=changes,
                probability=changes / elements,
                distances=tuple(table.distances[e, :columns].tolist()),
                sign_changes=int(table.sign_changes[e]),
                ups=int(table.ups[e]),
                predicted=chances[0],
                spread=chances[1],
                highest=chances[2],
                rate=float(table.moved[e] / theory.unit_moves[e]) if theory and theory.unit_moves[e] else None,
            )
        )
    return rows


# -- recurrence ------------------------------------------------------------------------------------------------


def recurrence_of(totals: Totals) -> Recurrence:
    """How often the same elements change."""
    timeline = totals.timeline
    ending = {target: step for step, (_, target) in enumerate(timeline.steps)}  # the step that leads to a version
    successive = [(ending[base], step) for step, (base, _) in enumerate(timeline.steps) if base in ending]
    changed = again = back = 0
    expected = 0.0
    for counted in totals.by_dtype.values():
        for first, second in successive:
            before, after = counted.steps[first], counted.steps[second]
            changed += before.changes
            again += after.again
            back += after.back
            # An element keeps its exponent, but for the few at the edge of a binade.
            expected += float(before.by_exponent() @ (after.by_exponent() / np.maximum(1, after.elements)))
    every = list(totals.by_dtype.values())
    return Recurrence(
        again=again / changed if changed else None,
        back=back / changed if changed else None,
        expected_again=expected / changed if changed else None,
        steps=timeline.chain_steps,
        times=tuple(sum((counted.times for counted in every), np.zeros(timeline.chain_steps + 1, np.int64)).tolist()),
        returned=sum(counted.returned for counted in every),
    )
