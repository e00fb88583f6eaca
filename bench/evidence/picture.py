"""The picture of docs/evidence.md: what a run kept from step to step, and what its patches took."""

from bench.evidence.keep import Run
from pulse_rl.errors import require

WIDTH, HEIGHT = 620, 130
SERIES = {
    "kept_1": ("unchanged in a step", "%", 100.0),
    "kept_8": ("unchanged in eight steps", "%", 100.0),
    "context": ("patch, context", "kB", 1e-3),
    "reward": ("reward", "", 1.0),
}


def drawn(runs: dict[str, Run]) -> str:
    """An SVG: a plot for each series, a line for each run."""
    return str(require("vl_convert", "study").vegalite_to_svg({"vconcat": [_plot(runs, column) for column in SERIES]}))


def _plot(runs: dict[str, Run], column: str) -> dict[str, object]:
    title, unit, scale = SERIES[column]
    points = [
        {"run": name, "step": row["version"], "value": scale * row[column]}
        for name, run in runs.items()
        for row in run.rows
        if column in row
    ]
    y = {"field": "value", "type": "quantitative", "title": f"{title}, {unit}".rstrip(", "), "scale": {"zero": False}}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": points},
        "mark": {"type": "line", "strokeWidth": 1},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "optimizer step"},
            "y": y,
            "color": {"field": "run", "type": "nominal"},
        },
    }
