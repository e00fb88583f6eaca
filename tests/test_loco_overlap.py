"""Rounds that are exchanged while inner steps go on, and rounds that one rank cannot go on with: on real ranks."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from blake3 import blake3
from test_loco_ranks import Model, Ranks, adam, begin_again, bits, good, inner_step, port, ranks, seen, start, trainable

import pulse_rl as pulse
from pulse_rl.loco import masters, payload

__all__ = ["ranks"]  # a fixture


def naive(size: int, steps: int, every: int, overlap: int, dense: bool) -> list[list[dict[str, bytes]]]:
    """The algorithm in plain torch, all ranks in one process: each rank's live parameters after every inner step."""
    shared = Model()
    outer = torch.optim.SGD(trainable(shared).values(), lr=0.7, momentum=0.9, nesterov=True)
    models = [Model() for _ in range(size)]
    inner = [adam(model) for model in models]
    residual = [{n: torch.zeros_like(p) for n, p in trainable(shared).items()} for _ in range(size)]
    frozen: list[dict[str, torch.Tensor]] = []
    found = []
    with torch.no_grad():
        for step in range(1, steps + 1):
            for rank in range(size):
                inner_step(models[rank], inner[rank], rank, step)
            if step % every == 0:
                frozen = [{n: p.detach().clone() for n, p in trainable(model).items()} for model in models]
                for name, theta in trainable(shared).items():
                    total = torch.zeros_like(theta)
                    for rank in range(size):
                        s = residual[rank][name] + (theta - frozen[rank][name])
                        send = (seen(theta, torch.bfloat16) != seen(theta - s, torch.bfloat16)) | dense
                        residual[rank][name] = torch.where(send, 0, s)
                        total += torch.where(send, s, 0)
                    theta.grad = total / size
            if frozen and step % every == overlap:
                outer.step()
                for rank in range(size):
                    for name, p in trainable(models[rank]).items():
                        p.copy_(trainable(shared)[name] - (frozen[rank][name] - p))
            found.append([bits(trainable(model)) for model in models])
    return found


def train(
    group: Any, rank: int, size: int, kind: str, steps: int, every: int, options: dict[str, Any]
) -> tuple[list[dict[str, bytes]], list[pulse.LocoReport]]:
    masters.FRAGMENT = 500
    model = Model()
    optimizer = adam(model)
    found = []
    with getattr(pulse, kind)(model, optimizer, sync_every=every, process_group=group, **options) as loco:
        for step in range(1, steps + 1):
            inner_step(model, optimizer, rank, step)
            found.append(bits(trainable(model)))
    return found, loco.reports


@pytest.mark.parametrize(
    ("size", "kind", "every", "overlap", "options"),
    [
        (1, "PulseLoCo", 2, 1, {}),
        (2, "PulseLoCo", 3, 1, {"exchange": "gather"}),
        (3, "PulseLoCo", 3, 2, {"exchange": "gather"}),
        (3, "PulseLoCo", 3, 2, {"exchange": "split"}),
        (2, "PulseLoCo", 3, 0, {"exchange": "split"}),
        (1, "DiLoCo", 3, 2, {}),
        (3, "DiLoCo", 2, 1, {}),
    ],
)
def test_overlapped_rounds_equal_the_algorithm_in_plain_torch(
    ranks: Ranks, size: int, kind: str, every: int, overlap: int, options: dict[str, Any]
) -> None:
    steps = 3 * every + overlap
    expected = naive(size, steps, every, overlap, dense=kind == "DiLoCo")
    found = good(ranks(train, size, kind, steps, every, {"overlap": overlap, **options}))
    for rank, (live, reports) in enumerate(found):
        for step in range(steps):
            assert live[step] == expected[step][rank], f"rank {rank}, inner step {step + 1}"
        assert [report.round for report in reports] == [1, 2, 3]
        assert [report.digest for report in reports] == [report.digest for report in found[0][1]]


def keep_going(group: Any, rank: int, size: int, folder: str) -> tuple[int, int]:
    """Rank 1 begins a round only once rank 0 has taken two inner steps beyond its begin."""
    model = Model()
    optimizer = adam(model)
    there = Path(folder) / "two steps beyond"
    with pulse.PulseLoCo(model, optimizer, sync_every=4, overlap=3, process_group=group) as loco:
        for step in range(1, 8):
            if rank == 1 and step == 4:
                while not there.exists():
                    time.sleep(0.01)
            inner_step(model, optimizer, rank, step)
            if rank == 0 and step == 6:
                there.touch()
                with pytest.raises(RuntimeError, match="found round 1: call it 1 inner steps later"):
                    loco.state_dict()
        assert loco.report is not None
        return loco.round, loco.inner_steps


def test_inner_steps_go_on_while_a_round_is_under_way(ranks: Ranks, tmp_path: Path) -> None:
    """Neither rank would come to an end if a round's begin waited for the others."""
    assert good(ranks(keep_going, 2, str(tmp_path))) == [(1, 3)] * 2


def resume(group: Any, rank: int, size: int, kind: str, folder: str) -> None:
    """Stopped between a round's end and the next one's begin, and begun again from files."""
    plain = Model()
    optimizer = adam(plain)
    options: dict[str, Any] = {"sync_every": 4, "overlap": 2, "process_group": group}
    with getattr(pulse, kind)(plain, optimizer, **options) as loco:
        for step in range(1, 13):
            inner_step(plain, optimizer, rank, step)
            if step == 7:
                state = {"loco": loco.state_dict(), "model": plain.state_dict(), "inner": optimizer.state_dict()}
                torch.save(state, Path(folder) / f"{kind}{rank}.pt")
    # Leaving ended round 3 as soon as it had begun, so nothing was on top of θ: a checkpoint for any number of ranks.
    assert (loco.round, loco.inner_steps) == (3, 0)
    assert loco.digest == pulse.digest(dict(trainable(plain)))
    assert loco.state_dict()["round"] == 3

    file = Path(folder) / f"{kind}{rank}.pt"
    begin_again(file, kind, options, rank, inner_steps=3, steps=range(8, 13), plain=plain, loco=loco)


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
def test_a_resumed_run_equals_the_uninterrupted_one(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    good(ranks(resume, 2, kind, str(tmp_path)))


def leave(group: Any, rank: int, size: int) -> None:
    """An error of the caller's own amid a round: it is the one that is raised, after the round's end."""
    model = Model()
    optimizer = adam(model)
    with (
        pytest.raises(KeyError, match="mine"),
        pulse.PulseLoCo(model, optimizer, sync_every=3, overlap=2, process_group=group) as loco,
    ):
        for step in range(1, 5):
            inner_step(model, optimizer, rank, step)
        raise KeyError("mine")
    assert (loco.round, loco.inner_steps) == (1, 1)
    assert loco.digest != pulse.digest(dict(trainable(model)))  # the step since the begin is on top
    whole = loco.sync()
    assert whole.digest == loco.digest == pulse.digest(dict(trainable(model)))
    assert (loco.round, loco.inner_steps) == (2, 0)


def test_leaving_ends_the_round_and_sync_makes_a_whole_one(ranks: Ranks) -> None:
    good(ranks(leave, 2))


def test_what_has_not_moved_becomes_theta_with_its_sign() -> None:
    """One trainer's masters: live = θ − (frozen − live), and where it has not moved, θ to the sign of zero."""
    live = torch.nn.Parameter(torch.tensor([0.0, -0.0, 1.0, 0.3, 1e-3]))
    held = masters.Masters({"w": live}, kept=False)
    held.freeze()
    frozen = live.detach().clone()
    with torch.no_grad():
        live[3] += 1e-4
        live[4] += 1e3
    theta = torch.tensor([-0.0, -0.0, -0.0, 0.7, -1e-9])
    held.theta["w"][:] = theta.numpy()
    (segment,) = held.segments
    assert held.live(segment).tobytes() == frozen.numpy().tobytes()
    held.commit(segment, None, np.zeros(5, np.float32), 0.7, 0.9)
    held.thaw()
    expected = theta - (frozen - torch.tensor([0.0, -0.0, 1.0, 0.3 + 1e-4, 1e-3 + 1e3]))
    assert bits({"w": live[3:]}) == bits({"w": expected[3:]})
    assert bits({"w": live[:3]}) == bits({"w": theta[:3]})


def lose(rank: int, at: int, pipe: Connection) -> None:
    """Rank 1 is killed amid its second round's exchange, while all take inner steps."""
    start(rank, 2, at, 15)
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=3, overlap=2) as loco:
        for step in range(1, 9):
            if step == 6:
                before = loco.digest, bits(loco.state_dict()["residual"][str(rank)])
                if rank == 1:
                    loco._group.gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
            try:
                inner_step(model, optimizer, rank, step)
            except pulse.ExchangeError as error:
                after = loco.digest, bits(loco.state_dict()["residual"][str(rank)])
                pipe.send((str(error), after == before, loco.round, step))
                os._exit(0)


def test_a_worker_lost_amid_an_overlapped_exchange_is_one_clear_error() -> None:
    """Raised where the round would have ended, with θ and residual of the round before."""
    context, at = mp.get_context("spawn"), port()
    here, there = context.Pipe()
    processes = [context.Process(target=lose, args=(rank, at, there)) for rank in range(2)]
    for process in processes:
        process.start()
    assert here.poll(60)
    message, untouched, rounds, step = here.recv()
    assert "start the trainers again from their last checkpoint" in message
    assert untouched
    assert (rounds, step) == (1, 8)
    for process in processes:
        process.join(20)
        assert process.exitcode is not None


def break_payload(group: Any, rank: int, size: int, way: Any, overlap: int, broken: int) -> tuple[str, bool]:
    """Rank 1's payloads of so many sends more than there are: sealed, and wrong. broken: in which of its payloads."""
    masters.FRAGMENT = 1 << 25
    model = Model()
    optimizer = adam(model)
    whole, calls = payload.encode, iter(range(100))

    def encode(*arguments: Any, **named: Any) -> bytes:
        data = bytearray(whole(*arguments, **named))
        if next(calls) == broken:
            data[payload.HASH + payload.LENGTHS.size] ^= 1  # of the first segment's sends
            data[: payload.HASH] = blake3(data[payload.HASH :]).digest(payload.HASH)
        return bytes(data)

    options: dict[str, Any] = {"sync_every": 2, "exchange": way, "overlap": overlap, "process_group": group}
    with pytest.MonkeyPatch.context() as patch, pulse.PulseLoCo(model, optimizer, **options) as loco:
        before = loco.digest
        if rank == 1:
            patch.setattr(payload, "encode", encode)
        try:
            for step in range(4):
                inner_step(model, optimizer, rank, step)
        except pulse.PulseError as error:
            return f"{type(error).__name__}: {error}", (loco.digest, loco.round) == (before, 0)
    return "nothing was raised", False


@pytest.mark.parametrize(
    ("way", "overlap", "broken", "find"),
    [
        ("gather", 0, 0, (0, 2)),
        ("split", 0, 1, (2,)),  # of the range that rank 2 adds up
        ("split", 1, 1, (2,)),
        ("split", 0, 2, (0, 2)),  # the sums that rank 1 hands out
    ],
)
def test_what_one_rank_cannot_read_is_an_error_on_all_at_once(
    ranks: Ranks, way: str, overlap: int, broken: int, find: tuple[int, ...]
) -> None:
    """Whoever finds it says whose payload it was; the others say who found it, and nobody waits for a timeout."""
    for rank, (said, untouched) in enumerate(good(ranks(break_payload, 3, way, overlap, broken))):
        if rank in find:
            assert said.startswith("BrokenPayloadError: rank 1: payload: expected"), said
        else:
            kind = "BlamedError" if rank == 1 else "ExchangeError"
            assert said.startswith(f"{kind}: rank {find[0]} could not go on"), said
            assert "(BrokenPayloadError: rank 1: payload: expected" in said
        assert untouched
    # The ranks are still together.
    assert len({reports[-1].digest for _, reports in good(ranks(train, 3, "PulseLoCo", 4, 2, {}))}) == 1


def test_an_overlap_that_reaches_the_next_round_is_refused(ranks: Ranks) -> None:
    assert "overlap: expected 0 to 2 inner steps" in good(ranks(too_long, 1))[0]


def too_long(group: Any, rank: int, size: int) -> str:
    model = Model()
    with pytest.raises(ValueError) as caught:
        pulse.DiLoCo(model, adam(model), sync_every=3, overlap=3, process_group=group)
    return str(caught.value)
