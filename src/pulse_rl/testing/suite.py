"""The list of checks, and what came of running them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from unittest import SkipTest

from pulse_rl.errors import one_line
from pulse_rl.testing import exact, histories, killed, outages, ranks, staged
from pulse_rl.testing.protocol import Adapter

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]

CHECKS: dict[str, Callable[[Adapter], None]] = {
    "dtypes-1-byte": exact.dtypes_of_1_byte,
    "dtypes-2-bytes": exact.dtypes_of_2_bytes,
    "dtypes-4-bytes": exact.dtypes_of_4_bytes,
    "dtypes-8-bytes": exact.dtypes_of_8_bytes,
    "zeros": exact.zeros,
    "nans": exact.nans,
    "patterns": exact.patterns,
    "scalars": exact.scalars,
    "empty-tensors": exact.empty,
    "shapes": exact.shapes,
    "dimensions": exact.dimensions,
    "gaps": exact.gaps,
    "beyond-16-bits": exact.beyond_16_bits,
    "beyond-20-bits": exact.beyond_20_bits,
    "beyond-24-bits": exact.beyond_24_bits,
    "many-tensors": exact.many,
    "names": exact.names,
    "strided": exact.strided,
    "fused": exact.fused,
    "tied": exact.tied,
    "tied-apart": exact.tied_apart,
    "no-changes": exact.still,
    "empty-history": histories.empty_history,
    "unknown-version": histories.unknown_version,
    "checkpoint": histories.checkpoint,
    "catch-up": histories.catch_up,
    "late-start": histories.late_start,
    "pruned": histories.pruned,
    "older-version": histories.older_version,
    "wrong-base": histories.wrong_base,
    "disturbed": histories.disturbed,
    "another-run": histories.another_run,
    "another-model": histories.another_model,
    "failing-call": outages.failing_call,
    "outage": outages.outage,
    "recovery": outages.versions_after,
    "torn-read": outages.torn_read,
    "torn-object": outages.torn_object,
    "missing-object": outages.missing_object,
    "exchanged-objects": outages.exchanged_objects,
    "killed": killed.killed,
    "killed-writing": killed.killed_writing,
    "stage": staged.stage,
    "stage-many": staged.stage_many,
    "newer-version": staged.newer_version,
    "obsolete": staged.obsolete,
    "discarded": staged.discarded,
    "applied-twice": staged.applied_twice,
    "staged-and-disturbed": staged.staged_and_disturbed,
    "failing-stage": staged.failing_stage,
    "pause": staged.pause,
    "ranks-together": ranks.together,
    "one-rank-fails": ranks.one_fails,
}


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
        return " ".join((CHECKS[self.name].__doc__ or "").split())

    def __call__(self) -> None:
        """Run it.

        Raises:
            ConformanceError: The receiver did what a receiver must not do.
            Unsupported: The check does not concern this receiver. pytest and unittest count it as skipped.
        """
        CHECKS[self.name](self.adapter)

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


def run(adapter: Adapter, only: Sequence[str] | None = None) -> Report:
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
