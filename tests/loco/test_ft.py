"""Trainers that die and join, as real processes around a real torchft lighthouse, against plain torch, bit for bit."""

import copy
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.group.collectives import Group
from pulse_rl.loco import lighthouse, payload
from pulse_rl.loco.elastic import ElasticMembers
from pulse_rl.loco.lighthouse import Lighthouse, QuorumReport
from tests.forked import forking, picklable
from tests.loco.naive import Naive
from tests.loco.ranks import Model, adam, bits, inner_step, trainable

EVERY = 2
DEFAULTS: dict[str, Any] = {"sync_every": EVERY, "value_dtype": "float32"}  # values as in `Naive`


def work(number: int, lighthouse: str, pipe: Connection) -> None:
    """A trainer that takes part when it is sent options, and then one round at a time."""
    os.environ["PULSE_THREADS"] = "2"
    torch.set_num_threads(1)
    pipe.send("ready")
    while (options := pipe.recv()) is not None:
        try:
            take_part(number, lighthouse, pipe, options)
        except (pulse.PulseError, FloatingPointError) as error:
            pipe.send(picklable(error))


def take_part(number: int, lighthouse: str, pipe: Connection, options: dict[str, Any]) -> None:
    model = Model()
    optimizer = adam(model)
    if number == 0:  # what a newcomer holds does not matter
        with torch.no_grad():
            model.b[3] += options.pop("off", 0)
    with pulse.Membership(lighthouse, f"trainer-{number}", timeout=5, host="localhost") as members:
        pipe.send("heard")
        pipe.recv()
        with pulse.PulseLoCo(model, optimizer, group=members, **(DEFAULTS | options)) as loco:
            pipe.send(("joined", loco.round, bits(trainable(model)), residual(loco)))
            while (dies := pipe.recv()) is not None:
                if dies == "spoil":
                    spoil()
                elif dies == "nan":
                    with torch.no_grad():
                        model.b[0] = torch.nan
                elif dies:
                    die(*dies)
                first = loco.round * EVERY
                for step in range(first, first + EVERY):
                    inner_step(model, optimizer, number, step)
                assert loco.report is not None
                assert loco.report.digest == loco.digest
                pipe.send((loco.report.workers, loco.round, bits(trainable(model)), residual(loco)))


def residual(loco: Any) -> dict[str, bytes]:
    return bits(loco.state_dict()["residual"]["0"])


def die(owner: type, name: str, call: int) -> None:
    """Kill this process at a method's call of that number, from 1."""
    real, calls = getattr(owner, name), iter(range(1, 100))

    def instead(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, instead)


def spoil() -> None:
    """Drop the last byte of every payload of this process."""
    whole = payload.encode

    def encode(*arguments: Any, **named: Any) -> bytes:
        data = whole(*arguments, **named)[payload.HASH : -1]
        return blake3(data).digest(payload.HASH) + data

    payload.encode = encode


class World:
    """A lighthouse and trainers."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.trainers: dict[int, tuple[Any, Connection]] = {}

    def start(self, *numbers: int) -> None:
        """Start these trainers' processes."""
        context = forking()
        for number in numbers:
            here, there = context.Pipe()
            process = context.Process(target=work, args=(number, self.lighthouse, there), daemon=True)
            process.start()
            self.trainers[number] = process, here
        for number in numbers:
            assert self.receive(number) == "ready"

    def send(self, order: Any, *numbers: int) -> None:
        for number in numbers:
            self.trainers[number][1].send(order)

    def receive(self, number: int) -> Any:
        pipe = self.trainers[number][1]
        assert pipe.poll(60), f"trainer {number} hangs"
        return pipe.recv()

    def round(self, *numbers: int) -> dict[int, Any]:
        """One round of these trainers."""
        self.send((), *numbers)
        return {number: self.receive(number) for number in numbers}

    def stop(self) -> None:
        for process, pipe in self.trainers.values():
            with suppress(OSError):
                pipe.send(None)
                pipe.send(None)
            process.kill()
            process.join(10)


@pytest.fixture
def world() -> Iterator[World]:
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=1_500
    )
    made = World(f"http://localhost:{server.address().rpartition(':')[2]}")
    yield made
    made.stop()
    server.shutdown()


def test_a_wait_for_other_trainers_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lighthouse answers when there are `--min_replicas` trainers; one alone waited without a word."""
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    monkeypatch.setattr(lighthouse, "SILENCE_S", 0.2)
    server = coordination.LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=20)
    url = f"http://localhost:{server.address().rpartition(':')[2]}"
    report = QuorumReport(0, True, False, "", "")
    ids = ["trainer-0:a", "trainer-1:b"]
    first, second = (Lighthouse(url, id_, timeout=timedelta(seconds=5), host="localhost") for id_ in ids)
    with ThreadPoolExecutor(1) as alone:
        waiting = alone.submit(first.ask, report)
        time.sleep(1)
        assert second.ask(report).reports.keys() == set(ids)
        waiting.result()
    told = [message for message in caplog.messages if message.startswith("trainer-0: no answer in ")]
    assert 1 <= len(told) <= 2
    first.close()
    second.close()
    server.shutdown()


def take_round(naive: Naive, taken: list[int], done: int) -> None:
    """A round of these trainers. One that took no part in the round before is new."""
    for number in naive.trainers.keys() - taken:
        del naive.trainers[number]
    naive.join(*(number for number in taken if number not in naive.trainers))
    naive.steps(range(done * EVERY, (done + 1) * EVERY), *taken)
    naive.round()


def test_trainers_die_and_join(world: World) -> None:
    """Killed during a round, a hand-over, and after a round; stopped for too long; joining, also with other options."""
    naive, history = Naive(), list[list[int]]()

    def check(answers: dict[int, Any], taken: list[int]) -> None:
        """Compare what these trainers hold with plain torch, for a round in which `taken` took part."""
        take_round(naive, taken, len(history))
        history.append(taken)
        for number, answer in answers.items():
            assert answer == (len(taken), len(history), naive.theta, naive.residual(number)), number

    def rounds_until_sent(number: int, *others: int) -> None:
        """Rounds of the others until this one sends something: it joins once it has asked in time."""
        while not world.trainers[number][1].poll(0.5):
            check(world.round(*others), list(others))

    def joined(number: int) -> None:
        what, rounds, theta, kept = world.receive(number)
        assert (what, rounds) == ("joined", len(history))
        assert theta == naive.theta
        assert not any(any(values) for values in kept.values())

    world.start(0, 1, 2)
    world.send({}, 0, 1, 2)
    for number in (0, 1, 2):
        assert world.receive(number) == "heard"
    world.send("enter", 0, 1, 2)
    for number in (0, 1, 2):
        joined(number)
    check(world.round(0, 1, 2), [0, 1, 2])

    # Killed in the third collective of a round, where payloads go, as the one at whose store all met: a round of two.
    world.send((Group, "_gather", 3), 0)
    check(world.round(1, 2), [1, 2])

    # Started again, with other weights than the rest: refused with other options, then let in with theirs.
    world.start(0)
    for options in ({"sync_every": 3}, {"off": 1.0}):
        world.send(options, 0)
        assert world.receive(0) == "heard"
        world.send("enter", 0)
        rounds_until_sent(0, 1, 2)
        if "sync_every" in options:
            refused = world.receive(0)
            assert isinstance(refused, pulse.IntegrityError)
            assert refused.expected != refused.found
    joined(0)
    check(world.round(0, 1, 2), [0, 1, 2])

    # Stopped for longer than an exchange may take: the others go on, and it raises when it is continued.
    os.kill(world.trainers[1][0].pid, signal.SIGSTOP)
    world.send((), 1)
    check(world.round(0, 2), [0, 2])
    os.kill(world.trainers[1][0].pid, signal.SIGCONT)
    rounds_until_sent(1, 0, 2)
    assert isinstance(left_behind := world.receive(1), pulse.ExchangeError)
    assert "trainer-1" in str(left_behind)
    world.send({}, 1)
    assert world.receive(1) == "heard"
    world.send("enter", 1)

    # Killed while it hands its state over: the newcomer gets it from the other one, after a round of that one alone.
    order: tuple[object, ...] = (ElasticMembers, "_transfer", 1)
    while world.trainers[0][0].is_alive():
        world.send(order, 0)
        check(world.round(2), [0, 2])
        order = ()
        world.trainers[0][0].join(1)
    rounds_until_sent(1, 2)
    joined(1)
    check(world.round(1, 2), [1, 2])

    # Killed when all of its round has arrived at all: it is in the mean of that round, and not of the next.
    world.send((ElasticMembers, "agree", 1), 2)
    check(world.round(1), [1, 2])
    check(world.round(1), [1])


def test_only_the_trainer_whose_payload_is_broken_goes(world: World) -> None:
    """So does one whose numbers are not finite: the others exchange the round again without it, and all stay."""
    world.start(0, 1, 2)
    orders: tuple[Any, ...] = ({}, "enter")
    for order in orders:
        world.send(order, 0, 1, 2)
        for number in (0, 1, 2):
            world.receive(number)
    world.send("spoil", 2)
    answers = world.round(0, 1)
    assert isinstance(blamed := world.receive(2), pulse.ExchangeError)
    assert (blamed.ranks, blamed.round) == ((2,), 1)
    naive = Naive()
    take_round(naive, [0, 1], 0)
    for number in (0, 1):
        assert answers[number] == (2, 1, naive.theta, naive.residual(number))
    world.send("nan", 1)
    ((workers, rounds, *_),) = world.round(0).values()
    assert (workers, rounds) == (1, 2)
    assert isinstance(left := world.receive(1), FloatingPointError)
    assert str(left).startswith("rank 1, round 2")


def test_a_checkpoint_is_each_trainers_own(world: World) -> None:
    """A trainer with a Membership, stopped after two rounds and resumed: as without the stop."""

    def rounds(loco: pulse.PulseLoCo, model: Model, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        with loco:
            for step in range(first * EVERY, last * EVERY):
                inner_step(model, optimizer, 0, step)

    plain = Model()
    optimizer = adam(plain)
    with pulse.Membership(world.lighthouse, "plain", host="localhost") as members:
        loco = pulse.PulseLoCo(plain, optimizer, sync_every=EVERY, group=members)
        rounds(loco, plain, optimizer, 0, 2)
        state = copy.deepcopy((plain.state_dict(), optimizer.state_dict(), loco.state_dict()))
        rounds(loco, plain, optimizer, 2, 4)
    model = Model()
    optimizer = adam(model)
    assert state[2]["workers"] == 0  # which trainers of a fixed number refuse
    with pulse.Membership(world.lighthouse, "plain", host="localhost") as members:
        again = pulse.PulseLoCo(model, optimizer, sync_every=EVERY, group=members)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        again.load_state_dict(state[2])
        rounds(again, model, optimizer, 2, 4)
    assert (again.round, bits(trainable(model)), residual(again)) == (4, bits(trainable(plain)), residual(loco))
    assert [report.digest for report in again.reports] == [report.digest for report in loco.reports[2:]]


def test_without_torchft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(pulse.MissingExtraError) as caught:
        pulse.Membership("http://localhost:1", "a")
    assert caught.value.extra == "ft"
