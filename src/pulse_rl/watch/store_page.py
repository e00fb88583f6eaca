"""A store as a page: its versions as they come, who follows them and how far behind, what is wrong.

A look at everything is `pulse_rl.status`, which lists the store. Where that costs much, as of many thousands of
versions, the looks between read the newest version alone.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pulse_rl import History, Status, status
from pulse_rl.html import charts
from pulse_rl.html.charts import BYTES, FRACTION, ChartAxis
from pulse_rl.html.page import Page, Plot
from pulse_rl.units import nbytes, seconds
from pulse_rl.watch.alarms import alarms_of_status
from pulse_rl.watch.live import Glance, HistoryLine, Paced, or_dash
from pulse_rl.watch.measurements import run_name

DRAWN = 10_000  # versions
NUMBER = ChartAxis("sequence number of the version", whole=True)


class StoreSource:
    """A store that is watched. max_lag: how many versions a subscriber may be behind; None for any number."""

    def __init__(self, url: str, *, max_lag: int | None = None) -> None:
        self.name = run_name(url)
        self._max_lag = max_lag
        self._history = History(url, patience=0)
        self._info: Status | None = None
        self._all = Paced(lambda: status(url, max_lag=max_lag))
        self._sizes = deque[tuple[float, float]](maxlen=DRAWN)  # of each version: its sequence number, and bytes
        self._densities = deque[tuple[float, float]](maxlen=DRAWN)

    def look(self) -> Page:
        """Read what is new, and draw it."""
        made, info = self._all.made, self._all.get()
        if made == self._all.made and self._info is not None:
            info = self._with_newest(self._info)
        last = self._info
        if last is not None and (info.history != last.history or info.sequence < last.sequence):
            self._sizes.clear()
            self._densities.clear()
        self._add(info)
        self._info = info
        return self._draw(info)

    def glance(self) -> Glance:
        """The store in a line, and its status, as the last look has found it."""
        info = self._info
        if info is None:
            raise ValueError("expected a look before a glance")
        held = [one.lag for one in info.subscribers or () if one.lag is not None]
        alarms = alarms_of_status(info, max_lag=self._max_lag)
        age = max(0.0, time.time() - info.created)
        line = HistoryLine(self.name, info.newest, max(held, default=None), age, info.verdict, alarms)
        return Glance(self.name, [line], info)

    def _with_newest(self, info: Status) -> Status:
        """What is known, with the newest version."""
        head = self._history.head()
        if head is None or (head.history, head.sequence) == (info.history, info.sequence):
            return info
        ahead, patch, recent = head.sequence - info.sequence, head.patch, info.recent
        return msgspec.structs.replace(
            info,
            newest=head.version,
            sequence=head.sequence,
            anchor_sequence=head.anchor_sequence,
            listing=msgspec.structs.replace(info.listing, age_s=0.0) if info.listing else None,  # it came just now
            ended=False,
            versions=info.versions + ahead,
            created=head.created,
            digest=head.digest,
            history=head.history,
            metadata=head.metadata,
            nonfinite=head.nonfinite,
            density=head.density,
            views=head.view_infos,
            recent=msgspec.structs.replace(recent, sizes=(patch.total_nbytes,)) if recent and patch else recent,
        )

    def _add(self, info: Status) -> None:
        known = self._sizes[-1][0] if self._sizes else -1
        sizes = info.recent.sizes if info.recent else ()
        first = info.sequence - len(sizes) + 1
        self._sizes += [(at, size) for at, size in enumerate(sizes, first) if at > known]
        if info.density is not None and (not self._densities or self._densities[-1][0] < info.sequence):
            self._densities.append((info.sequence, info.density))

    def _draw(self, info: Status) -> Page:
        ended = "; its run has ended" if info.ended else ""
        page = Page(f"The store {self.name}", f"{info.versions:,} versions of {nbytes(info.full_nbytes)}{ended}.")
        (line,) = self.glance().lines
        page.points([*(alarm.sentence for alarm in line.alarms), *info.problems], alarm=True)
        recent, listing = info.recent, info.listing
        page.numbers(
            [
                ("newest version", f"{info.newest:,}", f"{seconds(line.age_s or 0.0)} ago, by the publisher's clock"),
                ("changed", f"{info.density:.3%}" if info.density is not None else "–", "of its elements"),
                ("bytes of a patch", nbytes(recent.patch_nbytes) if recent else "–", "median of the last versions"),
                ("reduction", f"{recent.reduction:,.0f} ×" if recent else "–", "fewer bytes than full weights"),
                ("furthest behind", or_dash(line.behind), f"versions, of {len(info.subscribers or ())} subscribers"),
                ("verdict", info.verdict, "of the store and its subscribers"),
            ]
        )
        page.plot(
            Plot(
                "Bytes of a patch",
                f"What a worker fetches for one version, instead of {nbytes(info.full_nbytes)}. Of versions before the "
                "page was opened, the last ones.",
                charts.lines({"patch": self._sizes}, NUMBER, ChartAxis("a patch", BYTES, zero=True)),
            )
        )
        page.plot(
            Plot(
                "Density",
                "The share of the elements whose bits changed, of the versions that came while this was watched.",
                charts.lines({"density": self._densities}, NUMBER, ChartAxis("changed elements", FRACTION, zero=True)),
            )
        )
        if info.views:
            views_table(page, map(msgspec.structs.asdict, info.views))
        if info.subscribers:
            page.table(
                f"Subscribers, read {seconds(max(0.0, time.time() - self._all.made))} ago",
                (
                    "subscriber",
                    "verdict",
                    "version",
                    "behind",
                    "for",
                    "last seen",
                    "last sync",
                    "fetched",
                    "host",
                    "error",
                ),
                [
                    [
                        one.id,
                        one.verdict,
                        or_dash(one.version),
                        or_dash(one.lag),
                        seconds(one.lag_s) if one.lag_s is not None else "–",
                        f"{seconds(max(0.0, self._all.made - one.seen))} ago",
                        seconds(one.sync_s) if one.sync_s is not None else "–",
                        nbytes(one.fetched_nbytes) if one.fetched_nbytes is not None else "–",
                        one.host or "–",
                        one.unreadable or one.error or "–",
                    ]
                    for one in sorted(info.subscribers, key=lambda one: -(one.lag or 0))
                ],
            )
        if listing is not None:
            folders = ("manifests", "patches", "anchors", "trails", "unnamed", "partial")
            found = [(folder, getattr(listing, folder)) for folder in folders]
            rows = [[name, f"{total.count:,}", nbytes(total.nbytes)] for name, total in found]
            page.table("In the store", ("", "objects", "bytes"), rows, folded=True)
        return page


def views_table(page: Page, views: Iterable[Mapping[str, Any]]) -> None:
    """Add a table of a version's views. views: each as the fields of a ViewInfo; it may have no patch."""
    found = [(one["name"], one["form"], nbytes(one["full_nbytes"]), one["patch_nbytes"]) for one in views]
    rows = [[*about, nbytes(patch) if patch else "–"] for *about, patch in found]
    page.table("Views of the newest version", ("view", "form", "bytes", "of its patch"), rows)
