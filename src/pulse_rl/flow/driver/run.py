"""A run as its driver does it: start the services, watch them, replace what dies, write the summary.

The driver only watches. The Dataflow, the trainers and the workers talk to each other without it. The engine makes the
Dataflow again from its journal; `trainers` and `pools` start processes again. `directory` lists the files of a run.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pulse_rl import History, open_store
from pulse_rl.disk import write_stream
from pulse_rl.errors import ProcessDiedError, PulseError, require, require_installed
from pulse_rl.flow import directory as run_directory
from pulse_rl.flow import metrics, model_name, recipe_file
from pulse_rl.flow.data.journal import FILE as JOURNAL
from pulse_rl.flow.data.service import LOCK, NAME, DataflowProcess
from pulse_rl.flow.driver import report
from pulse_rl.flow.driver.display import Display
from pulse_rl.flow.driver.failures import Failures
from pulse_rl.flow.driver.pools import Pools
from pulse_rl.flow.driver.signals import stop_requests
from pulse_rl.flow.driver.summary import summary
from pulse_rl.flow.driver.trainers import Trainers
from pulse_rl.flow.driver.windows import Evaluations
from pulse_rl.flow.engine import engine, service, wait
from pulse_rl.flow.recipe import PolicyRecipe, PoolRecipe, Recipe
from pulse_rl.flow.training.checkpoints import saved_step
from pulse_rl.watch import Exporter
from pulse_rl.watch.alarms import RECENT, Alarm, Announcer, alarms_of_records, measured
from pulse_rl.watch.measurements import run_name
from pulse_rl.watch.runs import RunMeter

POLL_S = 0.25  # between the driver's polls of the board
SETUP_S = 10.0  # between two lines that say who is still starting
SHOW_S = 1.0  # between what it shows to other processes
FINISH_S = 300  # for workers to catch up with the last versions
OF_SERVICES = (f"{JOURNAL}*", LOCK, "trainer*.lock", f"{run_directory.POLICIES}/*/trainer*.lock")  # their files


def prepare(recipe: Recipe) -> Recipe:
    """Check what a new run needs, and make its directory. No process is started yet.

    Raises ValueError for a bad setting, FileExistsError if the directory holds a run already, or the store the history
    of another, or a `trainer_store` its rounds, OSError or StoreError if the directory or the store cannot be written.
    """
    _check(recipe)
    run_directory.refuse_running(recipe.directory)
    if run_directory.begun(recipe.directory):
        raise FileExistsError(
            f"{recipe.out} holds a run already: continue it with --resume {recipe.out}, or choose another --out"
        )
    run_directory.make(recipe.out, recipe.base_url)
    for name, policy in recipe.policies.items():
        _refuse_history(recipe, name)
        if policy.trainer_store is not None:
            _refuse_rounds(recipe, name, policy.trainer_store)
    return recipe


def _refuse_history(recipe: Recipe, policy: str) -> None:
    """A new run would go on with the history of another one, which may be of the same tensors."""
    url = recipe.store_url(policy)
    if head := History(url).head():
        run_directory.remove(recipe.directory)
        raise FileExistsError(
            f"store: {url} holds the history of a run already, with versions up to {head.version}: continue that run "
            "with --resume, or name another --store"
        )


def _refuse_rounds(recipe: Recipe, policy: str, url: str) -> None:
    """The trainers of a new run would join those of another one, and take its rounds for their own."""
    from pulse_rl.loco.meeting.names import FOLDER  # whose room imports torch

    if open_store(url).list(FOLDER):
        run_directory.remove(recipe.directory)
        raise FileExistsError(
            f"policies.{policy}.trainer_store: {url} holds the rounds of another run's trainers, which new ones would "
            f"join: continue that run with --resume, name another store, or delete the folder {FOLDER} there if no run "
            "needs it"
        )


def resume(directory: Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe with which a run continues. sets: settings that change.

    Raises FileNotFoundError if there is no run, FileExistsError if it is running, ValueError if a setting may not
    change or no step is left to do, OSError or StoreError if the directory or the store cannot be written.
    """
    run_directory.refuse_running(directory)
    recipe = recipe_file.resumed(directory, sets)
    _check(recipe)
    if (step := min(_steps(recipe).values())) >= recipe.steps:
        raise ValueError(
            f"steps: the run in {directory} is already at step {step} of {recipe.steps}: give --steps more than {step}"
        )
    run_directory.make(recipe.out, recipe.base_url)
    return recipe


def _check(recipe: Recipe) -> None:
    configs = {name: model_name.require_config(policy.model) for name, policy in recipe.policies.items()}
    for number, pool in enumerate(recipe.pools):
        experts = [name for name, config in configs.items() if model_name.has_experts(config)]
        if pool.kind == "vllm" and pool.view and experts:
            raise ValueError(
                f'pools[{number}].view: expected none with kind = "vllm" for a model with experts, whose quantised '
                f'weights vLLM repacks, found {pool.view!r} for policies.{experts[0]}: kind = "builtin" samples with it'
            )
        for name, config in configs.items():
            try:
                _check_view(pool, recipe.policies[name].model, config)
            except ValueError as error:
                raise ValueError(f"pools[{number}].view: policies.{name}: {error}") from None
    if recipe.address is None and any(pool.kind == "vllm" for pool in recipe.pools):
        require("vllm", "vllm")
    if any(policy.elastic for policy in recipe.policies.values()):
        require_installed("torchft", "ft")


def _check_view(pool: PoolRecipe, name: str, config: Any) -> None:
    """Raise ValueError if a pool's view cannot be made of a model. Of most forms one can be made of all models."""
    from pulse_rl.weights.views.formats import GROUPS, ViewFormat

    if pool.quantised is not None and (form := ViewFormat(pool.quantised[1])).key.kind in GROUPS:
        from pulse_rl.flow import model  # which imports torch

        form.check(model.shapes(name, config))


def _steps(recipe: Recipe) -> dict[str, int]:
    """The step of each trained policy's checkpoint."""
    return {name: saved_step(recipe.files(name)) for name in recipe.trained}


def train(
    recipe: Recipe, display: Display, *, resume: bool = False, exporters: Sequence[Exporter] = ()
) -> dict[str, Any]:
    """Do a run and return its summary, which is also written to summary.json.

    recipe: from `prepare` or `resume`. resume: whether it is the latter. exporters: of the run's metrics.
    The first SIGINT or SIGTERM stops the run in order: every policy's current step (with several trainers, its round)
    is finished, published and checkpointed. The summary's `stopped` then says by which signal, and how to go on; it is
    None after a run's last step.
    Raises FileExistsError if the run is running already, KeyboardInterrupt if it was stopped at once, ProcessDiedError,
    otherwise what a trainer or a worker raised.
    """
    require("ray", "run")
    absolute = recipe.with_absolute_paths()
    try:
        with run_directory.lock(recipe.directory), stop_requests() as stop_requested:
            if resume:
                display.log(_where_it_continues(recipe))
            workers = sum(pool.workers for pool in recipe.pools)
            names = ", ".join(f"{name} ({_kind(policy)})" for name, policy in recipe.policies.items())
            begun = time.monotonic()
            display.log(f"starting {recipe.name}: {names}, {workers} rollout workers, in {recipe.out} …")
            with (
                _on_failure(recipe),
                engine(recipe.directory, recipe.address),
                service(NAME, DataflowProcess, absolute) as dataflow,
            ):
                recipe_file.save(recipe)
                dataflow.resume()
                driver = _Driver(absolute, dataflow, display, stop_requested, exporters, begun)
                finals = driver.watch()
                result = driver.finish(finals)
    except KeyboardInterrupt:
        display.log(f"stopped; {_recovery_hint(recipe)}")
        raise
    sentence = f"stopped at step {result['steps']} of {recipe.steps}; {_recovery_hint(recipe)}"
    by = signal.Signals(stop_requested() or signal.SIGINT).name
    result["stopped"] = {"by": by, "sentence": sentence} if result["steps"] < recipe.steps else None
    write_stream(recipe.directory / run_directory.SUMMARY, [f"{json.dumps(result, indent=2)}\n".encode()])
    try:
        report.write(recipe, result)
    except Exception as error:  # noqa: BLE001  # the run is complete, with or without its report
        display.log(f"no {report.REPORT}: {error}")
    if result["stopped"]:
        display.log(sentence)
    return result


class _Driver:
    """The services of a run, and what its driver does with them. begun: when the console said that the run starts."""

    def __init__(
        self,
        recipe: Recipe,
        dataflow: Any,
        display: Display,
        stop_requested: Callable[[], int],
        exporters: Sequence[Exporter],
        begun: float,
    ) -> None:
        self._recipe, self._dataflow, self._display = recipe, dataflow, display
        self._stop_requested = stop_requested
        self._exporters = exporters
        self._meter = RunMeter({name: recipe.store_url(name) for name in recipe.policies})
        self._trainers = Trainers(recipe, dataflow, display.log)
        self._pools = Pools(recipe, dataflow, display.log)
        self._windows = Evaluations(recipe, dataflow, display.log)
        self._failures = Failures(display.log)
        self._announcer = Announcer(display.log)
        self._records = _Records(recipe)
        self._said: dict[tuple[str, str], str] = {}  # what each trainer and worker has logged last, as shown
        self._pid: int | None = None  # of the Dataflow's process
        self._revived = 0  # times that it was made again
        self._show_next = time.monotonic()
        self._setup_next = begun + SETUP_S
        self._stepped: set[str] = set()  # policies that have done a step since this driver started

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
            if why := self._failures.look(status):
                raise PulseError(why)
            if stop:
                if any(policy["version"] is None for policy in status["policies"].values()):
                    self._display.log("stopping …")
                    raise KeyboardInterrupt  # no step has begun: there is nothing to finish
                stopping = True
                self._display.log(f"stopping after {_current(self._recipe)} (Ctrl-C again: at once)")
            self._follow_requests(ending=stopping or ended)
            self._pools.poll()
            if not (stopping or ended):  # a worker that joins now would only be waited for
                self._pools.scale()
            done = stopping or self._windows.open(status, ended=ended)
            if done and ended:
                return self._trainers.results()

    def _follow_requests(self, *, ending: bool) -> None:
        """Let workers join or leave, as `pulse-rl rollout` asks. ending: none joins any more."""
        directory = self._recipe.directory
        joining = run_directory.requested_workers(directory)
        if joining and ending:
            self._display.log(f"the run is ending: it starts no more workers, though {joining} more were asked for")
        for _ in range(0 if ending else joining):
            self._display.log(f"{self._pools.add()} joins")
        for _ in range(run_directory.requested_workers(directory, leaving=True)):
            if name := self._pools.dismiss():
                self._display.log(f"{name} leaves")

    def finish(self, finals: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Wait until every worker has reached the last versions, proved them and ended; return the summary."""
        self._dataflow.end()
        deadline = time.monotonic() + FINISH_S
        while left := self._pools.running():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(left)} of the rollout workers have not caught up with the last versions in {FINISH_S} s; "
                    "the run itself is complete"
                )
            wait(left, POLL_S)
            self._follow_requests(ending=True)
            self._pools.poll()
            self._update()
        status = self._update() | {"restarts": self._revived}
        records = {name: metrics.read(self._recipe.files(name)) for name in self._recipe.policies}
        return summary(self._recipe, records, finals, self._pools.results(), status)

    def _update(self) -> dict[str, Any]:
        status: dict[str, Any] = self._dataflow.status()
        board = self._dataflow.board()
        if self._pid not in (None, status["pid"]):
            self._revived += 1
            self._display.log(f"the dataflow (pid {self._pid}) died; it goes on from its journal")
            self._pools.repeat()
        self._pid = status["pid"]
        records = self._records.new()
        self._display.update(records, status, board)
        alarms = self._records.alarms(ended=status["ended"])
        self._announcer.look([alarm for found in alarms.values() for alarm in found])
        if self._exporters:
            found = list(self._meter.measure(records, board))
            for policy, raised in alarms.items():
                found += measured(run_name(self._recipe.store_url(policy)), raised)
            for exporter in self._exporters:
                exporter.take(found)
        self._stepped |= {record["policy"] for record in records}
        if time.monotonic() >= self._setup_next and (starting := _starting(status, board, self._stepped)):
            self._setup_next = time.monotonic() + SETUP_S
            self._display.log(f"starting: {starting}")
        for who, facts in board.items():
            for kind, (text, _) in ((kind, facts[kind]) for kind in ("note", "warning") if kind in facts):
                if self._said.get((who, kind)) != text:
                    self._said[who, kind] = text
                    self._display.log(f"{who}: {text}")
        if time.monotonic() >= self._show_next:
            self._show_next = time.monotonic() + SHOW_S
            warnings = {who: facts["warning"] for who, facts in board.items() if "warning" in facts}
            shown = status | {"restarts": self._revived, "warnings": warnings}
            run_directory.show(self._recipe.directory, shown)
        return status


def _starting(status: Mapping[str, Any], board: Mapping[str, Any], stepped: Container[str]) -> str:
    """What a run waits for until each policy has done a step; empty where all have. stepped: those that have."""
    waiting = {name: policy for name, policy in status["policies"].items() if name not in stepped}
    # By what trainers say: a resumed run's journal knows versions of before.
    policies = [name for name in waiting if "version" not in board.get(f"{name}/trainer", {})]
    workers = [name for name, worker in status["workers"].items() if not worker["versions"]]
    every = len(status["workers"])
    if policies or (every and len(workers) == every):
        trainers = [f"trainers of {', '.join(policies)}"] if policies else []
        holding = [f"{every - len(workers)} of {every} workers hold weights"] if every else []
        return "; ".join([*trainers, *holding])
    return "; ".join(
        f"the first step of {name} is trained"
        if policy["uncommitted"]
        else f"the first step of {name}: {policy['ready']} groups ready, {policy['coming']} coming"
        for name, policy in waiting.items()
        if not policy["finished"]
    )


class _Records:
    """The metrics of all policies, as they are written."""

    def __init__(self, recipe: Recipe) -> None:
        self._readers = {name: metrics.Reader(recipe.files(name)) for name in recipe.trained}
        self._shown = dict.fromkeys(self._readers, 0)
        self._bounds = {name: recipe.policies[name].max_staleness for name in recipe.trained}
        self._last = {name: deque[dict[str, Any]](maxlen=RECENT + 1) for name in self._readers}
        self._seen = dict.fromkeys(self._readers, time.monotonic())  # when each policy's last record came
        for name, reader in self._readers.items():
            reader.look()
            self._shown[name] = len(reader.records)

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call, each with its policy."""
        found = []
        for name, reader in self._readers.items():
            reader.look()
            shown = min(self._shown[name], len(reader.records))  # a trainer that starts again repeats steps
            self._shown[name] = len(reader.records)
            if new := reader.records[shown:]:
                found += [{"policy": name} | record for record in new]
                self._last[name].extend(new)
                self._seen[name] = time.monotonic()
        return found

    def alarms(self, *, ended: bool) -> dict[str, tuple[Alarm, ...]]:
        """The alarms of each policy now, from what has come since this driver started."""
        now = time.monotonic()
        return {
            name: alarms_of_records(
                name, list(last), bound=self._bounds[name], age_s=now - self._seen[name], ended=ended
            )
            for name, last in self._last.items()
        }


@contextmanager
def _on_failure(recipe: Recipe) -> Iterator[None]:
    """If a run fails, note in the error how to go on; before a policy has begun, also remove what the run has made.

    But `ray.log` stays if a process died.
    """
    try:
        yield
    except BaseException as error:
        if not _begun(recipe):
            words = () if isinstance(error, ProcessDiedError) else (run_directory.LOG,)
            run_directory.remove(recipe.directory, *OF_SERVICES, *words)
        if isinstance(error, Exception):  # the others are a stop
            error.add_note(_recovery_hint(recipe))
        raise


def _begun(recipe: Recipe) -> bool:
    """Whether a policy was published: then the run can be resumed."""
    return any(metrics.begun(recipe.files(name)) for name in recipe.policies)


def _kind(policy: PolicyRecipe) -> str:
    """A policy's model, and its trainers where there are several."""
    return policy.model + f", {policy.trainers} trainers, {policy.trainer_sync}" * (policy.trainers > 1)


def _current(recipe: Recipe) -> str:
    """What is finished when a run is stopped."""
    if not recipe.only:
        return "the current steps and their checkpoints"
    unit = "step" if recipe.policies[recipe.only].trainers == 1 else "round"
    return f"the current {unit} and its checkpoint"


def _where(recipe: Recipe) -> str:
    """The steps of a run's checkpoints."""
    return ", ".join(
        f"step {step}" if recipe.only else f"step {step} of {name}" for name, step in _steps(recipe).items()
    )


def _where_it_continues(recipe: Recipe) -> str:
    """For a resumed run: from which steps, and which are repeated."""
    texts = []
    for name, step in _steps(recipe).items():
        of = "" if recipe.only else f" of {name}"
        text = f"continuing from the checkpoint of step {step}{of}"
        if not step:
            text = f"starting over{of and f' with {name}'}: there is no checkpoint yet"
        records = metrics.read(recipe.files(name))
        if records and (last := records[-1]["step"]) > step:
            text += f"; steps {step + 1} to {last} are repeated under new versions"
        texts.append(text)
    return "; ".join(texts)


def _recovery_hint(recipe: Recipe) -> str:
    """What a person can do after a run has ended early."""
    if not _begun(recipe):
        return f"nothing was published yet, so there is nothing to resume: start again, in {recipe.out} if you like"
    return f"continue from {_where(recipe)} with pulse-rl train --resume {recipe.out}"
