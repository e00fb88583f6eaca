"""Draw the mean reward of a run as an SVG: python -m bench.curve RUN/metrics.jsonl bench/learning.svg"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, WINDOW = 640, 300, 50, 40, 10


def main(source: str, target: str) -> None:
    rewards = [json.loads(line)["reward"] for line in Path(source).read_text().splitlines()]
    smooth = [sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(rewards))]

    def x(step: float) -> float:
        return LEFT + step / len(rewards) * (WIDTH - LEFT - 10)

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - reward * (HEIGHT - BOTTOM - 20)

    dots = "".join(f'<circle cx="{x(i + 1):.1f}" cy="{y(r):.1f}" r="1.5"/>' for i, r in enumerate(rewards))
    line = " ".join(f"{x(i + 1):.1f},{y(r):.1f}" for i, r in enumerate(smooth))
    grid = "".join(
        f'<path d="M{LEFT} {y(v):.1f}H{WIDTH - 10}" stroke="#ccc"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v}</text>'
        for v in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    ticks = "".join(
        f'<text x="{x(s):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{s}</text>'
        for s in range(0, len(rewards) + 1, 25)
    )
    Path(target).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{grid}{ticks}'
        f'<g fill="#9bb8d3">{dots}</g><polyline points="{line}" fill="none" stroke="#1f5f99" stroke-width="2"/>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer step (dots: the mean reward of a '
        f"batch of 64; line: mean of {WINDOW} steps)</text></svg>\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
