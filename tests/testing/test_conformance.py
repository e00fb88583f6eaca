"""The conformance suite: our receivers pass it, and each planted fault is found by the checks that are for it."""

from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

import pytest

from pulse_rl import parallel
from pulse_rl.testing import Check, ConformanceError, checks, run
from pulse_rl.testing.suite import CHECKS
from tests.testing.adapters import Subscribers
from tests.testing.broken_receivers import FAULTS, TwoRanks
from tests.testing.engines import Engines
from tests.testing.ranks import Channels, Pool, ShardedSubscribers
from tests.testing.simple_receiver import Adapter, Simple

POOL = Pool(2)
RANKS = {name for name in CHECKS if "rank" in name}
STAGING = {"stage", "stage-many", "newer-version", "obsolete", "discarded", "applied-twice", "staged-and-disturbed"}
STAGING |= {"failing-stage", "pause"}
STORES = {"empty-history", "unknown-version", "pruned", "another-run", "failing-call", "outage", "recovery"}
STORES |= {"torn-read", "torn-object", "missing-object", "exchanged-objects", "killed", "killed-writing"}
OUTAGES = {"failing-call", "outage", "torn-read", "torn-object", "missing-object", "exchanged-objects"}
LONG = {"failing-stage", "catch-up", "late-start", "patterns", "killed", "killed-writing"}
LARGEST = "beyond-24-bits"  # a second for each receiver
LONG |= {LARGEST, "many-tensors"}
SKIPPED: list[tuple[Any, set[str]]] = [
    (Subscribers(), RANKS),
    (ShardedSubscribers(POOL), {"killed-writing"}),
    (Channels(POOL), RANKS | STAGING | STORES),
    (Engines(), RANKS),
    (Adapter(Simple), RANKS),
]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[None]:
    yield
    POOL.end()


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread for a handful of elements."""
    monkeypatch.setattr(parallel, "threads", lambda: 1)


@pytest.mark.parametrize(
    ("check", "skipped"),
    [
        pytest.param(
            check,
            check.name in skipped,
            id=f"{adapter.name}: {check}",
            marks=[pytest.mark.slow] if check.name == LARGEST and not isinstance(adapter, Subscribers) else [],
        )
        for adapter, skipped in SKIPPED
        for check in checks(adapter)
        if not isinstance(adapter, Engines)
        or check.name not in OUTAGES | LONG  # a Subscriber reads for it, as tried above
    ],
)
def test_a_receiver_that_is_right(check: Check, skipped: bool) -> None:
    if skipped:
        with pytest.raises(SkipTest):
            check()
    else:
        check()


def test_ranks_that_are_right() -> None:
    report = run(Adapter(TwoRanks), only=[*RANKS, "tied", "failing-call", "stage"])
    assert (report.failed, report.skipped) == ((), ("stage",))


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_fails_in_the_checks_that_are_for_it(fault: Any) -> None:
    """Exactly those fail. Of the others a fifth are run, other ones for each fault, and none that takes long."""
    expected, number = FAULTS[fault], list(FAULTS).index(fault)
    some = {name for place, name in enumerate(CHECKS) if (place + number) % 5 == 0} - LONG - OUTAGES
    report = run(Adapter(fault), only=sorted(expected | some))
    assert {one.name: one.detail for one in report.results if one.name in set(report.failed) ^ expected} == {}
    assert not report.ok
    assert all(one.detail for one in report.results if one.outcome != "passed")


def test_a_report_is_a_table() -> None:
    report = run(Adapter(Simple), only=["stage", "scalars", "one-rank-fails"])
    assert (report.ok, report.failed, report.skipped) == (True, (), ("one-rank-fails",))
    lines = str(report).splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["passed", "scalars"],
        ["skipped", "one-rank-fails"],
        ["passed", "stage"],
    ]
    assert lines[-1] == "Simple: 2 passed, 0 failed, 1 skipped"
    with pytest.raises(ValueError, match="expected names of checks"):
        run(Adapter(Simple), only=["nonsense"])


def test_what_a_receiver_raises_is_a_finding() -> None:
    class Broken(Simple):
        def held(self) -> Any:
            raise RuntimeError("nothing is held")

    report = run(Adapter(Broken), only=["scalars"])
    assert report.failed == ("scalars",)
    assert report.results[0].detail == "RuntimeError: nothing is held"
    with pytest.raises(RuntimeError):
        checks(Adapter(Broken))[0]()


def test_an_error_names_the_tensor_and_the_version() -> None:
    broken = next(fault for fault in FAULTS if fault.__name__ == "ComparesFloats")
    (check,) = (check for check in checks(Adapter(broken)) if check.name == "zeros")
    with pytest.raises(ConformanceError) as raised:
        check()
    assert raised.value.version == 3
    assert raised.value.tensor in raised.value.args[0]


def test_every_check_says_what_it_tries() -> None:
    abouts = [check.about for check in checks(Adapter(Simple))]
    assert all(about.endswith(".") and len(about) > 20 for about in abouts)
    assert len(set(abouts)) == len(CHECKS)
