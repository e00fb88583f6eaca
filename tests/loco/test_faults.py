"""Rounds that fail: a rank is lost, cannot go on, sends what cannot be read, or computes what is not finite."""

import os
import re
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.loco import log8, payload
from tests.forked import Forked, picklable
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, start
from tests.store.servers import free_port


def disturb(group: Any, rank: int, size: int, what: str) -> None:
    """Rank 2's momentum changes during round 2, or its pseudo-gradient gets a NaN."""
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=1, group=group) as loco:
        inner_step(model, optimizer, rank, 0)
        before = loco.digest
        if what == "momentum" and rank == 2:
            loco.state_dict()["momentum"]["a"][3, 4] += 1
        if what == "nan" and rank == 2:
            with torch.no_grad():
                model.strided[1, 1] = float("nan")
        try:
            inner_step(model, optimizer, rank, 1)
        except FloatingPointError:
            assert loco.digest == before
            assert loco.round == 1
            raise


@pytest.mark.parametrize("what", ["momentum", "nan"])
def test_theta_that_differs_after_a_round_is_found_on_all(ranks: Ranks, what: str) -> None:
    """So is, before it, a pseudo-gradient that is not finite."""
    for error in ranks(disturb, 3, what):
        if what == "nan":
            assert isinstance(error, FloatingPointError)
            assert str(error).startswith("rank 2, round 2:")
            assert "'strided'" in str(error)
        else:
            assert isinstance(error, pulse.IntegrityError)
            assert error.ranks == (2,)
            assert len(str(error.expected)) == len(str(error.found)) == 16


def overflow(group: Any, rank: int, size: int, kind: str, what: str, options: Any) -> tuple[BaseException, bool]:
    """A finite pseudo-gradient whose mean overflows; or, of weights near the end of float32, that leads over it."""
    torch.manual_seed(0)
    small, large = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(small, large)
    with torch.no_grad():
        large.weight.fill_(0.0 if what == "mean" else -3e38)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    loco = getattr(pulse, kind)(model, optimizer, sync_every=1, group=group, outer_lr=1.0, **options)
    before = loco.digest
    with loco, pytest.raises((FloatingPointError, pulse.ExchangeError)) as caught:
        small.weight.grad, large.weight.grad = torch.zeros(3, 3), torch.zeros(4, 4)
        # The live weight stays finite; with the momentum θ does not.
        large.weight.grad[1, 2] = float(np.finfo(np.float32).max) if what == "mean" else 3e37
        optimizer.step()
    return picklable(caught.value), loco.digest == before


@pytest.mark.parametrize(
    ("kind", "what", "options"),
    [
        ("PulseLoCo", "mean", {"value_dtype": "float32", "exchange": "gather"}),
        ("PulseLoCo", "mean", {"value_dtype": "float32", "exchange": "split"}),
        ("PulseLoCo", "theta", {"value_dtype": "float32"}),
        ("PulseLoCo", "theta", {"exchange": "split"}),
        ("DiLoCo", "theta", {}),
    ],
)
def test_what_overflows_is_refused_on_all_ranks(ranks: Ranks, kind: str, what: str, options: Any) -> None:
    """Before θ is touched. Who did not add up a mean hears of it from the rank that did."""
    found = good(ranks(overflow, 2, kind, what, options))
    assert all(untouched for _, untouched in found)
    assert any(isinstance(error, FloatingPointError) for error, _ in found)
    if what == "theta":
        assert all(isinstance(error, FloatingPointError) and "'1.weight'" in str(error) for error, _ in found)


def run_out_of_memory(group: Any, rank: int, size: int, where: str, method: Any) -> tuple[BaseException, BaseException]:
    """Rank 1 does, in a round; returns the error of the round, and of the next attempt to enter."""

    def empty(*_: Any, **__: Any) -> Any:
        raise MemoryError("none left")

    model = Model()
    optimizer = adam(model)
    loco = pulse.PulseLoCo(model, optimizer, sync_every=2, group=group, exchange=method)
    with pytest.MonkeyPatch.context() as patch, loco:
        if rank == 1:
            patch.setattr(*((log8, "find_sends") if where == "gate" else (payload, "encode")), empty)
        inner_step(model, optimizer, rank, 0)
        with pytest.raises((pulse.ExchangeError, MemoryError)) as caught:
            inner_step(model, optimizer, rank, 1)
    with pytest.raises(pulse.ExchangeError) as entered:
        loco.__enter__()
    return picklable(caught.value), picklable(entered.value)


@pytest.mark.parametrize(("where", "method"), [("gate", "gather"), ("encode", "gather"), ("encode", "split")])
def test_a_rank_that_fails_alone_is_named_on_all_at_once(ranks: Ranks, where: str, method: str) -> None:
    """All raise in the same collective; nobody waits for the group's timeout, as when a worker is lost."""
    for rank, (error, entered) in enumerate(good(ranks(run_out_of_memory, 3, where, method))):
        if rank == 1:
            assert isinstance(error, MemoryError)
        else:
            assert isinstance(error, pulse.ExchangeError)
            assert (error.ranks, error.round) == ((1,), 1)
        assert "earlier round failed" in str(entered)


def break_payload(group: Any, rank: int, size: int, method: Any, overlap: int, broken: int) -> tuple[Any, bool]:
    """One of rank 1's payloads, by number, claims another count of sends, under a hash that matches."""
    model = Model()
    optimizer = adam(model)
    whole, calls = payload.encode, iter(range(100))

    def encode(*arguments: Any, **named: Any) -> bytes:
        data = bytearray(whole(*arguments, **named))
        if next(calls) == broken:
            data[payload.HASH + payload.LENGTHS.size] ^= 1  # the count of the first segment's sends
            data[: payload.HASH] = blake3(data[payload.HASH :]).digest(payload.HASH)
        return bytes(data)

    options: dict[str, Any] = {"sync_every": 2, "exchange": method, "overlap": overlap, "group": group}
    with pytest.MonkeyPatch.context() as patch, pulse.PulseLoCo(model, optimizer, **options) as loco:
        before = loco.digest
        if rank == 1:
            patch.setattr(payload, "encode", encode)
        with pytest.raises(pulse.PulseError) as caught:
            for step in range(4):
                inner_step(model, optimizer, rank, step)
        return picklable(caught.value), (loco.digest, loco.round) == (before, 0)


def whole_round(group: Any, rank: int, size: int) -> str:
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=1, group=group) as loco:
        inner_step(model, optimizer, rank, 0)
        return loco.digest


@pytest.mark.parametrize(
    ("method", "overlap", "broken", "readers"),
    [
        ("gather", 0, 0, (0, 2)),
        ("split", 0, 1, (2,)),  # of the range that rank 2 adds up
        ("split", 1, 1, (2,)),
        ("split", 0, 2, (0, 2)),  # the means that rank 1 hands out
    ],
)
def test_a_payload_that_one_rank_cannot_read_is_an_error_on_all_at_once(
    ranks: Ranks, method: str, overlap: int, broken: int, readers: tuple[int, ...]
) -> None:
    """All name the sender; who did not read it names the reader too, and nobody waits for a timeout."""
    for rank, (error, untouched) in enumerate(good(ranks(break_payload, 3, method, overlap, broken))):
        assert isinstance(error, pulse.ExchangeError)
        assert (error.ranks, error.round) == ((1,), 1)
        assert re.search("rank 1: (payload|context block): expected", str(error))
        failed = f"failed on rank{'s' if len(readers) > 1 else ''} {', '.join(map(str, readers))} of 3"
        assert str(error).startswith("rank 1: ") if rank in readers else failed in str(error)
        assert untouched
    assert len(set(good(ranks(whole_round, 3)))) == 1  # the ranks are still in step


def lose(rank: int, pipe: Connection, at: int, lost: int, overlap: int) -> None:
    """The last rank is killed in its second round; the others are left in an exchange."""
    size = lost + 1
    start(rank, size, at, 15)
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=3, overlap=overlap) as loco:
        for step in range(1, 9):
            if step == 6:
                before = loco.digest, bits(loco.state_dict()["residual"][str(rank)])
                if rank == lost and not overlap:  # before the exchange
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == lost:  # during the exchange
                    loco._members.group.gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
            try:
                inner_step(model, optimizer, rank, step)
            except pulse.ExchangeError as error:
                after = loco.digest, bits(loco.state_dict()["residual"][str(rank)])
                pipe.send((error, after == before, loco.round, step))
                os._exit(0)


@pytest.mark.parametrize(("size", "overlap", "raised"), [(3, 0, 6), (2, 2, 8)])
def test_a_lost_worker_is_one_clear_error_within_the_timeout(size: int, overlap: int, raised: int) -> None:
    """Raised where the round would have ended, with θ and residual of the round before."""
    ranks = Forked(lose, size, free_port(), size - 1, overlap)
    for here in ranks.pipes[:-1]:
        assert here.poll(60)
        error, untouched, rounds, step = here.recv()
        assert error.round == 2
        assert "start the trainers again from their last checkpoint" in str(error)
        assert re.search(r"\([A-Z][^()]*(reset|closed) by peer( \[\S+)?\)$", str(error))  # Gloo's words, and no more
        assert untouched
        assert (rounds, step) == (1, raised)
    clock = time.monotonic()
    for process in ranks.processes:
        process.join(20)
        assert process.exitcode is not None
    assert time.monotonic() - clock < 20
