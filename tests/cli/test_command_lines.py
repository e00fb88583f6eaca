"""Bad command lines: every command with everything that can be in place of a file, and streams that cannot be written.

Each ends with exit code 1 or 2 and one sentence: no traceback, no wait, no control character, nothing half printed.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.cli.main import main
from pulse_rl.errors import install_hint
from pulse_rl.weights.layout import layout

COMMANDS = [
    "diff X new -o out",
    "diff old X -o out",
    "apply X patch -o out",
    "apply old X -o out",
    "inspect X",
    "verify X",
    "verify store --deep X",
    "verify patch --deep X",
    "verify store --public-key X",
    "status X",
    "prune X --retain 1",
    "study X",
    "study X new",
    "rollout X",
    "bench codec X new",
    "bench codec --checkpoints X",
]
INPUTS = [
    "fifo",
    "empty",
    "directory",
    "cut",
    "shards",
    "index",
    "loop",
    "missing",
    "name\x1b[2J",
    "x" * 5000,
    "\udcff",
]
HUGE = "9" * 5000
NUMBERS = [
    f"plan --params {HUGE} --bandwidth 1Gbps --compute 1s",
    f"plan --params 7B --bandwidth {HUGE}Gbps --compute 1s",
    f"plan --params 1e300 --bandwidth 1e-300bit --compute 1e300s --workers {HUGE[:400]}",
    "plan --params nan --bandwidth infbit --compute -1s",
    f"diff old new -o out --base {HUGE}",
    f"diff old new -o out --target {HUGE[:30]}",
    "prune store --retain 1 --grace nan",
    "prune store --retain 0",
    f"rollout old --add {HUGE[:30]}",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with good files and all of INPUTS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    old = {"a": np.arange(500, dtype=np.float32)}
    new = {"a": np.where(np.arange(500) % 50, old["a"], 1).astype(np.float32)}
    write_checkpoint(tmp_path / "old", layout(old))
    write_checkpoint(tmp_path / "new", layout(new))
    (tmp_path / "patch").write_bytes(pulse.diff(old, new))
    pulse.Publisher("store").publish(old, version=0)
    for directory in ("directory", "shards", "index"):
        (tmp_path / directory).mkdir()
    for pipe in ("fifo", "shards/model.safetensors", "index/model.safetensors.index.json"):
        os.mkfifo(tmp_path / pipe)
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes((tmp_path / "patch").read_bytes()[:100])
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "name\x1b[2J").write_bytes(b"not weights at all, but long enough")
    return tmp_path


@pytest.fixture
def patience() -> Iterator[None]:
    """A command that waits for ever ends the test."""

    def end(*_: object) -> None:
        raise TimeoutError("the command waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(args)
    out, err = capsys.readouterr()
    code = stop.value.code
    shown = out if args[0] == "verify" and code == 1 and out else err  # its problems are its result
    assert code in (1, 2), (args[:3], code)
    assert shown, args[:3]
    assert "the command waits" not in err
    assert not {"\x1b", "\x00"} & set(out + err)
    assert "Traceback" not in err
    if code == 1 and shown is err:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: ")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("command", COMMANDS)
def test_everything_in_place_of_a_file(
    place: Path, patience: None, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in INPUTS:
        if command == "diff X new -o out" and name == "directory":
            shutil.rmtree(place / "out", ignore_errors=True)
        _fails([name if word == "X" else word for word in command.split()], capsys)
        assert not (place / "out").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_pipe_or_a_device_is_not_replaced(place: Path, patience: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("diff old new -o fifo", "apply old patch -o fifo"):
        _fails(command.split(), capsys)
    assert (place / "fifo").is_fifo()


def test_nothing_is_not_the_working_directory(
    place: Path, patience: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell's variable in quotes that is not set."""
    monkeypatch.chdir(place / "store")
    before = sorted(Path().iterdir())
    for args in ("prune", "--retain", "1", ""), ("mirror", str(place / "store"), "", "--once"), ("status", ""):
        _fails(list(args), capsys)
    assert sorted(Path().iterdir()) == before


def test_huge_and_impossible_numbers(place: Path, patience: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command in NUMBERS:
        _fails(command.split(), capsys)


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line of a shell, in which PULSE stands for pulse-rl."""
    code = f"PULSE() {{ '{sys.executable}' -c 'from pulse_rl.cli.main import main; main()' \"$@\"; }}; {command}"
    return subprocess.run(["sh", "-c", code], capture_output=True, env={**os.environ, **variables}, timeout=120)


def test_closed_streams(place: Path) -> None:
    done = shell("PULSE inspect old >&-")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert b"stdout is closed" in done.stderr
    done = shell("PULSE inspect missing 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    done = shell("PULSE inspect old 2>&- <&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"digest" in done.stdout
    if Path("/dev/full").exists():
        done = shell("PULSE inspect old >/dev/full")
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_narrow_encodings_and_terminals(place: Path) -> None:
    plan = "PULSE plan --params 7B --bandwidth 200Mbps --compute 50s"
    done = shell(plan, PYTHONIOENCODING="ascii", COLUMNS="1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"`coding` is the time" in done.stdout
    done = shell("PULSE inspect", COLUMNS="1")
    assert done.returncode == 2
    assert b"Missing argument" in done.stderr
    name = {"ü": np.zeros(3, np.float32)}
    (place / "umlaut").write_bytes(pulse.diff(name, {"ü": np.ones(3, np.float32)}))
    done = shell("PULSE inspect umlaut --json", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert "ü".encode() in done.stdout  # JSON is UTF-8


INTERRUPT_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from pulse_rl.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("pulse_rl.cli.app", "inspect old"),
        ("typer", "inspect old"),
        ("pulse_rl.cli.files", "inspect old"),
        ("numpy", "inspect old"),
        ("pulse_rl.checkpoint.header", "inspect old"),
        ("numba", "diff old new -o out"),
        ("torch", "train --model tiny --out run"),
        ("ray", "train --model tiny --out run"),
    ],
)
def test_ctrl_c_while_modules_are_imported(place: Path, module: str, command: str) -> None:
    """At any of them: quietly, with the exit code of an interruption."""
    code = INTERRUPT_AT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    assert not (place / "out").exists()
    assert not (place / "run").exists()


def test_an_import_that_an_interruption_turned_into_an_error(place: Path) -> None:
    code = (
        "import signal, sys, types\n"
        "class Broken(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt: raise RecursionError from None\n"
        "sys.modules['blake3'] = Broken('blake3')\n"
        "from pulse_rl.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "inspect", "patch"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_threads_that_are_no_number(place: Path) -> None:
    for setting in ("0", "²"):
        done = shell("PULSE inspect old", PULSE_THREADS=setting)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
        assert b"PULSE_THREADS: expected a positive whole number" in done.stderr


def test_a_missing_module_is_named(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "recipe.toml").write_text('[policies.solver]\nmodel = "tiny"\n')
    code = "import sys; sys.modules['ray'] = None\nfrom pulse_rl.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "--resume", "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "ray is needed for this" in done.stderr
    assert install_hint("run") in done.stderr
