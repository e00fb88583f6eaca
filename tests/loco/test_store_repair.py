"""A payload that is damaged in the store after its round was committed: another trainer gives the state after it."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from pulse_rl.loco.meeting import names, repair
from pulse_rl.store.base import Store
from tests.loco.ranks import bits, trainable
from tests.loco.store_trainers import EVERY, Trainer, enter, fine, in_turn, leave, naive, run_rounds, together

BROKEN = 2  # the round


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "PAUSE_S", 0.01)


class Late:
    """A store in which this trainer commits nothing in round BROKEN, and finds a payload of it damaged afterwards.

    rank: whose. everywhere: whether the object itself is damaged, or only what this trainer reads.
    """

    def __init__(self, inner: Store, rank: int, size: int, *, everywhere: bool = False) -> None:
        self.inner, self.rank, self.size, self.everywhere = inner, rank, size, everywhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def list(self, prefix: str, after: str = "") -> Any:
        while True:
            found = self.inner.list(prefix, after)
            offers = [names.offer_name(BROKEN, rank) for rank in range(self.size)]
            here = {info.name for info in self.inner.list(names.ROUNDS)}
            if not here.issuperset(offers) or names.commit_name(BROKEN) in here:
                return found
            time.sleep(0.005)

    def stream(self, name: str) -> Any:
        if not name.startswith(f"{names.PAYLOADS}/{BROKEN:012d}/{self.rank:05d}"):
            return self.inner.stream(name)
        data = b"damaged" + bytes(self.inner.get(name))[7:]
        if self.everywhere:
            self.inner.put(name, data)
        return iter([memoryview(data)])


def world(
    size: int, broken: dict[int, int], *, everywhere: bool = False, **options: Any
) -> tuple[Store, list[Trainer]]:
    """Trainers that have entered. broken: rank → the rank whose payload of round BROKEN it cannot read."""
    store = pulse.open_store("memory://")
    late = {rank: Late(store, other, size, everywhere=everywhere) for rank, other in broken.items()}
    trainers = [Trainer(late.get(rank, store), rank, size, **options) for rank in range(size)]
    enter(*trainers)
    return store, trainers


def state(trainer: Trainer) -> tuple[Any, ...]:
    found = trainer.loco.state_dict()
    residual = found["residual"].get(str(trainer.rank), {})
    return trainer.theta, bits(found["momentum"]), bits(residual), bits(trainable(trainer.model)), found["round"]


def run(trainers: list[Trainer], rounds: int) -> list[tuple[Any, ...]]:
    """Rounds, and the end of the one that is under way; then leave."""
    run_rounds(trainers, rounds)
    fine(together(*[lambda one=one: leave(one) for one in trainers]))
    return [state(one) for one in trainers]


@pytest.mark.parametrize(("broken", "everywhere"), [({1: 0}, False), ({1: 0, 2: 0}, True), ({0: 2, 2: 0}, False)])
@pytest.mark.parametrize(
    "options",
    [{"value_dtype": "log8"}, {"kind": "DiLoCo"}, {"value_dtype": "bfloat16", "overlap": 1}],
    ids=["log8", "DiLoCo", "overlap"],
)
def test_a_payload_that_was_damaged_after_the_commit_changes_no_bit(
    broken: dict[int, int], everywhere: bool, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """For one reader, for all but its sender, for two of each other: as in a store that damages nothing."""
    expected = run(world(3, {}, **options)[1], 4)
    _, trainers = world(3, broken, everywhere=everywhere, **options)
    with caplog.at_level(logging.WARNING):
        assert run(trainers, 4) == expected
    messages = [record.getMessage() for record in caplog.records]
    for words in ("asks the other trainers", "took over the state after round 2"):
        assert sum(words in message for message in messages) == len(broken)
    assert any(f"rank {rank} cannot end round 2" in message for rank in broken for message in messages)


def test_rounds_that_went_on_meanwhile_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others do not wait, the state is that of a later round; what this trainer had not sent is kept."""
    store = pulse.open_store("memory://")
    hasty, broken = Trainer(store, 0, late_after=0), Trainer(Late(store, 0, 2), 1)
    enter(hasty, broken)
    turn = threading.Lock()  # of whoever has `hasty` take its steps

    def after(name: str) -> None:
        while not any(info.name.startswith(name) for info in store.list(names.ROUNDS)):
            time.sleep(0.005)
        with turn:
            hasty.rounds()

    ask = repair.Repairs._ask

    def late(self: Any, current: int, round: int, error: Any) -> None:
        if current == BROKEN + 1:
            with turn:
                hasty.rounds()  # and so nobody sees it
        else:
            ask(self, current, round, error)

    monkeypatch.setattr(repair.Repairs, "_ask", late)
    fine(together(broken.rounds, lambda: after(names.offer_name(1, 1))))
    fine(
        together(
            broken.rounds,
            in_turn(
                lambda: after(names.offer_name(BROKEN, 1)),
                lambda: after(f"{names.round_folder(BROKEN + 2)}/lack-00001"),
            ),
        )
    )
    both = {0: EVERY, 1: EVERY}
    rounds = naive([both, both, {0: EVERY}, {0: EVERY}], [{0, 1}, {0, 1}, {0}, {0}])
    theta, residuals = rounds[BROKEN]
    assert (broken.loco.round, broken.theta, broken.residual) == (BROKEN + 1, theta, residuals[1])
    assert (hasty.loco.round, hasty.theta) == (BROKEN + 2, rounds[-1][0])
    fine(together(broken.rounds, lambda: after(names.offer_name(BROKEN + 3, 1))))
    assert broken.theta == hasty.theta


def test_a_trainer_that_is_started_again_meets_a_damaged_round() -> None:
    """As the others go on, it takes their state over, with an empty residual. Its own old payload may be damaged."""
    for broken in (0, 1):
        store, trainers = world(2, {})
        run_rounds(trainers, BROKEN)
        (name,) = [i.name for i in store.list(f"{names.PAYLOADS}/{BROKEN:012d}") if f"/{broken:05d}-" in i.name]
        store.put(name, b"damaged" + bytes(store.get(name))[7:])
        again = Trainer(store, 1)
        fine(together(trainers[0].rounds, in_turn(again.loco.__enter__, again.rounds)))
        assert again.theta == trainers[0].theta
        assert (again.loco.round, again.loco.report.workers) == (BROKEN + 1, 2)
        run_rounds([trainers[0], again])
        assert again.theta == trainers[0].theta


def test_where_nobody_has_the_state_the_trainer_raises_with_nothing_changed() -> None:
    _, trainers = world(2, {1: 0}, timeout=0.5)
    run_rounds(trainers)
    before = state(trainers[1])[:3]
    found = together(trainers[0].rounds, trainers[1].rounds)
    assert found[0] is None
    assert isinstance(found[1], pulse.ExchangeError)
    assert (found[1].ranks, found[1].round) == ((0,), BROKEN)
    assert "corrupt" in str(found[1])
    assert "no other trainer gave the state after round 2" in "".join(found[1].__notes__)
    assert state(trainers[1])[:3] == before


def test_a_commit_that_was_deleted(tmp_path: Path) -> None:
    """Who needs it is told what to put back, as often as it is started; who is past it goes on; an anchor ends that."""
    store = pulse.open_store(tmp_path)
    options: dict[str, Any] = {"late_after": 0, "anchor_every": 4, "retain": 9}
    first, slept = Trainer(store, 0, **options), Trainer(store, 1, **options)
    enter(first, slept)
    state = slept.save()
    first.rounds(3)
    gone = names.commit_name(2)
    commit = bytes(store.get(gone))
    store.delete(gone)
    told = f"holds later rounds and not round 2, which was not pruned: expected {gone}, found none; put it back"
    with pytest.raises(pulse.ExchangeError, match=told):
        slept.rounds(2)
    leave(slept)
    again = Trainer(store, 1, **options)
    again.load(state)
    with pytest.raises(pulse.ExchangeError, match=told):
        enter(again)
    store.put(gone, commit)
    enter(again)
    assert (again.loco.round, again.theta) == (3, first.theta)
    leave(again)
    store.delete(gone)
    first.rounds(2)  # the fourth writes an anchor
    joins = Trainer(store, 1, **options)
    joins.load(state)
    enter(joins)
    assert (joins.loco.round, joins.theta) == (5, first.theta)
    leave(first, joins)
