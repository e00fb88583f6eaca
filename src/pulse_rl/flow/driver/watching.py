"""A run as a page, while it goes on and afterwards: its report, with what is only known now.

It is read from the run's directory alone: the recipe, the metrics, what the driver shows each second, and the summary
of a run that has ended. So it can be watched from any machine that has the directory, and a run knows nothing of it.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.disk import read_file
from pulse_rl.flow import directory as run_directory
from pulse_rl.flow.driver import report
from pulse_rl.flow.driver.plots import Series
from pulse_rl.flow.driver.summary import HELD, WORKER, summary
from pulse_rl.flow.metrics import METRICS, Reader
from pulse_rl.flow.recipe_file import saved
from pulse_rl.html.page import Page
from pulse_rl.units import seconds
from pulse_rl.watch.alarms import RECENT, Alarm, alarms_of_records
from pulse_rl.watch.live import Glance, HistoryLine, Paced, or_dash

NOTHING: dict[str, Any] = {  # of a run of which its driver has shown nothing yet
    "policies": {},
    "frozen": {},
    "workers": {},
    "ended": False,
    "restarts": 0,
    "tasks": {},
    "skipped": {},
    "given_up": [],
    "windows": {},
    "balance": {"sentence": "the driver has shown nothing yet"},
    "warnings": {},
}


class RunSource:
    """A run that is watched. Raises FileNotFoundError where there is none, ValueError for a recipe that is broken."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._recipe = msgspec.structs.replace(saved(directory), out=str(directory))
        self._readers = {name: Reader(self._recipe.files(name)) for name in self._recipe.policies}
        self._series = {name: Series() for name in self._readers}
        self._so_far = Paced(self._summary)
        self._files: dict[str, tuple[float, Any]] = {}  # when each was written, and what it holds
        self._going_on = False  # this and the next two are as the last look has found them
        self._result: dict[str, Any] | None = None
        self._alarms: dict[str, tuple[Alarm, ...]] = {}

    def look(self) -> Page:
        """Read what is new, and draw it."""
        for name, reader in self._readers.items():
            known = reader.look()
            if known == 0:
                self._series[name] = Series()
            for record in reader.records[known:]:
                self._series[name].add(record)
            for record in reader.records[max(0, known - RECENT) : -RECENT]:
                record["workers"] = {}  # which are drawn already, and take most of the memory
        records = {name: reader.records for name, reader in self._readers.items()}
        self._going_on = run_directory.running(self._recipe.directory)
        self._result = None if self._going_on else self._ended()
        if self._result is not None:
            return report.draw(self._result, records, self._series)
        self._alarms = {name: self._alarms_of(name) for name in self._recipe.trained}
        return report.draw(self._so_far.get(), records, self._series, self._now)

    def glance(self) -> Glance:
        """Each policy in a line, and the summary, as the last look has found it."""
        result = self._result
        state = "going on" if self._going_on else "stopped" if result is None else "ended"
        lines, shown = [], [one["facts"] for one in self._shown()["workers"].values()]
        for name in self._recipe.trained:
            newest = self._series[name].last.get("version")
            workers = shown
            if result is not None:  # what the driver has shown last is older
                workers = [{"policies": {name: one}} for one in result["policies"][name]["workers"]]
            behind = [self._behind(name, facts) for facts in workers]
            alarms = () if result is not None else self._alarms[name]
            verdict = ", ".join([state, *(alarm.name for alarm in alarms)])
            of = self.name if self._recipe.only else f"{self.name}: {name}"
            furthest = max((one for one in behind if one is not None), default=None)
            lines.append(HistoryLine(of, newest, furthest, self._age(name), verdict, alarms))
        return Glance(self.name, lines, self._so_far.get() if result is None else result)

    def _alarms_of(self, policy: str) -> tuple[Alarm, ...]:
        recent = self._readers[policy].records[-RECENT - 1 :]
        bound, age = self._recipe.policies[policy].max_staleness, self._age(policy) or 0.0
        return alarms_of_records(policy, recent, bound=bound, age_s=age, ended=not self._going_on)

    def _behind(self, policy: str, facts: Mapping[str, Any]) -> int | None:
        """How many versions a worker is behind; None where it holds none."""
        held = facts.get("policies", {}).get(policy, {}).get("version")
        newest = self._series[policy].last.get("version") if policy in self._series else None
        return None if held is None or not newest else max(0, newest - held)

    def _summary(self) -> dict[str, Any]:
        """The summary of what has come so far."""
        shown = self._shown()
        return summary(
            self._recipe,
            {name: reader.records for name, reader in self._readers.items()},
            {name: _final(name, shown) for name in self._recipe.policies},
            [_worker(name, one["facts"]) for name, one in shown["workers"].items() if one["facts"].get("policies")],
            shown,
        )

    def _shown(self) -> dict[str, Any]:
        """What the driver has shown last."""
        return self._file(run_directory.NOW) or NOTHING

    def _file(self, name: str) -> Any:
        """What a JSON file of the run holds; None without it."""
        path = self._recipe.directory / name
        try:
            written = path.stat().st_mtime
            if self._files.get(name, (0.0, None))[0] != written:
                self._files[name] = (written, json.loads(read_file(path)))
        except FileNotFoundError:
            return None
        return self._files[name][1]

    def _ended(self) -> dict[str, Any] | None:
        """The summary of a run that has ended; not one that a resumed run has made old."""
        result: dict[str, Any] | None = self._file(run_directory.SUMMARY)
        now = self._files.get(run_directory.NOW, (0.0, None))[0]
        return result if result is not None and self._files[run_directory.SUMMARY][0] >= now else None

    def _now(self, page: Page) -> None:
        """Alarms, and how trainers and workers stand."""
        shown = self._shown()
        alarms = [alarm for found in self._alarms.values() for alarm in found]
        rows = []
        for name, reader in self._readers.items():
            policy = self._recipe.policies[name]
            age = self._age(name)
            last = reader.records[-1] if reader.records else {}
            of = shown["policies"].get(name, {})
            rows.append(
                [
                    name,
                    f"{last.get('step', 0)}/{self._recipe.steps}" if policy.trained else "frozen",
                    str(last.get("version", "–")),
                    "–" if age is None else f"{seconds(age)} ago",
                    f"{last['reward']:.3f}" if last else "–",
                    f"{last['loss']:+.4f}" if last else "–",
                    str(of.get("ready", "–")),
                    str(of.get("coming", "–")),
                    str(sum(of.get("dropped", {}).values())),
                ]
            )
        dead = "the run is not going on, and has written no summary: it was killed or has crashed. Continue it with"
        stopped = [] if self._going_on else [f"{dead} pulse-rl train --resume {self.name}"]
        page.points([*stopped, *(f"{alarm.of}: {alarm.sentence}" for alarm in alarms)], alarm=True)
        page.heading("Now" if self._going_on else "When it ended")
        columns = ("policy", "step", "version", "came", "reward", "loss", "groups ready", "coming", "dropped")
        page.table("Policies", columns, rows)
        page.points([shown["balance"]["sentence"]])
        columns = ("worker", "state", "host", "tasks", "done", "failed", "holds", "behind", "last error")
        page.table(
            "Workers",
            columns,
            [self._row(name, one) for name, one in shown["workers"].items()],
        )
        now = time.time()
        page.points([f"{who}, {seconds(now - at)} ago: {text}" for who, (text, at) in shown["warnings"].items()])

    def _age(self, policy: str) -> float | None:
        """Seconds since a policy's last version."""
        try:
            return max(0.0, time.time() - (self._recipe.files(policy) / METRICS).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _row(self, name: str, worker: Mapping[str, Any]) -> list[str]:
        facts = worker["facts"]
        held = {policy: one["version"] for policy, one in facts.get("policies", {}).items()}
        behind = [one for policy in held if (one := self._behind(policy, facts)) is not None]
        return [
            name,
            "restarting" if facts.get("restarting") else "left out" if facts.get("left_out") else worker["state"],
            facts.get("host", "–"),
            f"{worker['tasks']}/{worker['slots']}",
            str(worker["done"]),
            str(worker["failed"]),
            ", ".join(f"{policy} {have}" for policy, have in held.items() if have is not None) or "–",
            or_dash(max(behind, default=None)),
            worker["error"] or "–",
        ]


def _final(policy: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """The newest version of a policy, as a run's end gives its last."""
    of = status["policies"].get(policy) or {"version": status["frozen"].get(policy), "digest": ""}
    return {"version": of["version"], "digest": of["digest"], "restarts": 0}


def _worker(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker has said last, as it says it at its end."""
    empty: dict[str, Any] = dict.fromkeys(WORKER, 0) | {"id": name, "pool": "", "left": False}
    policies = {policy: dict.fromkeys(HELD, 0) | dict(held) for policy, held in facts["policies"].items()}
    return empty | dict(facts) | {"policies": policies}
