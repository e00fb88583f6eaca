"""Kinds of charts, as Vega-Lite specifications: lines, bars, ranges, stacks and heat maps of numbers that have names.

Names of series and rows are data, in the fields `x`, `y` and `series` of a specification, never a part of it. What is
not finite is left out, and on logarithmic axes what is not positive. A line of more than POINTS numbers shows means of
neighbours.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FEW = 10  # marks of whole numbers, each of which is drawn
POINTS = 400  # of a line: more are slower to draw than any screen can show
COLORS = tuple(f"var(--c{n})" for n in range(6))
RAMP = tuple(f"var(--s{n})" for n in range(6))  # for series that are an order
BYTES = "bytes"  # a format of axes: 1.5 MB
FRACTION = ".5~p"  # likewise: 0.65%
SPACED = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 4}  # of names along x: some are left out

Points = Sequence[tuple[float, float | None]]


class Axis(NamedTuple):
    """What is told along an axis."""

    title: str  # with the unit
    form: str = ""  # d3-format, or BYTES
    log: bool = False
    zero: bool = False  # whether it begins at 0
    whole: bool = False  # whether there is nothing between whole numbers

    def encoding(self, field: str, values: Sequence[float] = ()) -> dict[str, Any]:
        """How a field is drawn along it. values: all of them, for the marks of logarithmic axes and whole numbers."""
        axis: dict[str, Any] = {"title": self.title, "labelOverlap": True, "labelSeparation": 4}
        if self.form == BYTES:
            axis["labelExpr"] = "replace(format(datum.value, '.3~s'), /([kMGT]?)$/, ' $1B')"
        elif self.form:
            axis["format"] = self.form
        if self.whole:
            axis |= {"format": "d", "tickMinStep": 1}  # which is not kept where there are few
            first, last = 0 if self.zero else math.ceil(min(values)), math.floor(max(values))
            if last - first < FEW:
                axis["values"] = list(range(first, last + 1))
        across = field == "x" and self.whole  # of versions or exponents, which fill the width
        scale: dict[str, Any] = {"zero": self.zero, "nice": not across}
        if self.log:
            marks = _marks(min(values), max(values))
            axis["values"] = marks
            scale = {"type": "log", "domain": [marks[0], marks[-1]], "nice": False}
        axis["grid"] = not across
        return {"field": field, "type": "quantitative", "axis": axis, "scale": scale}

    def tooltip(self, field: str) -> dict[str, Any]:
        form = {"format": {BYTES: ".4s"}.get(self.form, self.form)} if self.form else {}
        return {"field": field, "type": "quantitative", "title": self.title} | form


def lines(
    series: Mapping[str, Points], x: Axis, y: Axis, *, dashed: Sequence[str] = (), colors: Sequence[str] = COLORS
) -> dict[str, Any] | None:
    """A line for each series of points (x, y); None if none has two. dashed: names of what is not measured."""
    drawn = {name: kept for name, points in series.items() if (kept := _drawn(points, x, y))}
    if max(map(len, drawn.values()), default=0) < 2:
        return None
    values = [{"x": a, "y": b, "series": name} for name, points in drawn.items() for a, b in points]
    places, heights = zip(*(point for points in drawn.values() for point in points), strict=True)
    color = _color(list(drawn), colors, symbolType="stroke", symbolSize=300)
    size = 24 if max(map(len, drawn.values())) <= 60 else 8
    encoding = {
        "x": x.encoding("x", places),
        "y": y.encoding("y", heights),
        "color": color,
        "tooltip": [_name(), x.tooltip("x"), y.tooltip("y")],
    }
    if dashed:
        shapes = [[5, 4] if name in dashed else [1, 0] for name in drawn]
        encoding["strokeDash"] = color | {"scale": {"domain": list(drawn), "range": shapes}}
    mark = {"type": "line", "strokeWidth": 2, "point": {"size": size, "filled": True}}
    return _chart(values, {"mark": mark, "encoding": encoding})


def columns(shares: Mapping[str, Sequence[tuple[str, float]]], x: str, y: Axis) -> dict[str, Any] | None:
    """Upright bars side by side, one for each series at each place on x, in the order given."""
    values = [{"x": place, "y": value, "series": name} for name, bars in shares.items() for place, value in bars]
    if not values:
        return None
    places = list(dict.fromkeys(value["x"] for value in values))
    encoding = {
        "x": _places(x, places) | {"axis": {"title": x} | SPACED},
        "xOffset": {"field": "series", "sort": None},
        "y": y.encoding("y"),
        "color": _color(list(shares)),
        "tooltip": [_name(), {"field": "x", "title": x}, y.tooltip("y")],
    }
    return _chart(values, {"mark": "bar", "encoding": encoding})


def stacks(parts: Mapping[str, Points], x: Axis, y: Axis) -> dict[str, Any] | None:
    """What a whole is made of at each x: areas on each other; None if there is one x at most."""
    drawn = {name: kept for name, points in parts.items() if (kept := _drawn(points, x, y))}
    if max(map(len, drawn.values()), default=0) < 2:
        return None
    values = [{"x": a, "y": b, "series": name} for name, points in drawn.items() for a, b in points]
    encoding = {
        "x": x.encoding("x", [a for points in drawn.values() for a, _ in points]),
        "y": y.encoding("y") | {"stack": "zero"},
        "color": _color(list(drawn)),
        "order": {"field": "rank"},
        "tooltip": [_name(), x.tooltip("x"), y.tooltip("y")],
    }
    rank = {name: number for number, name in enumerate(drawn)}
    ranked = [value | {"rank": rank[str(value["series"])]} for value in values]
    mark = {"type": "area", "line": False, "point": {"size": 12, "filled": True}, "opacity": 0.8}
    return _chart(ranked, {"mark": mark, "encoding": encoding})


def ranges(rows: Sequence[tuple[str, float, float, float]], x: Axis) -> dict[str, Any] | None:
    """A bar for each (name, value, lowest, highest), lying, with a line from the lowest to the highest."""
    if not rows:
        return None
    values = [{"series": name, "x": value, "low": low, "high": high} for name, value, low, high in rows]
    y = _places(None, [row[0] for row in rows]) | {"field": "series"}
    tooltip = [
        _name(),
        x.tooltip("x"),
        *(x.tooltip(f) | {"title": t} for f, t in (("low", "lowest"), ("high", "highest"))),
    ]
    bars = {"x": x.encoding("x"), "y": y, "tooltip": tooltip}
    spread = {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "y": y, "tooltip": tooltip}
    return _chart(
        values,
        {
            "height": 34 * len(rows) + 50,
            "layer": [
                {"mark": {"type": "bar", "color": COLORS[0], "height": {"band": 0.6}}, "encoding": bars},
                {"mark": {"type": "rule", "color": "var(--ink)", "strokeWidth": 2}, "encoding": spread},
            ],
        },
    )


def lying(rows: Sequence[tuple[str, str, float]], x: Axis) -> dict[str, Any] | None:
    """A lying bar for each name, made of the parts (name, part, value) that it has."""
    if not rows:
        return None
    values = [{"y": name, "series": part, "x": value, "rank": rank} for rank, (name, part, value) in enumerate(rows)]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    encoding = {
        "x": x.encoding("x"),
        "y": _places(None, names) | {"field": "y"},
        "color": _color(list(dict.fromkeys(part for _, part, _ in rows)), **_columns(1)),
        "order": {"field": "rank"},
        "tooltip": [{"field": "y", "title": " "}, _name(), x.tooltip("x")],
    }
    return _chart(values, {"height": 30 * len(names) + 50, "mark": "bar", "encoding": encoding})


def heat(cells: Mapping[tuple[str, int], float], x: str, value: Axis) -> dict[str, Any] | None:
    """A field for each (row, column), coloured by its value."""
    if not cells:
        return None
    values = [{"series": row, "x": column, "y": number} for (row, column), number in cells.items()]
    names = list(dict.fromkeys(row for row, _ in cells))
    encoding = {
        "x": _places(x, sorted({column for _, column in cells})),
        "y": _places(None, names) | {"field": "series"},
        "color": {
            "field": "y",
            "type": "quantitative",
            "scale": {"type": "sqrt", "scheme": "viridis", "zero": True},  # one high field leaves the others apart
            "legend": {
                "title": value.title,
                "format": value.form,
                "orient": "top",
                "gradientLength": {"expr": "min(200, width - 10)"},
                "tickCount": 3,
            },
        },
        "tooltip": [_name(), {"field": "x", "title": x}, value.tooltip("y")],
    }
    return _chart(values, {"height": 26 * len(names) + 90, "mark": "rect", "encoding": encoding})


def _chart(values: list[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    finite = [
        {
            field: None if isinstance(value, float) and not math.isfinite(value) else value
            for field, value in row.items()
        }
        for row in values
    ]
    return {"data": {"values": finite}, "width": "container", "height": 280} | content


def _places(title: str | None, order: Sequence[object]) -> dict[str, Any]:
    """An axis of names, in this order."""
    axis = {"title": title, "labelLimit": 170} | (SPACED if title else {})
    return {"field": "x", "type": "ordinal", "scale": {"domain": list(order)}, "axis": axis}


def _columns(narrow: int) -> dict[str, Any]:
    """How many names of a legend stand beside each other; narrow: where the plot is as wide as a phone."""
    return {"columns": {"expr": f"containerSize()[0] < 500 ? {narrow} : 4"}}


def _color(names: list[str], colors: Sequence[str] = COLORS, **look: object) -> dict[str, Any]:
    """Of series; a legend where there are several, in as many columns as a narrow window has room for."""
    columns = _columns(2 if max(map(len, names)) < 10 else 1)
    legend = {"title": None, "orient": "top", "labelLimit": 240} | columns | look
    scale = {"domain": names, "range": [colors[number % len(colors)] for number in range(len(names))]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": legend if len(names) > 1 else None}


def _marks(low: float, high: float) -> list[float]:
    """Round numbers that a logarithmic axis from low to high is marked with, one below and one above all included.

    Powers of 10; 2 and 5 times these too, where they are few.
    """
    low, high = low * (1 + 1e-9), high * (1 - 1e-9)  # 1.0000000001 needs no mark above 1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 4 else (1,)
    marks = [float(f"{step}e{decade}") for decade in (*decades, decades.stop) for step in steps]
    first = max((place for place, mark in enumerate(marks) if mark <= low), default=0)
    last = min(place for place, mark in enumerate(marks) if mark >= high and place > first)
    return marks[first : last + 1]


def _name() -> dict[str, Any]:
    return {"field": "series", "type": "nominal", "title": " "}


def _drawn(points: Points, x: Axis, y: Axis) -> list[tuple[float, float]]:
    """The points that can be drawn, means of neighbours where they are too many."""
    kept = [
        (a, b)
        for a, b in points
        if b is not None and math.isfinite(a) and math.isfinite(b) and not (y.log and b <= 0) and not (x.log and a <= 0)
    ]
    if len(kept) <= POINTS:
        return kept
    return [tuple(group.mean(0).tolist()) for group in np.array_split(np.array(kept), POINTS)]
