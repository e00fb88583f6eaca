"""What a person sees of a run of a recipe: tables on a terminal, lines elsewhere."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pulse_rl.flow.data.buffer import PolicySettings
from pulse_rl.flow.data.curators import All
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.driver.display import Display

RECORD = {
    "policy": "solver",
    "step": 3,
    "reward": 0.25,
    "loss": -0.5,
    "staleness": 1.5,
    "density": 0.01,
    "patch_nbytes": 2_000_000,
    "full_nbytes": 270_000_000,
    "reduction": 135.0,
    "total_s": 12.0,
    "wait_s": 4.0,
}


class Terminal:
    """Takes what would be shown live."""

    def __init__(self, columns: int = 200) -> None:
        self.text = ""
        self._columns = columns

    def update(self, shown: Any) -> None:
        file = StringIO()
        Console(file=file, width=self._columns).print(shown)
        self.text = file.getvalue()


def _dataflow() -> Dataflow:
    dataflow = Dataflow({"solver": PolicySettings(groups=2), "judge": None}, All())
    dataflow.begin("solver", 3, 3)
    dataflow.publish("solver", 3, "d" * 16, 3)
    dataflow.begin("judge", 0, 0)
    for number in range(3):
        dataflow.register(f"near-{number}", "builtin", 2, ["solver", "judge"], "paris")
    held = {name: {"version": version, "verified": True} for name, version in (("solver", 2), ("judge", 0))}
    dataflow.heartbeat("near-0", {"pid": 71, "policies": held, "versions": {"solver": 2}})
    assert dataflow.take("near-0", []) is not None
    dataflow.report("near-1", {"policies": {}, "restarting": True})
    return dataflow


def test_tables_show_policies_pools_queues_and_who_waits() -> None:
    dataflow, terminal = _dataflow(), Terminal()
    display = Display("solver and judge", 40)
    display._live = terminal  # type: ignore[assignment]
    status = dataflow.status()
    display.update([RECORD], status, dataflow.board())
    lines = [line.replace("│", "").split() for line in terminal.text.splitlines()]
    row = {line[0]: line for line in lines if line}
    assert row["solver"][:5] == ["solver", "3/40", "3", "0.250", "-0.5000"]
    assert row["judge"][:3] == ["judge", "frozen", "0"]
    assert row["near-0"][:8] == ["near-0", "builtin", "paris", "live", "71", "1/2", "0", "0"]
    assert "solver 2/3, judge 0/0" in terminal.text
    assert "✓ proved" in " ".join(row["near-0"])
    assert "restarting" in row["near-1"]
    assert "starting" in row["near-2"]
    assert status["balance"]["sentence"] in terminal.text


def test_the_queues_of_the_table_are_explained() -> None:
    terminal = Terminal()
    display = Display("solver and judge", 40)
    display._live = terminal  # type: ignore[assignment]
    dataflow = _dataflow()
    display.update([], dataflow.status(), dataflow.board())
    assert "groups ready for a batch, coming from workers, dropped; share of time waited for them" in terminal.text


def test_tables_fit_a_terminal_of_80_columns() -> None:
    dataflow, terminal = _dataflow(), Terminal(columns=80)
    display = Display("solver and judge", 100_000)
    display._live = terminal  # type: ignore[assignment]
    display.update([RECORD], dataflow.status(), dataflow.board())
    assert "…" not in terminal.text


BETWEEN = {"sent_nbytes": [1_000_000, 3_000_000], "dense_nbytes": 540_000_000}


def test_what_trainers_send_each_other_is_shown_beside_what_workers_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    dataflow, terminal = _dataflow(), Terminal()
    record = RECORD | {"trainer_sync": BETWEEN}
    with Display("solver and judge", 40) as display:
        display.update([record], dataflow.status(), dataflow.board())
    (line,) = capsys.readouterr().err.splitlines()
    assert "patch 2 MB of 270 MB 135× each trainer 2 MB of dense 540 MB saved 270× 12.0 s" in line
    display._live = terminal  # type: ignore[assignment]
    display.update([], dataflow.status(), dataflow.board())
    lines = [line.replace("│", "").split() for line in terminal.text.splitlines()]
    row = {line[0]: line for line in lines if line}
    assert " ".join(row["solver"]).startswith("solver 3/40 3 0.250 -0.5000 2 MB 2 MB 540 MB 270×")
    assert row["judge"][:3] == ["judge", "frozen", "0"]


def test_elsewhere_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    dataflow = _dataflow()
    with Display("solver and judge", 40) as display:
        display.update([RECORD], dataflow.status(), dataflow.board())
        display.update([], dataflow.status(), dataflow.board())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("solver 3/40 reward 0.250 loss -0.5000 staleness 1.50 density 1.000% patch 2 MB of 270 MB")
    assert line.endswith("12.0 s (4.0 waiting)")
