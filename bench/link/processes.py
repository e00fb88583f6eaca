"""The processes of a benchmark: each in a network namespace, and each takes orders, one line of JSON for each."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT
from bench.link.network import Network
from pulse_rl.errors import ProcessDiedError


class Process:
    """A process that reads orders from its standard input and answers each with a line on its standard output.

    name: for errors. place: its namespace. environment: beside that of this process, without its proxies, which cannot
    be reached from a namespace, and without its variables that begin with `hidden`. errors: a file for what it writes
    to its standard error; None: it goes where this process's goes.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        place: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        hidden: str | None = None,
        errors: Path | None = None,
    ) -> None:
        self._name, self._errors = name, errors
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.lower().endswith("_proxy") and not (hidden and key.startswith(hidden))
        }
        stderr = errors.open("w") if errors else None
        try:
            self._process = subprocess.Popen(
                network.inside(place, list(command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**kept, **environment},
                cwd=ROOT,
                text=True,
                process_group=0,  # Ctrl-C is for the benchmark, which ends every process
            )
        finally:
            if stderr is not None:
                stderr.close()

    def order(self, order: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last order. Raises ProcessDiedError if the process has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            said = self._errors.read_text().strip().splitlines()[-1:] if self._errors else ["its error is above"]
            why = said[0] if said else "no message"
            raise ProcessDiedError(
                f"the {self._name} of the benchmark ended with exit code {code}: {why}", process=self._name
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
