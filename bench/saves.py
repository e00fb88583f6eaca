"""Writes the numbers of docs/saves.md: the table, by `pulse_rl.plan`, and what the page's script calculates with.

    python -m bench.saves

The script, docs/javascripts/saves.js, has the planner's formulas again, since a page has no Python; a test compares
them in a browser.
"""

import json
from pathlib import Path

from pulse_rl import plan
from pulse_rl.planner import RATES
from pulse_rl.units import bandwidth as bandwidth_text
from pulse_rl.units import seconds

PAGE = Path(__file__).parents[1] / "docs" / "saves.md"
BEGIN, END = "<!-- begin: written by python -m bench.saves -->\n", "<!-- end -->\n"
DENSITY, THREADS, RANKS = 0.006, 16, 8
RELOAD_S = 0.161 / 269_060_520  # per byte: the pause of a reload from the page cache, measured
PAUSE_S, CHANGE_S = 0.006, 3.55e-9  # of an update, and more per change: between its two measured points
MODELS = {
    "0.1B": 134_515_008,
    "1.5B": 1_500_000_000,
    "7B": 7_000_000_000,
    "32B": 32_000_000_000,
    "106B, mixture of experts": 106_000_000_000,
    "235B, mixture of experts": 235_000_000_000,
    "1T, mixture of experts": 1_000_000_000_000,
}
LINKS = (1e7, 1e8, 1e9, 1e10, 1e11, 4e11)
MEASURED = {  # seconds from publish to proved by two workers: docs/measurements.md, "A narrow link"
    ("0.1B", 1e7): ("228 s", "", "710 ms", "510 ms"),
    ("0.1B", 1e8): ("24.7 s", "", "220 ms", "220 ms"),
}


def row(params: int, link: float) -> list[str]:
    """Seconds from publish to serving: a full reload, a broadcast, the paper's codec, and ours."""
    full, gap, context, _ = plan(params=params, density=DENSITY, bandwidth=link, compute_s=1.0).weights
    reload_s = RELOAD_S * full.nbytes / RANKS
    pause = PAUSE_S + CHANGE_S * DENSITY * params / RANKS
    patches = [one.seconds + one.coding_seconds / THREADS + pause for one in (gap, context)]
    return [seconds(one) for one in (full.seconds + reload_s, full.seconds, patches[0], min(patches))]


def written() -> str:
    """What stands in the page between the two marks."""
    inputs = {
        "rates": {name: [*rates] if rates.positions < 1e9 else [None, *rates[1:]] for name, rates in RATES.items()},
        "reload": RELOAD_S,
        "pause": PAUSE_S,
        "change": CHANGE_S,
    }
    lines = [
        f"<div id=\"saves\" data-inputs='{json.dumps(inputs)}'></div>",
        "",
        "| model | link | full reload | NCCL broadcast | the paper's codec | ours |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, params in MODELS.items():
        for link in LINKS:
            cells = row(params, link)
            measured = MEASURED.get((name, link), ("",) * len(cells))
            texts = [
                f"**{real}** (calculated {cell})" if real else cell for cell, real in zip(cells, measured, strict=True)
            ]
            lines.append(f"| {name} | {bandwidth_text(link)} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written()}\n{END}{rest.partition(END)[2]}")
