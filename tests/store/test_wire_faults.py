"""Faults on the wire, through a proxy before a real S3 server: the new version bit for bit, or one clear error.

Whatever happens, live weights hold the bits of a version that was offered, and a failed sync moves them only from
version to version; after the fault both sides go on, and the history is sound.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from obstore.store import S3Store

import pulse_rl as pulse
from pulse_rl.history.operate.verify import VerifyReport, verify
from pulse_rl.store.remote import CloudStore
from pulse_rl.store.requests import CLIENT
from tests.conftest import Trainee
from tests.store import servers
from tests.store.proxy import STATUSES, Fault, Proxy, What

# All requests of a run except deletions: method, part of the path or query.
WRITES = [("PUT", "probes/"), ("PUT", "patches/"), ("POST", "anchors/"), ("PUT", "anchors/"), ("PUT", "manifests/")]
READS = [("GET", "list-type=2"), ("GET", "manifests/"), ("GET", "patches/"), ("GET", "anchors/")]

# obstore's default of 10 retries takes seconds each time.
FEW = {
    "max_retries": 2,
    "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20)},
}


class Run:
    """A trainer and a rollout worker of one history behind a proxy; every step is compared with what was offered."""

    def __init__(self, proxy: Proxy, url: str) -> None:
        self.proxy, self.url = proxy, url
        self.trainee = Trainee()
        self.offered: dict[int, str] = {}
        self.labels = True  # whether the numbers of versions are compared, besides their bits
        self.publisher = self.opened()
        self.join()

    def store(self, read_timeout: str = "20 s") -> CloudStore:
        options = CLIENT | {"allow_http": True, "read_timeout": read_timeout}
        return CloudStore(S3Store.from_url(self.url, client_options=options, retry_config=FEW), self.url)

    def opened(self, **options: Any) -> pulse.Publisher:
        return pulse.Publisher(
            self.store(), **{"anchor_every": 1, "codec": "gap", "cast": "bfloat16", "patience": 0, **options}
        )

    def join(self) -> None:
        """A new worker, with nothing in its weights."""
        self.subscriber, self.live = pulse.Subscriber(self.store(), patience=0), self.trainee.empty()
        self.nothing = pulse.digest(self.live)

    def publish(self, **options: Any) -> str | None:
        """Publish the next version. Returns the error, None for success."""
        version, before = max(self.offered, default=-1) + 1, self.publisher.version
        cast = {n: w.bfloat16() if w.is_floating_point() else w for n, w in self.trainee.step().items()}
        self.offered[version] = pulse.digest(cast)
        try:
            report = self.publisher.publish(self.trainee.weights, version=version, **options)
        except pulse.PulseError as error:
            assert self.publisher.version in (before, version)
            return self._sentence(error)
        assert report.digest == self.offered[version]
        return None

    def sync(self) -> str | None:
        """Sync the worker and compare its bits. Returns the error, None for success."""
        before, version, failed = pulse.digest(self.live), self.subscriber.version, None
        try:
            self.subscriber.sync(self.live)
        except pulse.PulseError as error:
            failed = self._sentence(error)
        found = pulse.digest(self.live)
        assert found in ({before} if failed and self.subscriber.version == version else set(self.offered.values()))
        if self.subscriber.version is not None:
            assert found == self.subscriber.digest
            if self.labels:
                assert found == self.offered[self.subscriber.version]
        else:
            assert found == self.nothing
        return failed

    def _sentence(self, error: Exception) -> str:
        """The message of an error: one line that names the store."""
        message = str(error)
        assert "\n" not in message
        assert self.url in message
        return message

    def recover(self, **options: Any) -> VerifyReport:
        """Without faults: the trainer publishes, the worker and a new one follow. Returns the report of `verify`."""
        self.proxy.faults = []
        assert self.publish(**options) is None
        newest = max(self.offered)
        for _ in range(2):
            assert self.sync() is None
            assert self.subscriber.version == newest
            assert self.subscriber.verify(self.live) == self.offered[newest]
            self.join()
        return verify(self.store())


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with contextlib.closing(Proxy(servers.moto(), seed=getattr(request, "param", 0))) as proxy:
        servers.use_s3(monkeypatch, proxy.port)
        yield Run(proxy, f"s3://{servers.s3_bucket()}/run")


@pytest.mark.parametrize("what", ["drop", "lose", "truncate", "delay", "twice", 429, 500])
def test_a_fault_that_passes_is_not_noticed(run: Run, what: What) -> None:
    """Once for each kind of request: publish and sync still succeed, and no version is committed twice."""
    for method, path in (*WRITES, *READS):
        if what == "truncate" and (method, path) in [("POST", "anchors/"), ("GET", "list-type=2")]:
            continue  # a response without an object: obstore gives up
        fault = Fault(what, method, path, times=1, seconds=0.05)
        run.proxy.faults = [fault]
        assert [run.publish(), run.sync()] == [None, None], (method, path)
        run.join()
        assert run.sync() is None
        assert fault.hits == 1, (method, path)
    assert run.subscriber.history.sequences() == list(range(len(run.offered)))
    assert run.recover().problems == ()


@pytest.mark.parametrize("what", ["drop", "lose", "truncate", "shorten", "corrupt", 403, 404, 409, 412, 503])
def test_a_fault_that_lasts_is_one_clear_error(run: Run, what: What) -> None:
    """With each kind of request: its sender gets the error, all stay at the version before and go on from there."""
    for method, path in (*WRITES, *READS):
        changed_upload = what in ("shorten", "corrupt") and method != "GET"  # the next test's
        if not changed_upload:
            one_that_lasts(run, what, method, path)
    assert run.recover().problems == ()


def one_that_lasts(run: Run, what: What, method: str, path: str) -> None:
    """All requests of one kind fail; then none does."""
    if path == "probes/":  # a publisher tests once, before its first write
        run.publisher = run.opened()
    elif not run.offered:
        assert [run.publish(), run.sync()] == [None, None]
    if (method, path) == ("GET", "anchors/"):
        run.join()
    # Listings have no checksum: a number can be read as another one.
    run.labels = hashed = what != "corrupt" or path in ("patches/", "anchors/")
    fault = Fault(what, method, path)
    run.proxy.faults = [fault]
    publish, sync = run.publish(), run.sync()
    assert fault.hits, (method, path)
    reads = method == "GET" and path != "list-type=2"
    # The publisher reads its newest manifest again when it is first listed, so it may get the error.
    failed = publish or sync if path == "manifests/" and method == "GET" else sync if reads else publish
    if (method, path) == ("GET", "patches/") or (what, method, path) == ("lose", "PUT", "manifests/"):
        assert failed is None  # the anchor serves instead; and a commit whose response was lost is found
    elif hashed:
        assert failed is not None, (method, path)
        assert what not in (403, 429, 500, 503) or STATUSES[what][1] in failed  # the message of the service
        assert reads or run.subscriber.version in (None, run.publisher.version)
    run.proxy.faults = []
    # To the same version first: what was read wrong once is not kept.
    assert [run.sync() if run.publisher.version is not None else None, run.publish(), run.sync()] == [None] * 3
    assert run.subscriber.version == run.publisher.version == max(run.offered)
    run.labels = True


def test_what_s3_wants_to_be_tried_again_is(run: Run) -> None:
    """It fails after a response with status 200 has begun, has ended an upload whose answers are lost, or is at work on
    another put of the same object."""
    store = run.publisher.history.store
    run.publisher = run.opened(patience=20, retain=1, grace=0)
    ends: list[tuple[What, str, str]] = [
        (200, "POST", "uploadId="),
        ("lose", "POST", "uploadId="),
        (200, "POST", "?delete"),
        (409, "PUT", "manifests/"),
    ]
    for what, method, path in ends:
        run.proxy.faults = [fault := Fault(what, method, path, times=3)]  # all of obstore's attempts with FEW
        assert [run.publish(), run.publish()] == [None, None]
        assert fault.hits == 3, (what, path)
    assert [info.name[-6:] for info in store.list("manifests")] == ["7.json"]
    assert run.recover().problems == ()


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("shorten", "patches/"),
        ("corrupt", "patches/"),
        ("shorten", "anchors/"),
        ("corrupt", "anchors/"),
        ("shorten", "trails/"),
        ("corrupt", "trails/"),
        ("shorten", "manifests/"),
        ("corrupt", "manifests/"),
    ],
)
def test_an_upload_that_is_stored_changed(run: Run, what: What, path: str) -> None:
    """By a service that does not check the hash in the request: readers find it, and a new anchor helps."""
    run.publisher = run.opened(anchor_every=50)
    assert [run.publish(), run.sync()] == [None, None]
    run.proxy.faults = [Fault(what, "PUT", path, times=1)]
    assert run.publish(anchor=path == "anchors/") is None
    if path == "anchors/":
        run.join()
    failed = run.sync()
    if path in ("patches/", "manifests/"):
        assert failed is not None
        assert "is corrupt: expected" in failed or "its BLAKE3 hash does not match its bytes" in failed
    else:
        assert failed is None  # by the anchor before and a patch; a follower needs no trail
    assert run.subscriber.version == (1 if failed is None else 0)
    report = run.recover(anchor=True)
    assert report.problems
    assert report.good_versions[-1] == 2
    assert 0 in report.good_versions


def test_a_share_of_all_requests(run: Run) -> None:
    """Many kinds of faults at once, by seed, with pruning; workers that follow and workers that are new."""
    often: list[What] = ["drop", "lose", "truncate", "delay", "twice", 403, 429, 500, 503]
    faults = [Fault(what, rate=0.03, seconds=0.01) for what in often]
    # Hashes find these; in a listing they can pass for something else.
    changed: list[What] = ["shorten", "corrupt", 404, 409, 412]
    faults += [Fault(what, "GET", path, rate=0.05) for what in changed for path in ("patches/", "anchors/")]
    run.publisher = run.opened(anchor_every=3, retain=4, grace=0)
    run.proxy.faults = faults
    errors = []
    for _ in range(15):
        errors += [run.publish(), run.sync()]
        follower = run.subscriber, run.live
        run.join()
        errors.append(run.sync())
        run.subscriber, run.live = follower
    assert sum(fault.hits for fault in faults) > 20
    assert 0 < sum(error is not None for error in errors) < len(errors)
    assert not [error for error in errors if error and "another publisher" in error]  # there is none
    run.proxy.faults = []
    for _ in range(3):  # until pruning has deleted what it could not before
        assert run.publish() is None
    assert run.recover().problems == ()


def test_a_server_that_never_responds(run: Run) -> None:
    """Requests are accepted and never answered: an error after the client's timeout."""
    assert [run.publish(), run.sync(), run.publish()] == [None, None, None]
    run.subscriber.history = pulse.History(run.store(read_timeout="300 ms"), patience=0)
    run.proxy.faults = [Fault("hold", "GET", "manifests/")]
    failed = run.sync()
    assert failed is not None
    assert "cannot read manifests/000000000001.json" in failed
    run.proxy.faults[0].release.set()
    assert run.recover().problems == ()


@contextlib.contextmanager
def held(proxy: Proxy, act: Callable[[], str | None], method: str, path: str) -> Iterator[list[str | None]]:
    """Run `act` in a thread; hold one of its requests while this context lasts. Then the list has its result."""
    fault, result = Fault("hold", method, path, times=1), list[str | None]()
    proxy.faults = [fault]
    thread = threading.Thread(target=lambda: result.append(act()))
    thread.start()
    assert fault.reached.wait(30)
    yield result
    fault.release.set()
    thread.join()
    assert result


@pytest.mark.parametrize("path", ["patches/", "anchors/", "manifests/"])
def test_a_publisher_that_lags_behind_another(run: Run, path: str) -> None:
    """Its request is held while another publishes: it gets the error, and nothing that it sent is committed."""
    late = Run(run.proxy, run.url)
    late.trainee = Trainee(seed=1)
    assert late.publish() is None
    run.offered, run.publisher = dict(late.offered), run.opened()
    with held(run.proxy, late.publish, "PUT", path) as result:
        assert [run.publish(), run.publish(), run.sync()] == [None, None, None]
    for failed in (*result, late.publish()):
        assert failed is not None
        assert "another publisher" in failed
        assert "one publisher at a time" in failed
    assert run.recover().problems == ()
    run.publisher = run.opened()
    report = run.recover()
    assert report.problems == ()
    assert report.leftovers  # of the late publisher


@pytest.mark.parametrize(("path", "fresh"), [("patches/000000000002", False), ("tokenizer.json", True)])
def test_a_worker_that_pruning_overtakes(run: Run, path: str, fresh: bool) -> None:
    """In a chain of patches, and between the files of an anchor: it stops at a version; the next sync succeeds."""
    run.publisher = run.opened(anchor_every=50, retain=1, grace=0)
    assert [run.publish(assets={"tokenizer.json": b"{}"}), run.sync()] == [None, None]
    if fresh:
        run.join()
    assert [run.publish() for _ in range(3)] == [None] * 3
    with held(run.proxy, run.sync, "GET", path) as result:
        assert [run.publish(anchor=True), run.publish()] == [None, None]
        assert run.publisher.history.sequences() == [4, 5]
    (failed,) = result
    assert failed is not None
    assert re.search("is missing from|holds no|no route leads to version", failed)
    assert run.subscriber.version == (None if fresh else 1)
    assert run.sync() is None
    assert run.subscriber.version == 5
    assert run.recover().problems == ()


def test_workers_that_race_pruning(run: Run) -> None:
    """A publisher keeps one version and publishes without a pause; workers with slow requests reach the newest one."""
    run.publisher = run.opened(anchor_every=2, retain=1, grace=0)
    assert run.publish() is None
    published = list[str | None]()
    run.proxy.faults = [Fault("delay", "GET", path, seconds=0.03) for path in ("patches/", "anchors/", "manifests/0")]
    trainer = threading.Thread(target=lambda: published.extend(run.publish() for _ in range(25)))
    trainer.start()
    results = []
    while trainer.is_alive():
        results.append(run.sync())
        if len(results) % 3 == 0:
            run.join()
    trainer.join()
    assert published == [None] * 25
    assert None in results
    expected = "is missing from|holds no|no route leads to version"
    assert all(re.search(expected, failed) for failed in results if failed)
    assert run.recover().problems == ()
