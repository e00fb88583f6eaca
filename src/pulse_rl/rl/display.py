"""What a person sees of a run, on stderr: live tables on a terminal, elsewhere one line per step."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pulse_rl.errors import printable
from pulse_rl.units import nbytes

ROWS = 12  # steps shown


class Screen:
    """Lines on stderr, and on a terminal live tables below them. A context manager.

    title: of the run. steps: of each trainer.
    """

    def __init__(self, title: str, steps: int) -> None:
        self._console = Console(stderr=True)
        self._title = title
        self._steps = steps
        self._live: Live | None = None

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


class Display(Screen):
    """The steps of a run and its processes, as they change."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__(title, steps)
        self._records: list[dict[str, Any]] = []

    def update(self, records: list[dict[str, Any]], board: Mapping[str, Mapping[str, Any]]) -> None:
        """records: those since the last call. board: what every process has reported."""
        self._records += records
        if self._live is not None:
            self._live.update(Group(self._step_table(), self._worker_table(board)))
            return
        for record in records:
            self.log(
                f"step {record['step']}/{self._steps}  reward {record['reward']:.3f}  loss {record['loss']:+.4f}  "
                f"density {record['density']:.3%}  patch {nbytes(record['patch_nbytes'])} of "
                f"{nbytes(record['full_nbytes'])}  {record['reduction']:.0f}×  publish {record['publish_s']:.2f} s  "
                + "".join(f"{name} {text}  " for name, text in exchange(record).items())
                + "  ".join(self._worker_line(name, facts) for name, facts in self._workers(board))
            )

    @staticmethod
    def _workers(board: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
        return sorted((name, facts) for name, facts in board.items() if name != "trainer")

    @staticmethod
    def _worker_line(name: str, facts: Mapping[str, Any]) -> str:
        return f"{name} at {facts['version']} proved" if facts.get("verified") else f"{name} {_pending(facts)}"

    def _step_table(self) -> Table:
        table = Table(title=Text(printable(self._title)), title_justify="left", expand=False)
        for column in (
            "step",
            "reward",
            "solved",
            "loss",
            "density",
            "patch",
            "of",
            "reduction",
            "publish",
            "step s",
            *(exchange(self._records[-1]) if self._records else ()),
        ):
            table.add_column(column, justify="right")
        for record in self._records[-ROWS:]:
            table.add_row(
                f"{record['step']}/{self._steps}",
                f"{record['reward']:.3f}",
                f"{record['solved']:.0%}",
                f"{record['loss']:+.4f}",
                f"{record['density']:.3%}",
                nbytes(record["patch_nbytes"]),
                nbytes(record["full_nbytes"]),
                f"{record['reduction']:.0f}×",
                f"{record['publish_s']:.2f} s",
                f"{record['total_s']:.1f}",
                *exchange(record).values(),
            )
        return table

    def _worker_table(self, board: Mapping[str, Mapping[str, Any]]) -> Table:
        newest = board.get("trainer", {}).get("version")
        table = Table(expand=False)
        for column in ("worker", "pid", "version", "lag", "proof", "syncs", "fetched"):
            table.add_column(column, justify="right")
        digest, held = ("starting", "") if newest is None else (board["trainer"]["digest"], str(newest))
        table.add_row("trainer", "", held, "", digest, "", "")
        for name, facts in self._workers(board):
            version = facts.get("version")
            lag = "" if version is None or newest is None else str(newest - version)
            if facts.get("verified"):
                proof = Text("✓ " + facts["digest"], "green")
            else:
                proof = Text(_pending(facts), "red" if facts.get("restarting") else "yellow")
            table.add_row(
                name,
                str(facts.get("pid") or ""),
                "" if version is None else str(version),
                lag,
                proof,
                str(facts.get("syncs", 0)),
                nbytes(facts.get("fetched_nbytes", 0)),
            )
        return table


def exchange(record: Mapping[str, Any]) -> dict[str, str]:
    """Columns about several trainers: the bytes that one sends in a round, and those of DiLoCo."""
    if (sync := record.get("trainer_sync")) is None:
        return {}
    sent = sum(sync["sent_nbytes"]) / len(sync["sent_nbytes"])
    return {
        "each trainer": nbytes(sent),
        "of dense": nbytes(sync["dense_nbytes"]),
        "saved": f"{sync['dense_nbytes'] / sent:.3g}×",
    }


def _pending(facts: Mapping[str, Any]) -> str:
    """The state of a worker that holds no proved version."""
    return "restarting" if facts.get("restarting") else "starting"
