"""A report as one HTML file that needs nothing else: headline numbers, plots, tables, light and dark, wide and narrow.

Plots are Vega-Lite specifications, drawn in the reader's browser as SVG. Their colours are the page's CSS variables, so
they follow the reader's light or dark scheme; they fit the width of the window and show values under the pointer. The
libraries that draw them come from `vl-convert-python` (extra `study`) and are written into the page, 0.9 MB. The
page's content security policy forbids every request: opening a page contacts nobody.

A table that is wider than the window scrolls sideways under its first column, which stays. A shadow at its right edge
and a line below it show that there are more columns.

Text is hostile: names of tensors, files and workers come from outside. All text passes `escape`, all data `_json`, and
neither can end its element; a specification takes names as data only, never as fields or expressions.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from pulse_rl.errors import require
from pulse_rl.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"
DRAW = """
for (const table of document.querySelectorAll(".table")) {
  const inner = table.querySelector(".scroll");
  const update = () =>
    table.classList.toggle("more", inner.scrollLeft + inner.clientWidth + 1 < inner.scrollWidth);
  inner.addEventListener("scroll", update, {passive: true});
  new ResizeObserver(update).observe(inner);  // also when the table is unfolded
}
const plots = JSON.parse(document.getElementById("plots").textContent);
const options = {mode: "vega-lite", renderer: "svg", actions: false, config: plots.config,
                 tooltip: {disableDefaultStyle: true}};
plots.specs.forEach((spec, number) => vegaEmbed("#plot-" + number, spec, options));
"""  # 'unsafe-eval' in the policy: Vega compiles its expressions
STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --ink: #1c1f23; --faint: #5d6670; --line: #dcdfe3;
  --shade: #1c1f2338;
  --c0: #2268b2; --c1: #cc5f10; --c2: #23875a; --c3: #7d52bd; --c4: #bf3350; --c5: #0e8893;
  --s0: #0d3c71; --s1: #1f5f99; --s2: #3a84c4; --s3: #4fa3b8; --s4: #5fb08f; --s5: #a0a53c; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --card: #1d2126; --ink: #e7e9ec; --faint: #a0a9b3; --line: #363c44;
    --shade: #00000099;
    --c0: #69a9ea; --c1: #f0964f; --c2: #5fc795; --c3: #b596ea; --c4: #f07b92; --c5: #52c3cd;
    --s0: #cfe4fb; --s1: #9cc9f5; --s2: #69a9ea; --s3: #52b5c3; --s4: #5fc795; --s5: #c9cc62; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-top: 1px solid var(--line); padding-top: 1.4rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p, ul { margin: .4rem 0 .8rem; }
.faint, figcaption, dt { color: var(--faint); font-size: .9rem; }
figcaption { margin-top: .6rem; }
figure, .table, dl > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure { margin: 1rem 0; padding: 1rem; }
dl { display: grid; gap: .7rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(max(9.2rem, 100% / var(--columns) - .7rem), 1fr)); }
dl > div { padding: .7rem .9rem; }
dd { margin: 0; }
dd.value { font-size: 1.35rem; font-weight: 600; overflow-wrap: normal; }
.of-1 { --columns: 1; } .of-2 { --columns: 2; } .of-3 { --columns: 3; }
.of-4 { --columns: 4; } .of-5 { --columns: 5; } .of-6 { --columns: 6; }
.plot { width: 100%; min-width: 0; display: block !important; }
.plot svg { display: block; }
.table { margin: 1rem 0; position: relative; overflow: hidden; }
.scroll { overflow-x: auto; }
.table.more::after { content: ""; position: absolute; top: 0; bottom: 0; right: 0; width: 1.4rem; pointer-events: none;
  background: linear-gradient(to left, var(--shade), transparent); }
.title, .hint { position: relative; z-index: 1; background: var(--card); color: var(--faint); font-size: .88rem; }
.title { padding: .7rem .6rem .3rem; }
.hint { display: none; margin: 0; padding: .3rem .6rem; border-top: 1px solid var(--line); text-align: right; }
.table.more .hint { display: block; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
.words { text-align: left; }
.scroll :is(th, td):first-child { position: sticky; left: 0; background: var(--card); }
.more :is(th, td):first-child { border-right: 1px solid var(--line); }
@media (max-width: 40rem) {
  .words:first-child span { display: block; width: max-content; max-width: 40vw; white-space: normal; } }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--c0); }
#vg-tooltip-element { visibility: hidden; position: fixed; z-index: 9; padding: .4rem .6rem; font-size: .8rem;
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; pointer-events: none;
  max-width: min(22rem, 90vw); overflow-wrap: anywhere; }
#vg-tooltip-element.visible { visibility: visible; }
#vg-tooltip-element table { width: auto; }
#vg-tooltip-element td { border: 0; padding: 0 .3rem; white-space: normal; text-align: left; }
#vg-tooltip-element td.key { color: var(--faint); overflow-wrap: normal; }
"""
CARDS = 6  # of numbers in a row, at most
CONFIG = {  # of every plot: the page's colours, which change with its scheme
    "background": None,
    "font": "system-ui, sans-serif",
    "autosize": {"type": "fit", "contains": "padding"},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--faint)",
        "titleColor": "var(--faint)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
    },
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--faint)",
        "labelFontSize": 12,
        "titleFontWeight": "normal",
    },
}


class Plot(NamedTuple):
    """A chart with its title and caption."""

    title: str
    caption: str  # what it shows, and why that matters
    spec: dict[str, Any] | None  # Vega-Lite; None if there is nothing to draw


class Page:
    """A report: its parts are shown in the order in which they are added. All text is plain text, not HTML."""

    def __init__(self, title: str, about: str) -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="faint">{escape(about)}</p>']
        self._specs: list[dict[str, Any]] = []

    def heading(self, words: str) -> None:
        self._parts.append(f"<h2>{escape(words)}</h2>")

    def points(self, words: Sequence[str]) -> None:
        """A list of sentences; nothing if it is empty."""
        if words:
            self._parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in words) + "</ul>")

    def numbers(self, found: Sequence[tuple[str, str, str]]) -> None:
        """The headline: the name, value and remark of each number."""
        boxes = (
            f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="faint">{note}</dd></div>'
            for name, value, note in (map(escape, one) for one in found)
        )
        rows = -(-len(found) // CARDS)
        columns = -(-len(found) // rows) if rows else 1  # rows of the same length, but for the last
        self._parts.append(f'<dl class="of-{columns}">{"".join(boxes)}</dl>')

    def plot(self, plot: Plot) -> None:
        """A chart with its caption; nothing if there is nothing to draw."""
        if plot.spec is None:
            return
        self._parts.append(
            f'<figure><h3>{escape(plot.title)}</h3><div class="plot" id="plot-{len(self._specs)}"></div>'
            f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        )
        self._specs.append(plot.spec)

    def table(
        self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False
    ) -> None:
        """A table with columns of numbers right-aligned. folded: shown only after a click on its caption."""
        words = [not all(_numeric(row[place]) for row in rows) for place in range(len(columns))]
        lines = [_row("th", columns, words), *(_row("td", row, words) for row in rows)]
        title = escape(caption)
        table = (
            ("" if folded else f'<div class="title">{title}</div>')
            + f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
            + f"<table>{''.join(lines)}</table></div>"
            + '<p class="hint">more columns: scroll sideways →</p>'
        )
        table = f'<div class="table">{table}</div>'
        if folded:
            table = f"<details><summary>{title}</summary>{table}</details>"
        self._parts.append(table)

    def html(self) -> str:
        """The document. Raises MissingExtraError without the extra `study`."""
        script: str = require("vl_convert", "study").javascript_bundle(DRAW)
        plots = {"config": CONFIG, "specs": self._specs}
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            + "\n".join(self._parts)
            + "\n<noscript><p>The scripts in this file draw the plots; they are switched off. All numbers are in "
            f'the tables.</p></noscript>\n<p class="faint">pulse-rl {__version__}. Plots: Vega-Lite, BSD-3-Clause, '
            "University of Washington Interactive Data Lab.</p>\n</main>\n"
            f'<script type="application/json" id="plots">{_json(plots)}</script>\n'
            # Our script and the library's: it holds no other text, and only this could end the element.
             + "<script>" + script.replace("</script", "<\\/script") + "</script>\n</body>\n</html>\n"
        )


def _numeric(cell: str) -> bool:
    return cell[:1] in "0123456789+-–" or cell in ("nan", "inf")  # an empty cell too


def _row(tag: str, cells: Sequence[str], words: Sequence[bool]) -> str:
    """A row. words: whether each column is words, which are left-aligned, and wrap in the first column if need be."""
    texts = [
        f' class="words"><span>{escape(c)}</span>' if w else f">{escape(c)}" for c, w in zip(cells, words, strict=True)
    ]
    return "<tr>" + "".join(f"<{tag}{text}</{tag}>" for text in texts) + "</tr>"


def _json(document: object) -> str:
    """JSON in which no HTML parser finds a tag or a comment."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
