"""A run of a recipe as its driver does it: start the services, watch them, replace what dies, write the summary.

The driver only watches. The Dataflow, the trainers and the workers talk to each other without it. The engine makes the
Dataflow again from its journal; `trainers` and `pools` start processes again. The run's directory:

recipe.toml         the recipe, with every setting
policies/NAME/      the files of a policy's trainer: metrics.jsonl, trainer.pt, config.toml
store/NAME/         its history, unless the recipe names another store
dataflow.journal    the Dataflow's state; dataflow.lock is locked by the process that writes it
summary.json, report.html, ray.log, running: as in `rl.directory`
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pulse_rl.errors import ProcessDiedError, PulseError, require
from pulse_rl.flow import recipe_file
from pulse_rl.flow.data.journal import FILE as JOURNAL
from pulse_rl.flow.data.service import LOCK, NAME, DataflowProcess
from pulse_rl.flow.driver import report
from pulse_rl.flow.driver.pools import Pools
from pulse_rl.flow.driver.show import Display
from pulse_rl.flow.driver.summary import summary
from pulse_rl.flow.driver.trainers import Trainers
from pulse_rl.flow.driver.windows import Evaluations
from pulse_rl.flow.recipe import PolicyRecipe, Recipe
from pulse_rl.flow.training.trainer import DIRECTORY, directory
from pulse_rl.rl import config as settings
from pulse_rl.rl import directory as run_directory
from pulse_rl.rl import metrics, model_name
from pulse_rl.rl.checkpoints import saved_step
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import engine, service, wait
from pulse_rl.rl.run import POLL_S, stop_requests, wait_for_workers, write_results


def prepare(recipe: Recipe) -> Recipe:
    """Check what a new run needs, and make its directory. No process is started yet.

    Raises ValueError for a bad setting, FileExistsError if the directory holds a run already, OSError or StoreError if
    the directory or the store cannot be written.
    """
    _check(recipe)
    run_directory.refuse_running(recipe.directory)
    if settings.begun(recipe.directory) or recipe_file.begun(recipe.directory):
        raise FileExistsError(
            f"{recipe.out} holds a run already: continue it with --resume {recipe.out}, or choose another out"
        )
    run_directory.make(_place(recipe))
    return recipe


def resume(directory: Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe with which a run continues. sets: settings that change.

    Raises FileNotFoundError if there is no run, FileExistsError if it is running, ValueError if a setting may not
    change or no step is left to do.
    """
    run_directory.refuse_running(directory)
    recipe = recipe_file.resumed(directory, sets)
    _check(recipe)
    if (step := min(_steps(recipe).values())) >= recipe.steps:
        raise ValueError(
            f"steps: the run in {directory} is already at step {step} of {recipe.steps}: give --set steps= more than "
            f"{step}"
        )
    run_directory.make(_place(recipe))
    return recipe


def _check(recipe: Recipe) -> None:
    for policy in recipe.policies.values():
        model_name.require_config(policy.model)


def _kind(policy: PolicyRecipe) -> str:
    """A policy's model, and its trainers where there are several."""
    return policy.model + f", {policy.trainers} trainers, {policy.trainer_sync}" * (policy.trainers > 1)


def _place(recipe: Recipe) -> RunConfig:
    """Where a run is, as the reference run's directory takes it."""
    return RunConfig(out=recipe.out, store=recipe.store)


def _steps(recipe: Recipe) -> dict[str, int]:
    """The step of each trained policy's checkpoint."""
    return {name: saved_step(directory(recipe.directory, name)) for name in recipe.trained}


def train(recipe: Recipe, display: Display, *, resume: bool = False) -> dict[str, Any]:
    """Do a run and return its summary, which is also written to summary.json.

    recipe: from `prepare` or `resume`. resume: whether it is the latter. The first SIGINT or SIGTERM stops the run in
    order: every policy's current step (with several trainers, its round) is finished, published and checkpointed.
    Raises FileExistsError if the run is running already, PulseError if it was stopped at once, ProcessDiedError,
    otherwise what a trainer or a worker raised.
    """
    require("ray", "run")
    absolute, started = recipe.with_absolute_paths(), time.monotonic()
    try:
        with run_directory.lock(recipe.directory), stop_requests() as stop_requested:
            workers = sum(pool.workers for pool in recipe.pools)
            names = ", ".join(f"{name} ({_kind(policy)})" for name, policy in recipe.policies.items())
            if resume:
                display.log("continuing from " + _where(recipe))
            display.log(f"starting {recipe.name}: {names}, {workers} rollout workers, in {recipe.out} …")
            with _nothing_left(recipe), engine(absolute), service(NAME, DataflowProcess, absolute) as dataflow:
                recipe_file.save(recipe)
                dataflow.resume()
                driver = _Driver(absolute, dataflow, display, stop_requested)
                finals = driver.watch()
                result = driver.finish(finals, started)
    except KeyboardInterrupt:
        raise PulseError(f"stopped; {_recovery_hint(recipe)}") from None
    except ProcessDiedError as error:
        raise ProcessDiedError(f"{error}; {_recovery_hint(recipe)}", process=error.process) from None
    write_results(recipe.directory, result, lambda: report.write(recipe.directory, result), display.log)
    if result["steps"] < recipe.steps:
        display.log(f"stopped at step {result['steps']} of {recipe.steps}; {_recovery_hint(recipe)}")
    return result


class _Driver:
    """The services of a run, and what its driver does with them."""

    def __init__(self, recipe: Recipe, dataflow: Any, display: Display, stop_requested: Callable[[], bool]) -> None:
        self._recipe, self._dataflow, self._display = recipe, dataflow, display
        self._stop_requested = stop_requested
        self._trainers = Trainers(recipe, dataflow, display.log)
        self._pools = Pools(recipe, dataflow, display.log)
        self._windows = Evaluations(recipe, dataflow, display.log)
        self._records = _Records(recipe)
        self._pid: int | None = None  # of the Dataflow's process
        self._revived = 0  # times that it was made again

    def watch(self) -> dict[str, dict[str, Any]]:
        """Follow the run until the trainers have ended, and the windows are done; return what the trainers returned."""
        stopping = False
        while True:
            wait(self._trainers.running() or self._pools.running(), POLL_S)
            self._trainers.poll()
            ended = self._trainers.ended()
            stop = self._stop_requested() and not stopping
            if stop:
                self._dataflow.stop()
            # Steps that ended before the stop are shown before the stop is announced.
            status = self._update()
            if stop:
                if any(policy["version"] is None for policy in status["policies"].values()):
                    self._display.log("stopping …")
                    raise KeyboardInterrupt  # no step has begun: there is nothing to finish
                stopping = True
                self._display.log("stopping after the current steps and their checkpoints (Ctrl-C again: at once)")
            for _ in range(run_directory.requested_workers(self._recipe.directory)):
                self._display.log(f"{self._pools.add()} joins")
            for _ in range(run_directory.requested_workers(self._recipe.directory, leaving=True)):
                if name := self._pools.dismiss():
                    self._display.log(f"{name} leaves")
            self._pools.poll()
            self._pools.scale()
            done = stopping or self._windows.open(status, self._records.steps, ended=ended)
            if done and ended:
                return self._trainers.results()

    def finish(self, finals: dict[str, dict[str, Any]], started: float) -> dict[str, Any]:
        """Wait until every worker has reached the last versions, proved them and ended; return the summary."""
        self._dataflow.end()
        wait_for_workers(self._pools, "the last versions", self._update)
        seconds = time.monotonic() - started
        status = self._update() | {"restarts": self._revived}
        return summary(self._recipe, finals, self._pools.results(), status, seconds)

    def _update(self) -> dict[str, Any]:
        status: dict[str, Any] = self._dataflow.status()
        if self._pid not in (None, status["pid"]):
            self._revived += 1
            self._display.log(f"the dataflow (pid {self._pid}) died; it goes on from its journal")
            self._pools.repeat()
        self._pid = status["pid"]
        self._display.update(self._records.new(), status, self._dataflow.board())
        return status


class _Records:
    """The metrics of all policies, as they are written."""

    def __init__(self, recipe: Recipe) -> None:
        self._files = {name: directory(recipe.directory, name) for name in recipe.trained}
        self._shown = {name: len(metrics.read(files)) for name, files in self._files.items()}
        self._sizes = dict.fromkeys(self._files, -1)
        self.steps = _steps(recipe)  # of each trained policy

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call, each with its policy."""
        found = []
        for name, files in self._files.items():
            path = files / metrics.METRICS
            size = path.stat().st_size if path.exists() else 0
            if size == self._sizes[name]:
                continue
            self._sizes[name] = size
            records = metrics.read(files)
            shown = min(self._shown[name], len(records))  # a trainer that starts again repeats steps
            found += [{"policy": name} | record for record in records[shown:]]
            self._shown[name] = len(records)
            if records:
                self.steps[name] = records[-1]["step"]
        return found


@contextmanager
def _nothing_left(recipe: Recipe) -> Iterator[None]:
    """If a run fails before a policy has begun, remove what it has made; but not `ray.log` of a process that died."""
    try:
        yield
    except ProcessDiedError:
        raise
    except BaseException:
        if not _begun(recipe):
            for name in (recipe_file.FILE, JOURNAL, LOCK):
                (recipe.directory / name).unlink(missing_ok=True)
            shutil.rmtree(recipe.directory / DIRECTORY, ignore_errors=True)
            run_directory.remove(_place(recipe))
        raise


def _begun(recipe: Recipe) -> bool:
    """Whether a policy was published: then the run can be resumed."""
    return any(settings.begun(directory(recipe.directory, name)) for name in recipe.policies)


def _where(recipe: Recipe) -> str:
    """From which checkpoints a run continues."""
    return ", ".join(f"step {step} of {name}" for name, step in _steps(recipe).items())


def _recovery_hint(recipe: Recipe) -> str:
    """What a person can do after a run has ended early."""
    if not _begun(recipe):
        return f"nothing was published yet, so there is nothing to resume: start again, in {recipe.out} if you like"
    return f"continue from {_where(recipe)} with pulse-rl train --resume {recipe.out}"
