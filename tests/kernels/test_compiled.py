"""Compiled kernels on disk: found, kept, warmed up; and where nothing can be written."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import pulse_rl
from pulse_rl.kernels.cpu import beside, compiled

ROOM = "pulse_rl/kernels/cpu/__pycache__"
# A patch of 16-bit elements; "all": each codec on elements of each width, a publish, PULSELoCo's gate.
WORK = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import numpy as np, pulse_rl as pulse
from pulse_rl.kernels.cpu import compiled
every = "all" in sys.argv
old = {kind: np.arange(1, 4001).astype(kind) for kind in (
    ["uint8", "int16", "uint32", "int64", "float16", "float32", "float64"] if every else ["uint16"])}
new = {kind: tensor.copy() for kind, tensor in old.items()}
for tensor in new.values():
    tensor[::50] += 1
for codec in ["context", "gap"] if every else ["gap"]:
    live = {kind: tensor.copy() for kind, tensor in old.items()}
    pulse.apply(live, pulse.diff(old, new, codec=codec))
    assert all((live[kind] == new[kind]).all() for kind in live)
if every:
    pulse.Publisher(pulse.open_store("memory://")).publish(new, version=0)
    from pulse_rl.loco import gate
    for form in ("bfloat16", "float8_e4m3fn"):
        assert gate.find_sends(*[np.ones(9, np.float32)] * 3, form) is not None
print(compiled.so_far().kernels)
"""


@pytest.fixture
def package() -> Iterator[Path]:
    """A copy of the package without machine code."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        source = Path(pulse_rl.__file__).parent
        shutil.copytree(source, place / "pulse_rl", ignore=shutil.ignore_patterns("__pycache__"))
        yield place


def run(
    package: Path, *command: str, home: Path, locked: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a process that imports the copy. locked: as one that can write neither the copy nor its home."""
    unset = ("PULSE_CACHE", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {"HOME": str(home), "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    drop: list[str] = []
    if locked and os.geteuid() == 0:  # root may write everywhere, except without its capabilities
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("NOT TESTED: a process without permission to write; install setpriv, or do not run as root")
        drop = [setpriv, "--inh-caps=-all", "--bounding-set=-all"]
    directories = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    try:
        for path in directories:
            path.chmod(0o555 if locked else 0o755)
        return subprocess.run(
            [*drop, sys.executable, *command], env=environment, cwd="/", capture_output=True, text=True, timeout=300
        )
    finally:
        for path in directories:
            path.chmod(0o755)


CLI = ("-c", "from pulse_rl.cli.main import main; main()")


@pytest.mark.slow
def test_a_container_whose_package_and_home_cannot_be_written(package: Path) -> None:
    """It works, with one warning; after a warm-up in the image's recipe it compiles nothing and warns of nothing."""
    nowhere = package / "no-home"
    done = run(package, "-c", WORK, home=nowhere, locked=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert "pulse-rl warmup" in warning
    assert ROOM in warning
    assert int(done.stdout) > 5
    assert not list(package.rglob("*.nbi"))

    cache = package / "cache"
    made = run(package, *CLI, "warmup", "--cache", str(cache), "--json", home=nowhere)
    report = json.loads(made.stdout)
    assert report["compiled"] > 40
    assert report["seconds"] > 0
    assert report["environment"] == {"PULSE_CACHE": str(cache)}
    assert not (package / ROOM).exists()
    for variable, what in zip(compiled.VARIABLES, ("all", "some"), strict=True):
        again = run(package, "-c", WORK, what, home=nowhere, locked=True, **{variable: str(cache)})
        assert (again.returncode, again.stdout, again.stderr) == (0, "0\n", "")

    # Broken files are as good as none: they are compiled anew, here with a warning.
    for file in cache.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])
    for file in cache.rglob("*digest*.nbi"):
        file.write_bytes(b"")
    broken = run(package, "-c", WORK, home=nowhere, locked=True, PULSE_CACHE=str(cache))
    assert broken.returncode == 0, broken.stderr
    assert int(broken.stdout) > 5


def test_a_warm_up_says_where_it_cannot_write(package: Path) -> None:
    done = run(package, *CLI, "warmup", "--cache", "/proc/nowhere", home=package)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: /proc/nowhere")
    assert done.stderr.count("\n") == 1


def test_every_kernel_is_warmed_up() -> None:
    """Each that is called from Python has machine code after a warm-up; parts of kernels have it with their callers."""
    code = (
        "from pulse_rl.kernels.cpu import compiled, warmup\nwarmup.warm_up()\n"
        "print([k.__name__ for k in compiled.KERNELS if not k.overloads])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) <= {"merge_runs"}


# A kernel's source is edited after it was imported and before it is compiled.
EDITED = """
import sys, pathlib
import numpy as np
from pulse_rl.kernels.cpu import compiled, loco
if "edit" in sys.argv:
    file = pathlib.Path(loco.__file__)
    file.write_text(file.read_text().replace("out[i] = s\\n", "out[i] = s + 1\\n"))
out = np.zeros(2, np.float32)
loco.difference(np.ones(2, np.float32), out, out)
print(compiled.stamp(), out.tolist())
"""


def test_machine_code_is_of_the_sources_that_a_process_has_imported(package: Path) -> None:
    """Also where they are edited, or upgraded, before it compiles them: its code is not kept for the new ones."""
    before, old = run(package, "-c", EDITED, "edit", home=package).stdout.split(maxsplit=1)
    after, new = run(package, "-c", EDITED, home=package).stdout.split(maxsplit=1)
    assert before != after
    assert (old, new) == ("[1.0, 1.0]\n", "[2.0, 2.0]\n")


def test_kernels_check_bounds_where_numba_is_told_so() -> None:
    """Also where their machine code without checks is kept: they run without them first."""
    code = (
        "import numpy as np\nfrom pulse_rl.kernels import cpu\n"
        "cpu.gather(np.zeros(4, np.uint16), np.array([4], np.uint32), np.empty(1, np.uint16))"
    )
    for checks in "01":
        env = os.environ | {"NUMBA_BOUNDSCHECK": checks}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert ("IndexError" in done.stderr, done.returncode) == (checks == "1", int(checks))


def test_compiling_in_another_process_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How many kernels it has compiled; nothing where all were there; and why it failed."""
    caplog.set_level("INFO")
    monkeypatch.setattr(beside, "_COMPILE", "print(0, 0.0)")
    beside.start_compiling().join()
    assert caplog.messages == []
    monkeypatch.setattr(beside, "_COMPILE", "print(7, 1.26)")
    beside.start_compiling().join()
    monkeypatch.setattr(beside, "_COMPILE", "raise OSError('no room')")
    beside.start_compiling().join()
    told, failed = caplog.messages
    assert told == "compiled 7 kernels beforehand, in 1.3 s"
    assert failed.endswith("no room")


def test_machine_code_for_a_device_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And found for its own device and release of Numba-CUDA alone. A made-up compiler: there is no device."""
    numba_cuda = pytest.importorskip("numba_cuda")
    from numba.cuda.dispatcher import _Kernel

    from pulse_rl.kernels.gpu import bits

    class Target(SimpleNamespace):
        """A compiler for devices of a compute capability."""

        def refresh(self) -> None: ...

        def codegen(self) -> "Target":
            return self

        def magic_tuple(self) -> tuple[int, int]:
            return (9, self.capability)

    states = dict.fromkeys(("cooperative", "debug", "lineinfo", "call_helper", "extensions"))
    hopper = Target(capability=0)
    places = [bits.placer(cuda_part(name)) for name in ("one", "other")]
    with compiled.keeping(tmp_path):
        for kernel, name in zip(places, ("one", "other"), strict=True):
            made = {**states, "name": name, "signature": None, "codelibrary": None}
            result = SimpleNamespace(_codelibrary=Target(codegen=hopper), _reduce_states=lambda made=made: made)
            kernel._cache.save_overload((1,), result)
        found = [kernel._cache.load_overload((1,), hopper) for kernel in places]
        assert [(type(each), each.entry_name) for each in found] == [(_Kernel, "one"), (_Kernel, "other")]
        assert places[0]._cache.load_overload((1,), Target(capability=1)) is None
        monkeypatch.setattr(numba_cuda, "__version__", "0")
        assert places[0]._cache.load_overload((1,), hopper) is None


def test_threads_that_launch_a_kernel_for_the_first_time_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up kernel that takes a while to compile and to load, and that breaks if two threads do so at once."""
    pytest.importorskip("numba_cuda")
    from pulse_rl.kernels.gpu import device

    class Kernel:
        """Compiles and loads as Numba-CUDA's do: what is made is kept without a lock."""

        _codelibrary: "Kernel"
        kernel = "function"

        def __init__(self) -> None:
            self.made, self.loaded = 0, 0

        def compile(self, kinds: object) -> "Kernel":
            self.made += 1
            time.sleep(0.02)
            self._codelibrary = self
            return self

        def get_cufunc(self) -> "Kernel":
            if not self.loaded:
                time.sleep(0.02)
                self.loaded += 1
            return self

    kernel, launched, together = Kernel(), list[object](), Barrier(4)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(device, "core", MagicMock(launch=lambda *args: launched.append(args[2:])))

    def launch(_: int) -> None:
        together.wait()
        device.queue(kernel, 1, 1, (7,))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, range(4)))
    assert (kernel.made, kernel.loaded) == (1, 1)
    assert launched == [("function", 7)] * 4


def cuda_part(name: str) -> Any:
    """A part of kernels of this name."""
    from pulse_rl.kernels.gpu import device

    def part() -> None: ...

    part.__name__ = name
    return device.device(part)
