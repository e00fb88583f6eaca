"""What trackers are sent, and that a real TensorBoard, where there is one, reads it back."""

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pulse_rl.cli.app import app
from pulse_rl.errors import MissingExtraError
from pulse_rl.watch import trackers
from pulse_rl.watch.measurements import Labels, Measurement
from pulse_rl.watch.trackers import TRACKERS, TrackerSink, require_tracker, to_tracker

WORKER, PUBLISHER = Labels("/runs/a/store", worker="w-0"), Labels("/runs/a/store", worker="publisher")


class Kept:
    """A tracker that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append((step, values))

    def finish(self) -> None:
        self.finished = True


def version(number: int) -> list[Measurement]:
    return [
        Measurement("pulse_phase_seconds", PUBLISHER, 0.5, "put"),
        Measurement("pulse_payload_bytes_total", PUBLISHER, 100, "gap"),
        Measurement("pulse_version", PUBLISHER, number),
        Measurement("pulse_lag_seconds", WORKER, float("inf")),
    ]


def test_scalars_are_over_versions_and_sent_only_where_something_happens() -> None:
    """Counters add up, gauges are sent once, ages with a version; the step is the newest version and never falls."""
    kept = Kept()
    sink = TrackerSink(kept, {})
    sink.take(version(3))
    sink.take([Measurement("pulse_version", WORKER, 2), Measurement("pulse_lag_seconds", WORKER, float("inf"))])
    sink.take([Measurement("pulse_version", WORKER, 2), Measurement("pulse_lag_seconds", WORKER, float("inf"))])
    sink.take(version(4))
    sink.close()
    put, total = "pulse/phase_seconds/put/publisher", "pulse/payload_bytes_total/gap/publisher"
    newest, lag = "pulse/version/publisher", "pulse/lag_seconds/w-0"
    assert kept.sent == [
        (3, {put: 0.5, total: 100, newest: 3, lag: 0}),
        (3, {"pulse/version/w-0": 2}),
        (4, {put: 0.5, total: 200, newest: 4, lag: 0}),
    ]
    assert kept.finished


def test_policies_are_told_apart_and_names_are_such_as_all_trackers_take() -> None:
    kept = Kept()
    sink = TrackerSink(kept, {"s3://b/solver": "solver"})
    engine = Labels("s3://b/solver", engine="[::1]:8000")
    sink.take([Measurement("pulse_version", engine, 1), Measurement("pulse_run_reward", Labels("s3://b/solver"), 0.5)])
    assert kept.sent == [(1, {"solver/pulse/version/___1__8000": 1, "solver/pulse/run_reward": 0.5})]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"pip install {name}") as caught:
        require_tracker(name)
    assert caught.value.name == name
    result = CliRunner().invoke(app, ["train", "--track", name, "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, MissingExtraError)
    assert not (tmp_path / "run").exists()


def test_another_name_is_a_bad_command_line() -> None:
    result = CliRunner().invoke(app, ["follow", "memory://", "--engine", "http://a:1", "--track", "excel"])
    assert result.exit_code == 2
    assert "expected tensorboard, wandb, trackio, mlflow, found" in re.sub(r"[│\s]+", " ", result.output)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs TensorBoard")
def test_tensorboard_reads_back_what_was_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with to_tracker("tensorboard", "a", tmp_path) as exporter:
        for number in range(3):
            exporter.take(version(number))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tensors = found.Tensors("pulse/payload_bytes_total/gap/publisher")
    assert [(one.step, one.tensor_proto.float_val[0]) for one in tensors] == [(0, 100), (1, 200), (2, 300)]
