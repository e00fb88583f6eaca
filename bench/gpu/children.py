"""Sections of a benchmark, each in a process: one that fails, hangs or breaks the device leaves the others their turn.

A section prints each of its results as a line of JSON; the parent writes all that it has after every line. What one
measurement raises is a result, and the section's next measurement follows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ERROR_CHARACTERS = 4000  # of what a section that failed printed last
LEAST_S = 5.0  # a section is not begun with less time than this

Keep = Callable[[str, Callable[[], object]], None]  # measures, and reports under a name


class Options(NamedTuple):
    """What is measured."""

    elements: int
    version_elements: int
    cpu_elements: int
    rounds: int
    steps: int
    inner_steps: int
    seconds: float
    emulated: bool

    @property
    def where(self) -> str:
        """torch's device."""
        return "cpu" if self.emulated else "cuda"


class Report:
    """A section's side: its results go to what was standard output, and all that is printed to standard error."""

    def __init__(self) -> None:
        self._results: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.failed = False

    def keep(self, name: str, measure: Callable[[], object]) -> None:
        """Measure, and report under a name. A failure is reported, not raised."""
        begun = time.perf_counter()
        try:
            found = measure()
            measured: object = found._asdict() if hasattr(found, "_asdict") else found
        except Exception:  # noqa: BLE001 - the next measurement follows
            self.failed = True
            measured = {"error": traceback.format_exc()[-ERROR_CHARACTERS:]}
        print(f"  {time.perf_counter() - begun:6.1f} s  {name}", file=sys.stderr, flush=True)
        self.send({name: measured})

    def send(self, results: dict[str, Any]) -> None:
        print(json.dumps(results), file=self._results, flush=True)


class Results:
    """The parent's side: all results so far, in a file that is replaced whole."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._begun = path, time.monotonic()
        self._until = self._begun + seconds
        self._lock = threading.Lock()
        self.found: dict[str, Any] = {}

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def add(self, name: str, results: dict[str, Any]) -> None:
        with self._lock:
            self.found.setdefault(name, {}).update(results)
            self.found["seconds"] = time.monotonic() - self._begun
            partly = self._path.with_suffix(".partly")
            partly.write_text(json.dumps(self.found, indent=1))
            partly.replace(self._path)

    def run(self, name: str, command: list[str], limit: float, environment: Mapping[str, str] | None = None) -> None:
        """Run a section and keep what it reports.

        limit: seconds, at most those that are left. environment: what is added to this process's own.
        """
        limit = min(limit, self.left_s)
        if limit < LEAST_S:
            self.add(name, {"state": "left out: no time left"})
            return
        self._say(f"{name}: at most {limit:.0f} s")
        self.add(name, {"state": "running"})
        begun, late = time.monotonic(), threading.Event()

        def end() -> None:
            if process.poll() is None:
                late.set()
                os.killpg(process.pid, signal.SIGKILL)  # its group, which nothing else is in

        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            timer = threading.Timer(limit, end)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                self.add(name, json.loads(line))
            code = process.wait()
            timer.cancel()
            errors.seek(0)
            printed = errors.read()[-ERROR_CHARACTERS:]
        state = "done" if code == 0 else "out of time" if late.is_set() else f"failed, exit code {code}"
        ended = {"state": state, "seconds": time.monotonic() - begun}
        self.add(name, ended if code == 0 else {**ended, "printed": printed})
        self._say(f"{name}: {state}, {ended['seconds']:.1f} s\n{printed}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
