"""Tools: the calculator reads expressions alone; Python code is stopped at its limits, and whatever it started too."""

import asyncio
import os
import time

import pytest

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
    return asyncio.run(Python(**limits)(code))  # type: ignore[arg-type]  # ints where they must be


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
    assert _error("while True: pass", cpu_s=1, wall_s=60) == "stopped after 1 s of processor time"


def test_python_is_stopped_on_the_clock_with_all_that_it_started() -> None:
    started = time.monotonic()
    # As root it may start processes. They keep its output open, and would outlive it.
    code = "import os, time\nif hasattr(os, 'fork'):\n    try: os.fork()\n    except OSError: pass\nopen('/dev/null')\n"
    assert _error(code + "print(os.getpgid(0), flush=True)\ntime.sleep(60)", wall_s=0.5) == "stopped after 0.5 s"
    assert time.monotonic() - started < 10


def test_a_process_left_behind_is_killed() -> None:
    """The parent ends at once and its child closes all it shares: only the group says that they belong together."""
    code = (
        "import os, sys, time\n"
        "try: child = os.fork()\n"
        "except OSError: print('none'); sys.exit()\n"
        "if child: print(child, flush=True); os._exit(0)\n"
        "for n in range(3): os.close(n)\n"
        "time.sleep(60)\n"
    )
    found = _run(code)
    if found == "none":
        return  # whoever is not root may not start one
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(int(found)):
        time.sleep(0.01)
    assert not _alive(int(found))


def _alive(process: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    for limits in ({"cpu_s": 0}, {"wall_s": 0.0}, {"memory_mb": 1}, {"output": 0}):
        with pytest.raises(ValueError, match="cpu_s"):
            Python(**limits)
    assert isinstance(Toolbox()["calculator"], Calculator)
