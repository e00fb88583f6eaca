"""A run's directory: its files, its lock, and how another process asks its driver for workers.

recipe.toml         every setting, as a recipe
store/              the history, unless --store names another place
metrics.jsonl       one line per version; written just before the first one, so its policy has begun
trainer.pt          rank 0's checkpoint; its step is the one from which all trainers continue
trainer-R-S.pt      the checkpoint of trainer R, from 1, at step S
trainer.lock        locked by the trainer; trainer-R.lock by trainer R
dataflow.journal    the Dataflow's state (SQLite, with its log in -wal); dataflow.lock is locked by who writes it
summary.json        the result of the run
report.html         the result and the metrics as plots
ray.log             what Ray reports about its processes
now.json            what the driver sees of the services, each second, for `pulse-rl watch`
running             locked by the driver while the run goes on

Where several policies learn, each has its history in store/NAME/, and the files of its trainers in policies/NAME/.
"""

import os.path
import secrets
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from pulse_rl import open_store
from pulse_rl.disk import read_file, write_stream
from pulse_rl.errors import StoreError
from pulse_rl.flow.metrics import METRICS

RECIPE = "recipe.toml"
FORMER = "config.toml"  # the settings of a run of an older release
POLICIES = "policies"
RUNNING = "running"
LOG = "ray.log"
NOW = "now.json"
SUMMARY = "summary.json"
REQUEST = "add-workers-"  # prefix of files that ask the driver for more workers
DISMISSAL = "remove-workers-"  # likewise, for fewer
LOCK_POLL_S = 0.1
PROBE = "probe-"  # prefix of objects that are written and deleted to check that a store can be written


def make(out: str, store_url: str) -> None:
    """Make a run's directory and check that it and the store can be written. Leaves none that is new, if they cannot.

    out: the directory, as a person has given it. Raises OSError or StoreError, naming the option and its value.
    """
    directory = Path(out)
    new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out: cannot make the run directory {out}: {error.strerror}") from None
    probe = f"{PROBE}{secrets.token_hex(4)}"
    try:
        (directory / probe).touch()
        (directory / probe).unlink()
    except OSError as error:
        raise OSError(f"out: cannot write in the run directory {out}: {error.strerror}") from None
    store = open_store(store_url)
    try:
        store.put(probe, b"")
        store.delete(probe)
    except StoreError as error:
        if new:
            directory.rmdir()
        # The store's own message names the probe's files, which mean nothing to a user.
        reason = str(error).rsplit(": ", 1)[-1].partition(" (os error")[0]
        if isinstance(error.__cause__, OSError) and error.__cause__.strerror:
            reason = error.__cause__.strerror
        raise StoreError(f"store: cannot write to {store_url}: {reason}", url=store_url) from None


def remove(directory: Path, *more: str) -> None:
    """Remove what a run has made that has not begun, in the directory and the directory itself; nothing else in it.

    more: patterns of further files of it.
    """
    patterns = (RECIPE, RUNNING, NOW, f"{REQUEST}*", f"{DISMISSAL}*", *more)
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        path.unlink()
    for empty in (*directory.glob(f"{POLICIES}/*"), directory / POLICIES, directory / "store", directory):
        with suppress(OSError):  # it holds something
            empty.rmdir()


def begun(directory: Path) -> bool:
    """Whether a directory holds a run."""
    return any((directory / name).is_file() for name in (RECIPE, FORMER, METRICS))


def free(directory: Path) -> bool:
    """Whether a new run may begin there: no run has begun or is starting."""
    return not begun(directory) and not running(directory)


def is_run(target: str) -> bool:
    """Whether a path, or a URL, is the directory of a run."""
    return "://" not in target and os.path.isfile(os.path.join(os.path.expanduser(target), RECIPE))


def store_of(target: str) -> str:
    """The path or URL of the store of a run, if its directory is given; whatever else is given, as it is.

    Raises ValueError for a run of several policies, which has a store for each, and for a recipe that is broken.
    """
    directory = Path(os.path.expanduser(target))
    if not is_run(target) or (directory / "manifests").is_dir():
        return target
    try:
        recipe = tomllib.loads((directory / RECIPE).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{directory / RECIPE}: expected TOML: {error}") from None
    store = str(recipe.get("store", directory / "store"))
    if len(names := list(recipe.get("policies", {}))) > 1:
        stores = ", ".join(f"{store.rstrip('/')}/{name}" for name in names)
        raise ValueError(f"{directory}: the run has a store for each of its policies: expected one of {stores}")
    return store


def numbered(out: str) -> str:
    """The first of out, out-2, out-3, … where a new run may begin."""
    names = (out if number == 1 else f"{out}-{number}" for number in count(1))
    return next(name for name in names if free(Path(name)))


@contextmanager
def lock(directory: Path, *, name: str = RUNNING, patience: float = 0.0) -> Iterator[None]:
    """Hold the run's lock. The system releases it when its holder dies, however it dies.

    name: of the lock's file. patience: seconds for which to wait for another holder.
    Raises FileExistsError if another process holds it, OSError on a system without such locks.
    """
    deadline = time.monotonic() + patience
    with (directory / name).open("w") as file:
        while not _try_lock(file, shared=False):
            if time.monotonic() >= deadline:
                raise _already_running(directory)
            time.sleep(LOCK_POLL_S)
        yield


def refuse_running(directory: Path) -> None:
    """Raise FileExistsError if a driver holds the run's lock."""
    if running(directory):
        raise _already_running(directory)


def running(directory: Path) -> bool:
    """Whether a driver holds the run's lock."""
    try:
        with (directory / RUNNING).open() as file:
            return not _try_lock(file, shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _try_lock(file: IO[str], *, shared: bool) -> bool:
    """Lock a file until it is closed; return whether no other process holds it. A shared lock only looks."""
    try:
        import fcntl
    except ImportError:
        raise OSError("pulse-rl train needs Linux or macOS: this system has no flock to lock a run by") from None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _already_running(directory: Path) -> FileExistsError:
    return FileExistsError(
        f"the run in {directory} is going on: stop it first (Ctrl-C), or add workers by `pulse-rl rollout`"
    )


def show(directory: Path, status: Mapping[str, Any]) -> None:
    """Show other processes how a run stands. A disk that takes nothing does not end it."""
    with suppress(OSError):
        write_stream(directory / NOW, [msgspec.json.encode(status)])


def request_workers(directory: Path, count: int, *, leaving: bool = False) -> None:
    """Ask the run in a directory for more rollout workers; its driver starts them. leaving: for fewer, instead.

    Raises ValueError if count is not positive, FileNotFoundError if no run is going on there.
    """
    if count < 1:
        raise ValueError(f"{'remove' if leaving else 'add'}: expected at least 1 worker, found {count}")
    if not running(directory):
        raise FileNotFoundError(f"no run is going on in {directory}")
    name = DISMISSAL if leaving else REQUEST
    write_stream(directory / f"{name}{secrets.token_hex(4)}", [str(count).encode()])


def requested_workers(directory: Path, *, leaving: bool = False) -> int:
    """How many workers were requested since the last call; leaving: how many were to leave."""
    total = 0
    for request in sorted(directory.glob(f"{DISMISSAL if leaving else REQUEST}*")):
        total += int(read_file(request))
        request.unlink()
    return total
