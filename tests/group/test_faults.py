"""Ranks that are killed, late or interrupted in a group of ours: all others are told which, and none hangs."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.group import agreement, private
from pulse_rl.group.collectives import Wording
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.ranks import Ranks
from tests.group import world as group_world
from tests.group.world import caught

ADVICE = "nothing was published"


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _share(group: PrivateGroup, rank: int, size: int) -> None:
    Ranks(group).share("the publish", lambda: rank, int)


def _compare(group: PrivateGroup, rank: int, size: int) -> None:
    agreement.compare(group, {"codecs differ": 1}, "now", "")


def _broadcast(group: PrivateGroup, rank: int, size: int) -> None:
    group.broadcast(0, bytes(5000) if rank == 0 else None, 5000)


def _pass_on(group: PrivateGroup, rank: int, size: int) -> None:
    """From each rank to the next one."""
    for sender in range(size - 1):
        if rank == sender:
            group.send(rank + 1, bytes(5000))
        elif rank == sender + 1:
            group.receive(sender, 5000)


CALLS = {"share": _share, "compare": _compare, "broadcast": _broadcast, "send": _pass_on}


def lose(rank: int, size: int, call: str, lost: int, after: int) -> tuple[BaseException, float]:
    """One rank is killed in a call, after it has started so many transfers.

    The others make the call, and then share, unless the call raised already. Returns the error and its seconds.
    """
    group = PrivateGroup.of(timeout=20, wording=Wording(advice=ADVICE))
    private.CHUNK = 1000
    if rank == lost:
        start, left = group._start, iter(range(after))

        def starts(*arguments: Any) -> Any:
            return start(*arguments) if next(left, None) is not None else _die()

        group._start = starts  # type: ignore[method-assign,assignment]
    clock = time.monotonic()

    def calls() -> None:
        CALLS[call](group, rank, size)
        Ranks(group).share("the next one", lambda: rank, int)

    error = caught(calls)
    seconds = time.monotonic() - clock
    assert str(caught(lambda: _compare(group, rank, size))) in str(error)
    return error, seconds


@pytest.mark.parametrize(
    ("call", "lost", "after"),
    [
        ("share", 0, 0),
        ("share", 1, 2),  # of the first exchange it has told rank 0 alone
        ("share", 2, 4),  # it has told all others but one
        ("compare", 2, 0),
        ("broadcast", 0, 11),
        ("broadcast", 1, 14),
        ("broadcast", 3, 12),
        ("send", 1, 2),
        ("send", 2, 3),
    ],
)
def test_a_rank_that_is_killed_is_named_on_all_at_once(call: str, lost: int, after: int) -> None:
    results = group_world.run(lose, 4, call, lost, after)
    assert results.pop(lost) is None
    for error, seconds in results:
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == (lost,), str(error)
        assert f"rank {lost} of 4 is lost; {ADVICE}" in str(error)
        assert seconds < 5
    if call == "share" and not after:  # later, some ranks may have heard from it
        assert all(str(error).startswith("the publish: ") for error, _ in results)


def arrive_late(rank: int, size: int) -> tuple[BaseException, float]:
    """Rank 1's work takes longer than the others wait."""
    group = PrivateGroup.of(timeout=1)
    clock = time.monotonic()
    error = caught(
        lambda: Ranks(group).share("the publish", lambda: time.sleep(2.5) if rank == 1 else None, type(None))
    )
    return error, time.monotonic() - clock


def test_a_rank_that_does_not_answer_is_named_after_the_timeout() -> None:
    results = group_world.run(arrive_late, 3)
    assert all(isinstance(error, pulse.ExchangeError) for error, _ in results)
    for error, seconds in (results[0], results[2]):
        assert error.ranks == (1,)
        assert "rank 1 of 3 did not answer within 1 s" in str(error)
        assert 0.9 < seconds < 2.4


def interrupt_wait(rank: int, size: int) -> tuple[BaseException, BaseException]:
    """Ctrl-C on rank 0 while it waits for rank 1."""
    group = PrivateGroup.of(timeout=20)

    def work() -> None:
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank == 1:
            time.sleep(0.5)

    def calls() -> None:
        Ranks(group).share("the publish", work, type(None))
        Ranks(group).share("the next one", lambda: None, type(None))

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return caught(calls), caught(calls)


def test_a_rank_that_is_interrupted_while_it_waits_tells_the_others() -> None:
    (interrupted, refused), *others = group_world.run(interrupt_wait, 3)
    assert isinstance(interrupted, KeyboardInterrupt)
    for error in (refused, *others[0], *others[1]):
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == (0,)


def connect_late(rank: int, size: int, killed: bool) -> tuple[BaseException | None, float]:
    """Rank 1 is killed while it connects, or comes only when the others have given up."""
    clock = time.monotonic()
    if rank == 1 and killed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "ProcessGroupGloo", _die)
            PrivateGroup.of()
    if rank == 1:
        time.sleep(4)
        return None, 0.0
    return caught(lambda: PrivateGroup.of(timeout=1)), time.monotonic() - clock


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_does_not_come_to_the_making_of_a_group_is_waited_for_no_longer_than_the_timeout(
    killed: bool,
) -> None:
    """The caller's group would wait for 20 s."""
    first, late, last = group_world.run(connect_late, 3, killed)
    assert (late is None) == killed
    for error, seconds in (first, last):
        assert isinstance(error, pulse.ExchangeError)
        assert seconds < 3.5
