"""The pool that starts workers again, with workers that always die, or cannot start."""

from typing import Any

import pytest

from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow.driver import pools
from pulse_rl.flow.driver.pools import DEATHS, Pools
from pulse_rl.flow.recipe import PoolRecipe, Recipe


class _Handle:
    """Of a process that has ended with an error, or that goes on."""

    host = "node-3"

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.done = error is not None

    def ended(self) -> bool:
        return self.done

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return {"id": "worker-1"}

    def close(self) -> None:
        assert self.ended()


DIED = ProcessDiedError("its process died", process="worker-0")
OF_MEMORY = ProcessDiedError("its process died", process="worker-0", memory=True)
NO_MODULE = ValueError("hot_cold cannot be imported")


class _Board:
    """What workers have reported. working: those that have proved a version."""

    def __init__(self, *working: str) -> None:
        self.working = working
        self.gone: dict[str, Any] = {}  # what is shown of the first worker

    def board(self) -> dict[str, Any]:
        facts = {"pid": 7, "policies": {"solver": {"verified": True}}}
        return {"worker-0": {"pid": 7}} | dict.fromkeys(self.working, facts)

    def lost(self, name: str) -> None:
        assert name == "worker-0"

    def report(self, name: str, facts: Any) -> None:
        assert name == "worker-0"
        assert facts["policies"] == {}
        self.gone = facts


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a pool of two workers, of which the first one always fails, and what it logs."""

    def make(board: _Board, error: Exception) -> tuple[Pools, list[str]]:
        monkeypatch.setattr(pools, "start", lambda name, *_, **__: _Handle(error if name == "worker-0" else None))
        said: list[str] = []
        return Pools(Recipe(pools=[PoolRecipe(name="worker", workers=2)]), board, said.append), said

    return make


@pytest.mark.parametrize(
    ("error", "why"), [(DIED, "died"), (OF_MEMORY, "was ended by Ray, as the memory of its node ran out")]
)
def test_one_worker_that_keeps_dying_ends_a_run_in_which_no_other_works(
    pool_of: Any, error: Exception, why: str
) -> None:
    pool, said = pool_of(_Board(), error)
    for _ in range(DEATHS - 1):
        pool.poll()
    with pytest.raises(ProcessDiedError, match="worker-0 .pid 7 on node-3. died 5 times without proving a version"):
        pool.poll()
    assert said == [f"worker-0 (pid 7 on node-3) {why}; starting again"] * (DEATHS - 1)


@pytest.mark.parametrize("error", [DIED, NO_MODULE])
def test_one_worker_that_keeps_failing_is_left_out_where_others_work(pool_of: Any, error: Exception) -> None:
    """As on a node that was added without the user's module: the run goes on, and does not wait for it at its end."""
    board = _Board("worker-1")
    pool, said = pool_of(board, error)
    for _ in range(2 * DEATHS):
        pool.poll()
    assert len(said) == DEATHS
    assert said[-1].endswith("left out after 5 times in a row")
    assert (str(error) in said[0]) == (error is NO_MODULE)
    assert len(pool.running()) == 1
    assert pool.results() == []
    assert board.gone["left_out"]
    assert (board.gone["restarting"], board.gone["restarts"]) == (False, DEATHS - 1)


def test_a_worker_that_cannot_start_is_left_out_also_once_the_others_have_ended(pool_of: Any) -> None:
    """At the end of a run: they have proved what they hold, and their places on the board may be gone."""
    board = _Board("worker-1")
    pool, _ = pool_of(board, NO_MODULE)
    pool.running()[1].done = True
    pool.poll()
    board.working = ()
    for _ in range(DEATHS):
        pool.poll()
    assert pool.running() == []
    assert pool.results() == [{"id": "worker-1", "restarts": 0, "left": False}]


@pytest.mark.parametrize("working", [[], ["worker-0", "worker-1"]])
def test_what_a_worker_raises_ends_the_run_where_it_had_started_or_no_other_works(
    pool_of: Any, working: list[str]
) -> None:
    pool, said = pool_of(_Board(*working), ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong") as found:
        pool.poll()
    assert "raised by worker-0 on node-3" in found.value.__notes__
    assert not said
