"""Trainers that meet in a store: the bits of every round, stragglers, joiners, pruning and signatures."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.loco.meeting import commits, joining, names
from pulse_rl.store.base import Store
from tests.loco.naive import Naive
from tests.loco.ranks import bits, trainable
from tests.loco.store_trainers import EVERY, Trainer, enter, fine, in_turn, leave, naive, run_rounds, together
from tests.store import servers

BOTH = {0, 1}


@pytest.fixture
def store() -> Store:
    return pulse.open_store("memory://")


def test_a_round_whose_outer_step_overflows_is_not_committed() -> None:
    """Weights near the end of float32: all raise, and go on with what they had."""
    store = pulse.open_store("memory://")
    trainers = [Trainer(store, rank, outer_lr=1.0, value_dtype="log8") for rank in BOTH]
    for one in trainers:
        for parameter in trainable(one.model).values():
            parameter.data.fill_(3.3e38)
    enter(*trainers)
    before = trainers[0].loco.digest
    for one in trainers:
        for parameter in trainable(one.model).values():
            parameter.data.mul_(1.02)  # finite; with the momentum θ would not be
    for error in together(*[one.loco.sync for one in trainers]):
        assert isinstance(error, FloatingPointError)
    assert [one.loco.digest for one in trainers] == [before] * 2
    assert not any("commit" in info.name for info in store.list(""))
    leave(*trainers)
    # Whoever starts again meets the offers, until their round's folder is deleted, as the error says.
    again = [Trainer(store, rank, outer_lr=1.0, value_dtype="log8") for rank in BOTH]
    for error in together(*[one.loco.__enter__ for one in again]):
        assert isinstance(error, FloatingPointError)
        assert f"delete {names.round_folder(1)} in {store.url}" in error.__notes__[0]
    for info in store.list(names.round_folder(1)):
        store.delete(info.name)
    enter(*again)
    assert [one.loco.digest for one in again] == [before] * 2
    run_rounds(again)
    assert again[0].theta == again[1].theta


@pytest.mark.parametrize(
    ("where", "kind", "options"),
    [
        ("directory", "PulseLoCo", {"value_dtype": "float32"}),
        ("s3", "PulseLoCo", {"value_dtype": "float32"}),  # a service that honours If-None-Match
        ("memory", "PulseLoCo", {"value_dtype": "log8", "gate_scale": 7.0}),
        ("memory", "PulseLoCo", {"value_dtype": "bfloat16", "overlap": 1}),
        ("memory", "DiLoCo", {}),
    ],
)
def test_rounds_are_those_of_plain_torch(
    where: str, kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So over a store they are those over Gloo, too. A report says what went through the store."""
    if where == "s3":
        servers.use_s3(monkeypatch, servers.moto())
    bucket = f"s3://{servers.s3_bucket()}/run" if where == "s3" else ""
    place = {"directory": str(tmp_path / "store"), "s3": bucket, "memory": pulse.open_store("memory://")}[where]
    trainers = [Trainer(place, rank, kind=kind, **options) for rank in BOTH]
    enter(*trainers)
    plain = Naive(dense=kind == "DiLoCo", **{name: value for name, value in options.items() if name != "overlap"})
    plain.join(*BOTH)
    overlap = options.get("overlap", 0)
    for step in range(2 * EVERY + overlap):
        plain.steps(range(step, step + 1), *BOTH)
        fine(together(*[lambda one=one: one.take(1) for one in trainers]))
        if (step + 1) % EVERY == 0:
            plain.begin()
        if step + 1 < EVERY or (step + 1) % EVERY != overlap:
            continue
        plain.end()
        for rank, one in enumerate(trainers):
            assert (one.theta, bits(trainable(one.model))) == (plain.theta, bits(trainable(plain.trainers[rank].model)))
            assert kind == "DiLoCo" or one.residual == plain.residual(rank)
            report = one.loco.report
            assert (report.workers, report.counted, report.exchange) == (2, True, "store")
            assert report.digest == one.loco.digest
            assert report.received_nbytes == trainers[1 - rank].loco.report.sent_nbytes
    fine(together(*[lambda one=one: leave(one) for one in trainers]))


def test_a_service_that_ignores_if_none_match_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers.use_s3(monkeypatch, servers.rclone())
    with pytest.raises(pulse.StoreError, match="put-if-absent"):
        Trainer("s3://bucket/run", 0).loco.__enter__()
    assert not pulse.open_store("s3://bucket/run").list("trainers")


def test_what_comes_too_late_counts_in_the_next_round(store: Store) -> None:
    """Two rounds without it, in which all that it has stays in its residual, and then one without further steps."""
    quick, slow = Trainer(store, 0, late_after=0.05), Trainer(store, 1, late_after=20)
    enter(quick, slow)
    quick.rounds(2)
    fine(together(slow.rounds, in_turn(lambda: wait_for_offer(store, 3, 1), quick.rounds)))
    taken = [{0: EVERY, 1: EVERY}, {0: EVERY, 1: 0}, {0: EVERY, 1: 0}]
    expected = naive(taken, [{0}, {0}, BOTH])
    for rank, one in enumerate((quick, slow)):
        assert (one.theta, one.residual) == (expected[-1][0], expected[-1][1][rank])
    reports = slow.loco.reports
    assert [(report.round, report.workers, report.counted) for report in reports] == [
        (1, 1, False),
        (2, 1, False),
        (3, 2, True),
    ]
    assert (reports[0].sent, reports[0].sent_nbytes) == (0, 0)
    assert [report.digest for report in reports] == [report.digest for report in quick.loco.reports]
    leave(quick, slow)


def wait_for_offer(store: Store, round: int, rank: int) -> None:
    while names.offer_name(round, rank) not in [info.name for info in store.list(names.ROUNDS)]:
        time.sleep(0.01)


def test_an_offer_that_was_put_just_too_late_does_not_count(store: Store) -> None:
    """Its payload is in the store, and the commit decides: all of it is in the residual, and in the next payload."""
    quick, slow = Trainer(store, 0, late_after=0), Trainer(store, 1, late_after=20)
    enter(quick, slow)
    board = slow.group._members._meeting.board
    real, looks = board.look, iter(range(100))

    def look(round: int) -> Any:
        found = real(round)
        if next(looks) == 0:  # between its look and its offer
            quick.rounds()
        return found

    board.look = look  # type: ignore[method-assign]
    fine(together(slow.rounds, in_turn(lambda: wait_for_offer(store, 2, 1), quick.rounds)))
    expected = naive([{0: EVERY, 1: EVERY}, {0: EVERY, 1: 0}], [{0}, BOTH])
    for rank, one in enumerate((quick, slow)):
        assert (one.theta, one.residual) == (expected[-1][0], expected[-1][1][rank])
    assert slow.loco.reports[0].sent_nbytes > 0
    leave(quick, slow)


@pytest.mark.parametrize("anchor_every", [2, 100])
def test_a_newcomer_starts_from_the_last_committed_round(
    store: Store, caplog: pytest.LogCaptureFixture, anchor_every: int
) -> None:
    """From an anchor, or from the run's first state and all rounds since; what it held before does not matter.

    A warning says so, because a user who wanted a new run may have named the store of an old one.
    """
    first = Trainer(store, 0, late_after=0, anchor_every=anchor_every)
    enter(first)
    first.rounds(3)
    new = Trainer(store, 1, late_after=20)
    with torch.no_grad():
        new.model.b[3] += anchor_every == 2
    assert not caplog.records
    enter(new)
    assert "rank 1: goes on from round 3 of the run in" in caplog.text
    assert (new.loco.round, new.theta, bits(trainable(new.model))) == (3, first.theta, bits(trainable(first.model)))
    assert not any(any(kept) for kept in new.residual.values())
    fine(together(new.rounds, in_turn(lambda: wait_for_offer(store, 4, 1), first.rounds)))
    assert new.theta == first.theta
    assert new.loco.report.workers == 2
    leave(first, new)


def test_a_trainer_goes_on_from_an_older_checkpoint(store: Store) -> None:
    """What it had kept back stays, but for the elements that it has sent since; its inner steps are kept too."""
    trainers = [Trainer(store, rank) for rank in BOTH]
    enter(*trainers)
    run_rounds(trainers)
    state = trainers[1].save()
    run_rounds(trainers)
    again = Trainer(store, 1)
    again.load(state)
    kept = {name: tensor.clone() for name, tensor in state["loco"]["residual"]["1"].items()}
    enter(again)
    assert (again.loco.round, again.theta) == (2, trainers[0].theta)
    # `trainers[1]` holds +0 where its second round has sent, or nothing was left.
    for name, before in kept.items():
        after = torch.from_numpy(np.frombuffer(again.residual[name], np.float32).copy()).view(before.shape)
        full = torch.from_numpy(np.frombuffer(trainers[1].residual[name], np.float32).copy()).view(before.shape)
        assert torch.equal(after, torch.where(full == 0, 0, before))
    leave(trainers[1])
    run_rounds([trainers[0], again])
    assert again.theta == trainers[0].theta
    leave(trainers[0], again)


def test_inner_steps_of_a_checkpoint_before_the_first_round_are_kept(store: Store) -> None:
    """Such a trainer is no new one, though there is an anchor that a new one starts from."""
    quick, slow = Trainer(store, 0, late_after=0, anchor_every=1), Trainer(store, 1, late_after=20)
    enter(quick, slow)
    slow.take(1)
    again = Trainer(store, 1, late_after=20)
    again.load(slow.save())
    leave(slow)
    quick.rounds()
    enter(again)
    theta, residuals = naive([{0: EVERY, 1: 1}], [{0}])[0]
    assert (again.theta, again.residual) == (theta, residuals[1])
    leave(quick, again)


def test_inner_steps_of_a_checkpoint_are_kept_where_a_round_is_committed_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was of the last round when the trainer looked, and the others go on before it has its place."""
    quick, slow = Trainer(store, 0, late_after=0), Trainer(store, 1, late_after=20)
    enter(quick, slow)
    fine(together(slow.rounds, in_turn(lambda: wait_for_offer(store, 1, 1), quick.rounds)))
    slow.take(1)
    again = Trainer(store, 1, late_after=20)
    again.load(slow.save())
    leave(slow)
    real = joining._leads_on

    def looked(*arguments: Any) -> bool:
        found = real(*arguments)
        quick.rounds()
        return found

    monkeypatch.setattr(joining, "_leads_on", looked)
    enter(again)
    theta, residuals = naive([dict.fromkeys(BOTH, EVERY), {0: EVERY, 1: 1}], [BOTH, {0}])[1]
    assert (again.loco.round, again.loco.inner_steps) == (2, 0)
    assert (again.theta, again.residual) == (theta, residuals[1])
    leave(quick, again)


def test_a_trainer_that_was_killed_after_its_offer_is_counted_once(store: Store) -> None:
    """Its new life waits for that round, and the old payload leaves its residual."""
    trainers = [Trainer(store, rank) for rank in BOTH]
    enter(*trainers)
    run_rounds(trainers)
    state = trainers[1].save()
    meeting = trainers[1].group._members._meeting

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> Any:
        raise Killed

    meeting.end_round = killed  # type: ignore[method-assign,assignment]
    with pytest.raises(Killed):
        trainers[1].rounds()
    leave(trainers[1])
    again = Trainer(store, 1)
    again.load(state)
    fine(together(again.loco.__enter__, trainers[0].rounds))
    expected = naive([dict.fromkeys(BOTH, EVERY)] * 2, [BOTH] * 2)
    assert again.loco.round == 2
    assert again.theta == trainers[0].theta == expected[1][0]
    before, after = expected[0][1][1], expected[1][1][1]
    for name in before:
        old, new = (np.frombuffer(each[name], np.float32) for each in (before, after))
        assert np.array_equal(np.frombuffer(again.residual[name], np.float32), np.where(new == 0, 0, old))
    run_rounds([trainers[0], again])
    leave(trainers[0], again)


@pytest.mark.parametrize("overlap", [0, 1])
def test_steps_that_no_round_exchanged_are_a_warning(
    store: Store, caplog: pytest.LogCaptureFixture, overlap: int
) -> None:
    """Leaving with them leaves trainers whose weights differ; `sync` on all before it does not."""
    trainers = [Trainer(store, rank, overlap=overlap) for rank in (0, 1)]
    enter(*trainers)
    fine(together(*[lambda one=one: one.take(EVERY + 1) for one in trainers]))
    leave(*trainers)
    expected = "inner steps since round 1 that were not exchanged: 1; they are in this trainer's weights alone"
    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if message.startswith(expected)]) == 2
    assert len({pulse.digest(one.model) for one in trainers}) == 2

    caplog.clear()
    enter(*trainers)

    def share(one: Trainer) -> None:
        one.take(EVERY - 1)  # with overlap, a round is on its way now
        one.take(overlap)
        one.take(1)
        while one.loco.inner_steps:
            one.loco.sync()
        leave(one)

    fine(together(*[lambda one=one: share(one) for one in trainers]))
    assert not caplog.records
    assert len({pulse.digest(one.model) for one in trainers}) == 1
    lone = Trainer(pulse.open_store("memory://"), 0, 1)
    with pytest.raises(KeyError), lone.loco:  # an error that ends the context is reported alone
        lone.take(1)
        raise KeyError
    assert not caplog.records


def test_a_command_for_a_history_says_where_the_open_round_is(tmp_path: Path) -> None:
    one = Trainer(str(tmp_path), 0, 1)
    enter(one)
    one.rounds()
    leave(one)
    with pytest.raises(FileNotFoundError, match="no history in .*, but trainers that meet there: .*trainers/rounds"):
        pulse.status(str(tmp_path))
    assert [each.name for each in (tmp_path / "trainers" / "rounds").iterdir()] == ["000000000001"]


def test_trainers_that_count_rounds_end_together_after_a_restart(store: Store) -> None:
    """A killed trainer runs the same lines again and ends with the others; if it counts steps, the error says so."""

    def run(one: Trainer) -> None:
        with one.loco:
            while one.loco.round < 3:
                one.take(1)

    first, killed = Trainer(store, 0), Trainer(store, 1)

    def restart() -> Trainer:
        enter(killed)
        killed.rounds()
        killed.take(1)  # and no more
        leave(killed)
        again = Trainer(store, 1)
        run(again)
        return again

    _, again = fine(together(lambda: run(first), restart))
    assert (first.loco.round, again.loco.round) == (3, 3)
    assert first.theta == again.theta

    late = Trainer(store, 1, timeout=0.3)
    run(late)  # takes no step
    assert late.step == 0
    enter(late)
    told = r"rank 0 of 2 did not make an offer .* if the others have left .*loco\.round"
    with pytest.raises(pulse.ExchangeError, match=told) as caught:
        late.rounds()
    assert caught.value.ranks == (0,)


def test_who_is_waited_for_is_logged_before_the_timeout(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a trainer that others left alone: before the run, and in a round. Not at each look for them.

    Only sleep takes time here: after 10, 20 and 40 seconds it is logged, and after 60 given up.
    """
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    for module in (commits, joining):
        monkeypatch.setattr(module, "time", clock)
    with pytest.raises(pulse.ExchangeError):
        enter(Trainer(store, 1, timeout=60))
    alone = caplog.messages.copy()
    caplog.clear()
    waiting = Trainer(store, 0, timeout=60)
    enter(waiting)
    with pytest.raises(pulse.ExchangeError):
        waiting.rounds()
    for told, expected in ((alone, "rank 1 waits for rank 0 of 2"), (caplog.messages, "rank 0 waits for rank 1 of 2")):
        assert len(told) == 3
        assert all(message.startswith(expected) for message in told)


def test_a_checkpoint_within_a_round_resumes_bit_for_bit(store: Store) -> None:
    trainers = [Trainer(store, rank) for rank in BOTH]
    enter(*trainers)
    run_rounds(trainers)
    for one in trainers:
        one.take(1)
    states = [one.save() for one in trainers]
    leave(*trainers)
    again = [Trainer(store, rank) for rank in BOTH]
    for one, state in zip(again, states, strict=True):
        one.load(state)
    enter(*again)
    fine(together(*[lambda one=one: one.take(1) for one in again]))
    theta, residuals = naive([dict.fromkeys(BOTH, EVERY)] * 2, [BOTH] * 2)[1]
    for rank, one in enumerate(again):
        assert (one.theta, one.residual) == (theta, residuals[rank])
    leave(*again)


def test_a_checkpoint_goes_to_another_number_of_trainers_with_all_residuals() -> None:
    """Into another store, as over a process group: the sum that counts is kept, Σ residuals / trainers."""
    size, store = 3, pulse.open_store("memory://")
    trainers = [Trainer(store, rank, size) for rank in range(size)]
    enter(*trainers)
    run_rounds(trainers)
    leave(*trainers)
    states = [one.loco.state_dict() for one in trainers]
    fewer = [Trainer(pulse.open_store("memory://"), rank) for rank in BOTH]
    for one, state in zip(fewer, states, strict=False):
        if one.rank == 0:
            with pytest.raises(ValueError, match=r"found none of 2"):
                one.loco.load_state_dict(state)
        everyone = {str(rank): each["residual"][str(rank)] for rank, each in enumerate(states)}
        one.loco.load_state_dict(state | {"residual": everyone})
    for name in states[0]["theta"]:
        before = sum(state["residual"][str(rank)][name].double() for rank, state in enumerate(states)) / size
        after = sum(one.loco.state_dict()["residual"][str(one.rank)][name].double() for one in fewer) / 2
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-12)


def test_old_rounds_are_pruned_and_nobody_can_end_them_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"late_after": 0, "anchor_every": 2, "retain": 2}
    first, slept = Trainer(store, 0, **options), Trainer(store, 1, **options)
    enter(first, slept)
    first.rounds(1)
    before, old = slept.theta, first.save()
    first.rounds(6)
    left = {names.round_of(info.name) for folder in (names.ROUNDS, names.PAYLOADS) for info in store.list(folder)}
    assert left == {5, 6, 7}
    assert {names.round_of(info.name) for info in store.list(names.ANCHORS)} == {4, 6}
    # It did not hear of seven rounds: its error leaves its state as it was, and started again it takes over an anchor.
    with pytest.raises(pulse.ExchangeError, match="start it again") as caught:
        slept.rounds()
    assert (caught.value.ranks, caught.value.round) == ((1,), 1)
    assert slept.theta == before
    leave(slept)
    again = Trainer(store, 1, **options)
    enter(again)
    assert (again.loco.round, again.theta) == (7, first.theta)
    # Of a trainer that had looked before the pruning the commit is taken back.
    meeting = again.group._members._meeting
    commit = meeting.board.commit(7)
    meeting.board.begin_at(9)
    with pytest.raises(pulse.ExchangeError, match="went on without"):
        meeting._commit(_of_round(commit, 8))
    assert names.commit_name(8) not in [info.name for info in store.list(names.ROUNDS)]
    leave(first, again)
    # A checkpoint that is older than all rounds starts from the anchor, too.
    meeting.board.store.delete(names.FIRST)
    older = Trainer(store, 0, **options)
    older.load(old)
    enter(older)
    assert (older.loco.round, older.theta) == (7, first.theta)
    leave(older)


def _of_round(commit: Any, round: int) -> Any:
    import msgspec

    offers = tuple(msgspec.structs.replace(offer, round=round) for offer in commit.offers)
    return msgspec.structs.replace(commit, round=round, offers=offers)


def test_everything_is_signed_where_there_is_a_key(store: Store) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    first = Trainer(store, 0, sign_with=key, late_after=0)
    enter(first)
    first.rounds()
    for wrong in ({"sign_with": other}, {"public_key": other.public_key()}):
        stranger = Trainer(store, 1, **wrong)
        with pytest.raises(pulse.IntegrityError, match="signature"):
            stranger.loco.__enter__()
    # An offer by somebody without the key stops whoever reads it.
    unsigned = Trainer(store, 1)
    unsigned.loco.__enter__()
    first.group._members._meeting.late_after = None
    found = together(unsigned.rounds, first.rounds)
    assert isinstance(found[1], pulse.IntegrityError)
    assert "no signature" in str(found[1])
    leave(first)
