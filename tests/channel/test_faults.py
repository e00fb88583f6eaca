"""What a channel does when something is wrong: all ranks raise, weights are as they were, and the next send repairs it.

The first tests are defects of another implementation of SparseRL-Sync.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.sync.channel import receiver
from tests.channel.world import BUCKET, after, bits, call, made, step, zeros
from tests.forked import picklable
from tests.group import world as group_world
from tests.loco.ranks import Ranks, good
from tests.store.servers import free_port

NOTICED_S = 150  # seconds in which a busy machine tells the others that a rank died


def channel_of(group: Any, timeout: float = 60, **options: Any) -> pulse.Channel:
    # Longer than a busy machine compiles the kernels of the first send: a rank that is late would be named as lost.
    return pulse.Channel(group, bucket_nbytes=BUCKET, timeout=timeout, **options)


# Their defects


def zeros_and_nans(group: Any, rank: int, size: int) -> Any:
    """Only the sign of a zero and the payload of a NaN change."""
    channel = channel_of(group)
    start = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x3F80] * 500, np.uint16)
    weights = {"w": torch.from_numpy(start.copy()).view(torch.bfloat16)}
    call(channel, rank, weights, 0)
    if rank == 0:
        new = start.copy()
        new[:5] = [0x8000, 0x0000, 0x7FC5, 0x7FC0, 0x7FC0]
        weights["w"].view(torch.int16).copy_(torch.from_numpy(new.view(np.int16)))
    report = call(channel, rank, weights, 1)
    return report.changes, report.sent, bits(weights)


def test_signs_of_zeros_and_payloads_of_nans_arrive(ranks: Ranks) -> None:
    (changes, sent, first), (_, _, second) = good(ranks(zeros_and_nans, 2))
    assert (changes, sent) == (5, "sparse")
    assert first == second


def off_by_one_ulp(group: Any, rank: int, size: int) -> Any:
    """Something writes one ULP into a receiver's weights, where the next version changes nothing."""
    channel = channel_of(group, validate_every=2)
    weights = made() if rank == 0 else zeros()
    reports = [call(channel, rank, weights, 0)]
    if rank == 2:
        weights["wide"].numpy().view(np.uint32)[5] ^= 1  # torch does not count it
    if rank == 0:
        step(weights, 1)
    reports.append(call(channel, rank, weights, 1))
    version = channel.version
    reports += [call(channel, rank, weights, 2), call(channel, rank, weights, 3)]
    return [picklable(r) if isinstance(r, Exception) else r for r in reports], version, bits(weights)


def test_validation_finds_one_ulp_and_the_next_send_repairs_it(ranks: Ranks) -> None:
    results = good(ranks(off_by_one_ulp, 3))
    for rank, (reports, version, held) in enumerate(results):
        first, second, third, fourth = reports
        assert first.sent == "dense"
        assert isinstance(second, pulse.IntegrityError if rank == 2 else pulse.ExchangeError)
        assert "'wide' in 1 elements" in str(second)
        assert version == (None if rank == 2 else 1)
        assert third.dense_ranks == (2,)
        assert fourth.validated
        assert held == results[0][2]


def wrong_base(group: Any, rank: int, size: int) -> Any:
    """Something writes to an element of a receiver that the next version changes."""
    channel = channel_of(group)
    weights = made() if rank == 0 else zeros()
    call(channel, rank, weights, 0)
    if rank == 1:
        weights["embed"].view(torch.int16).numpy()[:] ^= 2
    held = bits(weights)
    if rank == 0:
        step(weights, 1)
    error = call(channel, rank, weights, 1)
    unchanged = rank == 0 or bits(weights) == held
    version = channel.version
    report = call(channel, rank, weights, 1)
    return picklable(error), unchanged, version, report, bits(weights)


def test_a_wrong_base_is_refused_on_all_and_repaired_by_the_next_send(ranks: Ranks) -> None:
    results = good(ranks(wrong_base, 3))
    for rank, (error, unchanged, version, report, held) in enumerate(results):
        assert isinstance(error, pulse.IntegrityError)
        assert error.ranks == (1,)
        assert error.expected != error.found
        assert unchanged
        assert version == (None if rank == 1 else 0)
        assert (report.sent, report.dense_ranks, report.base) == ("both", (1,), 0)
        assert held == results[0][4] == bits(after(1))


def watched(group: Any, rank: int, size: int) -> Any:
    """Notes the size of every message of bulk."""
    channel = channel_of(group, codec="gap")
    seen: list[int] = []
    wire: Any = channel._wire
    broadcast, send = wire._bulk.broadcast, wire._control.send

    def noted(source: int, data: Any, limit: int) -> Any:
        found = broadcast(source, data, limit)
        seen.append(len(found))
        return found

    def noted_send(to: int, data: Any) -> None:
        seen.append(len(data))
        send(to, data)

    wire._bulk.broadcast, wire._control.send = noted, noted_send
    weights = made() if rank == 0 else zeros()
    call(channel, rank, weights, 0)
    if rank == 0:
        step(weights, 1, share=0.4)
    sparse = call(channel, rank, weights, 1)
    if rank == 1:
        weights = zeros()
    both = call(channel, rank, weights, 2)
    return seen, sparse.sent_nbytes, both.buckets, both.full_nbytes


def test_no_message_is_larger_than_a_bucket(ranks: Ranks) -> None:
    for seen, sent_nbytes, buckets, full_nbytes in good(ranks(watched, 3)):
        assert sent_nbytes > 2 * BUCKET
        assert len(seen) > 8
        assert max(seen) == BUCKET
        assert buckets == -(-full_nbytes // BUCKET)


# What does not fit


def versions(group: Any, rank: int, size: int) -> Any:
    channel = channel_of(group)
    weights = made() if rank == 0 else zeros()
    call(channel, rank, weights, 5)
    if rank == 0:
        step(weights, 1)
    errors = [call(channel, rank, weights, version) for version in (4, 5)]
    same = bits(weights) == bits(made()) or rank == 0
    return [picklable(error) for error in errors], same, call(channel, rank, weights, 6).sent


def test_a_version_does_not_go_back_nor_stand_for_two_states(ranks: Ranks) -> None:
    for errors, same, sent in good(ranks(versions, 2)):
        assert [type(error) for error in errors] == [ValueError, ValueError]
        assert "expected at least 5" in str(errors[0])
        assert "other bits" in str(errors[1])
        assert same
        assert sent == "sparse"


def another_model(group: Any, rank: int, size: int) -> Any:
    channel = channel_of(group)
    weights = made() if rank == 0 else zeros()
    if rank == 1:
        del weights["wide"]
        weights["ids"] = weights["ids"].int()
    error = call(channel, rank, weights, 0)
    untouched = rank == 0 or not any(tensor.any() for tensor in weights.values())
    report = call(channel, rank, made() if rank == 0 else zeros(), 0)
    return picklable(error), untouched, report.sent


def test_another_model_is_refused_on_all(ranks: Ranks) -> None:
    for rank, (error, untouched, sent) in enumerate(good(ranks(another_model, 3))):
        if rank == 1:
            assert isinstance(error, pulse.BaseMismatchError)
            assert (error.missing, error.retyped) == (("wide",), ("ids",))
        else:
            assert isinstance(error, pulse.ExchangeError)
            assert error.ranks == (1,)
        assert untouched
        assert sent == "dense"


def odd_calls(group: Any, rank: int, size: int) -> Any:
    channel = channel_of(group)
    weights = made() if rank == 0 else zeros()
    errors = []
    odd: list[Callable[[], Any]] = [lambda: channel.send(weights, version=0), lambda: channel.receive(weights)]
    for each in odd:
        with pytest.raises(pulse.ExchangeError) as raised:
            each()
        errors.append(picklable(raised.value))
    with pytest.raises(pulse.ExchangeError, match="validate_every") as raised:
        other = channel_of(group, validate_every=rank)
        other.send(weights, version=0) if rank == 0 else other.receive(weights)
    errors.append(picklable(raised.value))
    return errors, call(channel, rank, weights, 1).sent


def test_calls_and_settings_that_do_not_fit_are_refused_on_all(ranks: Ranks) -> None:
    for errors, sent in good(ranks(odd_calls, 2)):
        assert [error.ranks for error in errors] == [(1,), (0,), (1,)]
        assert sent == "dense"


def replicas(group: Any, rank: int, size: int) -> Any:
    """Two senders hold the same weights, and then no more."""
    channel = channel_of(group, source=(1, 2))
    weights = zeros() if rank == 0 else made()
    errors: list[Any] = []
    for version in range(3):
        if rank == 2:
            weights["ids"][3] = 99 if version == 1 else 3
        try:
            report = channel.send(weights, version=version) if rank else channel.receive(weights)
            errors.append(report.sent)
        except pulse.ExchangeError as error:
            errors.append((error.ranks, str(error)))
    return errors, bits(weights)


def test_replicas_of_senders_that_differ_are_refused(ranks: Ranks) -> None:
    for errors, held in good(ranks(replicas, 3)):
        assert (errors[0], errors[2]) == ("dense", "none")
        ranks_found, text = errors[1]
        assert ranks_found == (1, 2)
        assert "different bits of ids: expected equal ones on ranks 1,2" in text
        assert held == bits(made())


def incomplete(group: Any, rank: int, size: int) -> Any:
    """The second of two senders has a tensor of another dtype, then lacks one of which it should hold a half."""
    channel = channel_of(group, source=(1, 2))
    whole = torch.ones(4, 2)
    weights: dict[str, Any] = {"a": torch.zeros(4, 2), "b": torch.ones(3)}
    if rank:
        weights["a"] = pulse.Shard(whole[2 * rank - 2 : 2 * rank], shape=(4, 2), offset=(2 * rank - 2, 0))
    odd = weights | {"b": torch.ones(3).bfloat16()} if rank == 2 else weights
    lacking = {"b": weights["b"]} if rank == 2 else weights
    # `call` sends on rank 0.
    return [picklable(call(channel, 0 if rank else 1, one, 0)) for one in (odd, lacking)]


def test_a_sender_of_other_tensors_is_named(ranks: Ranks) -> None:
    for odd, lacking in good(ranks(incomplete, 3)):
        assert "found BF16 [3] on rank 2" in str(odd)
        assert "'a': 4 of its 8 elements are on no rank, and it is missing on rank 2" in str(lacking)


def shared(group: Any, rank: int, size: int) -> Any:
    """A receiver has tied two tensors that differ at the sender; another one's overlap."""
    channel = channel_of(group)
    weights: Any = {"a": torch.ones(50), "b": torch.zeros(50)}
    if rank == 1:
        weights["b"] = weights["a"]
    error = call(channel, rank, weights, 0)
    weights = {"a": torch.ones(50), "b": torch.zeros(50)}
    if rank == 2:
        memory = torch.full((75,), 7.0)
        weights = {"a": memory[:50], "b": memory[25:]}
    return picklable(error), picklable(call(channel, rank, weights, 1)), bits(weights)


def test_receivers_whose_tensors_share_memory_are_refused(ranks: Ranks) -> None:
    results = good(ranks(shared, 3))
    for rank, (tied, overlapping, _) in enumerate(results):
        assert isinstance(tied, pulse.BaseMismatchError if rank == 1 else pulse.ExchangeError)
        assert isinstance(overlapping, pulse.BaseMismatchError if rank == 2 else pulse.ExchangeError)
    assert results[2][2]["a"] == torch.full((50,), 7.0).numpy().tobytes()


# Receivers that come late, and what they hold already


def late(group: Any, rank: int, size: int) -> Any:
    channel = channel_of(group)
    weights = made() if rank != 2 else zeros()  # rank 1 has loaded the checkpoint that the sender starts from
    reports = [call(channel, rank, weights, 0)]
    if rank == 0:
        step(weights, 1)
    if rank == 1:
        weights = {name: tensor.clone() for name, tensor in weights.items()}  # other memory, the same bits
    reports.append(call(channel, rank, weights, 1))
    if rank == 0:
        step(weights, 2)
    if rank == 1:
        weights = zeros()  # restarted
    reports.append(call(channel, rank, weights, 2))
    reports.append(call(channel, rank, weights, 3))
    return reports, bits(weights)


def test_only_a_receiver_that_needs_all_bits_is_sent_all(ranks: Ranks) -> None:
    results = good(ranks(late, 3))
    for reports, held in results:
        first, second, third, fourth = reports
        assert (first.sent, first.dense_ranks) == ("dense", (2,))
        assert (second.sent, second.dense_ranks) == ("sparse", ())
        assert (third.sent, third.dense_ranks) == ("both", (1,))
        assert third.sent_nbytes == third.payload_nbytes + third.full_nbytes
        assert (fourth.sent, fourth.changes, fourth.sent_nbytes) == ("none", 0, 0)
        assert held == results[0][1]


# Ranks that fail


def no_room(group: Any, rank: int, size: int) -> Any:
    """A receiver's disk is full when it is sent all bits."""
    channel = channel_of(group)
    weights = made() if rank == 0 else zeros()
    spool = receiver.spool  # type: ignore[attr-defined]

    def full(live: Any) -> Any:
        raise OSError(28, "No space left on device", "/tmp")

    if rank == 1:
        receiver.spool = full  # type: ignore[attr-defined]
    error = call(channel, rank, weights, 0)
    receiver.spool = spool  # type: ignore[attr-defined]
    untouched = rank == 0 or not any(tensor.any() for tensor in weights.values())
    return error, untouched, channel.version, call(channel, rank, weights, 0).sent, bits(weights)


def test_a_rank_that_fails_within_a_step_stops_all(ranks: Ranks) -> None:
    results = good(ranks(no_room, 3))
    for rank, (error, untouched, version, sent, held) in enumerate(results):
        assert isinstance(error, OSError if rank == 1 else pulse.ExchangeError)
        if isinstance(error, pulse.ExchangeError):
            assert error.ranks == (1,)
            assert "No space left" in str(error)
        assert untouched
        assert version is None
        assert sent == "dense"
        assert held == results[0][4]


def interrupted(rank: int, size: int) -> Any:
    """Ctrl-C on one rank, between two collectives."""
    channel = channel_of(None)
    weights = made() if rank == 0 else zeros()
    call(channel, rank, weights, 0)
    if rank == 0:
        step(weights, 1)
    if rank == 1:

        def stop(*_: Any) -> Any:
            raise KeyboardInterrupt

        channel._exchange._bulk = stop  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            channel.receive(weights)
        return channel.version, bits(weights)
    start = time.monotonic()
    error = call(channel, rank, weights, 1)
    assert time.monotonic() - start < 10
    return picklable(error), channel.version, bits(weights)


def test_an_interruption_of_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    first, second, third = good(group_world.run(interrupted, 3))
    assert second == (0, bits(made()))
    for error, version, _ in (first, third):
        assert isinstance(error, pulse.ExchangeError)
        assert version == 0
    assert third[2] == bits(made())


def killed(rank: int, size: int, victim: int, at: int, again: int) -> Any:
    """One rank is killed at its n-th collective of the second send. The others go on without it in a new group."""
    channel = channel_of(None, timeout=2 * NOTICED_S)
    weights = made() if rank == 0 else zeros()
    call(channel, rank, weights, 0)
    if rank == 0:
        step(weights, 1)
    calls = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == victim and calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments, **options)

        return do

    wire: Any = channel._wire
    wire.ranks.do_and_gather, wire._bulk.broadcast = counted(wire.ranks.do_and_gather), counted(wire._bulk.broadcast)
    start = time.monotonic()
    error = call(channel, rank, weights, 1)
    took = time.monotonic() - start
    version, held = channel.version, bits(weights)
    dist.destroy_process_group()
    left = [one for one in range(size) if one != victim]
    if victim == 0:
        return picklable(error), took, version, held, None
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{again}", rank=left.index(rank), world_size=len(left))
    channel.reconnect(None)
    report = call(channel, rank, weights, 1)
    return picklable(error), took, version, held, (report, bits(weights))


@pytest.mark.parametrize(("victim", "at"), [(1, 1), (2, 2), (1, 3), (0, 3), (2, 4), (1, 5)])
def test_a_killed_rank_is_an_error_on_all_others_who_go_on_without_it(victim: int, at: int) -> None:
    results = group_world.run(killed, 3, victim, at, free_port(), patience=180)
    before, target = bits(made()), bits(after(1))
    for rank, result in enumerate(results):
        if rank == victim:
            assert result is None
            continue
        error, took, version, held, rest = result
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == (victim,)
        assert took < NOTICED_S  # nobody waited for the timeout
        if rank:
            assert held == {0: before, 1: target}[version]
        if rest is not None:
            report, held = rest
            assert report.sent in ("sparse", "none")
            assert held == target


def killed_at_some_time(rank: int, size: int, victim: int, delay: float, again: int) -> Any:
    """One rank is killed so many seconds after the first send; versions go on and on until then."""
    channel = channel_of(None, validate_every=3)
    weights = made() if rank == 0 else zeros()
    good([call(channel, rank, weights, 0)])
    if rank == victim:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    number = 0
    while True:
        number += 1
        if rank == 0:
            step(weights, number)
        result = call(channel, rank, weights, number)
        if isinstance(result, Exception):
            break
    version, held = channel.version, bits(weights)
    dist.destroy_process_group()
    if victim == 0:
        return picklable(result), version, held, None
    left = [one for one in range(size) if one != victim]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{again}", rank=left.index(rank), world_size=len(left))
    channel.reconnect(None)
    call(channel, rank, weights, number + 1)
    return picklable(result), version, held, bits(weights)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_rank_killed_at_any_time_leaves_whole_versions(seed: int) -> None:
    random = np.random.default_rng(seed)
    victim, delay = int(random.integers(3)), float(random.uniform(0, 0.4))
    results = good(group_world.run(killed_at_some_time, 3, victim, delay, free_port(), patience=180))
    versions, last = set(), set()
    for rank, result in enumerate(results):
        if rank == victim:
            assert result is None
            continue
        error, version, held, rest = result
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == (victim,)
        if rank:
            assert held == bits(after(*range(1, version + 1)))
            versions.add(version)
        if rest is not None:
            last.add(tuple(sorted(rest.items())))
    assert max(versions) - min(versions) <= 1
    assert len(last) <= 1
