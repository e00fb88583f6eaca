"""The conformance suite: our receivers pass it, and each planted fault is found by the checks that are for it."""

from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

import pytest
from broken_receivers import TwoRanks
from conformance_adapters import Subscribers
from conformance_ranks import Channels, Pool, ShardedSubscribers
from simple_receiver import Adapter, Simple

from pulse_rl.testing import Check, checks
from pulse_rl.testing.suite import CHECKS

POOL = Pool(2)
RANKS = {name for name in CHECKS if "rank" in name}
STAGING = {"stage", "stage-many", "newer-version", "obsolete", "discarded", "applied-twice", "staged-and-disturbed"}
STAGING |= {"failing-stage", "pause"}
STORES = {"empty-history", "unknown-version", "pruned", "another-run", "failing-call", "outage", "recovery"}
STORES |= {"torn-read", "torn-object", "missing-object", "exchanged-objects", "killed", "killed-writing"}
SKIPPED: list[tuple[Any, set[str]]] = [
    (Subscribers(), RANKS),
    (ShardedSubscribers(POOL), {"killed-writing"}),
    (Channels(POOL), RANKS | STAGING | STORES),
    (Adapter(Simple), RANKS),
    (Adapter(TwoRanks), STAGING | {"killed", "killed-writing"}),
]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[None]:
    yield
    POOL.end()


@pytest.mark.parametrize(
    ("check", "skipped"),
    [(check, check.name in skipped) for adapter, skipped in SKIPPED for check in checks(adapter)],
    ids=lambda one: f"{one.adapter.name}-{one}" if isinstance(one, Check) else "",
)
def test_a_receiver_that_is_right(check: Check, skipped: bool) -> None:
    if skipped:
        with pytest.raises(SkipTest):
            check()
    else:
        check()
