"""The processes of a benchmark: each in a network namespace, and each takes orders, one line of JSON for each."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from bench import ROOT
from bench.link.network import Network
from pulse_rl.errors import ProcessDiedError


class Process:
    """`python -m MODULE SETTINGS`, which prints a line of JSON when it is ready, and one for each order (`orders`).

    name: for errors. place: its namespace. environment: beside that of this process, without its proxies, which cannot
    be reached from a namespace, and without its access to stores. A context manager, which kills it.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        place: int,
        module: str,
        settings: Mapping[str, object],
        environment: Mapping[str, str],
    ) -> None:
        self._name = name
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.lower().endswith("_proxy") and not key.startswith("AWS_")
        }
        self._process = subprocess.Popen(
            network.inside(place, [sys.executable, "-m", module, json.dumps(settings)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, **environment},
            cwd=ROOT,
            text=True,
            process_group=0,  # Ctrl-C is for the benchmark, which ends every process
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def order(self, order: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last order. Raises ProcessDiedError if the process has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProcessDiedError(
                f"the {self._name} of the benchmark ended with exit code {self._process.wait()}: its error is above",
                process=self._name,
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
