"""A run as its driver does it: check the settings, start the processes, watch them, write the summary.

The driver only watches. It updates the display, starts workers that are asked for or that died, and writes
`summary.json` and `report.html` at the end. `directory` lists the files of a run.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pulse_rl.codecs.choose import check as check_codec
from pulse_rl.errors import ExchangeError, ProcessDiedError, PulseError, require
from pulse_rl.rl import config as settings
from pulse_rl.rl import directory as run_directory
from pulse_rl.rl import metrics, model_name, report
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.display import Display
from pulse_rl.rl.engine import ProcessHandle, data_buffer, engine, wait
from pulse_rl.rl.rollout import Crew
from pulse_rl.rl.tasks import Task
from pulse_rl.rl.trainer_pool import ReferenceCrew, TrainerPool
from pulse_rl.rl.worker_pool import WorkerPool

POLL_S = 0.25  # between the driver's polls of the board
FINISH_S = 300  # for workers to catch up with the last version


def prepare(config: RunConfig) -> RunConfig:
    """Check the settings of a new run and make its directory. No process is started yet.

    Raises ValueError for a bad setting, FileExistsError if the directory holds a run already, OSError or StoreError if
    the directory or the store cannot be written.
    """
    _check(config)
    run_directory.refuse_running(config.directory)
    if settings.begun(config.directory):
        raise FileExistsError(
            f"{config.out} holds a run already: continue it with --resume {config.out}, or choose another --out"
        )
    run_directory.make(config)
    return config


def resume(directory: Path, given: dict[str, object]) -> RunConfig:
    """The settings with which a run continues. given: the settings that change.

    Raises FileNotFoundError if there is no run, FileExistsError if it is running, ValueError if a setting may not
    change or no step is left to do, OSError or StoreError if the directory or the store cannot be written.
    """
    from pulse_rl.rl.checkpoints import saved_step

    run_directory.refuse_running(directory)
    config = settings.resumed(directory, given)
    _check(config)
    if (step := saved_step(directory)) >= config.steps:
        raise ValueError(
            f"steps: the run in {directory} is already at step {step} of {config.steps}: give --steps more than {step}"
        )
    run_directory.make(config)
    return config


def _check(config: RunConfig) -> None:
    settings.check(config)
    check_codec(config.codec)
    Task(config.task, config.seed)
    model_name.require_config(config.model)


def train(config: RunConfig, display: Display, *, resume: bool = False) -> dict[str, Any]:
    """Do a run and return its summary, which is also written to summary.json.

    config: from `prepare` or `resume`. resume: whether it is the latter. The first SIGINT or SIGTERM stops the run in
    order: the current step (with several trainers, the round) is finished, published and checkpointed.
    Raises FileExistsError if the run is running already, PulseError if it was stopped at once, ProcessDiedError,
    otherwise what the trainer or a worker raised.
    """
    require("ray", "run")
    absolute = config.with_absolute_paths()
    try:
        with run_directory.lock(config.directory), stop_requests() as stop_requested:
            if resume:
                display.log(_where_it_continues(config))
            trainers = f"{config.trainers} trainers ({config.trainer_sync}), " * (config.trainers > 1)
            display.log(f"starting {config.model}, {trainers}{config.workers} rollout workers, in {config.out} …")
            with _nothing_left(config), engine(absolute), data_buffer(absolute) as buffer:
                trainer_pool = TrainerPool(absolute, ReferenceCrew(absolute, buffer, resume), display.log)
                workers = WorkerPool(Crew(absolute, buffer), display.log)
                for _ in range(config.workers):
                    workers.add()
                final = _watch(trainer_pool, workers, buffer, stop_requested, absolute, display)
                wait_for_workers(workers, f"version {final['version']}", lambda: display.update([], buffer.board()))
            summary = metrics.summary(absolute, final, workers.results())
    except KeyboardInterrupt:
        raise PulseError(f"stopped; {_recovery_hint(config)}") from None
    except ProcessDiedError as error:
        raise ProcessDiedError(f"{error}; {_recovery_hint(config)}", process=error.process) from None
    except ExchangeError as error:
        hint = _recovery_hint(config)
        raise ExchangeError(f"{error}; {hint}", ranks=error.ranks, round=error.round) from None
    write_results(
        config.directory,
        summary,
        lambda: report.write(config.directory, summary, metrics.read(config.directory)),
        display.log,
    )
    if final["step"] < config.steps:
        display.log(f"stopped at step {final['step']} of {config.steps}; {_recovery_hint(config)}")
    return summary


def write_results(
    directory: Path, summary: dict[str, Any], write_report: Callable[[], object], log: Callable[[str], None]
) -> None:
    """Write summary.json, and the report if it can be written. log: shows a person one line."""
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    try:
        write_report()
    except Exception as error:  # noqa: BLE001  # the run is complete, with or without its report
        log(f"no {report.REPORT}: {error}")


@contextmanager
def _nothing_left(config: RunConfig) -> Iterator[None]:
    """If a run fails before it has begun, remove what it has made; but not `ray.log`, which says how a process died."""
    try:
        yield
    except ProcessDiedError:
        raise
    except BaseException:
        if not settings.begun(config.directory):
            run_directory.remove(config)
        raise


def _where_it_continues(config: RunConfig) -> str:
    """For a resumed run: from which step, and which steps are repeated."""
    from pulse_rl.rl.checkpoints import saved_step

    step, records = saved_step(config.directory), metrics.read(config.directory)
    text = f"continuing from the checkpoint of step {step}" if step else "starting over: there is no checkpoint yet"
    if records and (last := records[-1]["step"]) > step:
        text += f"; steps {step + 1} to {last} are repeated under new versions"
    return text


def _recovery_hint(config: RunConfig) -> str:
    """What a person can do after a run has ended early."""
    from pulse_rl.rl.checkpoints import saved_step

    if not settings.begun(config.directory):
        return f"nothing was published yet, so there is nothing to resume: start again, in {config.out} if you like"
    return f"continue from step {saved_step(config.directory)} with pulse-rl train --resume {config.out}"


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived; a second signal raises KeyboardInterrupt.

    The handler only records the signal: an exception from it could interrupt the engine's code anywhere.
    """
    received: list[int] = []

    def record(number: int, frame: Any) -> None:
        received.append(number)
        for which in previous:
            signal.signal(which, signal.default_int_handler)

    previous = {which: signal.signal(which, record) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)


def _watch(
    trainers: TrainerPool,
    workers: WorkerPool,
    buffer: DataBuffer,
    stop_requested: Callable[[], bool],
    config: RunConfig,
    display: Display,
) -> dict[str, Any]:
    """Follow the run until the trainers have ended; return what rank 0 returned."""
    seen, ended, stopping, note = 0, False, False, ""
    while not ended:
        wait(trainers.running(), POLL_S)
        trainers.restart()
        ended = trainers.ended()
        stop = stop_requested() and not stopping
        if stop:
            buffer.stop()
        # Steps that ended before the stop are shown before the stop is announced.
        records, board = buffer.records(seen), buffer.board()
        seen += len(records)
        display.update(records, board)
        if note != (note := board.get("trainer", {}).get("note", "")):
            display.log(note)
        if stop:
            if "version" not in board.get("trainer", {}):
                display.log("stopping …")
                raise KeyboardInterrupt  # no step has begun: there is nothing to finish
            stopping = True
            unit = "step" if config.trainers == 1 else "round"
            display.log(f"stopping after the current {unit} and its checkpoint (Ctrl-C again: at once)")
        for _ in range(run_directory.requested_workers(config.directory)):
            display.log(f"{workers.add()} joins")
        workers.poll()
    return trainers.result()


class Workers(Protocol):
    """The rollout workers of a run."""

    def running(self) -> list[ProcessHandle]:
        """Those that have not ended."""

    def poll(self) -> None:
        """Collect results, and restart those that died."""


def wait_for_workers(workers: Workers, what: str, update: Callable[[], object]) -> None:
    """Wait until every worker has reached what was published last, proved it and ended.

    what: they are to reach. update: called all the while. Raises TimeoutError, and as `poll`.
    """
    deadline = time.monotonic() + FINISH_S
    while left := workers.running():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(left)} of the rollout workers have not caught up with {what} in {FINISH_S} s; the "
                "run itself is complete"
            )
        wait(left, POLL_S)
        workers.poll()
        update()
