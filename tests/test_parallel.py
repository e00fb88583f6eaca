"""Work that is spread over processors."""

import os
import threading

import pytest

from pulse_rl import parallel


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads kernels run on: other ones than this machine has processors, too."""
    count: int = request.param
    parallel._pool.cache_clear()
    monkeypatch.setattr(parallel, "threads", lambda: count)
    return count


def test_every_item_once(threads: int) -> None:
    for size in (0, 1, 2, 50):
        done: list[int] = []
        parallel.spread(done.append, range(size))
        assert sorted(done) == list(range(size))


def test_an_error_is_raised_when_the_other_threads_have_ended(threads: int) -> None:
    begun, ended = [], []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise KeyError(item)
        ended.append(item)

    with pytest.raises(KeyError):
        parallel.spread(work, range(20))
    assert set(begun) - set(ended) == {1}
    assert len(begun) == (2 if threads == 1 else 20)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to processors here")
def test_threads_stay_on_one_processor_each_and_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    count = len(allowed) + 1
    monkeypatch.setattr(parallel, "threads", lambda: count)
    parallel._pool.cache_clear()
    met = threading.Barrier(count, timeout=30)  # so that every thread of the pool takes one

    def where(_: object = None) -> set[int]:
        met.wait()
        return os.sched_getaffinity(0)

    found: list[set[int]] = []
    parallel.spread(lambda _: found.append(where()), range(count))
    assert all(len(processors) == 1 for processors in found)
    assert set.union(*found) == allowed
    after = list(parallel.ordered_map(where, range(count)))
    parallel._pool.cache_clear()
    assert after == [allowed] * count
    assert os.sched_getaffinity(0) == allowed


def test_where_threads_may_not_be_bound_the_work_is_done_all_the_same(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbid, raising=False)
    done: list[int] = []
    parallel.spread(done.append, range(20))
    assert sorted(done) == list(range(20))
