"""The rollout workers of a run, as its driver sees them: start them, start again what dies, hear what they end with.

The buffer's board says of a worker that died that it is `restarting` until its next life reports itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pulse_rl.errors import ProcessDiedError, PulseError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, RolloutProcess, start
from pulse_rl.rl.rollout import RolloutWorker

DEATHS = 5  # of one worker without a version proved between them, and the run is given up


@dataclass
class _Member:
    name: str
    handle: ProcessHandle
    restarts: int = 0
    futile: int = 0  # deaths since it last proved a version
    result: dict[str, Any] | None = None


class Crew:
    """Any number of rollout workers, named worker-0, worker-1, …

    say: tells a person one line.
    """

    def __init__(self, config: RunConfig, buffer: DataBuffer, say: Callable[[str], None]) -> None:
        self._config = config
        self._buffer = buffer
        self._say = say
        self._members: list[_Member] = []

    def add(self) -> str:
        """Start one more; return its name."""
        name = f"worker-{len(self._members)}"
        self._members.append(_Member(name, self._start(name)))
        return name

    def _start(self, name: str) -> ProcessHandle:
        return start(name, RolloutProcess, RolloutWorker, name, self._config, self._buffer, where="anywhere")

    def at_work(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [member.handle for member in self._members if member.result is None]

    def results(self) -> list[dict[str, Any]]:
        """What each that ended returned, with the times it was started again."""
        return [m.result | {"restarts": m.restarts} for m in self._members if m.result is not None]

    def look(self) -> None:
        """Take the results of those that ended, and start those again that died.

        Raises what a worker raised, PulseError if one dies again and again.
        """
        for member in self._members:
            if member.result is None and member.handle.ended():
                try:
                    member.result = member.handle.result()
                except ProcessDiedError:
                    self._start_again(member)

    def _start_again(self, member: _Member) -> None:
        facts = self._buffer.board().get(member.name, {})
        member.futile = 1 if facts.get("verified") else member.futile + 1
        pid = facts.get("pid")
        who = f"{member.name} (pid {pid})" if pid else member.name
        if member.futile >= DEATHS:
            raise PulseError(f"{who} died {DEATHS} times without proving a version between (killed, or out of memory)")
        member.restarts += 1
        self._buffer.release(member.name)
        gone = {"pid": None, "version": None, "verified": False, "restarting": True, "restarts": member.restarts}
        self._buffer.report(member.name, gone)
        self._say(f"{who} died; starting again")
        member.handle = self._start(member.name)
