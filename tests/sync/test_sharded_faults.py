"""Ranks of which one fails: a few cases of `make fuzz-ranks`, and what its cases draw too rarely."""

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.history.history import commit
from pulse_rl.sync.publish import anchors, delivery, line, pipeline
from pulse_rl.sync.subscribe import subscriber
from tests.group import world as group_world
from tests.group.world import caught
from tests.loco.ranks import Ranks
from tests.sync import fuzz_ranks
from tests.sync.rank_rounds import model
from tests.sync.shares import shares


@pytest.mark.parametrize("case", range(2))
def test_a_rank_that_fails_leaves_no_half_version_and_no_rank_waiting(case: int) -> None:
    counts = fuzz_ranks.run_case(6, case)
    assert counts["versions proved"] or counts["synced"]


def lose_beside_a_commit(rank: int, size: int, store: str) -> Any:
    """Rank 2 is killed when rank 0 has heard that its part is put, and rank 1 has not."""
    made = pulse.Publisher(store, group=dist.group.WORLD, group_timeout=20, codec="gap")
    made.publish(shares(model(0), rank, size))
    ranks: Any = made._ranks
    step, start, puts = ranks.share, ranks.group._start, False

    def share(what: str, *arguments: Any) -> Any:
        nonlocal puts
        puts = what == "put a patch"
        return step(what, *arguments)

    def starts(kind: str, to: int, *arguments: Any) -> Any:
        if puts and kind == "send" and to == 1:
            time.sleep(0.2)  # so that rank 0 has the message
            os.kill(os.getpid(), 9)
        return start(kind, to, *arguments)

    if rank == 2:
        ranks.share, ranks.group._start = share, starts
    return caught(lambda: made.publish(shares(model(1), rank, size)))


def test_no_rank_deletes_what_the_first_one_commits(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    *errors, killed = group_world.run(lose_beside_a_commit, 3, store)
    assert killed is None
    assert all(isinstance(error, pulse.ExchangeError) and error.ranks == (2,) for error in errors), errors
    report = pulse.verify(store)
    assert report.problems == ()
    assert report.good_versions == (0, 1)  # the first rank had all that it needs
    assert report.digest == pulse.digest(model(1))


def interrupt_outside(group: Any, rank: int, size: int, store: str, where: str) -> list[Any]:
    """Ctrl-C on rank 1 between two steps, after which it makes no call for some time."""
    made = pulse.Publisher(store, group=group, group_timeout=20, codec="gap")
    made.publish(shares(model(0), rank, size), version=0)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    owner, name = {
        "the checks": (line, "check_successor"),
        "the thread": (pipeline, "_InFlight"),
        "the anchor": (anchors, "_chunks"),
    }[where]
    begun, errors = time.monotonic(), list[BaseException]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(owner, name, interrupted)
        try:
            anchor, background = where == "the anchor", where == "the thread"
            made.publish(shares(model(1), rank, size), version=1, anchor=anchor, background=background)
            made.flush()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
    seconds = time.monotonic() - begun
    if rank == 1:
        time.sleep(1)
    again = caught(lambda: made.publish(shares(model(5), rank, size), version=5))
    return [type(errors[0]).__name__ if errors else "", getattr(errors[0], "ranks", ()), seconds, str(again)]


@pytest.mark.parametrize("where", ["the checks", "the thread", "the anchor"])
def test_ctrl_c_between_two_steps_is_told_to_all(ranks: Ranks, tmp_path: Path, where: str) -> None:
    found = ranks(interrupt_outside, 3, str(tmp_path / "store"), where)
    assert not any(isinstance(one, BaseException) for one in found), found
    assert [kind for kind, *_ in found] == ["ExchangeError", "KeyboardInterrupt", "ExchangeError"]
    assert all(names == (1,) for _, names, *_ in (found[0], found[2]))
    assert all(seconds < 10 for _, _, seconds, _ in found)  # no rank waits for its timeout
    assert all("rank 1" in again for *_, again in found)
    assert pulse.verify(str(tmp_path / "store")).problems == ()


def interrupt_the_making(group: Any, rank: int, size: int, store: str) -> tuple[str, tuple[int, ...], float]:
    """Ctrl-C on rank 1 when all ranks have made their subscribers, and before it has its own."""

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(subscriber, "Kept", stop)
            return type(caught(lambda: pulse.Subscriber(store, group=group, group_timeout=20))).__name__, (), 0.0
        made = pulse.Subscriber(store, group=group, group_timeout=20)
    begun = time.monotonic()
    error: Any = caught(lambda: made.sync(shares(model(0), rank, size)))
    return type(error).__name__, error.ranks, time.monotonic() - begun


def test_ctrl_c_at_the_end_of_the_making_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    first, interrupted, third = ranks(interrupt_the_making, 3, str(tmp_path))
    assert interrupted[0] == "KeyboardInterrupt"
    for kind, names, seconds in (first, third):
        assert (kind, names) == ("ExchangeError", (1,))
        assert seconds < 15


def fail_a_skip_patch(group: Any, rank: int, size: int, store: str) -> list[Any]:
    """Two skip patches are due at once, and the first rank cannot put the list of one."""
    made = pulse.Publisher(store, group=group, group_timeout=20, codec="gap")
    put, lists = made.history.store.put, itertools.count()

    def refuse(name: str, *arguments: Any, **options: Any) -> None:
        if name.startswith("patches/") and name.endswith(".json") and next(lists) == 1:  # 0 is the version's own
            raise pulse.StoreError("refused")
        put(name, *arguments, **options)

    found = []
    for version in range(18):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and version == 16:
                patch.setattr(made.history.store, "put", refuse)
            found.append(made.publish(shares(model(version), rank, size), version=version).warning)
    return found


def test_a_skip_patch_that_the_first_rank_cannot_put_is_a_warning_on_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(fail_a_skip_patch, 2, str(tmp_path / "store"))
    assert not any(isinstance(one, BaseException) for one in found), found
    for warnings in found:
        assert [version for version, warning in enumerate(warnings) if warning] == [16]
        assert "refused" in warnings[16]
    assert pulse.verify(str(tmp_path / "store")).good_versions == tuple(range(18))


def make_otherwise(group: Any, rank: int, size: int, store: str, option: str) -> list[Any]:
    """One rank makes its publisher or subscriber with a setting that it cannot have, or not like the others."""
    begun = time.monotonic()
    wrong: Any = {"codec": "nonsense", "store": "nonsense://nowhere", "anchor_every": 7, "cast": "float16"}[option]
    arguments: Any = {"store": store, "group": group, "group_timeout": 20} | ({option: wrong} if rank == 1 else {})

    def publish() -> None:
        pulse.Publisher(**arguments).publish(shares(model(0), rank, size))

    error = caught(publish)
    follow = caught(lambda: pulse.Subscriber(store, group=group, verify_live=-1 if rank == 1 else False))
    return [type(error).__name__, str(error), type(follow).__name__, time.monotonic() - begun]


@pytest.mark.parametrize(
    ("option", "own", "told"),
    [
        ("codec", "ValueError", "codec"),
        ("store", "ValueError", "nonsense"),
        ("anchor_every", "ExchangeError", "settings"),
        ("cast", "ExchangeError", "settings"),
    ],
)
def test_a_rank_with_other_settings(ranks: Ranks, tmp_path: Path, option: str, own: str, told: str) -> None:
    found = ranks(make_otherwise, 3, str(tmp_path / "store"), option)
    assert not any(isinstance(one, BaseException) for one in found), found
    assert [kind for kind, *_ in found] == ["ExchangeError", own, "ExchangeError"]
    assert all(told in text for _, text, *_ in found)
    assert [kind for _, _, kind, _ in found] == ["ExchangeError", "ValueError", "ExchangeError"]
    assert all(seconds < 10 for *_, seconds in found)


def publish_to_own_disks(group: Any, rank: int, size: int, path: str) -> Any:
    """The path is another directory on the machine of rank 1."""
    made = pulse.Publisher(f"{path}/{rank == 1}", group=group, group_timeout=20, codec="gap")
    made.publish(shares(model(0), rank, size))  # of one file, which rank 0 puts
    return caught(lambda: made.publish(shares(model(1), rank, size)))


def test_ranks_that_have_not_one_store(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(publish_to_own_disks, 3, str(tmp_path))
    assert [type(error) for error in found] == [pulse.StoreError, pulse.ExchangeError, pulse.ExchangeError]
    assert all("what rank 1 has put is missing from" in str(error) for error in found)
    report = pulse.verify(str(tmp_path / "False"))
    assert (report.good_versions, report.problems) == ((0,), ())


def lose_after_a_commit(rank: int, size: int, store: str) -> Any:
    """Rank 0 is killed when it has committed version 1, and before it says so."""
    made = pulse.Publisher(store, group=dist.group.WORLD, group_timeout=20, codec="gap")
    made.publish(shares(model(0), rank, size))

    def commit_and_die(*given: Any) -> None:
        commit(*given)
        os.kill(os.getpid(), 9)

    if rank == 0:
        pytest.MonkeyPatch().setattr(delivery, "commit", commit_and_die)
    return caught(lambda: made.publish(shares(model(1), rank, size))), made.version


def go_on(rank: int, size: int, store: str) -> int | None:
    return pulse.Publisher(store, group=dist.group.WORLD).resume()


def test_a_version_whose_first_rank_is_lost_after_the_commit(tmp_path: Path) -> None:
    """Who is left does not know of it, and says nothing else; the next group goes on from it."""
    store = str(tmp_path / "store")
    killed, *found = group_world.run(lose_after_a_commit, 3, store)
    assert killed is None
    for error, version in found:
        assert error.ranks == (0,)
        assert "goes on from the newest version in the store" in str(error)
        assert version == 0
    assert group_world.run(go_on, 2, store) == [1, 1]
    assert pulse.verify(store).problems == ()


def race(rank: int, size: int, store: str) -> list[tuple[str, str]]:
    """Two groups of two ranks publish to one history at once."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, seed = pairs[rank // 2], rank // 2
    made = pulse.Publisher(store, group=mine, group_timeout=20, codec="gap")
    found = []
    for version in range(5):
        try:
            report = made.publish(shares(model(version, seed), rank % 2, 2))  # as the next one, whichever that is
            found.append((report.digest, ""))
        except pulse.PulseError as error:
            found.append(("", f"{type(error).__name__}: {error}"))
    return found


def test_two_groups_on_one_history(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    results = group_world.run(race, 4, store)
    assert not any(isinstance(one, BaseException) for one in results), results
    for first, second in (results[:2], results[2:]):
        assert [digest for digest, _ in first] == [digest for digest, _ in second]  # both ranks or none
        assert all("another publisher" in error for found in (first, second) for digest, error in found if not digest)
    published = [{digest for digest, _ in one if digest} for one in (results[0], results[2])]
    assert not published[0] & published[1]
    report = pulse.verify(store)
    assert report.problems == ()
    manifests = pulse.History(store).manifests()
    assert {manifest.digest for manifest in manifests} == published[0] | published[1]
    assert len(manifests) == len(published[0]) + len(published[1])


LATE_S = 4.0  # in which the first publish ends on a busy machine, too


def publish_late(group: Any, rank: int, size: int, store: str) -> tuple[str, tuple[int, ...], float]:
    """The others have closed, and make no call any more."""
    made = pulse.Publisher(store, group=group, group_timeout=LATE_S, codec="gap")
    made.publish(shares(model(0), rank, size))
    made.close()
    if rank != 1:
        time.sleep(2 * LATE_S)
        return "", (), 0.0
    begun = time.monotonic()
    error: Any = caught(lambda: made.publish(shares(model(1), rank, size)))
    return type(error).__name__, error.ranks, time.monotonic() - begun


def test_a_rank_that_publishes_after_the_others_have_closed(ranks: Ranks, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    (_, (kind, names, seconds), _) = ranks(publish_late, 3, store)
    assert (kind, names) == ("ExchangeError", (0, 2))
    assert 0.9 * LATE_S < seconds < 5 * LATE_S
    assert pulse.verify(store).good_versions == (0,)


def miss_an_anchor(group: Any, rank: int, size: int, store: str) -> list[Any]:
    """Rank 1 cannot read once, so no route leads to the version; then it can."""
    follower = pulse.Subscriber(store, group=group, group_timeout=20, patience=0)
    weights = shares({name: tensor.clone() for name, tensor in model(0, seed=1).items()}, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            for name in ("stream", "get", "read_range"):
                patch.setattr(follower.history.store, name, _refuse)
        error = caught(lambda: follower.sync(weights))
    return [type(error).__name__, str(error), follower.sync(weights).digest]


def _refuse(name: str, *_: Any) -> Any:
    raise pulse.StoreError(f"cannot read {name}: refused", name=name)


def test_what_no_rank_can_reach_is_no_reason_to_leave(ranks: Ranks, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    pulse.Publisher(store).publish(model(0))
    found = ranks(miss_an_anchor, 3, store)
    assert not any(isinstance(one, BaseException) for one in found), found
    assert all((kind, digest) == ("StoreError", pulse.digest(model(0))) for kind, _, digest in found)
    assert all("rank 1 of 3" in text and "refused" in text for _, text, _ in found)


def run_out_of_room(group: Any, rank: int, size: int, store: str, disk: str) -> list[Any]:
    """Rank 0 has no room for temporary files when an anchor is published, and when one is loaded; then it has."""
    made = pulse.Publisher(store, group=group, group_timeout=20, codec="gap")
    made.publish(shares(model(0), rank, size))
    follower = pulse.Subscriber(store, group=group, group_timeout=20, patience=0)
    weights = shares({name: tensor.clone() for name, tensor in model(0, seed=1).items()}, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(tempfile, "tempdir", disk)
        errors = [
            caught(lambda: made.publish(shares(model(1), rank, size), anchor=True)),
            caught(lambda: follower.sync(weights)),
        ]
    versions = made.version, follower.version
    made.publish(shares(model(1), rank, size), anchor=True)
    return [errors, versions, follower.sync(weights).digest]


def test_a_rank_whose_disk_is_full(ranks: Ranks, tmp_path: Path, small_disk: Path) -> None:
    """All ranks are told, none has moved, and the same calls succeed when there is room."""
    filler, room = small_disk / "filler", os.statvfs(small_disk)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize))
    found = ranks(run_out_of_room, 3, str(tmp_path / "store"), str(small_disk))
    assert not any(isinstance(one, BaseException) for one in found), found
    assert [[type(error) for error in errors] for errors, _, _ in found] == [
        [pulse.StoreError] * 2,
        *[[pulse.ExchangeError] * 2] * 2,
    ]
    assert all("No space left on device" in str(error) for errors, _, _ in found for error in errors)
    assert all(error.ranks == (0,) for errors, _, _ in found[1:] for error in errors)
    assert all((versions, digest) == ((0, None), pulse.digest(model(1))) for _, versions, digest in found)
    assert list(small_disk.iterdir()) == [filler]
