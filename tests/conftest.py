"""Fixtures of several test modules."""

import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch
import typer.main

import pulse_rl as pulse
from pulse_rl.store.base import Store
from pulse_rl.store.opening import open_store

if TYPE_CHECKING:
    from tests.loco.ranks import Ranks

# A shell that starts the suite in the background makes it ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: times vary on a shared machine. CI tries the same examples every time.
hypothesis.settings.register_profile("pulse-rl", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("pulse-rl")

# Threads of torch that wait for each other spin; and bits do not depend on how many there are.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start

# A command line is built anew for each call, in 60 milliseconds. A process makes one call, the tests a thousand.
pytest.MonkeyPatch().setattr(typer.main, "get_command", functools.cache(typer.main.get_command))

# Ray gives its processes a low priority: beside other tests, a run would wait for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# Some of their tests take up to a minute. Each process of the suite begins with its share of them, so that none is left
# alone with them at the end.
LONG = (
    "flow/test_run",
    "history/test_fuzz",
    "loco/test_ft",
    "sync/test_faults",
    "sync/test_interrupted",
    "sync/test_views",
)
# Fixtures whose first use takes long in each process, as ranks start or kernels are compiled for the emulated device:
# tests that share them stay together.
OF_ALL = ("ranks", "a_device")
WORKERS = pytest.StashKey["list[subprocess.Popen[bytes]]"]()
WARMUP = pytest.StashKey["subprocess.Popen[bytes]"]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile the kernels once, while the processes of the suite collect its tests: else each process would."""
    command = [sys.executable, "-c", "from pulse_rl.cli.main import main; main()", "warmup"]
    config.stash[WARMUP] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    assert node.config.stash[WARMUP].wait() == 0, "pulse-rl warmup failed"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    node.config.stash.setdefault(WORKERS, []).append(node.gateway._io.popen)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """The suite fails where one of its processes crashes as it ends, as after a write past the end of an array."""
    result = yield
    ended = [worker.poll() for worker in session.config.stash.get(WORKERS, [])]
    if crashed := [signal.Signals(-code).name for code in ended if code in (-signal.SIGABRT, -signal.SIGSEGV)]:
        print(f"\nprocesses of the suite crashed as they ended: {', '.join(crashed)}")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests are a million objects that stay: the garbage collector is not to look at them again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # what tests make is freed without it, and looking for cycles takes a twentieth
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)  # when those that are not run, as the slow ones, are out of the list
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {name: [] for name in OF_ALL}
    others: list[pytest.Item] = []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if shared := next((name for name in OF_ALL if name in fixtures), None):
            groups[shared].append(item)
        elif not item.nodeid.removeprefix("tests/").startswith(LONG):
            others.append(item)
        else:
            groups[item.nodeid] = [item]
    long, short = list(filter(None, groups.values())), iter(others)
    # `--dist worksteal` gives each process as many tests that follow one another.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for process in range(processes):
        share = (len(items) - len(ordered)) // (processes - process)
        begin = [item for group in long[process::processes] for item in group]
        ordered += [*begin, *islice(short, max(0, share - len(begin)))]
    items[:] = ordered


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Every store in turn, empty."""
    return open_store("memory://" if request.param == "memory" else (tmp_path / "store").as_uri())


class Trainee:
    """FP32 masters that move like an RL run's: most steps leave most BF16 bits unchanged."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.weights = {
            "a": torch.from_numpy(self._random.normal(0, 0.02, (300, 257)).astype(np.float32)),
            "b.scale": torch.from_numpy(self._random.normal(1, 0.1, 77).astype(np.float32)),
            "c": torch.tensor(0.5),
            "empty": torch.zeros(0, 3),
            "ids": torch.arange(5),
        }

    def step(self) -> dict[str, torch.Tensor]:
        for weight in self.weights.values():
            if weight.is_floating_point():
                weight += torch.from_numpy(self._random.normal(0, 1e-5, tuple(weight.shape)).astype(np.float32))
        return self.weights

    def published(self, store: Any, versions: int = 1, **options: Any) -> pulse.Publisher:
        """The publisher of a history whose versions count from 0."""
        publisher = pulse.Publisher(store, cast="bfloat16", **options)
        for version in range(versions):
            publisher.publish(self.step(), version=version)
        return publisher

    def followed(self, store: Any) -> tuple[int, str]:
        """The version that a new subscriber reaches, and the digest recounted over its bits."""
        live = self.empty()
        return pulse.Subscriber(store).sync(live).version, pulse.digest(live)

    def cast(self) -> dict[str, torch.Tensor]:
        """Copies of what should arrive of the weights, published with cast="bfloat16": PyTorch's own cast."""
        return {n: w.bfloat16() if w.is_floating_point() else w.clone() for n, w in self.weights.items()}

    def digest(self) -> str:
        return pulse.digest(self.cast())

    def empty(self) -> dict[str, torch.Tensor]:
        """Weights of the published dtypes, all zero."""
        return {n: torch.zeros_like(w) for n, w in self.cast().items()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small disk: only root may mount one")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def trainee() -> Trainee:
    return Trainee()


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Ranks]":
    """Four trainers' processes, which all tests of trainers share: they take long to start."""
    from tests.loco.ranks import Ranks

    with Ranks() as run:
        yield run
