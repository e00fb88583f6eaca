"""Tools: the calculator reads expressions alone; Python code is stopped at its limits, and can start no process."""

import asyncio
import contextlib
import os
import platform
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulse_rl.errors import PulseError
from pulse_rl.flow.playing import alone
from pulse_rl.flow.playing.calculator import Calculator, calculate
from pulse_rl.flow.playing.tools import Python, Toolbox, ToolError, Tools
from pulse_rl.flow.registry import Plugin


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 4 * 2", "11"),
        ("(3 + 4) * 2 =", "14"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("-3 - -4", "1"),
        ("2 ** 10 % 1000 // 5", "4"),
        ("0.1 + 0.2", "0.3"),
        ("6 × 7 − 2 ÷ 1", "40"),
        ("2 ** -1", "0.5"),
        ("(-8) ** 2", "64"),
        ("1e3", "1000"),
        ("2 ** 500 - 2 ** 500", "0"),
        ("007 +\n05", "12"),
        ("-" * 199 + "1", "-1"),
    ],
)
def test_the_calculator_computes(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3 +",
        "1 / 0",
        "1 % 0",
        "0.0 ** -1",
        "9 ** 9 ** 9",
        "9 ** 999999999",
        "(2 ** 1000) ** 1000",
        "10.0 ** 400",
        "(-8) ** 0.5",
        "x",
        "a.b",
        "True + 1",
        "'a' * 9",
        "[1][0]",
        "__import__('os')",
        "f(1)",
        "lambda: 1",
        "1 if 1 else 2",
        "3j",
        "1 < 2",
        "~1",
        "1 << 9",
        "\0",
        "(" * 190,
        "-" * 190 + "1" * 300,
        "1_0" * 80,
    ],
)
def test_the_calculator_refuses(text: str) -> None:
    with pytest.raises(ToolError):
        calculate(text)


def _run(code: str, **limits: float) -> str:
    """Unless the test says otherwise, a busy machine has half a minute."""
    return asyncio.run(Python(**{"wall_s": 30.0} | limits)(code))  # type: ignore[arg-type]  # ints where they must be


def _error(code: str, **limits: float) -> str:
    with pytest.raises(ToolError) as caught:
        _run(code, **limits)
    return str(caught.value)


def test_python_answers_with_what_is_printed() -> None:
    assert _run("for i in range(3):\n    print(i ** 2)") == "0\n1\n4"
    assert _run("import sys; print('ä', file=sys.stdout); sys.exit(0)") == "ä"
    assert _error("print(1)\nraise KeyError('x')") == "KeyError: 'x'"
    assert _error("def f(:").startswith("SyntaxError")
    assert _error("import os; os._exit(3)") == "ended with status 3"


def test_python_has_no_more_than_its_limits() -> None:
    assert _error("x = bytearray(1 << 30)", memory_mb=128) == "out of memory: it may have 128 MB"
    assert _error("while True: print('x' * 100)", output=500).startswith("stopped after 500 bytes of output: xxx")
    assert _error("import sys\nwhile True: print('x' * 100, file=sys.stderr)").startswith("stopped after 2000 bytes")
    assert "File too large" in _error("f = open('f', 'wb', 0)\nwhile True: f.write(b'x' * 1000)", output=5000)


def test_python_is_stopped_after_its_processor_time() -> None:
    assert _error("while True: pass", cpu_s=1) == "stopped after 1 s of processor time"


def test_python_is_stopped_on_the_clock() -> None:
    started = time.monotonic()
    assert _error("import time\nprint('x', flush=True)\ntime.sleep(60)", wall_s=0.5) == "stopped after 0.5 s"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "os.forkpty()",
        "subprocess.run(['true'])",
        "subprocess.run(['true'], preexec_fn=os.setsid)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "call(clone, SIGCHLD)",
        "call(clone, 0x00008000 | SIGCHLD)",  # CLONE_PARENT: a child of the worker
        "call(435, ctypes.byref((ctypes.c_uint64 * 11)(0, 0, 0, 0, SIGCHLD)), 88)",  # clone3
        "call(58)",  # vfork on x86_64
        "call(0x40000000 + 57)",  # fork of another convention
        "call(322, -1, b'/bin/true', 0, 0, 0)",  # execveat on x86_64
        "call(425, 8, ctypes.create_string_buffer(120))",  # io_uring_setup
        "prctl(22, 0), os.fork()",  # without the filter
        "prctl(38, 0), os.fork()",
        "threading.Thread(target=lambda: print(os.fork())).start()",
    ],
)
def test_python_starts_no_process(start: str) -> None:
    """What it tries fails, and nothing of its session is left: asked as root, whom no limit on processes binds."""
    if "on x86_64" in start and platform.machine() != "x86_64":
        pytest.skip("another machine's call")
    code = f"""
import ctypes, os, platform, subprocess, sys, threading
from signal import SIGCHLD
threading.excepthook = lambda error: print("refused")
kernel = ctypes.CDLL(None, use_errno=True)
clone = 56 if platform.machine() == "x86_64" else 220
def prctl(*values): return kernel.prctl(*map(ctypes.c_long, values), 0, 0, 0)
def call(*values):
    if kernel.syscall(*[ctypes.c_long(v) if isinstance(v, int) else v for v in values]) < 0:
        raise OSError(ctypes.get_errno(), "refused")
print(os.getsid(0), flush=True)
try: {start}
except OSError: print("refused")
for thread in threading.enumerate()[1:]: thread.join()
"""
    session, answer = _run(code).split()
    assert answer == "refused"
    assert _of_session(session) == []


def test_python_has_threads() -> None:
    code = "import threading\nt = threading.Thread(target=lambda: print(6 * 7))\nt.start()\nt.join()"
    assert _run(code) == "42"


def test_python_ends_with_a_worker_that_is_killed() -> None:
    """Nobody is left to stop the code on the clock."""
    code = "import os, time\nprint(os.getsid(0), file=open('/proc/%d/fd/1', 'w'), flush=True)\ntime.sleep(60)"
    run = (
        "import asyncio, os, sys\nfrom pulse_rl.flow.playing.tools import Python\n"
        "asyncio.run(Python(wall_s=30)(sys.argv[1] % os.getpid()))"
    )
    with subprocess.Popen([sys.executable, "-c", run, code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        session = worker.stdout.readline().strip()
        assert len(_of_session(session)) == 1
        worker.kill()
    deadline = time.monotonic() + 10
    while (left := _of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_answers_as_a_list_of_calls_says(machine: str) -> None:
    """The program for the kernel, run here for each call and two sets of flags, against what each call is."""
    number, clone, refused = alone._MACHINES[machine]
    code = alone.program(number, clone, refused)
    for call in (*range(1024), 1 << 30, (1 << 30) + 57, (1 << 32) - 1):
        for flags in (17, 0x00010000 | 0x100):
            denied = call in refused or call >= 1 << 30 or (call == clone and flags == 17)
            expected = alone._REFUSE if denied else alone._UNKNOWN if call in (435, 425) else alone._ALLOW
            assert _answer(code, call, number, flags) == expected, call
    assert _answer(code, 0, 0x40000003, 0) == alone._END  # a call of 32 bits


def _answer(code: bytes, call: int, machine: int, flags: int) -> int:
    """What a filter answers, by the kernel's description of its instructions."""
    data = struct.pack("@IIQQ", call, machine, 0, flags)
    lines = list(struct.iter_unpack("@HBBI", code))
    value, at = 0, 0
    while True:
        what, yes, no, constant = lines[at]
        if what == 0x06:
            return int(constant)
        if what == 0x20:
            value, at = struct.unpack_from("@I", data, constant)[0], at + 1
            continue
        holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[what]
        at += 1 + (yes if holds else no)


def test_no_code_runs_where_the_kernel_has_no_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the worker's machine, which no answer to the policy may hide."""
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(
        "import platform, runpy\nplatform.machine = lambda: 'riscv64'\n"
        f"runpy.run_path({alone.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(alone, "__file__", str(elsewhere))
    tools = Tools(Toolbox())
    with pytest.raises(PulseError, match="expected Linux on x86_64 or aarch64, found linux, riscv64"):
        asyncio.run(tools.call("python", f"open({str(tmp_path / 'ran')!r}, 'w')"))
    assert not (tmp_path / "ran").exists()


def _of_session(session: str) -> list[int]:
    """The processes of a session that run, without those that have ended and were not waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if fields[3] == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def test_python_inherits_nothing() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    os.environ["PULSE_SECRET"] = "hidden"
    try:
        found = _run(
            "import os\n"
            f"try: os.fstat({write}); print('open')\n"
            "except OSError: print('closed')\n"
            "print(os.environ.get('PULSE_SECRET'), os.listdir('.'))\n"
        )
    finally:
        del os.environ["PULSE_SECRET"]
        os.close(read)
        os.close(write)
    assert found == "closed\nNone []"


def test_tools_count_and_give_errors_as_text() -> None:
    async def use() -> tuple[list[str], dict[str, float]]:
        tools = Tools(Toolbox({name: Plugin(f"{__name__}:{name}") for name in ("upper", "count")}))
        answers = [
            await tools.call("calculator", "1 + 1"),
            await tools.call("calculator", "one"),
            await tools.call("upper", "a" * 5000),
        ]
        with pytest.raises(ValueError, match="expected one of calculator, python, upper, count, found 'search'"):
            await tools.call("search", "x")
        with pytest.raises(TypeError, match="tool 'count': expected text as its answer, found int"):
            await tools.call("count", "x")
        return answers, tools.facts

    answers, facts = asyncio.run(use())
    assert answers[0] == "2"
    assert answers[1].startswith("error: expected an expression")
    assert answers[2] == "A" * 4000 + "…"
    assert facts == {"tool_calls": 4.0, "tool_errors": 1.0}


async def upper(text: str) -> str:
    """A tool of this module."""
    return text.upper()


async def count(text: str) -> int:
    """No tool: its answer is no text."""
    return len(text)


def test_limits_that_are_none_are_refused() -> None:
    for limits in (
        {"cpu_s": 0},
        {"wall_s": 0.0},
        {"memory_mb": 1},
        {"output": 0},
        {"wall_s": 31},
        {"memory_mb": 10**20},
    ):
        with pytest.raises(ValueError, match="cpu_s"):
            Python(**limits)
    assert isinstance(Toolbox()["calculator"], Calculator)
