"""The list of checks, and what came of running them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from types import ModuleType
from typing import Literal, TypeAlias
from unittest import SkipTest

from pulse_rl.errors import one_line
from pulse_rl.testing import exact, histories, killed, outages, staged
from pulse_rl.testing.protocol import Adapter

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]


def _functions_of(module: ModuleType) -> dict[str, tuple[str, Callable[[Adapter], None]]]:
    """The checks of a module: its functions without an underscore, whose docstrings say what they try."""
    return {
        name.replace("_", "-"): (" ".join((function.__doc__ or "").split()), function)
        for name, function in vars(module).items()
        if isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }


# By name, in the order in which it is sensible to repair what they find: what they try, and how.
CHECKS: dict[str, tuple[str, Callable[[Adapter], None]]] = {
    name: (check.about, check.follow) for name, check in exact.CHECKS.items()
}
for _module in (histories, outages, killed, staged):
    CHECKS |= _functions_of(_module)


@dataclass(frozen=True)
class Check:
    """One check of one kind of receiver. Call it to run it.

    Attributes:
        name: Its name, as "tied-apart".
        about: What it tries, in a sentence.
        adapter: What makes the receivers.
    """

    name: str
    adapter: Adapter

    @property
    def about(self) -> str:
        """What it tries, in a sentence."""
        return CHECKS[self.name][0]

    def __call__(self) -> None:
        """Run it.

        Raises:
            ConformanceError: The receiver did what a receiver must not do.
            Unsupported: The check does not concern this receiver. pytest and unittest count it as skipped.
        """
        CHECKS[self.name][1](self.adapter)

    def __str__(self) -> str:
        return self.name


def checks(adapter: Adapter) -> list[Check]:
    """List all checks, to be run as tests.

    With pytest: `@pytest.mark.parametrize("check", checks(adapter), ids=str)`, and `check()` in the test.

    Args:
        adapter: What makes the receivers.

    Returns:
        The checks, in the order in which it is sensible to repair what they find.
    """
    return [Check(name, adapter) for name in CHECKS]


@dataclass(frozen=True)
class Result:
    """What came of one check.

    Attributes:
        name: The check.
        about: What it tries, in a sentence.
        outcome: "passed", "failed" or "skipped".
        detail: What went wrong, or why it was skipped; None if it passed.
        seconds: Seconds that it took.
    """

    name: str
    about: str
    outcome: Outcome
    detail: str | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """What came of all checks. As text it is a table.

    Attributes:
        adapter: The name of the adapter.
        results: Of each check.
    """

    adapter: str
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return self._names("failed")

    @property
    def skipped(self) -> tuple[str, ...]:
        """The names of the checks that do not concern this receiver."""
        return self._names("skipped")

    def _names(self, outcome: Outcome) -> tuple[str, ...]:
        return tuple(result.name for result in self.results if result.outcome == outcome)

    def __str__(self) -> str:
        width = max((len(result.name) for result in self.results), default=0)
        lines = [
            f"{result.outcome:8}{result.name:{width}} {result.seconds:6.2f} s  {result.detail or result.about}"
            for result in self.results
        ]
        passed = len(self.results) - len(self.failed) - len(self.skipped)
        total = f"{self.adapter}: {passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return "\n".join([*lines, total])


def run(adapter: Adapter, *, only: Sequence[str] | None = None) -> Report:
    """Run checks, one after another, without a test runner.

    Args:
        adapter: What makes the receivers.
        only: Names of checks. None: all.

    Returns:
        What came of each.

    Raises:
        ValueError: There is no check of such a name.
    """
    unknown = sorted(set(only or ()) - CHECKS.keys())
    if unknown:
        raise ValueError(f"only: expected names of checks ({', '.join(CHECKS)}), found {', '.join(unknown)}")
    return Report(
        adapter.name, tuple(_result(check) for check in checks(adapter) if only is None or check.name in only)
    )


def _result(check: Check) -> Result:
    begun = time.perf_counter()
    outcome: Outcome = "passed"
    detail = None
    try:
        check()
    except SkipTest as reason:
        outcome, detail = "skipped", one_line(reason)
    except Exception as error:  # noqa: BLE001 - whatever a receiver raises is a finding
        outcome, detail = "failed", one_line(error)
        if not isinstance(error, AssertionError):
            detail = f"{type(error).__name__}: {detail}"
    return Result(check.name, check.about, outcome, detail, time.perf_counter() - begun)
