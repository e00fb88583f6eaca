"""Draw reward against bytes sent as an SVG: python -m bench loco --json > LOCO; python -m bench.loco_plot LOCO OUT

It draws the runs of the document's first task. A line for each method: the final reward minus the first, mean and
standard deviation over the seeds, against the bytes that one trainer sent in the whole run, by H. Methods also differ
in mark and dash; colours are readable on light and on dark.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 470, 70, 790, 30, 350
LAST = 3  # evaluations that make the final reward, as in `bench loco`
STYLES = {  # colour, dash, mark
    "DDP": ("#808080", "", "M-5 -5h10v10h-10z"),
    "DDP, lr × 7": ("#808080", "", "M-6 0h12M0 -6v12"),
    "DiLoCo": ("#d97a00", "", "M0 -6L6 5H-6z"),
    "PULSELoCo": ("#3b8fd6", "", "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"),
    "published": ("#7a6fd0", "4 2", "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"),
    "published, FP16 gate": ("#2f9e77", "2 3", "M0 -6L6 0L0 6L-6 0z"),
    "without feedback": ("#c2559b", "6 4", "M-5 -5L5 5M-5 5L5 -5"),
}
OTHER = ("#9a8a40", "1 3", "M-4 -4h8v8h-8z")
LABELS = {"DiLoCo": (7, -9, "start"), "PULSELoCo": (-9, -5, "end"), "published": (4, 18, "start")}  # where H is written


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'


def point(runs: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Bytes, and mean and deviation of the gain in reward, over the seeds of one method."""
    finals = [statistics.fmean(run["rewards"][-LAST:]) - run["rewards"][0] for run in runs]
    deviation = statistics.stdev(finals) if len(finals) > 1 else 0.0
    return statistics.fmean(sum(run["sent_nbytes"]) for run in runs), statistics.fmean(finals), deviation


def main(source: str, target: str) -> None:
    points: dict[str, dict[int, list[dict[str, Any]]]] = {}
    runs = json.loads(Path(source).read_text())["runs"]
    for run in runs:
        if run["task"] != runs[0]["task"]:
            continue
        points.setdefault(run["way"]["name"], {}).setdefault(run["way"]["sync_every"], []).append(run)
    methods = {name: {h: point(runs) for h, runs in by_h.items()} for name, by_h in points.items()}
    flat = [each for by_h in methods.values() for each in by_h.values()]
    first, last = (math.floor(math.log10(min(b for b, *_ in flat))), math.ceil(math.log10(max(b for b, *_ in flat))))
    step = 0.05
    low = math.floor((min(m - d for _, m, d in flat)) / step) * step
    high = math.ceil((max(m + d for _, m, d in flat)) / step) * step

    def x(size: float) -> float:
        return LEFT + (math.log10(size) - first) / (last - first) * (RIGHT - LEFT)

    def y(reward: float) -> float:
        return BOTTOM - (reward - low) / (high - low) * (BOTTOM - TOP)

    out = []
    for k in range(round((high - low) / step) + 1):
        at = y(low + k * step)
        out.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#888" stroke-opacity="0.3"/>')
        out.append(text(LEFT - 8, at + 4, f"{low + k * step:.2f}", "end"))
    units = ("B", "kB", "MB", "GB")
    for decade in range(first, last + 1):
        at = x(10**decade)
        out.append(f'<path d="M{at:.1f} {BOTTOM}v5" stroke="#888"/>')
        out.append(text(at, BOTTOM + 19, f"{10 ** (decade % 3)} {units[decade // 3]}"))
    for row, (name, by_h) in enumerate(methods.items()):
        color, dash, mark = STYLES.get(name, OTHER)
        style = f'stroke="{color}" stroke-width="2" fill="none"'
        line = " ".join(f"{x(size):.1f},{y(mean):.1f}" for size, mean, _ in by_h.values())
        out.append(f'<polyline points="{line}" {style} stroke-dasharray="{dash}"/>')
        for h, (size, mean, deviation) in by_h.items():
            out.append(f'<path d="M{x(size):.1f} {y(mean - deviation):.1f}V{y(mean + deviation):.1f}" {style}/>')
            out.append(f'<path d="{mark}" transform="translate({x(size):.1f} {y(mean):.1f})" {style}/>')
            if h and name in LABELS:
                dx, dy, anchor = LABELS[name]
                out.append(text(x(size) + dx, y(mean) + dy, f"H = {h}", anchor, ' font-size="10"'))
        legend = f"translate({LEFT + 20 + row % 3 * 240} {BOTTOM + 75 + row // 3 * 24})"
        sign = f'<path d="M-16 0h32" {style} stroke-dasharray="{dash}"/><path d="{mark}" {style}/>'
        out.append(f'<g transform="{legend}">{sign}{text(24, 4, name, "start")}</g>')
    middle = (TOP + BOTTOM) / 2
    out.append(text((LEFT + RIGHT) / 2, BOTTOM + 42, "sent by one trainer in the whole run"))
    out.append(text(18, middle, "reward gained", more=f' transform="rotate(-90 18 {middle})"'))
    # Text takes a light colour on dark pages.
    css = "<style>text{fill:#333}@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
    Path(target).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">{css}{"".join(out)}</svg>\n'
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
