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
from functools import cache
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from pulse_rl.errors import require
from pulse_rl.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data:"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"  # 'unsafe-eval': Vega compiles its expressions
STYLE, SCRIPT = ((resources.files("pulse_rl.html") / name).read_text() for name in ("page.css", "page.js"))
BAR = (
    '<div class="bar"><span id="state" role="status">connecting</span> '
    '<button id="hold" type="button">Pause</button></div>\n'
)
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


class PageBlock(NamedTuple):
    """A part of a page: one element, and the chart in it."""

    html: str
    spec: dict[str, Any] | None = None


class Page:
    """A report: its parts are shown in the order in which they are added. All text is plain text, not HTML."""

    def __init__(self, title: str, about: str) -> None:
        self.title = title
        self.blocks = [PageBlock(f"<h1>{escape(title)}</h1>"), PageBlock(f'<p class="faint">{escape(about)}</p>')]

    def heading(self, words: str) -> None:
        self.blocks.append(PageBlock(f"<h2>{escape(words)}</h2>"))

    def points(self, words: Sequence[str], *, alarm: bool = False) -> None:
        """A list of sentences; nothing if it is empty. alarm: of what deserves a look."""
        if words:
            items = "".join(f"<li>{escape(one)}</li>" for one in words)
            self.blocks.append(PageBlock(f"<ul{' class=alarm' if alarm else ''}>{items}</ul>"))

    def numbers(self, found: Sequence[tuple[str, str, str]]) -> None:
        """The headline: the name, value and remark of each number."""
        boxes = (
            f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="faint">{note}</dd></div>'
            for name, value, note in (map(escape, one) for one in found)
        )
        rows = -(-len(found) // CARDS)
        columns = -(-len(found) // rows) if rows else 1  # rows of the same length, but for the last
        self.blocks.append(PageBlock(f'<dl class="of-{columns}">{"".join(boxes)}</dl>'))

    def plot(self, plot: Plot) -> None:
        """A chart with its caption; nothing if there is nothing to draw."""
        if plot.spec is not None:
            html = (
                f'<figure><h3>{escape(plot.title)}</h3><div class="plot"></div>'
                f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
            )
            self.blocks.append(PageBlock(html, plot.spec))

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
        self.blocks.append(PageBlock(table))

    def html(self, *, live: bool = False) -> str:
        """The document. live: it follows the events of the server that it comes from.

        Raises MissingExtraError without the extra `study`.
        """
        script = _bundle(require("vl_convert", "study"))
        specs = [block.spec for block in self.blocks if block.spec is not None]
        plots = {"live": live, "config": CONFIG, "specs": specs}
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{LIVE_POLICY if live else POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + (BAR if live else "")
            + "<main>\n"
            + "\n".join(block.html for block in self.blocks)
            + "\n</main>\n<footer>\n<noscript><p>The scripts in this file draw the plots; they are switched off. All "
            f'numbers are in the tables.</p></noscript>\n<p class="faint">pulse-rl {__version__}. Plots: Vega-Lite, '
            "BSD-3-Clause, University of Washington Interactive Data Lab.</p>\n</footer>\n"
            f'<script type="application/json" id="plots">{_json(plots)}</script>\n'
            # Our script and the library's: it holds no other text, and only this could end the element.
             + "<script>" + script.replace("</script", "<\\/script") + "</script>\n</body>\n</html>\n"
        )


@cache
def _bundle(library: Any) -> str:
    """Our script with the library that draws, which takes a second to put together."""
    script: str = library.javascript_bundle(SCRIPT)
    return script


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
