"""Draw GPU use by bandwidth as an SVG: python -m bench link --json > LINK; python -m bench.utilization_plot LINK OUT

U(B) = Tc / (Tc + S / B): a trainer computes for Tc seconds between two versions, and everybody waits while S bits are
sent over a link of B bit/s. Left: the setting of arXiv 2602.03839, with the two points that its authors give. Right:
ours, with sizes as `bench/link` measured them; the points next to the curves have the measured time, from publish to
proved, in place of S / B.
"""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pulse_rl.planner import utilization as use
from pulse_rl.units import bandwidth as rate

WIDTH, HEIGHT, TOP, BOTTOM, PLOT = 980, 480, 50, 330, 390  # PLOT: width of one drawing
PAPER_S, PAPER_FULL, PAPER_PATCH = 50.0, 14e9, 108e6  # seconds of compute; bytes: a 7B model in BF16, its mean patch
PAPER_POINTS = ((20e9, 0.9), (0.2e9, 0.9))  # bit/s, GPU use
OURS_S = 4.2  # a step of `make train` without its publish
DECADES = 5
COLORS = {"full": "#6b6b6b", "gap": "#d97a00", "context": "#1f5f99"}


class Curve(NamedTuple):
    words: str
    nbytes: float
    color: str
    dash: str = ""


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'


class Drawing:
    """One pair of axes: bandwidth from `lowest` bit/s over DECADES, logarithmic; GPU use from 0 to 100 %."""

    def __init__(self, left: float, lowest: float, title: str) -> None:
        self._left, self._lowest, self._explained = left, lowest, 0
        self.parts = [text(left + PLOT / 2, TOP - 22, title, more=' font-weight="bold"')]
        for share in (0, 0.25, 0.5, 0.75, 0.9, 1):
            y = self.y(share)
            self.parts.append(f'<path d="M{left} {y:.1f}h{PLOT}" stroke="#ddd"/>')
            self.parts.append(text(left - 8, y + 4, f"{share:.0%}", "end"))
        for decade in range(DECADES + 1):
            bandwidth = lowest * 10**decade
            self.parts.append(f'<path d="M{self.x(bandwidth):.1f} {BOTTOM}v5" stroke="#333"/>')
            self.parts.append(text(self.x(bandwidth), BOTTOM + 19, rate(bandwidth)))
        self.parts.append(text(left + PLOT / 2, BOTTOM + 42, "bandwidth of the link, B"))

    def x(self, bandwidth: float) -> float:
        return self._left + math.log10(bandwidth / self._lowest) / DECADES * PLOT

    def y(self, share: float) -> float:
        return BOTTOM - share * (BOTTOM - TOP)

    def curves(self, compute_s: float, curves: Iterable[Curve]) -> None:
        for curve in curves:
            steps = [self._lowest * 10 ** (DECADES * k / 200) for k in range(201)]
            line = " ".join(f"{self.x(b):.1f},{self.y(use(compute_s, 8 * curve.nbytes / b)):.1f}" for b in steps)
            style = f'fill="none" stroke="{curve.color}" stroke-width="2" stroke-dasharray="{curve.dash}"'
            self.parts.append(f'<polyline points="{line}" {style}/>')
            self._explain(f'<path d="M-14 0h28" {style}/>', curve.words)

    def points(self, points: Iterable[tuple[float, float, str]], words: str) -> None:
        """points: bandwidth, GPU use, colour."""
        for bandwidth, share, color in points:
            sign = f'<circle r="4.5" fill="{color}" stroke="white" stroke-width="1.5"/>'
            self.parts.append(f'<g transform="translate({self.x(bandwidth):.1f} {self.y(share):.1f})">{sign}</g>')
        self._explain(sign, words)

    def _explain(self, sign: str, words: str) -> None:
        x, y = self._left + 90, BOTTOM + 70 + 20 * self._explained
        self.parts.append(f'<g transform="translate({x} {y})">{sign}</g>' + text(x + 24, y + 4, words, "start"))
        self._explained += 1


def main(source: str, target: str) -> None:
    link = json.loads(Path(source).read_text())
    measured = {(r["way"], r["mbit"]): r for r in link["results"]}  # by method and bandwidth
    sizes = {name: next(r["nbytes"] for (method, _), r in measured.items() if method == name) for name in COLORS}
    smaller = sizes["gap"] / sizes["context"]

    paper = Drawing(60, 1e6, f"7B model, {PAPER_S:.0f} s of compute (arXiv 2602.03839)")
    context = f"context: {smaller:.1f} × less, extrapolated"
    paper.curves(
        PAPER_S,
        (
            Curve(context, PAPER_PATCH / smaller, COLORS["context"], "6 4"),
            Curve("the paper's patch, 108 MB", PAPER_PATCH, COLORS["gap"]),
            Curve("full checkpoint, 14 GB", PAPER_FULL, COLORS["full"]),
        ),
    )
    marks = " and ".join(f"{share:.0%} at {rate(bandwidth)}" for bandwidth, share in PAPER_POINTS)
    paper.points(((*point, "#b00040") for point in PAPER_POINTS), f"the paper's figures: {marks}")

    ours = Drawing(550, 1e5, f"SmolLM2-135M, {OURS_S:g} s of compute (this repository)")
    names = {"context": "context", "gap": "gap", "full": "full checkpoint"}
    ours.curves(OURS_S, (Curve(f"{names[m]}, {sizes[m] / 1e6:,.2f} MB", sizes[m], COLORS[m]) for m in names))
    timed = ((mbit * 1e6, use(OURS_S, r["seconds"]), COLORS[method]) for (method, mbit), r in measured.items())
    ours.points(timed, "timed, from publish to proved (full: loaded)")

    middle = (TOP + BOTTOM) / 2
    turned = f' transform="rotate(-90 16 {middle})"'
    Path(target).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#222"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f"{text(16, middle, 'GPU use, U', more=turned)}"
        f"{''.join(paper.parts)}{''.join(ours.parts)}</svg>\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
