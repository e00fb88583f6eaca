"""The journal under faults of the disk and deaths: what was answered is kept, and what was refused has left nothing.

The model is a dataflow without a journal that gets only the calls that were answered.
"""

import json
import os
import sqlite3
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl.errors import IntegrityError, VersionSkewError
from pulse_rl.flow.data import events
from pulse_rl.flow.data.curators import DropSolved
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.data.journal import FILE, Journal
from pulse_rl.flow.samples import EpisodeGroup
from tests import ROOT
from tests.flow.faults import after_a_death, failing, full, journal_of, kept, make, short_writes, story
from tests.flow.world import Clock, dataflow, group, kill, started, take_all

LOG = f"{FILE}-wal"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MB; without the right to mount one, just a directory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = not os.geteuid() and not subprocess.run(mount, check=False).returncode
    yield disk
    if mounted:
        subprocess.run(["umount", "--lazy", disk], check=True)


def _faults(flow: Dataflow, directory: Path) -> Mapping[str, AbstractContextManager[None]]:
    """What is done to the disk while a call is made."""
    faults = {"write": failing(flow, "INSERT"), "sync": failing(flow, "COMMIT"), "short": short_writes(directory, 3000)}
    return faults | ({"full": full(directory)} if directory.parent.is_mount() else {})


@pytest.mark.parametrize("deterministic", [False, True])
def test_each_call_of_a_run_is_refused_whole_and_counts_when_it_is_repeated(
    tmp_path: Path, disk: Path, deterministic: bool
) -> None:
    """Each is made under every fault first: memory and journal are the model's. Then it is made once more."""
    directory = disk / "run"
    directory.mkdir()
    clock = Clock()
    model, flow = make(deterministic, None, clock), make(deterministic, directory, clock)
    expected, calls = story(model, clock), story(flow, clock)
    modelled, call = next(expected), next(calls)
    refused = {"write": 0, "sync": 0, "short": 0, "full": 0}
    while True:
        for kind, fault in _faults(flow, directory).items():
            with fault, suppress(OSError):
                call()
                assert not journal_of(flow)._database.in_transaction
                continue
            refused[kind] += 1
            flow.stopping("a")  # reads the state again
            assert kept(flow) == kept(model)
        assert after_a_death(deterministic, directory, tmp_path / "copy", clock) == kept(model)
        answer, wanted = call(), modelled()
        assert events.ENCODER.encode(answer) == events.ENCODER.encode(wanted)
        try:
            modelled, call = expected.send(wanted), calls.send(answer)
        except StopIteration:
            break
    assert after_a_death(deterministic, directory, tmp_path / "copy", clock) == kept(model)
    if not disk.is_mount():
        del refused["full"]
    assert set(refused.values()) == {34 if deterministic else 40}


def test_the_story_has_every_event(tmp_path: Path) -> None:
    seen = set()
    for deterministic in (False, True):
        (directory := tmp_path / str(deterministic)).mkdir()
        clock = Clock()
        flow = make(deterministic, directory, clock)
        calls, answer = story(flow, clock), None
        with suppress(StopIteration):
            while True:
                answer = calls.send(answer)()
        journal_of(flow).snapshot()
        seen |= {type(events.decoder(events.AnyEvent).decode(payload)) for payload in journal_of(flow).events()}
    assert seen == set(typing.get_args(events.AnyEvent))


def test_a_process_that_is_killed_before_in_and_after_each_write_has_lost_nothing(tmp_path: Path) -> None:
    """Real deaths, 3 for each kind of call in a run that has every event."""
    command = [sys.executable, "-m", "tests.flow.kills", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lost"] == []
    assert found["kills"] == 63


def test_a_commit_whose_answer_is_an_error_counts_in_memory_if_it_counts_on_the_disk(tmp_path: Path) -> None:
    flow = started("p", directory=tmp_path)
    (task, *_) = take_all(flow)
    with failing(flow, "COMMIT", done=True), pytest.raises(OSError, match="I/O error"):
        flow.push(group(task, "w0", {"p": 0}))
    assert not flow.push(group(task, "w0", {"p": 0}))
    assert flow.status()["policies"]["p"]["ready"] == 1
    kill(flow, tmp_path)
    assert dataflow("p", directory=tmp_path).status()["policies"]["p"]["ready"] == 1


def test_a_call_that_cannot_be_taken_back_lets_no_other_be_answered(tmp_path: Path) -> None:
    flow = started("p", directory=tmp_path)
    (task, *_) = take_all(flow)
    before = kept(flow)
    with failing(flow, "ROLLBACK"):
        with failing(flow, "COMMIT"), pytest.raises(OSError, match="I/O error"):
            flow.push(group(task, "w0", {"p": 0}))
        for call in (flow.status, lambda: flow.stopping("p"), lambda: flow.take("w0"), lambda: flow.shared("x")):
            with pytest.raises(OSError, match="I/O error"):
                call()
    flow.stopping("p")
    assert kept(flow) == before
    assert flow.push(group(task, "w0", {"p": 0}))


def test_a_plug_in_that_raises_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """Its event was written and half applied: it is taken back, so that the journal can be read later."""

    class Broken(DropSolved):
        broken = True

        def observe(self, outcome: Any) -> None:
            super().observe(outcome)
            if self.broken:
                raise ZeroDivisionError

    curator = Broken(problems=9, times=1)
    flow = started("p", directory=tmp_path, curator=curator)
    (task, *_) = take_all(flow)
    before = kept(flow)
    with pytest.raises(ZeroDivisionError):
        flow.push(group(task, "w0", {"p": 0}, solved=1.0))
    flow.stopping("p")
    assert kept(flow) == before
    curator.broken = False
    assert flow.push(group(task, "w0", {"p": 0}, solved=1.0))
    kill(flow, tmp_path)
    curator = Broken(problems=9, times=1)
    curator.broken = False
    found = dataflow("p", directory=tmp_path, curator=curator)
    assert kept(found) == kept(flow)


def test_a_group_that_could_not_be_read_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may send what Python takes and the journal's types do not, or far too much."""
    flow = started("p", directory=tmp_path)
    (task, *_) = take_all(flow)
    good = group(task, "w0", {"p": 0})
    first: Any = good.episodes[0]
    turn: Any = first.turns[0]
    before = kept(flow)
    bad: list[Any] = [
        first._replace(facts={"solved": 1.0, "n": "yes"}),
        first._replace(rewards={"p": None}),
        first._replace(turns=[turn._replace(prompt=[1, 2])]),
        first._replace(turns=[turn._replace(logprobs=np.zeros(2, np.longdouble))]),
        first._replace(turns=[turn._replace(tokens=np.array(["a", "b"]))]),
    ]
    for episode in bad:
        with pytest.raises((ValueError, TypeError)):
            flow.push(EpisodeGroup(task, "w0", [episode]))
        assert kept(flow) == before
    with monkeypatch.context() as patch:
        patch.setattr("pulse_rl.flow.data.state.LARGEST", 100)
        with pytest.raises(ValueError, match="at most 100 bytes"):
            flow.push(good)
    assert kept(flow) == before
    assert flow.push(good)
    kill(flow, tmp_path)
    assert kept(dataflow("p", directory=tmp_path)) == kept(flow)


@pytest.mark.parametrize("version", ["three", 1.5, -1, 1 << 70, [1]])
def test_a_worker_that_reports_no_version_cannot_spoil_the_next_snapshot(tmp_path: Path, version: object) -> None:
    flow = started("p", directory=tmp_path)
    before = kept(flow)
    with pytest.raises(ValueError, match="Expected `int`|out of range"):
        flow.heartbeat("w0", {"policies": {"p": {"version": version}}})
    assert flow.take("w0") is not None
    journal_of(flow).compact(events.ENCODER.encode(flow._state._snapshot()))
    kill(flow, tmp_path)
    assert kept(dataflow("p", directory=tmp_path)) == kept(flow) != before


def test_a_log_that_ends_anywhere_is_recovered(tmp_path: Path) -> None:
    """A machine that fails while its disk writes: a log that ends, or is zeros from, anywhere."""
    flow = started("p", directory=tmp_path, slots=4)
    sizes, states = [], []
    for task in take_all(flow)[:3]:
        flow.push(group(task, "w0", {"p": 0}))
        sizes.append((tmp_path / LOG).stat().st_size)
        states.append(kept(flow))
    journal, log = (tmp_path / FILE).read_bytes(), (tmp_path / LOG).read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    for end in sorted({*range(sizes[0], sizes[2] + 1, 331), *sizes, *(size - 1 for size in sizes[1:])}):
        (copy / FILE).write_bytes(journal)
        written = log[:end] + bytes(5000 * (end % 2))
        (copy / LOG).write_bytes(written)
        found = dataflow("p", directory=copy)
        acknowledged = max(number for number, size in enumerate(sizes) if log[:size] == written[:size])
        assert kept(found) == states[acknowledged], (end, sizes)
        found.share("end", 0, end)  # it can be written to again
        kill(found, copy)
        again = dataflow("p", directory=copy)
        assert again.shared("end") == {0: end}
        journal_of(again).close()


def test_damage_is_an_error_and_never_another_state(tmp_path: Path) -> None:
    flow = started("p", directory=tmp_path)
    for task in take_all(flow):
        flow.push(group(task, "w0", {"p": 0}))
    before = kept(flow)
    journal_of(flow).close()
    data = (tmp_path / FILE).read_bytes()
    refused = 0
    for place in [*range(100), *range(100, len(data), 61)]:
        for path in tmp_path.glob(f"{FILE}*"):
            path.unlink()
        (tmp_path / FILE).write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        try:
            found = dataflow("p", directory=tmp_path)
        except (IntegrityError, VersionSkewError, OSError):  # the number of the format may be what is damaged
            refused += 1
        else:
            assert kept(found) == before, place
            journal_of(found).close()
    assert refused > 50


@pytest.mark.parametrize("head", [b"pulse-rl flow 1\n" + bytes(8), b"something else entirely" * 100])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / FILE).write_bytes(head)
    with pytest.raises(IntegrityError, match="expected a database of SQLite") as caught:
        dataflow("p", directory=tmp_path)
    assert caught.value.name == str(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == head


def test_a_journal_of_a_newer_format_is_no_damaged_one(tmp_path: Path) -> None:
    journal_of(started("p", directory=tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(VersionSkewError, match="upgrade pulse-rl") as caught:
        dataflow("p", directory=tmp_path)
    assert (caught.value.found_version, caught.value.known_version) == (9, 1)


def test_a_second_process_cannot_open_a_journal(tmp_path: Path) -> None:
    flow = started("p", directory=tmp_path)
    with pytest.raises(OSError, match="locked"):
        Journal(tmp_path / FILE)
    flow.share("x", 0, 1)


def test_tasks_that_are_too_old_for_a_policy_as_they_are_handed_out_are_not_expected_of_it(tmp_path: Path) -> None:
    """They feed another policy. What is on its way is what a dataflow counts that is made again from the journal."""
    flow = started("a", "b", directory=tmp_path, max_staleness=0)
    flow.heartbeat("w0", {"policies": {"a": {"version": 0}, "b": {"version": 0}}})
    old = flow.take("w0")
    assert old is not None
    flow.publish("a", 1, "d", 1)
    older = flow.take("w0")  # for b: the worker has not followed a yet
    assert older is not None
    for task, coming in ((None, (0, 2)), (old, (0, 1)), (older, (0, 0))):
        if task is not None:
            assert flow.push(group(task, "w0", {"a": 0, "b": 0}))
        expected = [flow.status()["policies"][name]["coming"] for name in ("a", "b")]
        assert tuple(expected) == coming
        assert flow._buffers["a"].room() == 2
        kill(flow, tmp_path)
        flow = dataflow("a", "b", directory=tmp_path, max_staleness=0)
        assert [flow.status()["policies"][name]["coming"] for name in ("a", "b")] == expected


def test_of_a_snapshot_tasks_that_are_too_old_are_expected_no_more(tmp_path: Path) -> None:
    """They would hold back tasks that can be fresh, until their workers bring them."""
    flow = started("p", directory=tmp_path, max_staleness=0)
    assert take_all(flow)
    flow.begin("p", 0, 1)
    room = flow._buffers["p"].room()
    journal_of(flow).compact(events.ENCODER.encode(flow._state._snapshot()))
    kill(flow, tmp_path)
    again = dataflow("p", directory=tmp_path, max_staleness=0)
    assert again.status()["policies"]["p"]["coming"] == 0
    assert again._buffers["p"].room() == room > 0


def test_a_compacted_journal_holds_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where compacting fails: it goes on growing, and is compacted later."""
    monkeypatch.setattr("pulse_rl.flow.data.state.COMPACT_NBYTES", 2000)
    monkeypatch.setattr("pulse_rl.flow.data.journal.PART", 1000)
    curator = DropSolved(problems=9)
    flow = started("a", "b", directory=tmp_path, slots=12, curator=curator, max_staleness=3, workers=2)
    for step in range(1, 8):
        with failing(flow, "DELETE") if step < 4 else nullcontext():
            for task in take_all(flow):
                assert flow.push(group(task, "w0", {"a": step - 1, "b": step - 1}, solved=1.0))
        for name in ("a", "b"):
            assert flow.pull(name) is not None
            flow.publish(name, step, "d", step)
        flow.evaluate("small", [1, 2], {"a": step, "b": step})
        flow.commit("a", step)
    take_all(flow, "w1")
    assert [record.message.split(":")[0] for record in caplog.records][:1] == ["the journal was not compacted"]
    assert journal_of(flow).snapshot()
    before = flow.status()
    kill(flow, tmp_path)
    found = dataflow("a", "b", directory=tmp_path, curator=DropSolved(problems=9), max_staleness=3).status()
    for key in ("policies", "workers", "tasks", "windows", "skipped", "given_up"):
        assert found[key] == before[key], key
