"""The plots of a study, one function each: the chart, its title and its caption."""

import re
from collections import defaultdict
from itertools import pairwise

from pulse_rl.html import charts
from pulse_rl.html.charts import BYTES, FRACTION, ChartAxis, Points
from pulse_rl.html.page import Plot
from pulse_rl.study.results import Exponent, Report

ROWS = 24  # of a heat map
RARE = 1e-6  # a smaller share of the elements is only in the table
TINY = -100  # exponents below it are only in the table: zeros and subnormals of dtypes with a wide range

VERSION = ChartAxis("version (optimizer step)", whole=True)
DENSITY = ChartAxis("density: changed in a step", FRACTION, zero=True)
EXPONENT = ChartAxis("exponent e: |w| from 2^e to 2^(e+1)", whole=True)
MEASURED, PREDICTED, SPREAD = "measured", "predicted", "masters anywhere"
FITTED, HIGHEST = "by the measured rate", "farthest moves"


def sparsity(report: Report) -> Plot:
    """S_k(t) over t."""
    series = {f"k = {span.k}": list(zip(span.bases, span.sparsity, strict=True)) for span in report.spans}
    spec = charts.lines(series, VERSION, ChartAxis("sparsity S_k", FRACTION), colors=charts.RAMP)
    return Plot(
        "Sparsity over time",
        "The share of the elements that have the same bits k steps later, by the version before these steps. A patch "
        "over k steps carries the rest. Some changes are undone and many fall on the same elements, so S_k falls more "
        "slowly than k grows: a worker that is k versions behind needs far fewer bytes than those of k patches.",
        spec,
    )


def prediction(report: Report) -> Plot:
    """Measured and predicted density over time; without a learning rate, nothing."""
    known = [(step.target, step.prediction) for step in report.steps if step.prediction]
    series: dict[str, Points] = {
        MEASURED: [(step.target, step.density) for step in report.steps],
        PREDICTED: [(target, one.density) for target, one in known],
        SPREAD: [(target, one.spread) for target, one in known],
        FITTED: [(target, one.by_rate) for target, one in known],
        HIGHEST: [(target, one.highest) for target, one in known],
    }
    spec = charts.lines(series, VERSION, ChartAxis(DENSITY.title, FRACTION, log=True), dashed=list(series)[1:])
    return Plot(
        "Density, measured and predicted",
        "Theory predicts the density from the sizes of the weights, the learning rate and Adam's betas. Predicted: "
        "gradients are independent noise, and the masters were the BF16 weights themselves at step 0; nothing is "
        "fitted. Masters anywhere: they lie anywhere in the cells that round to their bits, as after many steps. By "
        "the measured rate: as predicted, with moves of the measured size. Farthest moves: masters anywhere in their "
        "cells, moved as far as Adam can.",
        spec if known else None,
    )


def rate(report: Report) -> Plot:
    """E[r] over time; without a learning rate, nothing."""
    spec = charts.lines(
        {MEASURED: [(step.target, step.rate) for step in report.steps]},
        VERSION,
        ChartAxis("mean |move| / learning rate", zero=True),
    )
    return Plot(
        "How far Adam moves a weight",
        "The mean move of a weight in a step, in learning rates, measured at weights so small that their bits show it. "
        "1 means that every weight moves by the full learning rate, as in Adam's first step. Gradients that are noise "
        "cancel out in its momentum and leave far less: 0.18 in the long run at β1 = 0.9. The density follows this "
        "number.",
        spec,
    )


def kinds(report: Report) -> Plot:
    """Density by kind of layer."""
    rows = [(group.name, group.density, group.min, group.max) for group in report.kinds]
    return Plot(
        "Density by kind of layer",
        "The mean over all steps; the line extends from the sparsest step to the densest. Kinds differ mostly because "
        "their weights differ in size: small weights have small ULPs, so the same move changes their bits more often.",
        charts.ranges(rows, DENSITY),
    )


def kinds_over_time(report: Report) -> Plot:
    """Density by kind over time."""
    names = [group.name for group in report.kinds]
    series = {name: [(step.target, step.kinds.get(name)) for step in report.steps] for name in names}
    return Plot(
        "Density by kind of layer over time",
        "All kinds share the learning rate and its schedule: where their curves differ, their gradients do.",
        charts.lines(series, VERSION, DENSITY),
    )


def layers(report: Report) -> Plot:
    """Density by part and depth."""
    elements: dict[tuple[str, int], int] = defaultdict(int)
    changes: dict[tuple[str, int], int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for tensor in report.tensors:
        if tensor.depth is not None and tensor.elements:
            part = _part(tensor.name, tensor.depth)
            elements[part, tensor.depth] += tensor.elements
            changes[part, tensor.depth] += tensor.changes
            sizes[part] += tensor.elements
    largest = set(sorted(sizes, key=lambda part: -sizes[part])[:ROWS])
    cells = {
        place: changes[place] / count / len(report.steps) for place, count in elements.items() if place[0] in largest
    }
    left_out = len(sizes) - len(largest)
    return Plot(
        "Density by depth",
        "Each cell is the tensors of one name in one layer, the mean over all steps. Rows show which tensors change, "
        "columns where in the model."
        + (f" The {ROWS} largest parts are drawn; report.json has {left_out} more." if left_out else ""),
        charts.heat(cells, "layer", ChartAxis("density", FRACTION)),
    )


def probability(report: Report) -> Plot:
    """P(change | exponent), measured and by theory."""
    rows = _drawn(report)
    series: dict[str, Points] = {
        MEASURED: [(e, row.probability) for e, row in rows],
        PREDICTED: [(e, row.predicted) for e, row in rows],
        SPREAD: [(e, row.spread) for e, row in rows],
        HIGHEST: [(e, row.highest) for e, row in rows],
    }
    spec = charts.lines(series, EXPONENT, ChartAxis("changed in a step", FRACTION, log=True), dashed=list(series)[1:])
    return Plot(
        "Probability of a change by size of the weight",
        f"{_of(report)}. One exponent to the right, a weight is twice as large and its ULP twice as wide. Weights on "
        "the left, whose ULP is smaller than a step's move, change nearly every time. On the right, a move crosses "
        "into another cell with probability move / ULP if masters lie anywhere, and more rarely while they have not "
        "moved far from where they began. Twice the learning rate shifts the curves by one to the right.",
        spec,
    )


def population(report: Report) -> Plot:
    """The share of elements and of changes that each exponent has."""
    rows = _drawn(report)
    elements, changes = (max(1, sum(getattr(row, what) for _, row in rows)) for what in ("elements", "changes"))
    shares = {
        "elements": [(str(e), row.elements / elements) for e, row in rows],
        "changes": [(str(e), row.changes / changes) for e, row in rows],
    }
    return Plot(
        "Where the weights are, and where the changes",
        f"{_of(report)}: the share of all elements and of all changes, by exponent. Changes come from the smaller "
        "weights. Patches are small because the exponent predicts where changes are.",
        charts.columns(shares, EXPONENT.title, ChartAxis("share", FRACTION, zero=True)),
    )


def rate_by_exponent(report: Report) -> Plot:
    """Mean moves by exponent; without a learning rate, nothing."""
    # A mean of few changes is mostly chance.
    series = {MEASURED: [(e, row.rate) for e, row in _drawn(report) if row.changes >= 100]}
    return Plot(
        "How far weights of each size move",
        f"{_of(report)}: the mean |new − old| in learning rates, for exponents with at least 100 changes. Where moves "
        "are several ULP, this is the move of the masters. If masters lay anywhere in their cells, the line would stay "
        "level to the right; where it falls, masters have not reached the edges of their cells.",
        charts.lines(series, EXPONENT, ChartAxis("mean |new − old| / learning rate", zero=True)),
    )


def distances(report: Report) -> Plot:
    """By how many ULPs changed elements moved."""
    counts = [sum(row.distances[place] for row in report.exponents) for place in range(len(report.distances))]
    total = sum(counts)
    names = [str(b) if b == a + 1 else f"≤{b}" for a, b in pairwise((0, *report.distances))]
    shares = {"changes": [(name, count / total) for name, count in zip(names, counts, strict=True) if total]}
    return Plot(
        "How far the changes go",
        "Changes by their distance in ULPs, the number of places from the old bits to the new. "
        f"{sum(counts[:1]) / max(1, total):.1%} go to the neighbouring value: for these a patch needs a direction and "
        "no new bits.",
        charts.columns(shares, "distance, ULPs; ≤8: 5 to 8", ChartAxis("share of the changes", FRACTION, zero=True)),
    )


def recurrence(report: Report) -> Plot:
    """Whether the elements changed in one step change in the next."""
    series = {
        "changed again": [(step.target, step.again) for step in report.steps],
        "changed back": [(step.target, step.back) for step in report.steps],
    }
    if (expected := report.recurrence.expected_again) is not None and any(
        step.again is not None for step in report.steps
    ):
        series["again, by exponent and chance"] = [(step.target, expected) for step in report.steps]
    spec = charts.lines(
        series,
        VERSION,
        ChartAxis("of the elements changed before", FRACTION, zero=True),
        dashed=["again, by exponent and chance"],
    )
    return Plot(
        "The same elements again",
        "Of the elements that changed in the step before: the share that changes again, and the share that returns to "
        "its earlier bits. Dashed: the share that would change again by exponent and chance alone.",
        spec,
    )


def times(report: Report) -> Plot:
    """Elements by how often they changed."""
    found = report.recurrence
    total = max(1, sum(found.times))
    series = {"elements": [(number, count / total) for number, count in enumerate(found.times)]}
    spec = charts.lines(
        series,
        ChartAxis(f"changes in {found.steps} steps", whole=True),
        ChartAxis("share of the elements", FRACTION, log=True),
    )
    return Plot(
        "How often an element changes",
        f"Elements by how often they changed in {found.steps} successive steps. On the left are those that never did, "
        "on the right those that change in every step, which are small weights.",
        spec if found.steps > 1 else None,
    )


def sizes(report: Report) -> Plot:
    """Bytes of a step's patch by codec, with the entropy bound."""
    names = list(dict.fromkeys(name for step in report.steps for name in step.codecs))
    series: dict[str, Points] = {
        name: [(step.target, step.codecs.get(name)) for step in report.steps] for name in names
    }
    series["entropy bound"] = [(step.target, step.bounds.total / 8) for step in report.steps]
    spec = charts.lines(series, VERSION, ChartAxis("a patch", BYTES, zero=True), dashed=["entropy bound"])
    return Plot(
        "Bytes of a patch",
        "The patch of each step, by codec. Dashed: the entropy of positions and moves, if the frequencies for each "
        "exponent of each tensor are known for free. A codec that knows exponents can come close to it.",
        spec if names else None,
    )


def bits(report: Report) -> Plot:
    """Bits per change, of the codecs and of the entropy bounds."""
    changes = sum(step.changes for step in report.steps)
    names = list(dict.fromkeys(name for step in report.steps for name in step.codecs))
    sizes = {name: sum(step.codecs.get(name, 0) for step in report.steps) for name in names}
    rows = [(name, "codec", 8 * size / max(1, changes)) for name, size in sizes.items()]
    for title, positions, moves in (
        ("bound: exponent, tensor", "positions", "moves"),
        ("bound: exponent", "positions_by_exponent", "moves_by_exponent"),
        ("bound: tensor", "positions_by_tensor", None),
        ("bound: density alone", "positions_uniform", None),
    ):
        rows.append(
            (title, "positions", sum(getattr(step.bounds, positions) for step in report.steps) / max(1, changes))
        )
        if moves:
            rows.append((title, "moves", sum(getattr(step.bounds, moves) for step in report.steps) / max(1, changes)))
    return Plot(
        "Bits per change",
        "The bounds: the fewest bits for the positions of the changes, by what is known of an element (the density "
        "alone, its tensor, its exponent, or both), and for direction and distance. Knowing the exponent saves most of "
        "the positions. Above the bounds are the codecs, if they were tried, with everything that they store.",
        charts.stacked_bars(rows if changes else [], ChartAxis("bits per change", zero=True)),
    )


def precisions(report: Report) -> Plot:
    """The density of changed codes in other precisions, over time."""
    seen = [(step.target, step.precisions) for step in report.steps if step.precisions]
    names = list(report.precisions)
    series: dict[str, Points] = {name: [(target, found[name].density) for target, found in seen] for name in names}
    spec = charts.lines(
        series, VERSION, ChartAxis("codes changed in a step", FRACTION, log=True), dashed=[n for n in names if "/" in n]
    )
    return Plot(
        "Density in other precisions",
        "The share of codes that change for a receiver whose weights are cast from the stored ones. The fewer digits a "
        "format keeps, the fewer moves it shows; BF16 and F16 mostly coincide. Dashed: with scales. A scale that "
        "changes affects the codes of all its elements, which makes peaks.",
        spec,
    )


def _part(name: str, depth: int) -> str:
    """A tensor's name within its layer, without the numbers of experts and the like: mlp.experts.*.up_proj."""
    inside = re.split(rf"(?:^|\.){depth}\.", name, maxsplit=1)[-1]
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", inside).removesuffix(".weight")


def _drawn(report: Report) -> list[tuple[int, Exponent]]:
    """The exponents of the most common dtype, by e, without rare ones and without zeros and subnormals."""
    rows = [(row.exponent, row) for row in report.exponents if row.exponent is not None and row.dtype == _main(report)]
    total = sum(row.elements for _, row in rows)
    return [(e, row) for e, row in rows if row.elements > RARE * total and e > TINY]


def _main(report: Report) -> str:
    """The dtype of most elements."""
    totals: dict[str, int] = defaultdict(int)
    for row in report.exponents:
        totals[row.dtype] += row.elements
    return max(totals, key=lambda dtype: totals[dtype], default="")


def _of(report: Report) -> str:
    return f"The elements in {_main(report)}"
