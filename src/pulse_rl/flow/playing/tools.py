"""Tools that a workflow gives to its policies: text in, text out, with limits.

A model makes mistakes, so a tool's error is an answer: its text goes into the conversation, and it is counted. The
limits (time, memory, output, one process: `alone`) keep a mistake from harming the worker. They are no prison for
hostile code: it runs with all rights of the worker's user.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Protocol

from pulse_rl.errors import PulseError
from pulse_rl.flow import registry
from pulse_rl.flow.playing import alone
from pulse_rl.flow.registry import Plugin

SECONDS = 30.0  # that any tool may take
ANSWER = 4000  # characters of any tool's answer


class ToolError(Exception):
    """A tool cannot do what it was asked for; its text is the answer."""


class Tool(Protocol):
    """A tool: it answers a text with a text, and raises ToolError."""

    async def __call__(self, text: str, /) -> str: ...


class Python:
    """Runs Python code in a process that can start no other one, and answers with what it prints.

    Where the kernel cannot promise that, a call raises PulseError.

    Args:
        cpu_s: Seconds of processor time.
        wall_s: Seconds on the clock.
        memory_mb: Megabytes of address space.
        output: Bytes that it may print, and that a file may have.
    """

    def __init__(self, *, cpu_s: int = 2, wall_s: float = 5.0, memory_mb: int = 512, output: int = 2000) -> None:
        if not (
            1 <= cpu_s <= SECONDS and 0 < wall_s <= SECONDS and 64 <= memory_mb < 1 << 20 and 1 <= output < 1 << 20
        ):
            raise ValueError(
                f"expected cpu_s from 1 and wall_s above 0, both to {SECONDS:g}, memory_mb from 64 and output from 1, "
                f"both to below {1 << 20:,}, found {cpu_s}, {wall_s}, {memory_mb} and {output}"
            )
        self._cpu_s, self._wall_s, self._memory, self._output = cpu_s, wall_s, memory_mb << 20, output

    async def __call__(self, text: str, /) -> str:
        with tempfile.TemporaryDirectory(prefix="pulse-tool-", ignore_cleanup_errors=True) as scratch:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", alone.__file__),
                *map(str, (os.getpid(), self._cpu_s, self._memory, self._output)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=scratch,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch},
                start_new_session=True,  # its signals to its own group do not reach the worker
                close_fds=True,
            )
            try:
                async with asyncio.timeout(self._wall_s):
                    printed, complaint, cut = await self._talk(process, text.encode())
                    await process.wait()  # it may have closed its output and go on
            except TimeoutError:
                raise ToolError(f"stopped after {self._wall_s:g} s") from None
            finally:
                _kill(process)
                status = await process.wait()
        if not printed.startswith(alone.READY):
            raise PulseError(complaint.strip() or f"tool python: its process could not start: status {status}")
        printed = printed.strip()
        if cut:
            raise ToolError(f"stopped after {self._output} bytes of output: {printed[:100]}…")
        if status == -signal.SIGXCPU:
            raise ToolError(f"stopped after {self._cpu_s} s of processor time")
        if "MemoryError" in complaint:
            raise ToolError(f"out of memory: it may have {self._memory >> 20} MB")
        if status:
            raise ToolError(complaint.strip().rsplit("\n", 1)[-1] or f"ended with status {status}")
        return printed

    async def _talk(self, process: asyncio.subprocess.Process, code: bytes) -> tuple[str, str, bool]:
        """Send the code. Returns what was printed, the last of the errors, and whether it printed too much."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(code)
            await process.stdin.drain()
        process.stdin.close()
        (printed, cut), (complaint, flooded) = await asyncio.gather(
            _read(process.stdout, len(alone.READY) + self._output, process),
            _read(process.stderr, self._output, process),
        )
        return printed, complaint, cut or flooded


async def _read(stream: asyncio.StreamReader, limit: int, process: asyncio.subprocess.Process) -> tuple[str, bool]:
    """What a stream gives, and whether it gives more than `limit` bytes; then the process is killed at once."""
    data = b""
    while len(data) <= limit and (more := await stream.read(limit + 1 - len(data))):
        data += more
    if len(data) > limit:
        _kill(process)
        while await stream.read(1 << 16):  # a pipe that is not read to its end keeps asyncio waiting for the process
            pass
    return data[:limit].decode(errors="replace"), len(data) > limit


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.kill()


class Toolbox:
    """The tools of a worker.

    Args:
        plugins: By the name under which a workflow calls them; beside, or instead of, `calculator` and `python`.

    Raises:
        ValueError: If a tool or a setting is unknown.
    """

    def __init__(self, plugins: Mapping[str, Plugin] | None = None) -> None:
        wanted = {name: Plugin(name) for name in ("calculator", "python")} | dict(plugins or {})
        self._tools: dict[str, Tool] = {
            name: registry.build("tool", plugin, key=f"tools.{name}") for name, plugin in wanted.items()
        }

    @property
    def names(self) -> list[str]:
        """The names under which tools are called."""
        return list(self._tools)

    def __getitem__(self, name: str) -> Tool:
        """A tool. Raises ValueError for an unknown one."""
        if name not in self._tools:
            raise ValueError(f"tool: expected one of {', '.join(self.names)}, found {name!r}")
        return self._tools[name]


class Tools:
    """The tools as one episode sees them; it counts calls and errors.

    Args:
        toolbox: The worker's tools.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self.calls = 0
        self.errors = 0

    async def call(self, name: str, text: str) -> str:
        """Ask a tool.

        Args:
            name: The tool: "calculator", "python", or one of the recipe's `[tools]`.
            text: What it is asked.

        Returns:
            Its answer; where it cannot do it, "error: " and why.

        Raises:
            ValueError: If there is no tool of that name.
            TypeError: If it answers with something else than text.
        """
        tool = self._toolbox[name]
        self.calls += 1
        try:
            async with asyncio.timeout(SECONDS):
                answer = await tool(text)
        except ToolError as error:
            self.errors += 1
            answer = f"error: {error}"
        except TimeoutError:
            self.errors += 1
            answer = f"error: stopped after {SECONDS:g} s"
        if not isinstance(answer, str):
            raise TypeError(f"tool {name!r}: expected text as its answer, found {type(answer).__name__}")
        return answer if len(answer) <= ANSWER else answer[:ANSWER] + "…"

    @property
    def facts(self) -> dict[str, float]:
        """What an episode counts of its tools; nothing where none was asked."""
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)} if self.calls else {}
