"""`report.html` of a study: the results in the order in which a reader asks for them."""

from collections.abc import Sequence

from pulse_rl.html.page import Page
from pulse_rl.study.results import Report, TensorGroup, TensorStudy
from pulse_rl.study.show import plots
from pulse_rl.units import nbytes

LISTED = 10  # tensors at each end
FULL = "full weights"
Table = tuple[Sequence[str], list[list[str]]]
PRECISIONS = (
    "The stored weights are cast. If they are BF16, this is what a receiver sees that casts the published weights; if "
    "they are FP32 masters, one whose weights are cast from the masters.",
    "Masters on the BF16 grid, as in a run's first steps, often lie on midpoints between FP8 numbers, where the "
    "smallest move changes the code.",
    "A scale that changes gives other values to all its codes but 0, even where the codes stay the same.",
)


def html(report: Report) -> str:
    """The report as one HTML document that refers to nothing outside itself.

    Raises MissingExtraError without the extra `study`; before long work, check with `require("vl_convert", "study")`.
    """
    first, last = report.versions[0], report.versions[-1]
    page = Page(
        "How sparse the updates are, and why",
        f"{report.location}: {len(report.versions)} versions, {first.number} to {last.number}, of {report.elements:,} "
        f"elements ({nbytes(report.full_nbytes)}). {_settings(report)} Everything is counted on the stored bits, "
        f"except what is called predicted. All numbers are in report.json. Counted in {report.seconds:.3g} s.",
    )
    page.numbers(headline(report))
    page.points(report.notes)
    page.heading("Over time")
    page.plot(plots.sparsity(report))
    page.table("Sparsity over k steps", *spans(report))
    page.plot(plots.prediction(report))
    page.plot(plots.rate(report))
    page.heading("Where the changes are")
    page.plot(plots.kinds(report))
    page.plot(plots.kinds_over_time(report))
    page.table("By kind of layer", *groups("kind", report.kinds))
    page.plot(plots.layers(report))
    page.table("By depth", *groups("layer", report.depths), folded=True)
    filled = sorted((t for t in report.tensors if t.elements), key=lambda t: -t.density)
    page.table(f"The {min(LISTED, len(filled))} most changing tensors, by density", *_tensors(filled[:LISTED]))
    page.table(f"The {min(LISTED, len(filled))} least changing tensors, by density", *_tensors(filled[::-1][:LISTED]))
    page.heading("Why: the size of a weight decides")
    page.plot(plots.probability(report))
    page.plot(plots.population(report))
    page.plot(plots.rate_by_exponent(report))
    page.table("By exponent of the old value", *_exponents(report), folded=True)
    page.heading("What a change is")
    page.plot(plots.distances(report))
    page.plot(plots.recurrence(report))
    page.plot(plots.times(report))
    page.table("The same elements again", ("elements", "share"), _recurrence(report))
    if report.precisions:
        page.heading("What other precisions see")
        page.points(PRECISIONS)
        page.plot(plots.precisions(report))
        page.table("Codes that change in a step, by precision", *precisions(report))
    page.heading("What a patch costs")
    page.plot(plots.sizes(report))
    page.plot(plots.bits(report))
    page.table("A step's patch", *codecs(report))
    page.table("Every step", *_steps(report), folded=True)
    return page.html()


def headline(report: Report) -> list[tuple[str, str, str]]:
    """The name, value and remark of the numbers at the top."""
    one = report.spans[0].over_time
    found = [
        ("mean sparsity", f"{one.mean:.3%}", "of one step"),
        ("spread over time", f"{one.std:.3%}", "standard deviation"),
        ("lowest sparsity", f"{one.min:.3%}", "of one step"),
    ]
    longest = max((span for span in report.spans if span.k <= 8), key=lambda span: span.k)
    if longest.k > 1:
        found.append((f"sparsity, {longest.k} steps", f"{longest.over_time.mean:.3%}", f"mean of S_{longest.k}"))
    found.append((FULL, nbytes(report.full_nbytes), f"{report.elements:,} elements"))
    for name, mean in _patches(report).items():
        found.append((f"patch, {name}", nbytes(mean), f"{_times(report.full_nbytes, mean)} fewer bytes"))
    return found


def _settings(report: Report) -> str:
    if report.settings is None:
        return "No learning rate is known, so nothing is predicted."
    beta1, beta2 = report.settings.betas
    return f"Adam with learning rate {report.settings.lr:g}, betas {beta1:g} and {beta2:g}."


def _patches(report: Report) -> dict[str, float]:
    """`Report.patch_nbytes`, smallest first."""
    return dict(sorted(report.patch_nbytes.items(), key=lambda item: item[1]))


def _times(full: float, sent: float) -> str:
    if not sent:
        return "–"
    return f"{full / sent:,.0f} ×" if full / sent >= 10 else f"{full / sent:.2g} ×"


def _or_dash(value: float | None, form: str = ".3%") -> str:
    """A number, or a dash for None."""
    return "–" if value is None else format(value, form)


def spans(report: Report) -> Table:
    """The sparsity over 1, 2, 4, … steps."""
    rows = [
        [str(span.k)]
        + [f"{getattr(span.over_time, name):.4%}" for name in ("mean", "std", "min", "max")]
        + [str(len(span.bases))]
        for span in report.spans
    ]
    return ("steps", "sparsity", "spread", "lowest", "highest", "pairs"), rows


def groups(what: str, found: Sequence[TensorGroup]) -> Table:
    """The sparsity of groups of tensors. what: of which sort they are."""
    steps = list(dict.fromkeys(k for group in found for k in group.sparsity))
    columns = (what, "tensors", "elements", "density", "lowest", "highest", *(f"S_{k}" for k in steps))
    rows = [
        [group.name, f"{group.tensors:,}", f"{group.elements:,}"]
        + [f"{value:.4%}" for value in (group.density, group.min, group.max)]
        + [_or_dash(group.sparsity.get(k)) for k in steps]
        for group in found
    ]
    return columns, rows


def _tensors(tensors: Sequence[TensorStudy]) -> Table:
    columns = ("tensor", "kind", "shape", "dtype", "density", "lowest", "highest", "changes")
    rows = [
        [t.name, t.kind, " × ".join(map(str, t.shape)), t.dtype]
        + [f"{value:.4%}" for value in (t.density, t.min, t.max)]
        + [f"{t.changes:,}"]
        for t in tensors
    ]
    return columns, rows


def _exponents(report: Report) -> Table:
    columns = (
        "dtype",
        "e",
        "ULP",
        "elements, all steps",
        "changes",
        "changed",
        "predicted",
        "anywhere",
        "farthest",
        "rate",
        "up",
    )
    rows = [
        [row.dtype, _or_dash(row.exponent, "d"), _or_dash(row.ulp, ".3g"), f"{row.elements:,}", f"{row.changes:,}"]
        + [_or_dash(value, ".3%") for value in (row.probability, row.predicted, row.spread, row.highest)]
        + [_or_dash(row.rate, ".3f"), _or_dash(row.ups / row.changes if row.changes else None, ".1%")]
        for row in report.exponents
    ]
    return columns, rows


def _recurrence(report: Report) -> list[list[str]]:
    found = report.recurrence
    total, never = sum(found.times), found.times[0] if found.times else 0
    rows = [
        ["Changed in a step and again in the next", _or_dash(found.again, ".2%")],
        ["the same, by exponent and chance alone", _or_dash(found.expected_again, ".2%")],
        ["Changed in a step and back in the next", _or_dash(found.back, ".2%")],
    ]
    if total:
        changed = total - never
        steps = f"{found.steps} step{'s' * (found.steps > 1)}"
        rows += [
            [f"Never changed in {steps}", f"{never:,} ({never / total:.2%})"],
            [f"Changed in {steps}", f"{changed:,} ({changed / total:.2%})"],
            ["of these back at their first bits", f"{found.returned:,} ({found.returned / max(1, changed):.2%})"],
        ]
    return rows


def precisions(report: Report) -> Table:
    """What of a step receivers of other precisions see."""
    rows = []
    for name, seen in report.precisions.items():
        densities, scales = [one.density for one in seen], sum(one.scales for one in seen)
        by = {"tensor": "one per tensor", "row": "one per row"}.get(name.partition("/")[2], "none")
        rescaled = sum(one.rescaled for one in seen)
        rows.append(
            [name.partition("/")[0], by]
            + [f"{value:.4%}" for value in (sum(densities) / len(seen), min(densities), max(densities))]
            + [f"{rescaled / scales:.4%}" if scales else "–"]
        )
    return ("precision", "scales", "density", "lowest", "highest", "scales changed"), rows


def codecs(report: Report) -> Table:
    """What a step takes with each codec, beside the least possible and the weights themselves."""
    changes = sum(step.changes for step in report.steps) / len(report.steps)
    bound = sum(step.bounds.total for step in report.steps) / len(report.steps) / 8
    found = _patches(report) | {"entropy bound": bound, FULL: float(report.full_nbytes)}
    rows = [
        [
            name,
            nbytes(mean),
            f"{8 * mean / changes:.2f}" if changes and name != FULL else "–",
            _times(report.full_nbytes, mean),
        ]
        for name, mean in found.items()
    ]
    return ("codec", "mean bytes", "bits per change", "fewer bytes"), rows


def _steps(report: Report) -> Table:
    names = list(_patches(report))
    columns = ("from", "to", "changes", "density", "predicted", "rate", "up", "mean ULPs", "again", "back", *names)
    rows = [
        [str(step.base), str(step.target), f"{step.changes:,}", f"{step.density:.4%}"]
        + [_or_dash(step.prediction.density if step.prediction else None, ".4%"), _or_dash(step.rate, ".3f")]
        + [f"{step.ups:.1%}", f"{step.mean_distance:.2f}", _or_dash(step.again, ".1%"), _or_dash(step.back, ".1%")]
        + [nbytes(step.codecs[name]) if name in step.codecs else "–" for name in names]
        for step in report.steps
    ]
    return columns, rows
