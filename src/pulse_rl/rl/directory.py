"""A run's directory: who may work in it, what can be written there, and what a driver is asked through it.

config.toml      the settings; there from the first version on, so where it stands a run can be resumed
metrics.jsonl    a line a version
trainer.pt       the trainer's checkpoint; of several trainers the first one's, by which all others' count
trainer-R-S.pt   the checkpoint of trainer R, from 1, of step S
store/           the history, unless it is elsewhere
summary.json     what the run came to
report.html      the same to look at, with the lines of metrics as plots; needs the extra `study`
ray.log          what the engine says about its processes
running          locked by the driver while the run goes on
"""

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulse_rl.disk import write_stream
from pulse_rl.errors import StoreError
from pulse_rl.rl.config import RunConfig, begun
from pulse_rl.store.objects import open_store

RUNNING = "running"
REQUEST = "add-workers-"  # files that ask the driver for more workers
PROBE = "probe-"  # an object that is written and deleted again to see whether a store can be written


def make(config: RunConfig) -> None:
    """Make the run's directory and see that it and the store can be written.

    Raises OSError or StoreError, naming the option and what was given for it.
    """
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out: cannot make the run directory {config.out}: {error.strerror}") from None
    probe = f"{PROBE}{secrets.token_hex(4)}"
    try:
        (config.directory / probe).touch()
        (config.directory / probe).unlink()
    except OSError as error:
        raise OSError(f"out: cannot write in the run directory {config.out}: {error.strerror}") from None
    store = open_store(config.store_url)
    try:
        store.put(probe, b"")
        store.delete(probe)
    except StoreError as error:
        # The store's own message names scratch files of the probe, which say nothing to who reads them.
        reason = str(error).rsplit(": ", 1)[-1].partition(" (os error")[0]
        if isinstance(error.__cause__, OSError) and error.__cause__.strerror:
            reason = error.__cause__.strerror
        raise StoreError(f"store: cannot write to {config.store_url}: {reason}") from None


def free(directory: Path) -> bool:
    """Whether a new run may begin there: none has begun, and none is just starting."""
    return not begun(directory) and not going_on(directory)


@contextmanager
def only_driver(directory: Path) -> Iterator[None]:
    """Hold the run's lock, which the system lets go when its holder dies, however it dies.

    Raises FileExistsError, before anything is started or touched, if another driver holds it.
    """
    with (directory / RUNNING).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(directory) from None
        yield


def refuse_going_on(directory: Path) -> None:
    """Raise FileExistsError if a driver holds the run's lock."""
    if going_on(directory):
        raise _busy(directory)


def going_on(directory: Path) -> bool:
    """Whether a driver holds the run's lock."""
    try:
        with (directory / RUNNING).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def _busy(directory: Path) -> FileExistsError:
    return FileExistsError(
        f"the run in {directory} is going on: stop it first (Ctrl-C), or add workers by `pulse-rl rollout`"
    )


def ask_for_workers(directory: Path, more: int) -> None:
    """Ask the run in a directory for more rollout workers; its driver starts them.

    Raises ValueError if more is not positive, FileNotFoundError if no run is going on there.
    """
    if more < 1:
        raise ValueError(f"add: expected at least 1 worker, found {more}")
    if not going_on(directory):
        raise FileNotFoundError(f"no run is going on in {directory}")
    write_stream(directory / f"{REQUEST}{secrets.token_hex(4)}", [str(more).encode()])


def asked_for(directory: Path) -> int:
    """How many workers were asked for since the last look."""
    total = 0
    for request in sorted(directory.glob(f"{REQUEST}*")):
        total += int(request.read_text())
        request.unlink()
    return total
