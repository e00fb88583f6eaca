"""A run as its driver does it: check the settings, start the actors, watch them, sum up.

The driver only watches: it feeds the display, starts workers that were asked for or that died, and writes
`summary.json` and `report.html` at the end. What is in the run's directory is told in `directory`.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.codecs.choose import check as check_codec
from pulse_rl.errors import ExchangeError, ProcessDiedError, PulseError, require
from pulse_rl.rl import config as settings
from pulse_rl.rl import directory as places
from pulse_rl.rl import metrics, report
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.crew import Crew
from pulse_rl.rl.display import Display
from pulse_rl.rl.engine import data_buffer, engine, wait
from pulse_rl.rl.tasks import Task
from pulse_rl.rl.team import Team

POLL_S = 0.25  # between the driver's looks at the board
FINISH_S = 300  # for workers to catch up with the last version


def prepare(config: RunConfig) -> RunConfig:
    """Check the settings of a new run and make its directory; nothing heavy is started yet.

    Raises ValueError for a senseless setting, FileExistsError if a run is there already, OSError or StoreError if
    the directory or the store cannot be written.
    """
    _check(config)
    places.refuse_going_on(config.directory)
    if settings.begun(config.directory):
        raise FileExistsError(
            f"{config.out} holds a run already: go on with it by --resume {config.out}, or choose another --out"
        )
    places.make(config)
    return config


def resume(directory: Path, given: dict[str, object]) -> RunConfig:
    """The settings of a run that has begun, to go on with it; `given` are those named anew.

    Raises FileNotFoundError if there is none, FileExistsError if it is going on, ValueError if it may not be
    changed so or has no step left to do, OSError or StoreError if its directory or store cannot be written.
    """
    from pulse_rl.rl.trainer import saved_step

    places.refuse_going_on(directory)
    config = settings.resumed(directory, given)
    _check(config)
    if (step := saved_step(directory)) >= config.steps:
        raise ValueError(
            f"steps: the run in {directory} is already at step {step} of {config.steps}: give --steps more than {step}"
        )
    places.make(config)
    return config


def _check(config: RunConfig) -> None:
    settings.check(config)
    check_codec(config.codec)
    if config.store_url.startswith("memory:"):
        raise ValueError("store: expected a directory that every process reaches; memory:// lives in one process only")
    Task(config.task, config.seed)
    from pulse_rl.rl import model  # brings torch

    model.check(config.model, dither=config.dither)


def train(config: RunConfig, display: Display, *, resume: bool = False) -> dict[str, Any]:
    """Do a run, prepared or to be resumed; return its summary, which is also written to summary.json.

    A first SIGINT or SIGTERM ends it in order: the step under way (of several trainers, the round) is finished,
    published and checkpointed.
    Raises FileExistsError if the run is going on already, PulseError if it was stopped at once or a process died,
    else what the trainer or a worker raised.
    """
    require("ray", "run")
    # Processes on other nodes, or of a cluster started elsewhere, have other working directories.
    rooted = msgspec.structs.replace(config, out=str(config.directory), store=config.store and config.store_url)
    try:
        with places.only_driver(config.directory), _signals() as interrupted:
            if resume:
                display.say(_taken_up(config))
            trainers = f"{config.trainers} trainers ({config.trainer_sync}), " * (config.trainers > 1)
            display.say(f"starting {config.model}, {trainers}{config.workers} rollout workers, in {config.out} …")
            with engine(rooted), data_buffer(rooted) as buffer:
                team = Team(rooted, buffer, resume)
                crew = Crew(rooted, buffer, display.say)
                for _ in range(config.workers):
                    crew.add()
                final = _watch(team, crew, buffer, interrupted, rooted, display)
                _finish(crew, buffer, display, final["version"])
            summary = metrics.summary(rooted, final, crew.results())
    except KeyboardInterrupt:
        raise PulseError(f"stopped; {_outlook(config)}") from None
    except ProcessDiedError as error:  # not a rollout worker's, which is started again
        raise PulseError(f"{error} (killed, or out of memory); {_outlook(config)}") from None
    except ExchangeError as error:
        raise PulseError(f"{error}; {_outlook(config)}") from None
    (config.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    try:
        report.write(config.directory, summary, metrics.read(config.directory))
    except Exception as error:  # noqa: BLE001  # the run is whole, whatever happens to what is said of it
        display.say(f"no {report.REPORT}: {error}")
    if final["step"] < config.steps:
        display.say(f"stopped at step {final['step']} of {config.steps}; {_outlook(config)}")
    return summary


def _taken_up(config: RunConfig) -> str:
    """Where a resumed run goes on."""
    from pulse_rl.rl.trainer import saved_step

    step, records = saved_step(config.directory), metrics.read(config.directory)
    text = f"going on from the checkpoint of step {step}" if step else "beginning again: there is no checkpoint yet"
    if records and (last := records[-1]["step"]) > step:
        text += f"; steps {step + 1} to {last} are done again, and their versions superseded by new ones"
    return text


def _outlook(config: RunConfig) -> str:
    """What can be done after a run has ended early."""
    from pulse_rl.rl.trainer import saved_step

    if not settings.begun(config.directory):
        return f"nothing was published yet, so there is nothing to resume: begin again, in {config.out} if you like"
    return f"go on from step {saved_step(config.directory)} by pulse-rl train --resume {config.out}"


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGINT or SIGTERM has come; a second one interrupts at once.

    The handler only takes note: an exception out of it would land in the middle of the engine's code.
    """
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        for which in previous:
            signal.signal(which, signal.default_int_handler)

    previous = {which: signal.signal(which, note) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)


def _watch(
    team: Team,
    crew: Crew,
    buffer: DataBuffer,
    interrupted: Callable[[], bool],
    config: RunConfig,
    display: Display,
) -> dict[str, Any]:
    """Follow the run until the trainers are done; return what the first returns."""
    seen, done, stopping, note = 0, False, False, ""
    while not done:
        wait(team.at_work(), POLL_S)
        done = team.ended()
        stop = interrupted() and not stopping
        if stop:
            buffer.stop()
        # Steps that were done before the stop are shown before it is spoken of.
        records, board = buffer.records(seen), buffer.board()
        seen += len(records)
        display.update(records, board)
        if note != (note := board.get("trainer", {}).get("note", "")):
            display.say(note)
        if stop:
            if "version" not in board.get("trainer", {}):
                display.say("stopping …")
                raise KeyboardInterrupt  # still starting: there is nothing to finish
            stopping = True
            unit = "step" if config.trainers == 1 else "round"
            display.say(
                f"stopping: no new {unit}; what is under way is finished and checkpointed (Ctrl-C again: at once)"
            )
        for _ in range(places.asked_for(config.directory)):
            display.say(f"{crew.add()} joins")
        crew.look()
    return team.result()


def _finish(crew: Crew, buffer: DataBuffer, display: Display, version: int) -> None:
    """Wait until every worker has caught up with the last version, proved it and ended."""
    deadline = time.monotonic() + FINISH_S
    while left := crew.at_work():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(left)} of the rollout workers have not caught up with version {version} in {FINISH_S} s; the "
                "run itself is complete"
            )
        wait(left, POLL_S)
        crew.look()
        display.update([], buffer.board())
