"""Stores that are gone for a while: publish, sync and wait go on, for as long as `patience` says and no longer."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.store import patient as patience
from pulse_rl.store.around import StoreAround
from pulse_rl.store.base import Store
from pulse_rl.store.patient import patient
from tests.conftest import Trainee
from tests.store import servers
from tests.store.proxy import Fault, Proxy


class Gone(StoreAround):
    """A store that can be out of reach; reads may end in the middle of an object."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.until = 0.0  # monotonic
        self.temporary = True
        self.tries = 0
        self.cuts = 0  # how many reads will end after their first bytes

    def gone_for(self, seconds: float) -> None:
        self.until, self.tries = time.monotonic() + seconds, 0

    def _call(self, verb: str, name: str, call: Callable[[], Any]) -> Any:
        self.tries += 1
        if time.monotonic() < self.until:
            raise pulse.StoreError(f"cannot reach {name}", url=self.url, name=name, temporary=self.temporary)
        return call()

    def check_create(self) -> None:
        self.inner.check_create()

    def put(self, name: str, data: Any, *, mode: Any = "overwrite") -> None:
        if not isinstance(data, bytes):
            begun = next(iter(data))  # some of it is sent before the connection ends
            assert len(begun)
        super().put(name, data, mode=mode)

    def stream(self, name: str) -> Iterator[memoryview]:
        data = self.get(name)
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]
            if self.cuts:
                self.cuts -= 1
                raise pulse.StoreError(f"lost {name}", url=self.url, name=name, temporary=True)


@pytest.fixture
def gone(store: Store) -> Gone:
    return Gone(store)


def test_an_outage_that_patience_covers(gone: Gone, trainee: Trainee) -> None:
    """Anchors and patches, in the foreground and in the background; the same bits as were offered."""
    live, subscriber = trainee.empty(), pulse.Subscriber(gone, patience=20)
    with pulse.Publisher(gone, cast="bfloat16", anchor_every=2, patience=20) as publisher:
        for version in range(4):
            gone.gone_for(0.3)
            publisher.publish(trainee.step(), version=version, background=version == 3)
            publisher.flush()
            gone.gone_for(0.3)
            assert subscriber.sync(live).version == version
            assert gone.tries > 2
    assert subscriber.verify(live) == pulse.digest(live) == publisher.digest
    assert pulse.verify(gone.inner).problems == ()


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_patience_is_bounded(gone: Gone, trainee: Trainee, seconds: float) -> None:
    """However many objects an operation needs, an outage costs it the patience once."""
    publisher = trainee.published(gone, patience=seconds)
    live, subscriber = trainee.empty(), pulse.Subscriber(gone, patience=seconds)
    for act in (lambda: publisher.publish(trainee.step(), version=1), lambda: subscriber.sync(live)):
        gone.gone_for(1000)
        start = time.monotonic()
        with pytest.raises(pulse.StoreError, match="^cannot reach") as raised:
            act()
        assert seconds <= time.monotonic() - start + 1e-3 < seconds + 2
        assert raised.value.temporary
        assert "anchor=True" not in "".join(getattr(raised.value, "__notes__", []))
        gone.gone_for(0)
        act()
    assert subscriber.version == publisher.version == 1


def test_what_does_not_pass_is_raised_at_once(gone: Gone, trainee: Trainee) -> None:
    gone.temporary = False
    gone.gone_for(1000)
    weights = {"w": np.zeros(3)}
    for act in (
        lambda: pulse.Publisher(gone).publish(weights, version=0),
        lambda: pulse.Subscriber(gone).wait(0, 60),
    ):
        gone.tries = 0
        with pytest.raises(pulse.StoreError, match="cannot reach"):
            act()
        assert gone.tries == 1


def test_a_download_goes_on_after_its_last_byte(gone: Gone) -> None:
    data = np.random.default_rng(0).bytes(5500)
    gone.inner.put("x/a", data)
    gone.cuts = 3
    assert b"".join(patient(gone, 10).stream("x/a")) == data
    assert gone.cuts == 0


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None, "1"])
def test_patience_is_a_number_of_seconds(value: Any) -> None:
    for kind in (pulse.Publisher, pulse.Subscriber, pulse.History):
        with pytest.raises(ValueError, match="patience: expected seconds"):
            kind("memory://", patience=value)


def test_wait_goes_on_through_an_outage(gone: Gone, trainee: Trainee) -> None:
    publisher, subscriber = pulse.Publisher(gone.inner, cast="bfloat16"), pulse.Subscriber(gone)
    gone.gone_for(0.4)
    threading.Timer(0.6, lambda: publisher.publish(trainee.step(), version=0)).start()
    assert subscriber.wait(0, timeout=30) == 0
    gone.gone_for(1000)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="waited 0.3 s for version 7 in .*; the last look failed: cannot reach"):
        subscriber.wait(7, timeout=0.3)
    assert time.monotonic() - start < 2
    gone.gone_for(0)
    with pytest.raises(TimeoutError, match="the newest is 0"):
        subscriber.wait(7, timeout=0.1)


def test_a_wait_in_another_thread_takes_no_patience_away(
    gone: Gone, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee.published(gone.inner)
    subscriber, looking, go_on = pulse.Subscriber(gone, patience=20), threading.Event(), threading.Event()

    def call(*of: Any) -> Any:
        if threading.current_thread() in waiting:
            looking.set()
            go_on.wait(20)
        return Gone._call(gone, *of)

    monkeypatch.setattr(gone, "_call", call)
    waiting = [threading.Thread(target=subscriber.wait, args=(0, 20)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    looking.wait(20)
    gone.gone_for(0.3)
    assert subscriber.sync(trainee.empty()).version == 0
    go_on.set()
    for thread in waiting:
        thread.join(20)
    gone.gone_for(0.3)
    assert subscriber.sync(trainee.empty()).version == 0


@pytest.mark.parametrize("timeout", [float("nan"), -1, None, "1"])
def test_wait_has_a_timeout(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout: expected seconds"):
        pulse.Subscriber("memory://").wait(0, timeout)


@pytest.mark.parametrize("version", ["1", 1.0, True, -1])
def test_a_version_is_a_whole_number(version: Any) -> None:
    store = pulse.open_store("memory://")
    pulse.Publisher(store).publish({"w": np.zeros(3)}, version=1)
    subscriber = pulse.Subscriber(store)
    for act in (lambda: subscriber.wait(version, 1), lambda: subscriber.sync({"w": np.zeros(3)}, version=version)):
        with pytest.raises(ValueError, match="version: expected a whole number"):
            act()


def test_intervals_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `poll` to 5 % of the time waited, to `poll_max`."""
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    subscriber = pulse.Subscriber("memory://", poll=0.2, poll_max=2)
    monkeypatch.setattr("pulse_rl.sync.subscribe.polling.time.monotonic", lambda: now[0])
    monkeypatch.setattr("pulse_rl.sync.subscribe.polling.time.sleep", sleep)
    with pytest.raises(TimeoutError):
        subscriber.wait(0, 100)
    assert slept[:3] == [0.2] * 3
    assert max(slept) == 2
    assert slept[-2] == 2
    for wrong in ({"poll": 0}, {"poll_max": -1}, {"poll": float("nan")}):
        with pytest.raises(ValueError, match="poll(_max)?: expected seconds"):
            pulse.Subscriber("memory://", **wrong)


@pytest.mark.slow
def test_an_outage_of_a_real_server(monkeypatch: pytest.MonkeyPatch, trainee: Trainee) -> None:
    """Longer than obstore's own attempts: connections refused, then answers of 503; one line in the end."""
    with contextlib.closing(Proxy(servers.moto())) as proxy:
        servers.use_s3(monkeypatch, proxy.port)
        url = f"s3://{servers.s3_bucket()}/run"
        publisher, subscriber = pulse.Publisher(url, cast="bfloat16"), pulse.Subscriber(url)
        for version, what in enumerate(("drop", 503)):
            for act in (
                lambda version=version: publisher.publish(trainee.step(), version=version),
                lambda: subscriber.sync(trainee.empty()),
            ):
                proxy.faults = [Fault(what)]  # type: ignore[arg-type]
                threading.Timer(2.5, proxy.faults.clear).start()
                assert act().version == version
        proxy.faults = [Fault("drop")]
        with pytest.raises(pulse.StoreError) as raised:
            pulse.Subscriber(url, patience=0.1).latest()
        assert "\n" not in str(raised.value)
        assert raised.value.temporary
        proxy.faults = [Fault(403)]
        start = time.monotonic()
        with pytest.raises(pulse.StoreError) as refused:
            pulse.Subscriber(url).latest()
        assert not refused.value.temporary
        assert time.monotonic() - start < 5


def test_http_that_the_environment_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.use_s3(monkeypatch, servers.moto())
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(pulse.StoreError, match="set AWS_ALLOW_HTTP=true"):
        pulse.Subscriber("s3://bucket/run").latest()


def test_a_forked_process_does_not_hang(tmp_path: Any) -> None:
    """With a heartbeat that is being written and a version in flight, or newly made there: one error each, at once."""
    import os
    import subprocess
    import sys

    code = """
import os, sys, numpy as np, pulse_rl as pulse
bits = {"w": np.arange(9000, dtype=np.uint16)}
publisher, subscriber = pulse.Publisher(sys.argv[1], codec="gap"), pulse.Subscriber(sys.argv[1], heartbeat="w")
publisher.publish(bits, version=0)
subscriber.sync({"w": np.zeros_like(bits["w"])})
bits["w"][0] += 1
subscriber._heart._lock.acquire()
publisher.publish(bits, version=1, background=True)
if os.fork() == 0:
    for act in (lambda: subscriber.sync(bits), publisher.close, lambda: pulse.Subscriber(sys.argv[1]).sync(bits)):
        try:
            act()
        except pulse.StoreError as error:
            print(type(error).__name__, "forked" in str(error), flush=True)
    sys.exit(0)
subscriber._heart._lock.release()
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, timeout=60, env=os.environ,
    )  # fmt: skip
    assert done.stdout == "StoreError True\n" * 3, done.stderr


def test_a_callers_loop_is_not_slowed_down(gone: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call after one that failed does not wait again; after a while a call has its patience again."""
    gone.gone_for(1000)
    store = patient(gone, 0.5)
    tries = []
    for forget in (patience.FORGET_S, patience.FORGET_S, 0.0):
        monkeypatch.setattr(patience, "FORGET_S", forget)
        gone.tries = 0
        with pytest.raises(pulse.StoreError):
            store.get("x")
        tries.append(gone.tries)
    assert tries[1] == 1 < min(tries[0], tries[2])


def test_an_outage_may_end_for_another_thread_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch and its trail are put at once: one may succeed while the failure of the other is looked at."""
    gone = Gone(pulse.open_store("memory://"))
    store = patient(gone, 5.0)
    monkeypatch.setattr(patience.log, "warning", lambda *_: setattr(store, "_since", None))
    gone.gone_for(0.05)
    store.put("a", b"x")
    assert bytes(store.get("a")) == b"x"
