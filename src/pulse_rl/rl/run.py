"""The engine around the actors: Ray starts them, restarts what dies, and carries their calls.

On this machine by default, on a cluster with an address: the same code. The driver only watches: it writes
`metrics.jsonl`, feeds the display, starts workers that were asked for, and writes `summary.json` at the end.
"""

import fcntl
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

from pulse_rl.codecs.choose import choose
from pulse_rl.errors import PulseError, require
from pulse_rl.rl import config as settings
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.display import Display
from pulse_rl.rl.tasks import Task
from pulse_rl.store.objects import open_store

POLL_S = 0.25  # between the driver's looks at the board
FINISH_S = 300  # for workers to catch up with the last version
BUFFER = "buffer"  # the actor's name in the run's namespace
RUNNING = "running"  # locked by the driver while a run goes on
REQUEST = "add-workers-"  # files that ask the driver for more workers
OBJECT_STORE_NBYTES = 256 << 20  # Ray's shared memory: trajectories are small
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


class Remote:
    """Calls the methods of a named actor as if it were here. Holds only the name, so it travels anywhere."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        import ray

        if method.startswith("_"):
            raise AttributeError(method)
        actor = ray.get_actor(self._name)
        return lambda *arguments: ray.get(getattr(actor, method).remote(*arguments))


class Process:
    """One process of a run: makes the object in it that does the work, and lends it its life.

    The work starts in a method and not in the constructor, so that what it raises reaches the driver as it is.
    """

    def run(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        return kind(*arguments).run()


class TrainerProcess(Process):
    """Named for the list of processes."""


class RolloutProcess(Process):
    """Named for the list of processes."""


def prepare(config: RunConfig) -> RunConfig:
    """Check the settings, make the run's directory and write config.toml; nothing heavy is started yet.

    Raises ValueError for a senseless setting, FileExistsError if a run is there already.
    """
    settings.check(config)
    choose(config.codec)
    if config.store_url.startswith("memory:"):
        raise ValueError("store: expected a directory that every process reaches; memory:// lives in one process only")
    open_store(config.store_url)
    Task(config.task, config.seed)
    directory = config.directory
    if (directory / "config.toml").exists():
        raise FileExistsError(
            f"{directory} holds a run already: go on with it by --resume {config.out}, or choose another --out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    settings.save(config)
    return config


def train(config: RunConfig, display: Display, *, resume: bool = False) -> dict[str, Any]:
    """Do a run, in its prepared directory; return its summary, which is also written to summary.json.

    A first SIGINT or SIGTERM ends it in order: the step under way is finished, published and checkpointed.
    Raises FileExistsError if the run is going on already, else what the trainer or a worker raised.
    """
    ray = require("ray", "run")
    started = time.time()
    with _only_driver(config.directory), _engine(config):
        # The actor lives as long as this handle.
        _board = (
            ray.remote(num_cpus=0)(DataBuffer)
            .options(name=BUFFER)
            .remote(chunks=config.chunks, max_staleness=config.max_staleness, deterministic=config.deterministic)
        )
        buffer = cast(DataBuffer, Remote(BUFFER))
        display.say(f"starting {config.model}, {config.workers} rollout workers, in {config.out} …")
        trainer = _start_trainer(config, buffer, resume)
        workers: dict[Any, str] = {}

        def add_worker() -> None:
            name = f"worker-{len(workers)}"
            workers[_start_worker(name, config, buffer)] = name

        for _ in range(config.workers):
            add_worker()
        with _own_errors():
            final = _watch(trainer, buffer, workers, add_worker, config, display)
            held = ray.get(list(workers), timeout=FINISH_S)
        summary = _summary(config, final, held, buffer.dropped_chunks(), time.time() - started)
    (config.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def add_workers(directory: Path, more: int) -> None:
    """Ask the run in a directory for more rollout workers; its driver starts them.

    Raises FileNotFoundError if no run is going on there.
    """
    if more < 1:
        raise ValueError(f"add: expected at least 1 worker, found {more}")
    if not _going_on(directory):
        raise FileNotFoundError(f"no run is going on in {directory}")
    request = directory / f"{REQUEST}{secrets.token_hex(4)}"
    temporary = directory / f".{request.name}"
    temporary.write_text(str(more))
    temporary.replace(request)


@contextmanager
def _only_driver(directory: Path) -> Iterator[None]:
    """Hold the run's lock, which the system lets go when its holder dies, however it dies.

    Raises FileExistsError, before anything is started or touched, if another driver holds it.
    """
    with (directory / RUNNING).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"the run in {directory} is going on: stop it first (Ctrl-C), or add workers by `pulse-rl rollout`"
            ) from None
        yield


def _going_on(directory: Path) -> bool:
    """Whether a driver holds the run's lock."""
    try:
        with (directory / RUNNING).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _requested(directory: Path) -> int:
    """How many workers were asked for since the last look."""
    total = 0
    for request in sorted(directory.glob(f"{REQUEST}*")):
        total += int(request.read_text())
        request.unlink()
    return total


@contextmanager
def _engine(config: RunConfig) -> Iterator[None]:
    """Ray, on this machine or at an address, in a namespace of its own; shut down at the end."""
    import ray

    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    local = {} if config.address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_NBYTES}
    try:
        ray.init(
            address=config.address,
            namespace=f"pulse-rl-{secrets.token_hex(4)}",
            logging_level="ERROR",
            log_to_driver=False,
            **local,
        )
    except ConnectionError as error:
        raise PulseError(
            f"{error}: is a Ray cluster running there? One that asks for tokens (newer releases of Ray do by "
            "themselves) wants RAY_AUTH_MODE=token in this environment"
        ) from None
    try:
        # The engine prints what befalls its processes on stdout, which belongs to the summary.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ray.shutdown()


def _start_trainer(config: RunConfig, buffer: DataBuffer, resume: bool) -> Any:
    """The trainer, on the driver's node, where its checkpoints are to be; the future of its whole life."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from pulse_rl.rl.trainer import Trainer

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    process = ray.remote(num_cpus=0)(TrainerProcess).options(scheduling_strategy=here).remote()
    return process.run.remote(Trainer, config, buffer, resume)


def _start_worker(name: str, config: RunConfig, buffer: DataBuffer) -> Any:
    """A worker on any node; the future of its whole life. A killed one is restarted and lives it again."""
    import ray

    from pulse_rl.rl.rollout import RolloutWorker

    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RolloutProcess)
    process = kind.options(scheduling_strategy="SPREAD").remote()
    return process.run.remote(RolloutWorker, name, config, buffer)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Let out what an actor raised, without the engine's wrapping around it."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError:
        # Workers are restarted, so this is the trainer (or the buffer, which dies with nothing else).
        raise PulseError(
            "the trainer's process died (killed, or out of memory); the history is whole: go on with --resume"
        ) from None


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
    future: Any,
    buffer: DataBuffer,
    workers: dict[Any, str],
    add_worker: Callable[[], None],
    config: RunConfig,
    display: Display,
) -> dict[str, Any]:
    """Follow the run until the trainer is done; return what it returns."""
    import ray

    seen, done, stopping = 0, False, False
    with (config.directory / "metrics.jsonl").open("a") as metrics, _signals() as interrupted:
        while not done:
            done = bool(ray.wait([future], timeout=POLL_S)[0])
            if interrupted() and not stopping:
                stopping = True
                display.say("stopping: the step under way is finished, published and checkpointed …")
                buffer.stop()
            records, board = buffer.records(seen), buffer.board()
            for record in records:
                versions = {n: facts.get("version") for n, facts in board.items() if n != "trainer"}
                metrics.write(json.dumps(record | {"workers": versions}) + "\n")
            metrics.flush()
            seen += len(records)
            display.update(records, board)
            for _ in range(_requested(config.directory)):
                add_worker()
            _raise_failures(workers)
    final: dict[str, Any] = ray.get(future)
    return final


def _raise_failures(workers: dict[Any, str]) -> None:
    """A worker that ended early has raised: let that out. (One that was killed is still running, elsewhere.)"""
    import ray

    for future in ray.wait(list(workers), num_returns=len(workers), timeout=0)[0]:
        ray.get(future)


def _summary(
    config: RunConfig, final: dict[str, Any], workers: list[dict[str, Any]], dropped: int, seconds: float
) -> dict[str, Any]:
    with (config.directory / "metrics.jsonl").open() as metrics:
        # After a resume a step may stand there twice: the later one counts.
        records = list({r["step"]: r for r in map(json.loads, metrics)}.values())
    sent = [record["patch_nbytes"] for record in records]
    full = records[-1]["full_nbytes"] if records else 0
    verified = [worker | {"verified": worker["digest"] == final["digest"]} for worker in workers]
    return {
        "run": str(config.directory),
        "model": config.model,
        "task": config.task,
        "sync": config.sync,
        "steps": len(records),
        "elements": records[-1]["elements"] if records else 0,
        "full_nbytes": full,
        "patch_nbytes": sent,
        "reduction": full * len(sent) / sum(sent) if sum(sent) else 1.0,
        "density": [record["density"] for record in records],
        "reward": [record["reward"] for record in records],
        "solved": [record["solved"] for record in records],
        "loss": [record["loss"] for record in records],
        "dropped_chunks": dropped,
        "seconds": seconds,
        "trainer_version": final["version"],
        "trainer_digest": final["digest"],
        "workers": verified,
    }
