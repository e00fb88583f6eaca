"""A publisher interrupted at every line: what is published afterwards is what the trainer holds."""

import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl import parallel
from pulse_rl.errors import StoreError
from pulse_rl.history.history import commit
from pulse_rl.history.operate.verify import verify
from pulse_rl.sync import turn
from pulse_rl.sync.publish import (
    attempt,
    baseline,
    delivery,
    encoding,
    intake,
    pipeline,
    position,
    publisher,
    report,
    skips,
    successor,
)

PUBLISHING = (publisher, intake, pipeline, attempt, position, baseline, encoding, successor, delivery, skips, report)
FILES = {part.__file__ for part in (*PUBLISHING, turn)}


Point = tuple[str, int, int]  # a line that is passed: its file, its number, and how often it was passed before


class Run:
    """A publisher that is interrupted again and again, and a subscriber that follows."""

    def __init__(self, background: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._background, self._fails, self._monkeypatch = background, fails, monkeypatch
        self.version, self._store = -1, pulse.open_store("memory://")
        self._weights = {"w": np.arange(4000, dtype=np.uint16)}
        self._publisher = pulse.Publisher(self._store, codec="gap")
        self._follower, self._subscriber = {"w": np.zeros(4000, np.uint16)}, pulse.Subscriber(self._store)
        for _ in range(2):
            self._publish()

    def _publish(self) -> None:
        self.version += 1
        self._weights["w"][self.version] += 1000
        self._publisher.publish(self._weights, version=self.version, background=self._background)
        self._publisher.flush()

    def interrupted(self, at: Point | None) -> list[Point]:
        """Publish, interrupted at a point, then publish on. Returns the points that were passed, that one the last.

        Of a line that is passed again and again, the first two times count.
        """
        passed, times = list[Point](), Counter[Any]()

        def refused(*_: Any) -> Any:
            self._monkeypatch.setattr(delivery, "commit", commit)
            raise StoreError("refused")

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in FILES:
                return None
            line = frame.f_code.co_filename, frame.f_lineno
            if event == "line" and times[line] < 2 and passed[-1:] != [at]:
                passed.append((*line, times[line]))
                times[line] += 1
                if passed[-1] == at:
                    raise KeyboardInterrupt
            return trace

        if self._fails:
            self._monkeypatch.setattr(delivery, "commit", refused)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            self._publish()
        except (KeyboardInterrupt, StoreError):
            pass
        finally:
            sys.settrace(before)
        if self._fails:
            with suppress(StoreError):  # of the version that failed; the next one must succeed
                self._publish()
        self._publish()
        self.check(self._subscriber, at)
        return passed

    def check(self, subscriber: pulse.Subscriber, at: Point | None) -> None:
        report = subscriber.sync(self._follower)
        assert report.version == self.version, at
        assert (self._follower["w"] == self._weights["w"]).all(), at
        assert report.digest == pulse.digest(self._weights), at

    def join(self) -> None:
        """A new subscriber begins."""
        self._follower["w"][:] = 0
        self.check(pulse.Subscriber(self._store), None)


@pytest.mark.parametrize(("background", "fails"), [(False, False), (True, True)])
def test_interrupted_at_every_line(background: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: 1)  # for a few elements; what threads would do is traced too

    def begun() -> Run:
        return Run(background, fails, monkeypatch)

    points = begun().interrupted(None)
    assert len(points) > 50
    run, missed = begun(), 0
    for point in points:
        if run.version > 60:
            run.join()
            run = begun()
        if run.interrupted(point)[-1] != point:
            run = begun()  # some lines are passed by the first versions alone
            missed += run.interrupted(point)[-1] != point
    run.join()
    assert missed <= len(points) // 20  # as threads took other turns


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def submit(self, *args: Any) -> Any:
            raise RuntimeError("can't start new thread")

        def shutdown(self) -> None: ...

    store = pulse.open_store("memory://")
    weights = {"w": np.arange(100, dtype=np.uint16)}
    publisher = pulse.Publisher(store)
    publisher.publish(weights, version=0)
    weights["w"][0] = 7
    monkeypatch.setattr(pipeline, "ThreadPoolExecutor", Pool)
    with pytest.raises(RuntimeError, match="can't start"):
        publisher.publish(weights, version=1, background=True)
    weights["w"][1] = 9
    assert publisher.publish(weights, version=2).changes == 2
    follower = {"w": np.zeros(100, np.uint16)}
    pulse.Subscriber(store).sync(follower)
    assert (follower["w"] == weights["w"]).all()


def test_a_delivery_that_an_interruption_left_behind_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted right after the thread has started: the next publish builds on the version that it commits."""
    store = pulse.open_store("memory://")
    weights = {"w": np.arange(100, dtype=np.uint16)}
    publisher = pulse.Publisher(store)
    publisher.publish(weights, version=0)

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        commit(*given)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    weights["w"][0] = 1000
    with monkeypatch.context() as patched:
        patched.setattr(delivery, "commit", slow)
        patched.setattr(pipeline, "_InFlight", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights, version=1, background=True)
    weights["w"][1] = 1001
    report = publisher.publish(weights, version=2)
    assert (report.base, report.changes) == (1, 1)
    assert [manifest.version for manifest in publisher.history.manifests()] == [0, 1, 2]


PROGRAM = """
import sys, time, numpy as np, pulse_rl as pulse
store = pulse.open_store(sys.argv[1])
put = store.put
def slow(name, *args, **options):
    time.sleep(0.2 if "patches" in name else 0)
    put(name, *args, **options)
store.put = slow
weights = {"w": np.zeros(3_000_000, np.uint16)}
publisher = pulse.Publisher(store)
publisher.publish(weights, version=0)
for version in range(1, 5):
    weights["w"][version] = 1
    publisher.publish(weights, version=version, background=True, anchor=version == 4)
"""


def test_a_process_that_ends_finishes_the_version_in_flight(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "s")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = verify(str(tmp_path / "s"))
    assert report.ok
    assert report.good_versions == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "name", ["sub/tokenizer.json", "", ".hidden", "a b", "ü", "model.safetensors", "model.safetensors.index.json"]
)
def test_assets_that_no_anchor_can_have(name: str) -> None:
    store = pulse.open_store("memory://")
    with pytest.raises(ValueError, match="assets"):
        pulse.Publisher(store).publish({"w": np.zeros(3, np.uint16)}, version=0, assets={name: b"x"})
    assert pulse.Subscriber(store).latest() is None


def test_no_sequence_number_is_left() -> None:
    store = pulse.open_store("memory://")
    store.put("manifests/999999999999.json", b"x")
    with pytest.raises(StoreError, match="full") as raised:
        pulse.Publisher(store).publish({"w": np.zeros(3, np.uint16)}, version=0, anchor=True)
    assert (raised.value.url, raised.value.name) == (store.url, "manifests/999999999999.json")
