"""Work that ranks do together: shared results, failures that all are told, and ranks that are killed or stopped."""

import subprocess
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.group import agreement, private
from pulse_rl.group.collectives import Group, Wording
from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.ranks import LIMIT, Ranks
from tests.group import world as group_world
from tests.group.world import caught
from tests.loco.ranks import Ranks as Running
from tests.loco.ranks import good

ADVICE = "nothing was published"


class Found(msgspec.Struct, frozen=True, array_like=True):
    """What a rank finds."""

    changes: int
    digest: str


def found(rank: int) -> Found:
    return Found(10 * rank, f"{rank:016x}")


def share_twice(torch_group: Any, rank: int, size: int, kind: str) -> tuple[list[Any], int]:
    group = PrivateGroup.of(torch_group) if kind == "private" else Group.of(torch_group)
    before = group.sent_nbytes
    results = [Ranks(group).share("the count", lambda: found(rank), Found) for _ in range(2)]
    return results, (group.sent_nbytes - before) // 2


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", ["private", "the caller's"])
def test_every_rank_gets_what_all_found(ranks: Running, kind: str, size: int) -> None:
    for results, sent_nbytes in good(ranks(share_twice, size, kind)):
        assert results == 2 * [[found(rank) for rank in range(size)]]
        assert sent_nbytes <= 80 * (size - 1)  # of three in a publish with four ranks: below 1 KB


def fail(torch_group: Any, rank: int, size: int, kind: str, failing: dict[int, BaseException]) -> Any:
    wording = Wording(advice=ADVICE)
    group = PrivateGroup.of(torch_group, wording) if kind == "private" else Group.of(torch_group, wording)

    def work() -> Found:
        if rank in failing:
            raise failing[rank]
        return found(rank)

    error = caught(lambda: Ranks(group).share("the publish of version 7", work, Found))
    return error, Ranks(group).share("the next one", lambda: found(rank), Found)


@pytest.mark.parametrize("kind", ["private", "the caller's"])
@pytest.mark.parametrize(
    "failing",
    [
        {2: pulse.StoreError("the bucket \x1b is full", url="s3://b")},
        {2: KeyboardInterrupt()},
        {0: ValueError("x" * 10_000), 3: MemoryError()},
    ],
)
def test_all_raise_when_the_work_of_some_fails_and_may_try_again(
    ranks: Running, kind: str, failing: dict[int, BaseException]
) -> None:
    """These raise their own errors; all others one that names them, with bounded texts."""
    for rank, (raised, after) in enumerate(good(ranks(fail, 4, kind, failing))):
        assert after == [found(each) for each in range(4)]
        if rank in failing:
            assert (type(raised), str(raised)) == (type(failing[rank]), str(failing[rank]))
            continue
        assert isinstance(raised, pulse.ExchangeError)
        assert raised.ranks == tuple(failing)
        said = str(raised)
        assert said.startswith("the publish of version 7 failed on rank")
        assert all(type(error).__name__ in said for error in failing.values())
        assert len(failing) == 1 or "rank 0: ValueError: xxx" in said
        assert said.endswith(f"; {ADVICE}")
        assert said.isprintable()
        assert len(said) < 1000


def share_badly(torch_group: Any, rank: int, size: int, what: str) -> Any:
    group = PrivateGroup.of(torch_group)
    results: dict[str, Any] = {"long": "x" * LIMIT, "no JSON": object(), "other type": ["a"]}
    error = caught(lambda: Ranks(group).share("it", lambda: results[what] if rank == 1 else "fine", str))
    return error, Ranks(group).share("the next one", lambda: rank, int)


@pytest.mark.parametrize(("what", "own"), [("long", ValueError), ("no JSON", TypeError), ("other type", None)])
def test_a_result_that_cannot_be_sent_is_an_error_on_all(ranks: Running, what: str, own: Any) -> None:
    for rank, (error, after) in enumerate(good(ranks(share_badly, 2, what))):
        assert after == [0, 1]
        if rank == 1 and own:
            assert type(error) is own
        else:
            assert isinstance(error, pulse.ExchangeError)
            assert error.ranks == (1,)


def differ(torch_group: Any, rank: int, size: int, kind: str) -> tuple[int, BaseException]:
    group = PrivateGroup.of(torch_group) if kind == "private" else Group.of(torch_group)
    before = group.sent_nbytes
    agreement.compare(group, {"models differ": "0" * 16, "steps differ": 3}, "now", "load one")
    sent = group.sent_nbytes - before
    return sent, caught(lambda: agreement.compare(group, {"models differ": f"{rank // 3:016x}"}, "now", "load one"))


@pytest.mark.parametrize("kind", ["private", "the caller's"])
def test_digests_that_differ_are_named_on_all(ranks: Running, kind: str) -> None:
    for sent, error in good(ranks(differ, 4, kind)):
        assert sent <= 24 * 3
        assert isinstance(error, pulse.IntegrityError)
        assert error.ranks == (3,)
        assert (error.expected, error.found) == ("0" * 16, f"{1:016x}")


def move_bytes(torch_group: Any, rank: int, size: int, kind: str) -> list[int]:
    """Broadcasts of several sizes from every rank, and a ring of messages; returns what this rank sent in each."""
    group = PrivateGroup.of(torch_group) if kind == "private" else Group.of(torch_group)
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "CHUNK", 1000)
        for nbytes in (0, 1, 999, 1000, 1001, 4500):
            for source in range(size):
                data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
                before = group.sent_nbytes
                mine = (data.tobytes() if source else data) if rank == source else None
                assert np.array_equal(group.broadcast(source, mine, 4500), data)
                sent.append(group.sent_nbytes - before)
    error = caught(lambda: group.broadcast(0, np.zeros(11, np.uint8), 10))
    assert isinstance(error, pulse.ExchangeError)
    assert (error.ranks, "at most 10 bytes" in str(error)) == ((0,), True)
    for nbytes in (1, 5000):
        data = np.full(nbytes, rank, np.uint8)
        for sender in range(size if size > 1 and isinstance(group, PrivateGroup) else 0):
            assert isinstance(group, PrivateGroup)
            if rank == sender:
                group.send((rank + 1) % size, bytes(data) if rank % 2 else data)
            elif rank == (sender + 1) % size:
                assert set(group.receive(sender, nbytes)) == {sender}
    pieces = [bytes([rank]) * (rank + to) for to in range(size)]
    assert Ranks(group).exchange("it", lambda: pieces, 100) == [bytes([by]) * (by + rank) for by in range(size)]
    return sent


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["private", "the caller's"])
def test_bytes_arrive_and_are_counted(ranks: Running, kind: str, size: int) -> None:
    sent = good(ranks(move_bytes, size, kind))
    if kind == "private":
        for number, by_rank in enumerate(zip(*sent, strict=True)):
            nbytes = (0, 1, 999, 1000, 1001, 4500)[number // size]
            assert max(by_rank) <= nbytes + 200  # the chain: nobody sends it twice
            assert sum(by_rank) >= nbytes * (size - 1)


def disagree_on_length(torch_group: Any, rank: int, size: int) -> BaseException:
    group = PrivateGroup.of(torch_group)
    error = caught(lambda: group.send(1, bytes(5)) if rank == 0 else group.receive(0, 6))
    assert Ranks(group).share("after", lambda: rank, int) == [0, 1]
    return error


def test_a_message_of_another_length_is_refused_on_both_sides(ranks: Running) -> None:
    for rank, error in enumerate(ranks(disagree_on_length, 2)):
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == (1 - rank,)


def work_behind(torch_group: Any, rank: int, size: int) -> bool:
    """A thread shares, while the main thread averages in the group that ours was made from."""
    group, done = PrivateGroup.of(torch_group), []

    def background() -> None:
        for step in range(50):
            assert Ranks(group).share("step", lambda step=step: step, int) == size * [step]  # type: ignore[misc]
        done.append(True)

    thread = threading.Thread(target=background)
    thread.start()
    for step in range(50):
        tensor = torch.tensor([float(rank + step)])
        dist.all_reduce(tensor, group=torch_group)
        assert tensor.item() == sum(range(size)) + size * step
    thread.join()
    return done == [True]


def test_a_private_group_works_in_the_background_of_the_callers(ranks: Running) -> None:
    assert all(good(ranks(work_behind, 3)))


def leave_out(rank: int, size: int) -> BaseException | None:
    """Rank 0 is in one group more than rank 1, and rank 2 in none of ours."""
    dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    pair = dist.new_group([0, 1])
    if rank == 2:
        return caught(lambda: PrivateGroup.of(pair))
    assert Ranks(PrivateGroup.of(pair)).share("it", lambda: rank, int) == [0, 1]
    return None


def test_a_group_may_be_made_of_some_ranks_only() -> None:
    first, second, outside = group_world.run(leave_out, 3)
    assert (first, second) == (None, None)
    assert isinstance(outside, pulse.ExchangeError)
    assert "not a member" in str(outside)


def give_meshes(rank: int, size: int) -> list[str]:
    """What a Publisher and a Subscriber say of meshes, as FSDP2 and tensor parallelism have them."""
    meshes = [
        dist.device_mesh.init_device_mesh("cpu", (size,)),
        dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("replicas", "shards")),
    ]
    pulse.Subscriber("memory://", group=meshes[0].get_group())
    pulse.Subscriber("memory://", group=meshes[1].get_group("shards"))
    errors = [caught(lambda mesh=mesh: pulse.Publisher("memory://", group=mesh)) for mesh in meshes]  # type: ignore[misc]
    errors += [caught(lambda: pulse.Channel(meshes[0])), caught(lambda: pulse.Subscriber("memory://", group=meshes[0]))]  # type: ignore[arg-type]
    assert all(isinstance(error, TypeError) for error in errors), errors
    return [str(error) for error in errors]


def test_a_mesh_is_no_group() -> None:
    for one, two, *others in good(group_world.run(give_meshes, 2)):
        assert one == "group: expected a process group, found a DeviceMesh (2,): give mesh.get_group()"
        assert others == [one, one]
        assert two.endswith("group.WORLD for all ranks, or mesh.get_group('shards') for one dimension")


def test_without_torch_distributed_the_error_says_what_to_call() -> None:
    with pytest.raises(pulse.ExchangeError, match="init_process_group"):
        PrivateGroup.of()


def work_apart(torch_group: Any, rank: int, size: int) -> BaseException:
    group = PrivateGroup.of(torch_group)
    return caught(lambda: Ranks(group).share(f"version {rank // 2}", lambda: None, type(None)))


def test_ranks_at_different_work_are_all_told(ranks: Running) -> None:
    for rank, error in enumerate(ranks(work_apart, 3)):
        assert isinstance(error, pulse.ExchangeError)
        assert error.ranks == ((0, 1) if rank == 2 else (2,))


def test_the_room_imports_without_torch() -> None:
    code = "import sys; from pulse_rl.group import agreement, private, ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
