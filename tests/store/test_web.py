"""Histories that a plain web server serves, read-only: nginx as it is, and a few lines of Python.

There is no listing, so the newest version is found by probing: compared with a listing of the same files.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from pulse_rl.errors import CannotListError, ObjectNotFoundError
from pulse_rl.history import versions
from pulse_rl.history.history import History
from pulse_rl.history.operate.verify import verify
from pulse_rl.log.beginning import FIRST, encode_first
from tests.conftest import Trainee
from tests.store import servers
from tests.store.proxy import Proxy
from tests.store.through import Through, unlisted


@pytest.fixture(params=["nginx", "python"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A directory, and the URL that it is served at."""
    (tmp_path / "root" / "runs").mkdir(parents=True)
    (tmp_path / "nginx").mkdir()
    root = tmp_path / "root"
    port = servers.nginx(root, tmp_path / "nginx") if request.param == "nginx" else servers.web(root)
    return root / "runs" / "a", f"http://127.0.0.1:{port}/runs/a"


def test_reading_objects(served: tuple[Path, str]) -> None:
    directory, url = served
    written, store = pulse.open_store(directory), pulse.open_store(url)
    assert store.url == url
    data = bytes(range(256)) * (80 << 10)
    written.put("x/a", b"hello")
    written.put("x/big", data)
    assert bytes(store.get("x/a")) == b"hello"
    assert b"".join(store.stream("x/big")) == data
    with pytest.raises(ObjectNotFoundError) as raised:
        store.get("x/none")
    assert (raised.value.url, raised.value.name) == (url, "x/none")
    with pytest.raises(ObjectNotFoundError):
        list(store.stream("x/none"))
    with pytest.raises(CannotListError) as cannot:
        store.list("x")
    assert (cannot.value.url, cannot.value.name) == (url, "x")


def test_nothing_can_be_written(served: tuple[Path, str], trainee: Trainee) -> None:
    """Refused before any request; the files stay as they were."""
    directory, url = served
    pulse.open_store(directory).put("x", b"hello")
    store = pulse.open_store(url)
    with pytest.raises(pulse.StoreError, match="can only be read"):
        store.put("y", b"", mode="create")
    with pytest.raises(pulse.StoreError, match="can only be read"):
        store.delete("x")
    with pytest.raises(pulse.StoreError, match="can only be read"):
        pulse.Publisher(store, cast="bfloat16").publish(trainee.weights, version=0)
    assert [path.name for path in directory.iterdir()] == ["x"]


def test_a_subscriber_follows_over_http(served: tuple[Path, str], trainee: Trainee) -> None:
    """Publish to the directory, subscribe to the server: one that follows through prunings, one that starts late."""
    directory, url = served
    publisher = pulse.Publisher(directory, anchor_every=4, retain=3, grace=0, cast="bfloat16")
    live, follower, files = trainee.empty(), pulse.Subscriber(url), History(directory)
    assert follower.latest() is None
    with pytest.raises(pulse.VersionNotFoundError) as raised:
        follower.sync(live)
    assert raised.value.version is None
    for version in range(11):
        report = publisher.publish(trainee.step(), version=10 * version)
        assert follower.wait(10 * version, timeout=10) == 10 * version
        assert follower.sync(live).digest == report.digest == follower.verify(live)
        assert follower.history.sequences() == History(url).sequences() == files.sequences()
    assert files.sequences()[0] == 8
    late, fresh = pulse.Subscriber(url), trainee.empty()
    assert late.sync(fresh, version=90).route == "anchor"
    assert late.sync(fresh).digest == publisher.digest == pulse.digest(fresh)
    assert verify(url).ok
    assert verify(url).digest == publisher.digest


@pytest.mark.parametrize("what", ["begun anew", "begun anew and longer", "rolled back", "deleted"])
def test_a_history_that_goes_back_behind_a_server(served: tuple[Path, str], trainee: Trainee, what: str) -> None:
    """A subscriber that has seen it says so at its next sync, and at every later one; its weights stay."""
    directory, url = served
    trainee.published(directory, 6)
    live, subscriber = trainee.empty(), pulse.Subscriber(url)
    subscriber.sync(live)
    before = pulse.digest(live)
    assert subscriber.sync(live).route == "none"
    if what == "rolled back":
        for sequence in (4, 5):
            (directory / f"manifests/{sequence:012d}.json").unlink()
    else:
        shutil.rmtree(directory)
        directory.mkdir()
    if what.startswith("begun anew"):
        trainee.published(directory, 9 if "longer" in what else 6)
    for _ in range(2):
        with pytest.raises(pulse.IntegrityError, match="has gone back|belongs to another history|of another history"):
            subscriber.sync(live)
        assert (subscriber.version, pulse.digest(live)) == (5, before)


@pytest.mark.parametrize("web", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_copy_that_was_gone_on_with_takes_the_place_of_the_store(
    served: tuple[Path, str], tmp_path: Path, trainee: Trainee, web: bool, ahead: int
) -> None:
    """As when a backup is restored: version 3 is another one now, and what follows builds on that."""
    directory, url = served
    pulse.Publisher(directory, cast="bfloat16").publish(trainee.step(), version=0)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    live, subscriber = trainee.empty(), pulse.Subscriber(url if web else directory)
    with pulse.Publisher(directory, cast="bfloat16") as publisher:
        publisher.publish(trainee.step(), version=3)
    subscriber.sync(live)
    successor = pulse.Publisher(copy, cast="bfloat16")
    for version in range(3, 4 + ahead):
        report = successor.publish(trainee.step(), version=version, anchor=version == 3)
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)
    assert subscriber.sync(live).version == 3 + ahead
    assert pulse.digest(live) == report.digest


def test_an_anchor_that_is_kept_for_good_is_not_taken_for_the_newest(tmp_path: Path, trainee: Trainee) -> None:
    """A subscriber sleeps at an anchor while what follows it is published and pruned: there is a gap after it then."""
    publisher = trainee.published(tmp_path / "run", anchor_every=2, retain=1, keep_every=1, grace=0)
    live, subscriber = trainee.empty(), pulse.Subscriber(f"http://127.0.0.1:{servers.web(tmp_path)}/run")
    assert subscriber.sync(live).version == subscriber.sync(live).version == 0
    for version in range(1, 5):
        publisher.publish(trainee.step(), version=version)
    assert History(tmp_path / "run").sequences() == [0, 2, 4]
    assert subscriber.latest() == subscriber.sync(live).version == 4


def test_a_look_at_rest_is_few_small_requests(
    tmp_path: Path, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next manifest, which is missing, and the newest one, which is not sent; over the web also first.json."""
    servers.use_s3(monkeypatch, 0)
    bucket = servers.s3_bucket()
    for upstream, url in ((servers.moto(), f"s3://{bucket}/run"), (servers.web(tmp_path), "http")):
        with contextlib.closing(Proxy(upstream)) as proxy:
            servers.use_s3(monkeypatch, proxy.port)
            publisher = pulse.Publisher(url if url != "http" else tmp_path / "run")
            for version in range(2):
                publisher.publish(trainee.step(), version=version)
            subscriber = pulse.Subscriber(url if url != "http" else f"http://127.0.0.1:{proxy.port}/run")
            monkeypatch.setattr(versions, "TAG_AFTER_S", 0.0)
            for _ in range(3):
                assert subscriber.latest() == 1
            requests, draw = list[str](), proxy.draw

            def counted(method: str, path: str, requests: list[str] = requests, draw: Any = draw) -> Any:
                requests.append(path)
                return draw(method, path)

            monkeypatch.setattr(proxy, "draw", counted)
            for _ in range(10):
                assert subscriber.latest() == 1
            assert len(requests) == (30 if url == "http" else 20)
            assert sum(path.endswith("manifests/000000000002.json") for path in requests) == 10


def test_no_history_and_no_server(served: tuple[Path, str]) -> None:
    directory, url = served
    assert pulse.Subscriber(url).latest() is None
    directory.mkdir(exist_ok=True)
    (directory / "first.json").write_text("<html>every address has a page here</html>")
    with pytest.raises(pulse.IntegrityError, match=f"{FIRST}.*its server answers to every name"):
        pulse.Subscriber(url).latest()
    (directory / "first.json").write_bytes(encode_first(3))
    with pytest.raises(pulse.IntegrityError, match="manifests/000000000003.json"):
        pulse.Subscriber(url).latest()
    nowhere = f"http://127.0.0.1:{servers.free_port()}/a"
    with pytest.raises(pulse.StoreError, match="error sending request") as unreachable:
        pulse.Subscriber(nowhere, patience=0).latest()
    assert (unreachable.value.url, unreachable.value.name) == (nowhere, FIRST)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_the_newest_number_is_found_in_few_requests(first: int, count: int) -> None:
    """Probing against the numbers themselves; manifests need not be sound, but are asked for twice then."""
    store = pulse.open_store("memory://")
    requested: list[str] = []

    def noted(call: str, name: str) -> None:
        unlisted(call, name)
        requested.append(name)

    if first and count:
        store.put("first.json", encode_first(first))
    for sequence in range(first, first + count):
        store.put(f"manifests/{sequence:012d}.json", b"not sound")
    history = History(Through(store, before=noted))
    assert history.sequences() == list(range(first, first + count))
    assert len(requested) <= 4 + 2 * 2 * count.bit_length()
