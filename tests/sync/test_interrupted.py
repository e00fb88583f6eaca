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


def _interrupted_at(line: int, *, background: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Publish, interrupted at the n-th line of the publisher's code, then publish on. Returns where, None for never.

    Of a line that is passed again and again, the first two times count.
    """
    store = pulse.open_store("memory://")
    weights = {"w": np.arange(100, dtype=np.uint16)}
    publisher = pulse.Publisher(store, codec="gap")
    publisher.publish(weights, version=0)
    weights["w"][0] = 1000
    publisher.publish(weights, version=1, background=background)
    where, passed, times = None, 0, Counter[Any]()

    def refused(*_: Any) -> Any:
        monkeypatch.setattr(delivery, "commit", commit)
        raise StoreError("refused")

    if fails:
        publisher.flush()
        monkeypatch.setattr(delivery, "commit", refused)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal passed, where
        if frame.f_code.co_filename not in FILES:
            return None
        at = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and times[at] < 2:
            times[at] += 1
            passed += 1
            if passed == line:
                where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    weights["w"][1] = 1001
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        publisher.publish(weights, version=2, background=background)
        publisher.flush()
    except (KeyboardInterrupt, StoreError):
        pass
    finally:
        sys.settrace(before)
    weights["w"][2] = 1002
    for version in (3, 4) if fails else (3,):
        with suppress(StoreError):  # of the version that failed; the next one must succeed
            publisher.publish(weights, version=version, background=background)
            publisher.flush()
    follower = {"w": np.zeros(100, np.uint16)}
    report = pulse.Subscriber(store).sync(follower)
    assert report.version == version, where
    assert (follower["w"] == weights["w"]).all(), where
    assert report.digest == pulse.digest(weights), where
    return where


@pytest.mark.parametrize(("background", "fails"), [(False, False), (True, True)])
def test_interrupted_at_every_line(background: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: 1)  # for a hundred elements; what threads would do is traced too
    line = 1
    while _interrupted_at(line, background=background, fails=fails, monkeypatch=monkeypatch) is not None:
        line += 1
    assert line > 50


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
