"""The plots of a study, a function each: what is drawn, its title and its caption."""

import re
from collections import defaultdict
from itertools import pairwise

from pulse_rl.html import charts
from pulse_rl.html.charts import BYTES, FRACTION, Axis, Points
from pulse_rl.html.page import Plot
from pulse_rl.study.results import Exponent, Report, StepStudy

ROWS = 24  # of a heat map
RARE = 1e-6  # exponents that fewer of the elements have are left to the table
TINY = -100  # likewise exponents below it: of a dtype with so wide a range, its zeros and subnormals

VERSION = Axis("version (optimizer step)", whole=True)
DENSITY = Axis("density: changed in a step", FRACTION, zero=True)
EXPONENT = Axis("exponent e: |w| from 2^e to 2^(e+1)", whole=True)
MEASURED, PREDICTED, SPREAD = "measured", "predicted", "masters anywhere"
FITTED, HIGHEST = "by the measured rate", "farthest moves"


def sparsity(report: Report) -> Plot:
    """S_k(t) over t."""
    series = {f"k = {span.k}": list(zip(span.bases, span.sparsity, strict=True)) for span in report.spans}
    spec = charts.lines(series, VERSION, Axis("sparsity S_k", FRACTION), colors=charts.RAMP)
    return Plot(
        "Sparsity over time",
        "The share of the elements that have the same bits k steps later, for each version from which k steps lead on. "
        "A patch over k steps carries the rest. Changes come back and fall on the same elements, so S_k falls more "
        "slowly than k grows: whoever is k versions behind needs far less than k patches.",
        spec,
    )


def prediction(report: Report) -> Plot:
    """Measured and predicted density over time; nothing without a learning rate."""
    known = [(step.target, step.prediction) for step in report.steps if step.prediction]
    series: dict[str, Points] = {
        MEASURED: [(step.target, step.density) for step in report.steps],
        PREDICTED: [(target, one.density) for target, one in known],
        SPREAD: [(target, one.spread) for target, one in known],
        FITTED: [(target, one.by_rate) for target, one in known],
        HIGHEST: [(target, one.highest) for target, one in known],
    }
    spec = charts.lines(series, VERSION, Axis(DENSITY.title, FRACTION, log=True), dashed=list(series)[1:])
    return Plot(
        "Density, measured and predicted",
        "What theory expects of the sizes of the weights, the learning rate and Adam's betas. Predicted: gradients are "
        "independent noise and the masters were the BF16 weights themselves at step 0; nothing is fitted. Masters "
        "anywhere: they lie spread over the cells that round to their bits, as after many steps. By the measured rate: "
        "as predicted, with moves as long as they were measured. Farthest moves: masters anywhere in their cells, "
        "moved as far as Adam can.",
        spec if known else None,
    )


def rate(report: Report) -> Plot:
    """E[r] over time; nothing without a learning rate."""
    spec = charts.lines(
        {MEASURED: [(step.target, step.rate) for step in report.steps]},
        VERSION,
        Axis("mean |move| / learning rate", zero=True),
    )
    return Plot(
        "How far Adam moves a weight",
        "The mean move in a step, in learning rates, measured at weights so small that their bits show it. 1 is a step "
        "of the full learning rate for every weight, as in Adam's first; gradients that are noise cancel out in its "
        "momentum and leave far less, 0.18 in the long run at β1 = 0.9. The density follows this number.",
        spec,
    )


def kinds(report: Report) -> Plot:
    """Density by kind of layer."""
    rows = [(group.name, group.density, group.min, group.max) for group in report.kinds]
    return Plot(
        "Density by kind of layer",
        "The mean over all steps; the line goes from the sparsest step to the densest. Kinds differ mostly because "
        "their weights differ in size: small weights have small ULPs, so the same move changes their bits more often.",
        charts.ranges(rows, DENSITY),
    )


def kinds_over_time(report: Report) -> Plot:
    """Density by kind over time."""
    names = [group.name for group in report.kinds]
    series = {name: [(step.target, step.kinds.get(name)) for step in report.steps] for name in names}
    return Plot(
        "Density by kind of layer over time",
        "All kinds share the learning rate and its schedule: where their curves part, gradients do.",
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
        "Each field is the tensors of one name in one layer, the mean over all steps. Rows that differ say what kind "
        "of tensor changes, columns that differ say where in the model."
        + (f" The {ROWS} largest parts are drawn, {left_out} more are in report.json." if left_out else ""),
        charts.heat(cells, "layer", Axis("density", FRACTION)),
    )


def probability(report: Report) -> Plot:
    """P(change | exponent), with the theory's."""
    rows = _drawn(report)
    series: dict[str, Points] = {
        MEASURED: [(e, row.probability) for e, row in rows],
        PREDICTED: [(e, row.predicted) for e, row in rows],
        SPREAD: [(e, row.spread) for e, row in rows],
        HIGHEST: [(e, row.highest) for e, row in rows],
    }
    spec = charts.lines(series, EXPONENT, Axis("changed in a step", FRACTION, log=True), dashed=list(series)[1:])
    return Plot(
        "Probability of a change by size of the weight",
        f"{_of(report)}: one to the right, a weight is twice as large and its ULP twice as wide. Weights on the left, "
        "whose ULP is smaller than a step's move, change nearly every time; on the right a move crosses into another "
        "cell with the probability move / ULP if masters lie anywhere, and more rarely while they have not moved far "
        "from where they began. Twice the learning rate moves the curves one to the right.",
        spec,
    )


def population(report: Report) -> Plot:
    """Which share of elements and changes each exponent has."""
    rows = _drawn(report)
    elements, changes = (max(1, sum(getattr(row, what) for _, row in rows)) for what in ("elements", "changes"))
    shares = {
        "elements": [(str(e), row.elements / elements) for e, row in rows],
        "changes": [(str(e), row.changes / changes) for e, row in rows],
    }
    return Plot(
        "Where the weights are, and where the changes",
        f"{_of(report)}: the share of all elements and of all changes by exponent. Changes come from the smaller "
        "weights; that exponents tell where to look for changes is what makes patches small.",
        charts.columns(shares, EXPONENT.title, Axis("share", FRACTION, zero=True)),
    )


def rate_by_exponent(report: Report) -> Plot:
    """Mean moves by exponent; nothing without a learning rate."""
    # What few changes tell is mostly chance.
    series = {MEASURED: [(e, row.rate) for e, row in _drawn(report) if row.changes >= 100]}
    return Plot(
        "How far weights of each size move",
        f"{_of(report)}: the mean |new − old| in learning rates, where there were 100 changes at least. Where a move "
        "goes over several ULP it is the masters' own; were they spread over their cells, it would stay so to the "
        "right, a level line. Where it falls there, masters have not come to their cells' edges.",
        charts.lines(series, EXPONENT, Axis("mean |new − old| / learning rate", zero=True)),
    )


def distances(report: Report) -> Plot:
    """By how many ULPs changed elements moved."""
    counts = [sum(row.distances[place] for row in report.exponents) for place in range(len(report.distances))]
    total = sum(counts)
    names = [str(b) if b == a + 1 else f"≤{b}" for a, b in pairwise((0, *report.distances))]
    shares = {"changes": [(name, count / total) for name, count in zip(names, counts, strict=True) if total]}
    return Plot(
        "How far the changes go",
        "Changes by their distance in ULPs, the number of places between the old bits and the new: "
        f"{sum(counts[:1]) / max(1, total):.1%} go to the neighbouring value, for which a patch needs a direction and "
        "no new bits.",
        charts.columns(shares, "distance, ULPs; ≤8: 5 to 8", Axis("share of the changes", FRACTION, zero=True)),
    )


def recurrence(report: Report) -> Plot:
    """Whether the elements that change did so in the step before."""
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
        Axis("of the elements changed before", FRACTION, zero=True),
        dashed=["again, by exponent and chance"],
    )
    return Plot(
        "The same elements again",
        "Of the elements that changed in one step: which share changes in the next one too, and which share returns to "
        "the very bits it had before. The dashed line: what would change again by exponents and chance alone.",
        spec,
    )


def times(report: Report) -> Plot:
    """How many elements changed how often."""
    found = report.recurrence
    total = max(1, sum(found.times))
    series = {"elements": [(number, count / total) for number, count in enumerate(found.times)]}
    spec = charts.lines(
        series, Axis(f"changes in {found.steps} steps", whole=True), Axis("share of the elements", FRACTION, log=True)
    )
    return Plot(
        "How often an element changes",
        f"Elements by the number of times that they changed in {found.steps} successive steps. On the left those that "
        "never did; on the right those that change in every step, which are small weights.",
        spec if found.steps > 1 else None,
    )


def sizes(report: Report) -> Plot:
    """Bytes of a step's patch by codec, with the entropy bound."""
    names = list(dict.fromkeys(name for step in report.steps for name in step.codecs))
    series: dict[str, Points] = {
        name: [(step.target, step.codecs.get(name)) for step in report.steps] for name in names
    }
    series["entropy bound"] = [(step.target, step.bounds.total / 8) for step in report.steps]
    spec = charts.lines(series, VERSION, Axis("a patch", BYTES, zero=True), dashed=["entropy bound"])
    return Plot(
        "Bytes of a patch",
        "What is sent for a step under each codec, instead of the full weights. The dashed line is the entropy of "
        "positions and moves, with the frequencies of each exponent of each tensor known for nothing: about what a "
        "codec that knows exponents can reach.",
        spec if names else None,
    )


def bits(report: Report) -> Plot:
    """Bits a change, of the codecs and of what is known about entropies."""
    changes = sum(step.changes for step in report.steps)
    names = list(dict.fromkeys(name for step in report.steps for name in step.codecs))
    rows = [(name, "codec", 8 * _codec_bytes(report.steps, name) / max(1, changes)) for name in names]
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
        "Bits a change",
        "The bounds: what the positions of the changes cost at least, by what is known of an element (the density "
        "alone, its tensor, its exponent, or both), and what direction and distance cost on top. Knowing the exponent "
        "shrinks the positions. Above them, where codecs were tried, what these take, all included.",
        charts.lying(rows if changes else [], Axis("bits a change", zero=True)),
    )


def precisions(report: Report) -> Plot:
    """Density of the codes that receivers of other precisions would see change, over time."""
    seen = [(step.target, step.precisions) for step in report.steps if step.precisions]
    names = list(report.precisions)
    series: dict[str, Points] = {name: [(target, found[name].density) for target, found in seen] for name in names}
    spec = charts.lines(
        series, VERSION, Axis("codes changed in a step", FRACTION, log=True), dashed=[n for n in names if "/" in n]
    )
    return Plot(
        "Density in other precisions",
        "Which share of the codes a receiver would see change whose weights are cast from the stored ones. The fewer "
        "digits a format keeps, the fewer moves it shows; BF16 and F16 lie on each other mostly. Dashed: with scales. "
        "A scale that changes touches the codes of all elements under it, which makes peaks.",
        spec,
    )


def _part(name: str, depth: int) -> str:
    """A tensor's name within its layer, the numbers of experts and the like left out: mlp.experts.*.up_proj."""
    inside = re.split(rf"(?:^|\.){depth}\.", name, maxsplit=1)[-1]
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", inside).removesuffix(".weight")


def _drawn(report: Report) -> list[tuple[int, Exponent]]:
    """Exponents of the dtype that most elements have, by e; but for rare ones, and zeros with the subnormals."""
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


def _codec_bytes(steps: tuple[StepStudy, ...], name: str) -> int:
    return sum(step.codecs.get(name, 0) for step in steps)
