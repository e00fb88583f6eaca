"""What trainers that come and go make of one quorum: who is in the next group, and whether the round is committed."""

from typing import Any

import pytest

from pulse_rl.loco.elastic import Decision, decide
from pulse_rl.loco.lighthouse import Quorum, QuorumReport


def decided(**reports: QuorumReport) -> Decision:
    return decide(Quorum("0002", reports, {id_: f"{id_}:1" for id_ in reports}))


def member(**fields: Any) -> QuorumReport:
    """One of the group "0001", with all of its round."""
    standard: dict[str, Any] = {"round": 5, "whole": True, "arrived": True, "group": "0001", "options": "x"}
    return QuorumReport(**standard | fields)


def newcomer(**fields: Any) -> QuorumReport:
    return member(**{"round": 0, "arrived": False, "group": ""} | fields)


def test_all_that_have_the_round_commit_it() -> None:
    found = decided(b=member(), a=member())
    assert found.between
    assert (found.ids, sorted(found.holders), found.rendezvous) == (["a", "b"], ["a", "b"], "a:1/pulse/0002")
    assert found.transfers() == []


def test_a_newcomer_joins_only_between_rounds() -> None:
    found = decided(a=newcomer(), b=member(), c=member(), d=newcomer(), e=newcomer())
    assert found.between
    assert found.ids == ["a", "b", "c", "d", "e"]
    assert found.transfers() == [(1, 0), (2, 3), (1, 4)]  # the holders in turn
    waiting = decided(a=newcomer(), b=member(), c=member(arrived=False))
    assert not waiting.between
    assert waiting.ids == ["b", "c"]


def test_only_the_newest_state_goes_on() -> None:
    """One that missed a round, or a group of as many rounds, has lost its place."""
    for late in (member(round=5, group="0001"), member(round=6, group="0000")):
        found = decided(a=late, b=member(round=6))
        assert found.holders == found.ids == ["b"]


@pytest.mark.parametrize("options", ["x", "y"])
def test_where_all_are_new_those_with_the_most_rounds_hold_the_state(options: str) -> None:
    found = decided(a=newcomer(options=options), b=newcomer(round=3), c=newcomer(round=3))
    assert found.between
    assert sorted(found.holders) == ["b", "c"]
    assert found.ids == (["a", "b", "c"] if options == "x" else ["b", "c"])  # not one with other options


def test_a_state_that_is_not_whole_is_never_the_one_to_hold() -> None:
    """Its transfer was cut off: one that has done no round goes before it."""
    assert decided(a=newcomer(round=7, whole=False), b=newcomer()).holders == ["b"]
    assert not decided(a=newcomer(round=7, whole=False)).whole
