"""Charts as Vega-Lite specifications: lines, bars, ranges, stacked areas and heat maps of numbers with names.

Names of series and rows are data, in the fields `x`, `y` and `series` of a specification, never part of its structure.
Numbers that are not finite are left out, and on logarithmic axes those that are not positive. A line of more than
POINTS numbers shows means of neighbours.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FEW = 10  # whole numbers: up to this many, each has a mark
POINTS = 400  # of a line: no screen shows more, and they are slow to draw
COLORS = tuple(f"var(--c{n})" for n in range(6))
RAMP = tuple(f"var(--s{n})" for n in range(6))  # for series that have an order
HEIGHT, LEGEND_ROW = 280, 14  # of a chart, pixels; more for each further name of a long legend
ROWS = "rows"  # the name of a chart's data, by which a live page replaces them
BYTES = "bytes"  # a format of axes: 1.5 MB
FRACTION = ".5~p"  # a format of axes: 0.65%
SPACED = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 4}  # names along x: some are left out

Points: TypeAlias = Sequence[tuple[float, float | None]] | NDArray[np.float64]  # of the latter each row is one


class ChartAxis(NamedTuple):
    """What an axis shows."""

    title: str  # with the unit
    form: str = ""  # d3-format, or BYTES
    log: bool = False
    zero: bool = False  # begins at 0
    whole: bool = False  # has whole numbers only

    def encoding(self, field: str, values: Sequence[float] = ()) -> dict[str, Any]:
        """A field's encoding. values: all of the field, for the marks of logarithmic axes and whole numbers."""
        axis: dict[str, Any] = {"title": self.title, "labelOverlap": True, "labelSeparation": 4}
        if self.form == BYTES:
            axis["labelExpr"] = "replace(format(datum.value, '.3~s'), /([kMGT]?)$/, ' $1B')"
        elif self.form:
            axis["format"] = self.form
        if self.whole:
            axis |= {"format": "d", "tickMinStep": 1}  # ignored where there are few, so those are listed
            first, last = 0 if self.zero else math.ceil(min(values)), math.floor(max(values))
            if last - first < FEW:
                axis["values"] = list(range(first, last + 1))
        across = field == "x" and self.whole  # versions or exponents, which fill the width
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
    series: Mapping[str, Points],
    x: ChartAxis,
    y: ChartAxis,
    *,
    dashed: Sequence[str] = (),
    colors: Sequence[str] = COLORS,
) -> dict[str, Any] | None:
    """A line for each series of points (x, y); None if none has two points. dashed: names of series not measured."""
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


def columns(shares: Mapping[str, Sequence[tuple[str, float]]], x: str, y: ChartAxis) -> dict[str, Any] | None:
    """Upright bars side by side, one per series at each place on x, in the order given; None without any."""
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
    return _chart(_finite(values), {"mark": "bar", "encoding": encoding})


def stacks(parts: Mapping[str, Points], x: ChartAxis, y: ChartAxis) -> dict[str, Any] | None:
    """The parts of a whole at each x, as stacked areas; None unless one part has two points."""
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


def ranges(rows: Sequence[tuple[str, float, float, float]], x: ChartAxis) -> dict[str, Any] | None:
    """A horizontal bar for each (name, value, lowest, highest), with a line from the lowest to the highest."""
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
        _finite(values),
        {
            "height": 34 * len(rows) + 50,
            "layer": [
                {"mark": {"type": "bar", "color": COLORS[0], "height": {"band": 0.6}}, "encoding": bars},
                {"mark": {"type": "rule", "color": "var(--ink)", "strokeWidth": 2}, "encoding": spread},
            ],
        },
    )


def stacked_bars(rows: Sequence[tuple[str, str, float]], x: ChartAxis) -> dict[str, Any] | None:
    """A horizontal bar for each name, stacked of its parts (name, part, value)."""
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
    return _chart(_finite(values), {"height": 30 * len(names) + 50, "mark": "bar", "encoding": encoding})


def heat(cells: Mapping[tuple[str, int], float], x: str, value: ChartAxis) -> dict[str, Any] | None:
    """A cell for each (row, column), coloured by its value."""
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
            "scale": {
                "type": "sqrt",
                "scheme": "viridis",
                "zero": True,
            },  # a square root, so that the others still differ where one cell is high
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
    return _chart(_finite(values), {"height": 26 * len(names) + 90, "mark": "rect", "encoding": encoding})


def _chart(values: list[dict[str, Any]], content: dict[str, Any]) -> dict[str, Any]:
    names = len(dict.fromkeys(row.get("series") for row in values))
    height = HEIGHT + LEGEND_ROW * max(0, names - 4)  # a long legend must not take the plot's room
    return {"data": {"name": ROWS, "values": values}, "width": "container", "height": height} | content


def _finite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with nothing in place of numbers that JSON has not."""
    return [
        {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}
        for row in rows
    ]


def _places(title: str | None, order: Sequence[object]) -> dict[str, Any]:
    """An axis of names, in this order."""
    axis = {"title": title, "labelLimit": 170} | (SPACED if title else {})
    return {"field": "x", "type": "ordinal", "scale": {"domain": list(order)}, "axis": axis}


def _columns(narrow: int) -> dict[str, Any]:
    """Names in a row of a legend: 4, or `narrow` where the plot is as wide as a phone."""
    return {"columns": {"expr": f"containerSize()[0] < 500 ? {narrow} : 4"}}


def _color(names: list[str], colors: Sequence[str] = COLORS, **look: object) -> dict[str, Any]:
    """The colours of series; with several, a legend in as many columns as fit into a narrow window."""
    columns = _columns(2 if max(map(len, names)) < 10 else 1)
    legend = {"title": None, "orient": "top", "labelLimit": 240} | columns | look
    scale = {"domain": names, "range": [colors[number % len(colors)] for number in range(len(names))]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": legend if len(names) > 1 else None}


def _marks(low: float, high: float) -> list[float]:
    """The marks of a logarithmic axis: round numbers from one at or below low to one at or above high.

    Powers of 10; also 2 and 5 times these where they are few.
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


def _drawn(points: Points, x: ChartAxis, y: ChartAxis) -> list[tuple[float, float]]:
    """The points that can be drawn; means of neighbours if there are too many."""
    kept = np.asarray(points, np.float64).reshape(-1, 2)
    drawable = np.isfinite(kept).all(1)
    for at, axis in enumerate((x, y)):
        if axis.log:
            drawable &= kept[:, at] > 0
    kept = kept[drawable]
    if len(kept) > POINTS:
        edges = np.linspace(0, len(kept), POINTS + 1).astype(int)
        kept = np.add.reduceat(kept, edges[:-1]) / np.diff(edges)[:, None]
    return [(a, b) for a, b in kept.tolist()]
