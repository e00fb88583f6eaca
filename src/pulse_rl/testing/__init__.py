"""A conformance suite for receivers: whoever writes one runs it, and learns whether it is right.

    @pytest.mark.parametrize("check", pulse_rl.testing.checks(MyAdapter()), ids=str)
    def test_my_receiver(check):
        check()

    print(pulse_rl.testing.run(MyAdapter()))     # the same without pytest

A *receiver* is whatever keeps weights at the newest version of a history: a `Subscriber`, the ranks of an engine, the
loader of an inference server. An *adapter*, which its author writes, makes one, has it sync, and says what it holds.

`protocol` says what an adapter is. `models` are the weights that are published, `recorded` the histories of them,
`source` one history as a receiver sees it, version by version, and `faults` what goes wrong with its store. `trial`
makes a receiver and compares what it reports with the bits that it holds, after every call. What is tried is in
`exact`, `histories`, `outages`, `killed` and `staged`; `suite` lists and runs it. Nothing here knows how a receiver
works.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.testing.protocol import (
        Adapter,
        CanDisturb,
        CanRestart,
        CanStage,
        ConformanceError,
        Held,
        Receiver,
        StagedVersion,
        Unsupported,
    )
    from pulse_rl.testing.source import Source
    from pulse_rl.testing.suite import Check, Report, Result, checks, run

_HOME = dict.fromkeys(("Check", "Report", "Result", "checks", "run"), "suite") | {"Source": "source"}
_HOME |= dict.fromkeys(("Adapter", "CanDisturb", "CanRestart", "CanStage", "ConformanceError"), "protocol")
_HOME |= dict.fromkeys(("Held", "Receiver", "StagedVersion", "Unsupported"), "protocol")

__all__ = [
    "Adapter",
    "CanDisturb",
    "CanRestart",
    "CanStage",
    "Check",
    "ConformanceError",
    "Held",
    "Receiver",
    "Report",
    "Result",
    "Source",
    "StagedVersion",
    "Unsupported",
    "checks",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pulse_rl.testing' has no attribute {name!r}")
    return getattr(import_module(f"pulse_rl.testing.{_HOME[name]}"), name)
