"""What a person sees of a run, on stderr: one line per step, and on a terminal live tables below them."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pulse_rl.errors import printable
from pulse_rl.flow.data.board import workers
from pulse_rl.units import nbytes

# Columns of the table of policies; those about several trainers are between them.
_HEAD = ("policy", "step", "version", "reward", "loss", "patch")
_TAIL = ("ready", "coming", "dropped", "waits")
LEGEND = "groups ready for a batch, coming from workers, dropped; share of time waited for them"


class Display:
    """The policies and workers of a run, as they change. A context manager.

    title: of the run. steps: of each policy.
    """

    def __init__(self, title: str, steps: int) -> None:
        self._console = Console(stderr=True)
        self._title = title
        self._steps = steps
        self._live: Live | None = None
        self._last: dict[str, Mapping[str, Any]] = {}  # the newest record of each policy

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)

    def log(self, message: str) -> None:
        """Show one line."""
        self._console.print(printable(message), highlight=False, markup=False, soft_wrap=True)

    def update(self, records: list[dict[str, Any]], status: Mapping[str, Any], board: Mapping[str, Any]) -> None:
        """records: of steps since the last call, each with its `policy`. status, board: the Dataflow's."""
        only = len(status["policies"]) == 1 and not status["frozen"]
        for record in records:
            self._last[record["policy"]] = record
            self.log("  ".join([*self._parts(record, only=only), *(_held(board, record["policy"]) if only else [])]))
        if self._live is not None:
            shown: list[RenderableType] = [self._policies(status)]
            if status["workers"]:  # at the end all have left
                shown += [
                    Text(LEGEND, "dim"),
                    Text(),
                    self._workers(status, board),
                    Text(status["balance"]["sentence"]),
                ]
            self._live.update(Group(*shown))

    def _parts(self, record: Mapping[str, Any], *, only: bool) -> list[str]:
        """The columns of a step's line. only: whether there is no other policy."""
        return [
            f"{'step' if only else record['policy']} {record['step']}/{self._steps}",
            f"reward {record['reward']:.3f}",
            f"loss {record['loss']:+.4f}",
            f"staleness {record['staleness']:.2f}",
            f"density {record['density']:.3%}",
            f"patch {nbytes(record['patch_nbytes'])} of {nbytes(record['full_nbytes'])}",
            f"{record['reduction']:.0f}×",
            *(f"{name} {text}" for name, text in _exchange(record).items()),
            f"{record['total_s']:.1f} s ({record['wait_s']:.1f} waiting)",
        ]

    def _policies(self, status: Mapping[str, Any]) -> Table:
        exchanged = {name: found for name, last in self._last.items() if (found := _exchange(last))}
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
                nbytes(last["patch_nbytes"]) if last else "",
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
                worker["state"] if held else _waiting(facts),
                _text(facts.get("pid")),
                f"{worker['tasks']}/{worker['slots']}",
                str(worker["done"]),
                str(worker["failed"]),
                ", ".join(f"{policy} {_text(each['version'])}/{newest[policy]}" for policy, each in held.items()),
                Text("✓ proved", "green") if proved else Text("not yet", "yellow"),
            )
        return table


def _table(columns: tuple[str, ...], title: str | None = None) -> Table:
    # Without lines between columns both tables fit a terminal of 80.
    shown = Text(printable(title)) if title else None
    table = Table(title=shown, title_justify="left", box=None, padding=(0, 1, 0, 0), expand=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _exchange(record: Mapping[str, Any]) -> dict[str, str]:
    """Columns about several trainers: the bytes that one sends in a round, and those of DiLoCo."""
    if (sync := record.get("trainer_sync")) is None:
        return {}
    sent = sum(sync["sent_nbytes"]) / len(sync["sent_nbytes"])
    return {
        "each trainer": nbytes(sent),
        "of dense": nbytes(sync["dense_nbytes"]),
        "saved": f"{sync['dense_nbytes'] / sent:.3g}×",
    }


def _held(board: Mapping[str, Any], policy: str) -> list[str]:
    """What each worker that has not left holds of a policy."""
    held = [(name, facts, facts["policies"].get(policy, {})) for name, facts in sorted(workers(board).items())]
    return [
        f"{name} at {found['version']} proved" if found.get("verified") else f"{name} {_waiting(facts)}"
        for name, facts, found in held
    ]


def _waiting(facts: Mapping[str, Any]) -> str:
    """The state of a worker that holds nothing."""
    return "left out" if facts.get("left_out") else "restarting" if facts.get("restarting") else "starting"
