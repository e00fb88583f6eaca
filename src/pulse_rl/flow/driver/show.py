"""What a person sees of a run of a recipe, on stderr: live tables on a terminal, elsewhere one line per step."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pulse_rl.errors import printable
from pulse_rl.rl.display import Screen, exchange
from pulse_rl.units import nbytes

# Columns of the table of policies; those about several trainers are between them.
_HEAD = ("policy", "step", "version", "reward", "loss", "patch", "of")
_TAIL = ("ready", "coming", "dropped", "waits")


class Display(Screen):
    """The policies and workers of a run, as they change."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__(title, steps)
        self._last: dict[str, Mapping[str, Any]] = {}  # the newest record of each policy

    def update(self, records: list[dict[str, Any]], status: Mapping[str, Any], board: Mapping[str, Any]) -> None:
        """records: of steps since the last call, each with its `policy`. status, board: the Dataflow's."""
        for record in records:
            self._last[record["policy"]] = record
            if self._live is None:
                self.log(self._line(record))
        if self._live is not None:
            self._live.update(
                Group(self._policies(status), self._workers(status, board), Text(status["balance"]["sentence"]))
            )

    def _line(self, record: Mapping[str, Any]) -> str:
        seconds = f"{record['total_s']:.1f} s ({record['wait_s']:.1f} waiting)"
        return (
            f"{record['policy']} {record['step']}/{self._steps}  reward {record['reward']:.3f}  "
            f"loss {record['loss']:+.4f}  staleness {record['staleness']:.2f}  density {record['density']:.3%}  "
            f"patch {nbytes(record['patch_nbytes'])} of {nbytes(record['full_nbytes'])}  "
            + "".join(f"{name} {text}  " for name, text in exchange(record).items())
            + seconds
        )

    def _policies(self, status: Mapping[str, Any]) -> Table:
        exchanged = {name: found for name, last in self._last.items() if (found := exchange(last))}
        between = tuple(next(iter(exchanged.values()), ()))  # columns about several trainers, where a policy has them
        columns = (*_HEAD, *between, *_TAIL)
        table = _table(columns, self._title)
        for name, policy in status["policies"].items():
            last = self._last.get(name)
            table.add_row(
                name,
                f"{policy['step']}/{self._steps}",
                _text(policy["version"]),
                *([f"{last['reward']:.3f}", f"{last['loss']:+.4f}"] if last else ["", ""]),
                *([nbytes(last["patch_nbytes"]), nbytes(last["full_nbytes"])] if last else ["", ""]),
                *(exchanged.get(name, {}).get(column, "") for column in between),
                str(policy["ready"]),
                str(policy["coming"]),
                str(sum(policy["dropped"].values())),
                f"{status['balance']['waits'].get(name, 0):.0%}",
            )
        for name, version in status["frozen"].items():
            table.add_row(name, "frozen", _text(version), *[""] * (len(columns) - 3))
        return table

    def _workers(self, status: Mapping[str, Any], board: Mapping[str, Any]) -> Table:
        table = _table(("worker", "kind", "region", "state", "pid", "tasks", "done", "failed", "holds", "proof"))
        newest = {name: policy["version"] for name, policy in status["policies"].items()} | dict(status["frozen"])
        for name, worker in sorted(status["workers"].items()):
            facts = board.get(name, {})
            held = facts.get("policies", {})
            proved = bool(held) and all(each["verified"] for each in held.values())
            table.add_row(
                name,
                worker["kind"],
                worker["region"],
                "restarting" if facts.get("restarting") else worker["state"] if held else "starting",
                _text(facts.get("pid")),
                f"{worker['tasks']}/{worker['slots']}",
                str(worker["done"]),
                str(worker["failed"]),
                ", ".join(f"{policy} {_text(each['version'])}/{newest[policy]}" for policy, each in held.items()),
                Text("✓ proved", "green") if proved else Text("not yet", "yellow"),
            )
        return table


def _table(columns: tuple[str, ...], title: str | None = None) -> Table:
    table = Table(title=Text(printable(title)) if title else None, title_justify="left", expand=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _text(value: Any) -> str:
    return "" if value is None else str(value)
