"""Kill a process at every kind of call in `faults.story`: before, in and after its write. Prints what was lost.

    python -m tests.flow.kills SCRATCH

Where "in" is: the kernel kills a process that writes beyond its limit, in the middle of that write.
"""

import json
import os
import resource
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.events import Event
from pulse_rl.flow.data.journal import FILE, Journal
from tests.flow.faults import Call, after_a_death, die, failing, kept, make, short_writes, story
from tests.flow.world import Clock

WHERE = ("before", "in", "after")


def recorded(deterministic: bool) -> list[tuple[str, ...]]:
    """What each call of the story records."""
    clock = Clock()
    flow = make(deterministic, None, clock)
    record, found = flow._state.record, []

    def note(event: Event) -> None:
        names.append(type(event).__name__)
        record(event)

    flow._state.record = note  # type: ignore[method-assign]
    calls, answer = story(flow, clock), None
    with suppress(StopIteration):
        while True:
            names: list[str] = []
            answer = calls.send(answer)()
            found.append(tuple(names))
    return found


def doomed(flow: Dataflow, directory: Path, call: Call, where: str) -> int:
    """Make the call in a process that has this journal, and is killed if the call writes. Returns its number."""
    process = os.fork()
    if process:
        return process
    flow._state._journal = Journal(directory / FILE, durable=False)
    if where == "in":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with short_writes(directory, 3000):
            call()
    else:
        with failing(flow, "COMMIT", die, done=where == "after"):
            call()
    os._exit(0)


def main(scratch: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lost, kills, seen = [], 0, set()
    for deterministic in (False, True):
        clock = Clock()
        home = scratch / f"{deterministic}"
        home.mkdir()
        flow = make(deterministic, home, clock)
        calls, answer = story(flow, clock), None
        for names in recorded(deterministic):
            call = calls.send(answer)
            where = () if names in seen else WHERE
            seen.add(names)
            copies = {each: shutil.copytree(home, scratch / each) for each in where}
            processes = {each: doomed(flow, copies[each], call, each) for each in where}
            killed = [each for each in where if os.WIFSIGNALED(os.waitpid(processes[each], 0)[1])]
            before = kept(flow)
            answer = call()
            for each in killed:
                expected = kept(flow) if each == "after" else before
                if after_a_death(deterministic, copies[each], scratch / "copy", clock) != expected:
                    lost.append([each, names])
            for copy in copies.values():
                shutil.rmtree(copy)
            kills += len(killed)
    print(json.dumps({"kills": kills, "lost": lost}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
