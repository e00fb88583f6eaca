"""Histories in buckets of real servers: end to end, two publishers at once, a lost connection, no put-if-absent."""

import contextlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from obstore.store import S3Store

import pulse_rl as pulse
from pulse_rl.history.operate.verify import verify
from pulse_rl.store.base import Store
from pulse_rl.store.remote import CloudStore
from tests.conftest import Trainee
from tests.store import servers
from tests.store.through import Through

ROUNDS = 4


@pytest.fixture(params=["s3", "azure"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket or container."""
    if request.param == "azure":
        return f"az://{servers.azure_container(monkeypatch)}"
    servers.use_s3(monkeypatch, servers.moto())
    return f"s3://{servers.s3_bucket()}"


def proved(store: Store, trainee: Trainee) -> int:
    """The version that a new subscriber reaches, proved by itself and by `verify`."""
    live, subscriber = trainee.empty(), pulse.Subscriber(store)
    report = subscriber.sync(live)
    assert subscriber.verify(live) == report.digest
    assert verify(store).problems == ()
    return report.version


def test_publish_subscribe_verify(bucket: str, trainee: Trainee) -> None:
    """The trainer's weights, cast, against those of subscribers: one that follows, one that starts late."""
    store = pulse.open_store(f"{bucket}/runs/a")
    publisher = pulse.Publisher(store, anchor_every=3, retain=2, grace=0, cast="bfloat16")
    live, subscriber = trainee.empty(), pulse.Subscriber(f"{bucket}/runs/a/")
    for version in range(8):
        report = publisher.publish(trainee.step(), version=version)
        assert subscriber.sync(live).digest == report.digest
    assert subscriber.verify(live) == pulse.digest(live) == publisher.digest
    published = {n: w.bfloat16() if w.is_floating_point() else w for n, w in trainee.weights.items()}
    assert pulse.digest(published) == publisher.digest
    assert proved(store, trainee) == 7
    assert [s for s in subscriber.history.sequences() if s < 6] == []  # pruned: 6 is the newest anchor
    assert store.list("probes") == []
    assert pulse.Subscriber(f"{bucket}/runs/b").latest() is None


def test_large_objects_go_in_parts(bucket: str) -> None:
    """An anchor and a patch of more than one part; the same bits come back."""
    random = np.random.default_rng(0)
    weights = {"w": random.integers(0, 1 << 16, 9 << 20, dtype=np.uint16)}
    publisher = pulse.Publisher(f"{bucket}/large", codec="gap")
    publisher.publish(weights, version=0)
    weights["w"] ^= 0x5A5A
    report = publisher.publish(weights, version=1)
    assert min(report.patch_nbytes, report.full_nbytes) > 16 << 20
    live = {"w": np.zeros(9 << 20, np.uint16)}
    pulse.Subscriber(f"{bucket}/large").sync(live)
    np.testing.assert_array_equal(live["w"], weights["w"])


RACER = """
import sys, numpy as np, pulse_rl as pulse
weights = {"w": np.full(1000, int(sys.argv[2]), np.uint16)}
publishers = [pulse.Publisher(f"{sys.argv[1]}/race-{round}") for round in range(int(sys.argv[3]))]
for publisher in publishers:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        print(publisher.publish(weights, version=0).digest, flush=True)
    except (pulse.StoreError, ValueError) as error:  # ValueError: the other had committed before it looked
        print("lost", "another publisher" in str(error) or isinstance(error, ValueError), flush=True)
"""


def test_two_publishers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes publish other bits as the first version at the same moment: exactly one commits, every time."""
    servers.use_s3(monkeypatch, servers.moto())
    bucket = f"s3://{servers.s3_bucket()}"
    command = [sys.executable, "-c", RACER, bucket]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with (
        subprocess.Popen([*command, "1", str(ROUNDS)], **pipes) as one,
        subprocess.Popen([*command, "2", str(ROUNDS)], **pipes) as two,
    ):
        for number in range(ROUNDS):
            assert [_line(racer) for racer in (one, two)] == ["ready"] * 2
            for racer in (one, two):
                assert racer.stdin is not None
                racer.stdin.write("\n")
            printed = [_line(racer) for racer in (one, two)]
            assert printed.count("lost True") == 1, printed
            (winner,) = set(printed) - {"lost True"}
            subscriber, live = pulse.Subscriber(f"{bucket}/race-{number}"), {"w": np.zeros(1000, np.uint16)}
            assert subscriber.sync(live).digest == winner == subscriber.verify(live)
            assert subscriber.history.sequences() == [0]
        for racer in (one, two):
            racer.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("prefix", "after"), [("patches/", 0), ("anchors/", 70_000), ("manifests/", 0)])
def test_a_store_that_goes_away_in_the_middle(
    prefix: str, after: int, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost after some bytes: one StoreError, and the history stays at the version before."""
    with contextlib.closing(servers.Line(servers.moto())) as line:
        servers.use_s3(monkeypatch, line.port)
        url = f"s3://{servers.s3_bucket()}/run"
        few = S3Store.from_url(url, retry_config={"max_retries": 3})  # the default takes seconds each time
        store = CloudStore(few, url)

        def cut(call: str, name: str) -> None:  # the connection is lost while an object of this kind is written
            if call == "put" and name.startswith(prefix):
                line.left = after

        publisher = pulse.Publisher(store, anchor_every=1, cast="bfloat16", patience=0)
        publisher.publish(trainee.step(), version=0)
        publisher.history.store = Through(store, before=cut)
        live, subscriber = trainee.empty(), pulse.Subscriber(store, patience=0)
        assert subscriber.sync(live).version == 0
        with pytest.raises(pulse.StoreError, match=f"cannot write {prefix}") as raised:
            publisher.publish(trainee.step(), version=1)
        assert "\n" not in str(raised.value)
        assert raised.value.url == url
        assert (raised.value.name or "").startswith(prefix)
        with pytest.raises(pulse.StoreError) as raised:
            subscriber.sync(live)
        assert (raised.value.url, raised.value.name) == (url, "manifests")
        assert subscriber.version == 0
        line.left = float("inf")
        assert subscriber.sync(live).route == "none"
        assert proved(store, trainee) == 0
        publisher.history.store = store
        publisher.publish(trainee.weights, version=1)
        assert subscriber.sync(live).digest == publisher.digest
        assert proved(store, trainee) == 1


def test_a_download_goes_on_where_its_connection_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is cut after the second part of many; the bytes are those that were put."""
    with contextlib.closing(servers.Line(servers.moto())) as line:
        servers.use_s3(monkeypatch, line.port)
        store = pulse.open_store(f"s3://{servers.s3_bucket()}/run")
        data = np.random.default_rng(0).bytes(48 << 20)
        store.put("x", data)
        found = []
        for part in store.stream("x"):
            found.append(bytes(part))
            if len(found) == 2:
                line.cut()
                line.left = float("inf")
        assert b"".join(found) == data


class _Missing(BaseHTTPRequestHandler):
    """Answers a bulk deletion as some services do where there is no object of that name. S3 says that it is deleted."""

    code = "NoSuchKey"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        error = f"<Error><Key>a</Key><Code>{self.code}</Code><Message>no</Message></Error>"
        body = f"<?xml version='1.0'?><DeleteResult>{error}</DeleteResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_what_is_deleted_already_counts_as_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), _Missing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.use_s3(monkeypatch, server.server_port)
        store = pulse.open_store("s3://bucket")
        store.delete("a")
        monkeypatch.setattr(_Missing, "code", "AccessDenied")
        with pytest.raises(pulse.StoreError, match="cannot delete a"):
            store.delete("a")
        server.shutdown()


@pytest.fixture
def no_put_if_absent(monkeypatch: pytest.MonkeyPatch) -> str:
    servers.use_s3(monkeypatch, servers.rclone())
    return "s3://bucket/run"


def test_a_service_without_put_if_absent_is_refused(no_put_if_absent: str, trainee: Trainee) -> None:
    """rclone overwrites what If-None-Match should protect: refused before anything is written, again and again."""
    store = pulse.open_store(no_put_if_absent)
    publisher = pulse.Publisher(store, cast="bfloat16")
    for _ in range(2):
        with pytest.raises(pulse.StoreError, match="cannot hold a history") as raised:
            publisher.publish(trainee.step(), version=0)
        assert raised.value.url == no_put_if_absent
        assert "\n" not in str(raised.value)
    assert [store.list(prefix) for prefix in ("probes", "patches", "anchors", "manifests")] == [[]] * 4
    assert pulse.Subscriber(store).latest() is None


def test_no_bucket_and_no_server(trainee: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, with the message of the service."""
    servers.use_s3(monkeypatch, servers.moto())
    for verb in (pulse.Subscriber("s3://no-such-bucket/a").latest, lambda: _publish("s3://no-such-bucket/a", trainee)):
        with pytest.raises(pulse.StoreError, match=r"(?m)404 Not Found: The specified bucket does not exist$"):
            verb()
    servers.use_s3(monkeypatch, servers.free_port())
    with pytest.raises(pulse.StoreError, match=r"error sending request$"):
        pulse.Subscriber("s3://bucket/a", patience=0).latest()


def _publish(url: str, trainee: Trainee) -> None:
    pulse.Publisher(url, cast="bfloat16").publish(trainee.weights, version=0)
