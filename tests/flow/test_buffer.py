"""One policy's buffer: staleness at hand-out and at consumption, order, replay, filters; and curators."""

import numpy as np
import pytest

from pulse_rl.flow.data.buffer import PATIENCE, Order, PolicyBuffer, PolicySettings
from pulse_rl.flow.data.curators import All, Curator, DropSolved, Greso, GroupOutcome
from pulse_rl.flow.data.filters import drop_equal
from pulse_rl.flow.data.replay import Candidate, Recent
from pulse_rl.flow.samples import PolicyGroup
from tests.flow.world import part


def _buffer(version: int = 0, **settings: object) -> PolicyBuffer:
    buffer = PolicyBuffer(PolicySettings(**({"groups": 2} | settings)))  # type: ignore[arg-type]
    buffer.begin(0, version, 0)
    return buffer


def _numbers(buffer: PolicyBuffer) -> list[int]:
    return [group.number for group in buffer.give(buffer.state.given).groups]


@pytest.mark.parametrize(("staleness", "room"), [(0, 2), (1, 4), (8, 18)])
def test_room_is_for_groups_that_are_fresh_when_their_turn_comes(staleness: int, room: int) -> None:
    buffer = _buffer(max_staleness=staleness)
    assert buffer.room() == room
    buffer.expect(0)
    buffer.add(part(0, 0))
    assert buffer.room() == room - 2
    # A worker that is behind by the whole bound can only feed the version that is trained next.
    assert buffer.room(lag=staleness) == 0
    assert buffer.room(lag=staleness + 1) < 0


def test_after_the_last_batch_of_a_version_only_later_ones_count() -> None:
    buffer = _buffer(max_staleness=0)
    for number in range(2):
        buffer.add(part(number, 0))
    buffer.give(0)
    assert buffer.room() == 0
    assert buffer.room(waiting=True) == 2  # a trainer that asks again before it publishes is fed
    buffer.publish(1, 1, None)
    assert buffer.room() == 2


def test_leases_that_have_become_too_old_make_room() -> None:
    buffer = _buffer(max_staleness=1)
    for _ in range(4):
        buffer.expect(0)
    assert buffer.room() == 0
    buffer.publish(1, 1, None)
    assert buffer.room() == 0
    buffer.publish(2, 2, None)
    assert buffer.room() == 4
    buffer.expect_no_more(0)  # it comes back after all
    assert buffer.room() == 4


def test_stale_groups_are_dropped_when_they_come_and_when_they_would_be_pulled() -> None:
    buffer = _buffer(version=5, max_staleness=1)
    assert not buffer.add(part(0, 3))
    assert buffer.add(part(1, 4))
    assert buffer.add(part(2, 5))
    assert buffer.has(0)
    buffer.publish(1, 6, None)
    assert not buffer.has(0)
    assert buffer.state.dropped == {"stale": 2}
    buffer.add(part(3, 6))
    assert _numbers(buffer) == [2, 3]
    assert buffer.state.lags == {1: 1, 0: 1}


@pytest.mark.parametrize(("order", "first"), [("task", [0, 1]), ("deadline", [2, 3]), ("newest", [0, 1])])
def test_order(order: Order, first: list[int]) -> None:
    buffer = _buffer(version=9, order=order)
    for number, version in ((3, 8), (0, 9), (2, 8), (1, 9)):
        buffer.add(part(number, version))
    assert _numbers(buffer) == first


def test_a_full_buffer_drops_what_would_be_too_old_first() -> None:
    buffer = _buffer(version=9, max_staleness=1)
    for number, version in enumerate((9, 8, 9, 9)):
        assert buffer.add(part(number, version))
    assert buffer.add(part(4, 9))
    assert sorted(buffer.state.ready) == [0, 2, 3, 4]
    assert not buffer.add(part(5, 8))
    assert buffer.state.dropped == {"surplus": 2}


def test_groups_without_variance_are_dropped_until_patience_ends() -> None:
    buffer = _buffer(filter=drop_equal)
    for number in range(2 * PATIENCE):
        assert not buffer.add(part(number, 0, (1.0, 1.0)))
    assert buffer.add(part(98, 0, (1.0, 1.0)))
    assert buffer.add(part(99, 0, (0.0, 1.0)))
    assert buffer.state.dropped == {"no_variance": 2 * PATIENCE}
    assert buffer.state.unfiltered == 1
    buffer.give(0)
    assert not buffer.add(part(100, 0, (1.0, 1.0)))


def test_replays_are_counted_marked_and_within_the_bound() -> None:
    buffer = _buffer(groups=4, max_staleness=1, replay=Recent(), replay_ratio=0.5)
    for number in range(4):
        buffer.add(part(number, 0))
    assert _numbers(buffer) == [0, 1, 2, 3]
    buffer.publish(1, 1, None)
    for number in (4, 5):
        buffer.add(part(number, 1))
    again = buffer.give(1).groups
    assert [(group.number, group.repeated) for group in again] == [(4, False), (5, False), (2, True), (3, True)]
    assert buffer.state.replayed == 2
    buffer.publish(2, 2, None)  # 0 to 3 are too old now; 4 and 5 are not
    assert not buffer.has(2)
    for number in (6, 7):
        buffer.add(part(number, 2))
    assert [group.number for group in buffer.give(2).groups] == [6, 7, 4, 5]
    for version in (3, 4):
        buffer.publish(version, version, None)
    buffer.add(part(8, 4))
    assert not buffer.has(3)  # nothing is fresh enough for a replay: it needs 4


class _Greedy:
    """A selector that offers everything, twice, and what was never trained on."""

    def choose(self, candidates: list[Candidate], count: int) -> list[PolicyGroup]:
        return [candidate.group for candidate in candidates] * 2 + [part(77, 0)]


def test_a_replay_selector_cannot_go_beyond_what_is_offered() -> None:
    buffer = _buffer(groups=4, replay=_Greedy(), replay_ratio=0.5)
    for number in range(8):
        buffer.add(part(number, 0))
    buffer.give(0)
    groups = buffer.give(1).groups
    assert len(groups) == 4
    assert len({group.number for group in groups}) == 4
    assert 77 not in {group.number for group in groups}


def test_what_a_lost_trainer_pulled_is_ready_again_and_marked() -> None:
    buffer = _buffer(max_staleness=3)
    for number in range(6):
        buffer.add(part(number, 0))
    for number in range(3):
        buffer.give(number)
    buffer.commit(1)
    buffer.begin(1, 3, 1)
    batch = buffer.give(1)
    assert [(group.number, group.repeated) for group in batch.groups] == [(2, True), (3, True)]
    assert buffer.state.repeated == 2
    assert [group.number for group in buffer.give(2).groups] == [4, 5]


def test_ranks_ask_for_their_batches_in_any_order() -> None:
    buffer = _buffer(ranks=2)
    for number in range(4):
        buffer.add(part(number, 0))
    assert buffer.has(1)
    assert [group.number for group in buffer.give(1).groups] == [2, 3]
    assert [group.number for group in buffer.give(0).groups] == [0, 1]
    assert buffer.state.given == 2


def test_a_version_is_in_its_round_until_every_rank_has_its_batches() -> None:
    buffer = _buffer(ranks=2, round_steps=2)
    for number in range(8):
        buffer.add(part(number, 0))
    assert not buffer.in_round()
    buffer.give(1)
    buffer.give(3)  # rank 1 has both of its batches, rank 0 none
    assert buffer.in_round()
    buffer.give(0)
    assert buffer.in_round()
    buffer.give(2)
    assert not buffer.in_round()


def test_the_first_round_with_overlap_has_the_steps_of_the_overlap_too() -> None:
    buffer = _buffer(ranks=2, round_steps=2, overlap=1, max_staleness=1)
    groups = buffer.settings.groups
    assert buffer.room() == (6 + 4) * groups
    for number in range(6 * groups):
        assert buffer.add(part(number, 0))
    for number in range(5):
        buffer.give(number)
        assert buffer.in_round()
    assert buffer.lacking() == 0  # the last batch's groups are there
    buffer.give(5)
    assert not buffer.in_round()
    assert buffer.room() == 4 * groups
    buffer.publish(3, 1, "d")
    assert buffer.room() == (4 + 4) * groups


def test_a_rank_that_starts_again_gets_what_it_had_and_it_is_counted() -> None:
    buffer = _buffer(ranks=2, round_steps=2)
    for number in range(8):
        buffer.add(part(number, 0))
    for number in (1, 0, 3):
        buffer.give(number)
    buffer.begin_rank(1, 0)
    assert buffer.in_round()
    for number, groups, repeated in ((1, [2, 3], True), (3, [6, 7], True), (2, [4, 5], False)):
        batch = buffer.give(number)
        assert [(group.number, group.repeated) for group in batch.groups] == [(each, repeated) for each in groups]
    assert buffer.state.repeated == 4
    buffer.begin_rank(0, 1)
    buffer.commit(4)  # the checkpoint holds the round after all
    assert not buffer.in_round()


def test_nothing_is_kept_for_a_rank_that_is_away_and_what_it_had_is_ready_again() -> None:
    buffer = _buffer(ranks=3, round_steps=2, max_staleness=1, elastic=True)
    groups = buffer.settings.groups
    for number in range(4 * groups):
        buffer.add(part(number, 0))
    assert buffer.room() == (6 + 6 - 4) * groups
    assert [group.number for group in buffer.give(2).groups] == [0, 1]  # not of the ranks before it
    assert [group.number for group in buffer.give(1).groups] == [2, 3]
    buffer.lose_rank(1)
    assert buffer.room() == (4 + 4 - 1 - 3) * groups
    assert [(group.number, group.repeated) for group in buffer.give(0).groups] == [(2, True), (3, True)]
    for number in (3, 5):
        assert buffer.in_round()
        buffer.give(number)
    assert not buffer.in_round()  # the others have all their batches
    assert not buffer.has(4)
    buffer.publish(2, 1, "d")
    assert not buffer.in_round()
    assert (buffer.state.owed, buffer.state.pulled, buffer.state.repeated) == ([], 5 * groups, groups)
    buffer.begin_rank(1, 2)
    assert buffer.room() == (6 + 6) * groups
    buffer.commit(6)
    assert not buffer.has(4)


def test_what_no_rank_had_is_not_repeated_when_all_start_again() -> None:
    for deterministic in (False, True):
        buffer = PolicyBuffer(PolicySettings(groups=1, ranks=2, max_staleness=9), deterministic=deterministic)
        buffer.begin(0, 0, 0)
        for number in range(2):
            buffer.add(part(number, 0))
        buffer.give(1)
        for life in (1, 2):  # also where it dies again before it has pulled
            buffer.begin(0, life, 0)
        assert [buffer.give(number).groups[0].repeated for number in (0, 1)] == [False, True]
        assert buffer.state.repeated == 1


def test_a_deterministic_batch_is_given_again_as_it_was() -> None:
    buffer = PolicyBuffer(PolicySettings(groups=2), deterministic=True)
    buffer.begin(0, 0, 0)
    for number in range(4):
        buffer.add(part(number, number // 2))
    first = [buffer.give(0), buffer.give(1)]
    buffer.begin(0, 7, 0)  # its weights are those of version 0, published anew
    again = [buffer.give(0), buffer.give(1)]
    assert [[g.number for g in b.groups] for b in again] == [[g.number for g in b.groups] for b in first]
    assert all(group.repeated for batch in again for group in batch.groups)
    assert buffer.state.repeated == 4
    buffer.commit(2)
    with pytest.raises(ValueError, match="number 2"):
        buffer.check_begin(1)


# --- curators -------------------------------------------------------------------------------------------------------


def _outcome(problem: int, rewards: list[float]) -> GroupOutcome:
    found = np.array(rewards, np.float32)
    return GroupOutcome(0, problem, {"p": found}, float((found >= 1).mean()))


def test_all_plays_each_problem_once_an_epoch() -> None:
    curator = All(problems=10, seed=3)
    epochs = [[curator.choose(number) for number in range(start, start + 10)] for start in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert [All().choose(number) for number in (0, 7)] == [0, 7]


def test_solved_problems_are_left_out_for_a_while() -> None:
    curator = DropSolved(problems=4, times=2, epochs=2)
    played: list[list[int]] = []
    for _ in range(7):
        epoch = []
        start = curator.state()["position"] // 4
        while curator.state()["position"] // 4 == start:
            problem = curator.choose(0)
            epoch.append(problem)
            curator.observe(_outcome(problem, [1.0, 1.0] if problem == 1 else [0.0, 1.0]))
        played.append(epoch)
    times = [epoch.count(1) for epoch in played]
    assert times[:2] == [1, 1]  # solved twice
    assert times.count(0) >= 2
    assert sum(times[2:]) >= 1  # and tried again
    assert curator.skipped["solved"] >= 2


def test_a_curator_that_leaves_everything_out_still_plays() -> None:
    curator = DropSolved(problems=3, times=1, epochs=5)
    for _ in range(9):
        curator.observe(_outcome(curator.choose(0), [1.0, 1.0]))
    assert curator.choose(0) in range(3)


def test_greso_plays_problems_without_variance_less_and_less_but_always_again() -> None:
    curator = Greso(problems=50, seed=1)
    counts = np.zeros(50, int)
    for number in range(3000):
        problem = curator.choose(number)
        counts[problem] += 1
        rewards = [0.0, 1.0] if problem % 2 else [0.0, 0.0] if problem % 4 else [1.0, 1.0]
        curator.observe(_outcome(problem, rewards))
    useful, useless = counts[1::2], counts[::2]
    assert useless.mean() < useful.mean() / 3
    assert useless.min() >= 2
    assert set(curator.skipped) == {"easy", "hard"}


def test_greso_moves_its_probabilities_towards_its_targets() -> None:
    curator = Greso(problems=8, window=4)
    before = dict(curator.state()["p"])
    for _ in range(4):
        curator.observe(_outcome(0, [0.0, 0.0]))
    after = curator.state()["p"]
    assert after["hard"] == pytest.approx(before["hard"] - 0.01)
    assert after["easy"] == pytest.approx(before["easy"] + 0.01)


@pytest.mark.parametrize("kind", [DropSolved, Greso])
def test_a_curator_goes_on_from_its_state(kind: type[DropSolved] | type[Greso]) -> None:
    rng = np.random.default_rng(0)
    curator: Curator = kind(problems=6, seed=2)
    copy: Curator = kind(problems=6, seed=2)
    for number in range(60):
        if number == 30:
            copy.restore(curator.state())
        problem = curator.choose(number)
        if number >= 30:
            assert copy.choose(number) == problem
        outcome = _outcome(problem, [float(rng.random() < 0.9)] * 2)
        curator.observe(outcome)
        if number >= 30:
            copy.observe(outcome)
    assert copy.skipped == curator.skipped


def test_settings_of_plug_ins_are_checked() -> None:
    with pytest.raises(ValueError, match="problems"):
        All(problems=0)
    with pytest.raises(ValueError, match="epochs"):
        DropSolved(problems=3, epochs=0)
    with pytest.raises(ValueError, match="easy"):
        Greso(problems=3, easy=1.5)
    with pytest.raises(ValueError, match="times"):
        Recent(times=0)
