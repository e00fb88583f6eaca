"""Trackers of experiments: what is exported goes to TensorBoard, W&B, Trackio or MLflow, whichever is installed.

Each measurement is a scalar, `pulse/version/worker-0`, over the newest version that was heard of. A gauge is sent where
it has changed, an age where a version came, so that nothing is sent where nothing happens.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from pulse_rl.errors import MissingExtraError
from pulse_rl.watch.exporters import Exporter, age
from pulse_rl.watch.measurements import METRICS, Measurement, Meter

TrackerName: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
PROJECT = "pulse-rl"  # unless WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME names another one
UNUSUAL = re.compile(r"[^\w./ -]")  # characters that MLflow takes in no name


def require_tracker(name: str) -> None:
    """Raise MissingExtraError, which names the package, unless a tracker is installed; ValueError for another name."""
    if name not in TRACKERS:
        raise ValueError(f"--track: expected {', '.join(TRACKERS)}, found {name!r}")
    if find_spec(name) is None:
        message = f"--track {name}: the package {name} is needed for this and is not installed: pip install {name}"
        raise MissingExtraError(message, name=name)


def to_tracker(name: TrackerName, run: str, directory: Path, *, policies: Mapping[str, str] | None = None) -> Exporter:
    """Track what this process reports from now on.

    run: what to call it. directory: where TensorBoard's files go; the others keep theirs as they are set up. policies:
    what to call each store in names, by its label `run`, where there are several.
    """
    require_tracker(name)
    return Exporter(Meter(), TrackerSink(_OPEN[name](run, directory), policies or {}))


class Tracker(Protocol):
    """One run of a tracker."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep scalars of a step; steps rise."""

    def finish(self) -> None:
        """The run is over."""


class TrackerSink:
    """Measurements as the scalars of a tracker."""

    port = None

    def __init__(self, tracker: Tracker, policies: Mapping[str, str]) -> None:
        self._tracker, self._policies = tracker, policies
        self._lock = threading.Lock()
        self._step = -1  # the newest version
        self._last: dict[str, float] = {}
        self._totals = Counter[str]()

    def take(self, found: Iterable[Measurement]) -> None:
        with self._lock:
            measurements = list(found)
            versions = [int(one.value) for one in measurements if one.name == "pulse_version"]
            came = max(versions, default=-1) > self._step
            self._step = max([self._step, *versions])
            values = {}
            for one in measurements:
                tag, kind, value = self._tag(one), METRICS[one.name].kind, one.value
                if kind == "counter":
                    self._totals[tag] += value  # type: ignore[assignment]  # bytes and calls
                    value = self._totals[tag]
                elif kind == "age":
                    if not came:
                        continue
                    value = age(value)
                elif kind == "gauge" and self._last.get(tag) == value:
                    continue
                values[tag] = self._last[tag] = float(value)
            if values:
                self._tracker.log(values, max(0, self._step))

    def _tag(self, one: Measurement) -> str:
        parts = (self._policies.get(one.labels.run, ""), one.of, one.labels.engine or one.labels.worker)
        policy, *rest = (UNUSUAL.sub("_", part) for part in parts)
        return "/".join(filter(None, [policy, "pulse", one.name.removeprefix("pulse_"), *rest]))

    def close(self) -> None:
        self._tracker.finish()


class _TensorBoard:
    def __init__(self, run: str, directory: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(directory))

    def log(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _RunOf:
    """W&B, and Trackio, which has its interface."""

    def __init__(self, module: str, run: str, directory: Path) -> None:
        project = os.environ.get(f"{module.upper()}_PROJECT", PROJECT)
        self._run = import_module(module).init(name=run, project=project)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, run: str, directory: Path) -> None:
        import mlflow

        if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            mlflow.set_experiment(PROJECT)
        self._client, self._run = mlflow, mlflow.start_run(run_name=run)

    def log(self, values: dict[str, float], step: int) -> None:
        self._client.log_metrics(values, step=step, run_id=self._run.info.run_id)

    def finish(self) -> None:
        self._client.end_run()


_OPEN: dict[TrackerName, Any] = {
    "tensorboard": _TensorBoard,
    "wandb": partial(_RunOf, "wandb"),
    "trackio": partial(_RunOf, "trackio"),
    "mlflow": _MLflow,
}
