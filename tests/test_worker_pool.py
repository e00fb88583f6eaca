"""The pool that starts workers again, with workers that always die."""

from typing import Any, cast

import pytest

from pulse_rl.errors import ProcessDiedError
from pulse_rl.flow.driver.worker_pool import DEATHS, WorkerPool
from pulse_rl.rl.engine import ProcessHandle


class _Dead:
    def ended(self) -> bool:
        return True

    def result(self) -> Any:
        raise ProcessDiedError("its process died", process="worker-0")


class _Alive:
    def ended(self) -> bool:
        return False


class _Crew:
    """The first worker always dies; the others live. working: whether these have proved a version."""

    def __init__(self, *, working: bool) -> None:
        self._working = working

    def start(self, name: str) -> ProcessHandle:
        return cast(ProcessHandle, _Dead() if name == "worker-0" else _Alive())

    def facts(self, name: str) -> dict[str, Any]:
        return {"pid": 7, "verified": self._working and name != "worker-0"}

    def lost(self, name: str, facts: Any) -> None:
        assert name == "worker-0"
        assert not facts["verified"]


@pytest.mark.parametrize("working", [False, True])
def test_one_worker_that_keeps_dying_ends_the_run_only_if_no_other_works(working: bool) -> None:
    said: list[str] = []
    pool = WorkerPool(_Crew(working=working), said.append, "worker")
    pool.add()
    pool.add()
    for _ in range(DEATHS - 1):
        pool.poll()
    if working:
        for _ in range(DEATHS):
            pool.poll()
    else:
        with pytest.raises(ProcessDiedError, match="worker-0 .pid 7. died 5 times without proving a version"):
            pool.poll()
    assert len(said) == (2 * DEATHS - 1 if working else DEATHS - 1)
    assert pool.names() == ["worker-0", "worker-1"]
