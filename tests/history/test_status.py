"""Heartbeats, `pulse-rl status` and `pulse-rl prune`: what an operator sees, compared with what is in the store."""

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.cli import stores
from pulse_rl.cli.main import main
from pulse_rl.history import heartbeat
from pulse_rl.history.heartbeat import Heartbeat
from pulse_rl.history.history import History
from pulse_rl.history.manifest import manifest_name
from pulse_rl.history.operate.describe import store_info
from pulse_rl.history.operate.prune import GRACE_S, Retention, delete_planned
from pulse_rl.history.operate.status import Objects, status
from pulse_rl.history.operate.verify import verify
from pulse_rl.log.beginning import FIRST
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.version import SOFTWARE
from tests.history.parts import even, publish_parts
from tests.store import servers
from tests.store.through import Through

ERASE = "\x1b[2J"  # what erases a terminal's screen


class Counting(Through):
    """A store that records reads and heartbeats, and can hold the puts of heartbeats."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, before=self._begun, after=self._done)
        self.gets: list[str] = []
        self.beats: list[Heartbeat] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def _begun(self, call: str, name: str) -> None:
        if call in ("get", "stream"):
            self.gets.append(name)
        assert call != "put" or not name.startswith("heartbeats/") or self.go_on.wait(30)

    def _done(self, call: str, name: str) -> None:
        if call == "put" and name.startswith("heartbeats/"):
            self.beats.append(msgspec.json.decode(self.inner.get(name), type=Heartbeat))


class Run:
    """A publisher of small weights, and empty weights for a subscriber."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.bits = {"w": np.arange(9000, dtype=np.uint16)}
        self._publisher = pulse.Publisher(store, codec="gap", **options)
        self._version = 0

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.bits["w"][self._version : self._version + 5] += 1
            self._publisher.publish(self.bits, version=self._version)
            self._version += 2

    def empty(self) -> dict[str, Any]:
        return {"w": np.zeros_like(self.bits["w"])}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def beat(store: Store, name: str = "w") -> Heartbeat:
    return heartbeat.read(store, f"heartbeats/{name}.json")


def test_a_heartbeat_after_each_sync(store: Store) -> None:
    """Compared with the report of the sync, or with its error."""
    run, live = Run(store, anchor_every=5), Counting(store)
    subscriber, weights = pulse.Subscriber(live, heartbeat="w"), run.empty()
    with pytest.raises(pulse.VersionNotFoundError):
        subscriber.sync(weights)
    until(lambda: len(live.beats) == 1)
    first = beat(store)
    assert (first.id, first.version, first.sequence, first.lag) == ("w", None, None, None)
    assert first.error == f"{store.url} holds no version yet"
    run.publish(4)
    report = subscriber.sync(weights)
    until(lambda: len(live.beats) == 2)
    assert beat(store) == Heartbeat(
        "w", 6, 3, 0, None, beat(store).sync_s, report.fetched_nbytes, socket.gethostname(), SOFTWARE
    )
    assert beat(store).sync_s == pytest.approx(report.total_s, abs=0.1)
    subscriber.sync(weights, version=2)
    until(lambda: len(live.beats) == 3)
    assert (beat(store).version, beat(store).lag) == (2, 2)
    with pytest.raises(TypeError):
        subscriber.sync({"w": "no tensor"})
    until(lambda: len(live.beats) == 4)
    assert beat(store).version == 2
    assert "str" in str(beat(store).error)


def test_an_unchanged_heartbeat_is_not_repeated_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run, live = Run(store), Counting(store)
    run.publish()
    subscriber, weights = pulse.Subscriber(live, heartbeat="w"), run.empty()
    for _ in range(20):
        subscriber.sync(weights)
    until(lambda: len(live.beats) == 1)
    run.publish()
    subscriber.sync(weights)
    until(lambda: len(live.beats) == 2)
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    monkeypatch.setattr(subscriber._heart, "_next", 0.0)
    subscriber.sync(weights)
    until(lambda: len(live.beats) == 3)
    assert [written.version for written in live.beats] == [0, 2, 2]


def test_a_heartbeat_delays_no_sync(store: Store) -> None:
    """While the store does not respond, syncs go on; afterwards only the newest heartbeat is written."""
    run, live = Run(store), Counting(store)
    subscriber, weights = pulse.Subscriber(live, heartbeat="w"), run.empty()
    live.go_on.clear()
    for _ in range(5):
        run.publish()
        subscriber.sync(weights)
    assert live.beats == []
    live.go_on.set()
    until(lambda: len(live.beats) == 2)
    assert [written.version for written in live.beats] == [0, 8]


@pytest.mark.parametrize("name", ["", ".hidden", "../w", "a/b", "a b", "ä", "x" * 65, 3])
def test_an_invalid_id(name: Any) -> None:
    with pytest.raises(ValueError, match="heartbeat: "):
        pulse.Subscriber("memory://", heartbeat=name)


def test_a_process_writes_its_last_heartbeat_before_it_exits(tmp_path: Path) -> None:
    """One whose store does not respond exits all the same."""
    run = Run(tmp_path)
    run.publish()
    code = (
        "import sys, time, numpy as np, pulse_rl as p; from pulse_rl.history import heartbeat\n"
        "store = p.open_store(sys.argv[1]); put = store.put\n"
        "def slow(*a, **o): time.sleep(float(sys.argv[2])); put(*a, **o)\n"
        "store.put = slow; heartbeat.AT_EXIT_S = 1\n"
        "p.Subscriber(store, heartbeat=sys.argv[3]).sync({'w': np.zeros(9000, np.uint16)})"
    )
    for seconds, name in (("0.3", "quick"), ("1000", "never")):
        subprocess.run([sys.executable, "-c", code, str(tmp_path), seconds, name], check=True, timeout=60)
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["quick.json"]
    assert beat(pulse.open_store(tmp_path), "quick").version == 0


def test_behind_a_web_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat is a warning, once; status shows what can be known without a listing."""
    run = Run(tmp_path / "run", anchor_every=3)
    run.publish(5)
    url = f"http://127.0.0.1:{servers.web(tmp_path)}/run"
    subscriber, weights = pulse.Subscriber(url, heartbeat="w"), run.empty()
    with caplog.at_level(logging.WARNING, "pulse_rl.history.heartbeat"):
        assert subscriber.sync(weights).version == 8
        until(lambda: bool(caplog.records))
        run.publish()
        assert subscriber.sync(weights).version == 10
        assert subscriber._heart is not None
        until(lambda: subscriber._heart is not None and subscriber._heart._thread is None)
    assert [record.getMessage() for record in caplog.records] == [
        f"the heartbeat of w could not be written: cannot write heartbeats/w.json in {url}: over HTTP a store can only "
        "be read; publish to the directory or bucket behind it"
    ]
    seen, whole = status(url), status(tmp_path / "run")
    assert (seen.listing, seen.subscribers) == (None, None)
    assert msgspec.structs.replace(seen, url=whole.url) == msgspec.structs.replace(
        whole, listing=None, subscribers=None
    )


def test_over_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real server: heartbeats, status, and a pruning that keeps them."""
    servers.use_s3(monkeypatch, servers.moto())
    url = f"s3://{servers.s3_bucket()}/run"
    run = Run(url, anchor_every=3)
    run.publish(8)
    weights = run.empty()
    pulse.Subscriber(url, heartbeat="w").sync(weights)
    history = History(url)
    until(lambda: bool(history.store.list("heartbeats")))
    delete_planned(history, Retention(2, None, 0).plan(history))
    seen = status(url)
    assert seen.subscribers is not None
    assert [(s.id, s.version, s.lag, s.error) for s in seen.subscribers] == [("w", 14, 0, None)]
    assert abs(seen.subscribers[0].seen - time.time()) < 60
    assert (seen.versions, seen.oldest, seen.newest, seen.problems) == (2, 12, 14, ())


def test_versions_that_are_pruned_while_they_are_read_are_not_described(store: Store) -> None:
    run = Run(store, anchor_every=4)
    run.publish(10)

    class Overtaken(History):
        def sequences(self) -> list[int]:
            found = super().sequences()
            delete_planned(self, Retention(retain=1, grace=0).plan(History(store), leftovers=True))
            return found

    info = store_info(Overtaken(store))
    assert [version.sequence for version in info.versions] == History(store).sequences() == [8, 9]
    assert info.problems == ()


def test_status_compared_with_all_manifests(store: Store) -> None:
    run = Run(store, anchor_every=20)
    run.publish(70)
    seen, listed = status(store), store_info(History(store))
    sizes = [version.patch_nbytes for version in listed.versions]
    assert (seen.versions, seen.oldest, seen.newest, seen.sequence) == (70, 0, 138, 69)
    assert (seen.digest, seen.full_nbytes) == (listed.versions[-1].digest, listed.full_nbytes)
    assert seen.recent is not None
    assert seen.recent.patches == Objects(64, sum(sizes[-64:]))
    assert seen.recent.reduction == listed.full_nbytes / seen.recent.patch_nbytes
    assert seen.listing is not None
    assert seen.listing.patches.nbytes == sum(info.nbytes for info in store.list("patches"))
    assert seen.listing.patches.count == 69 + 17 + 4 + 1  # with skip patches over 4, 16 and 64
    assert seen.recent.skips.count == 15 + 4 + 1  # those of span 4 from number 5 on, and all longer ones
    assert seen.listing.anchors.nbytes == sum(version.anchor_nbytes for version in listed.versions)
    assert seen.listing.anchor_sequences == (0, 20, 40, 60)
    assert seen.listing.unnamed == Objects(0, 0)
    assert (seen.problems, seen.subscribers) == ((), ())


def test_status_reads_few_objects(store: Store) -> None:
    """However many versions there are: first.json, two manifests, a trail, the heartbeats, and end.json."""
    Run(store).publish(40)
    store.put("heartbeats/a.json", msgspec.json.encode(Heartbeat("a", 0, 0, 0, None, 0.1, 5)))
    counting = Counting(store)
    status(counting)
    assert len(counting.gets) == 6


def test_heartbeats_are_hostile(store: Store) -> None:
    """Each is reported with its fault; nothing that would move a terminal's cursor is printed."""
    Run(store).publish(3)
    good: dict[str, Any] = msgspec.to_builtins(Heartbeat("good", 2, 1, 0, f"a{ERASE}b\u202ec\nd", 0.1, 5))
    bad = {
        "large": b" " * 5000,
        "empty": b"",
        "list": b"[]",
        "other": json.dumps(good).encode(),
        "version": json.dumps(good | {"id": "version", "version": "2"}).encode(),
        "less": json.dumps(good | {"id": "less", "lag": -1}).encode(),
        "huge": json.dumps(good | {"id": "huge", "sync_s": 1e300}).encode(),
        "erase": json.dumps(good | {"id": ERASE}).encode(),
        "deep": b"[" * 4000,
    }
    for name, data in (bad | {"good": json.dumps(good).encode()}).items():
        store.put(f"heartbeats/{name}.json", data)
    for name in ("heartbeats/x.txt", "heartbeats/a/b.json", "heartbeats/.json"):
        store.put(name, b"no heartbeat")
    seen = status(store).subscribers
    assert seen is not None
    assert [info.id for info in seen] == sorted([*bad, "good"])
    for info in seen:
        assert (info.unreadable is None) == (info.id == "good")
        assert all(char.isprintable() for char in (info.unreadable or "") + (info.error or ""))
    assert next((s.version, s.lag, s.error) for s in seen if s.id == "good") == (2, 1, "a\ufffd[2Jb\ufffdc d")
    assert verify(store).ok


def test_a_damaged_store_has_a_status(tmp_path: Path) -> None:
    """The newest manifest, the trail, first.json, and a manifest in the middle: each is reported."""
    Run(tmp_path, anchor_every=3).publish(9)
    (tmp_path / manifest_name(8)).write_bytes(b"other bytes")
    (tmp_path / manifest_name(4)).unlink()
    (tmp_path / FIRST).write_bytes(b"none")
    next((tmp_path / "trails").glob("000000000007-*")).write_bytes(b"none")
    (tmp_path / "patches" / "000000000009-00000000000000aa.safetensors").write_bytes(b"of a failed attempt")
    seen = status(tmp_path)
    assert (seen.newest, seen.recent) == (14, None)
    for problem, name in zip(seen.problems, ["first.json", "1 manifests are missing", "000008", "000007"], strict=True):
        assert name in problem
    assert seen.listing is not None
    assert seen.listing.unnamed.count == 1 + 3  # and the patches and the trail of the version that is missing
    for sequence in range(8):
        (tmp_path / manifest_name(sequence)).write_bytes(b"other bytes")
    with pytest.raises(pulse.IntegrityError, match="none of the newest manifests"):
        status(tmp_path)


def reaches(store: Any, run: Run) -> bool:
    """Whether a new subscriber reaches the newest version."""
    try:
        return pulse.Subscriber(store).sync(run.empty()).version == status(store).newest
    except pulse.PulseError:
        return False


@pytest.mark.parametrize(
    ("removed", "starts", "missing"),
    [
        (("anchors/000000000000-*/model.safetensors",), False, "of anchors: anchors/000000000000-"),
        (("patches/000000000009-*",), False, ": patches/000000000009-"),  # a version's own: no skip patch is over it
        (("patches/000000000006-*",), True, ": patches/000000000006-"),  # a skip patch is
        (("patches/000000000005-*", "patches/000000000008-*"), False, ": patches/000000000005-"),
    ],
)
def test_status_compares_what_the_newest_version_needs_with_the_listing(
    tmp_path: Path, removed: tuple[str, ...], starts: bool, missing: str
) -> None:
    """The only anchor, and patches with and without a skip patch over them; compared with a new subscriber."""
    run = Run(tmp_path)
    run.publish(10)
    sound = status(tmp_path)
    assert (sound.verdict, sound.problems, reaches(tmp_path, run)) == ("ok", (), True)
    for pattern in removed:
        for file in tmp_path.glob(pattern):
            file.unlink()
    seen = status(tmp_path)
    assert seen.verdict == "damaged"
    assert missing in seen.problems[0]
    assert reaches(tmp_path, run) == starts
    assert any(problem.startswith("a new subscriber cannot start: ") for problem in seen.problems) != starts


def test_status_names_the_part_of_a_patch_that_is_missing(tmp_path: Path) -> None:
    run, store = Run(tmp_path), pulse.open_store(tmp_path)
    run.publish()
    old, new = {"w": run.bits["w"].copy()}, {"w": run.bits["w"] + 1}
    run.bits["w"] += 1
    publish_parts(store, old, new, even(3), 3)
    assert (status(tmp_path).problems, reaches(tmp_path, run)) == ((), True)
    for part in ("00001.safetensors", "parts.json"):
        (file,) = tmp_path.glob(f"patches/000000000001-*/{part}")
        data = file.read_bytes()
        file.unlink()
        seen = status(tmp_path)
        assert seen.problems[0] == f"missing or cut short: {file.relative_to(tmp_path).as_posix()}"
        assert (len(seen.problems), reaches(tmp_path, run)) == (2, False)
        file.write_bytes(data)


def test_status_goes_back_to_an_older_anchor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a new subscriber does; and a file that is cut short is no anchor."""
    run = Run(tmp_path, anchor_every=5)
    run.publish(8)
    (file,) = tmp_path.glob("anchors/000000000005-*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    seen = status(tmp_path)
    assert (seen.verdict, len(seen.problems), reaches(tmp_path, run)) == ("damaged", 1, True)
    assert file.relative_to(tmp_path).as_posix() in seen.problems[0]
    file.unlink()
    code, out, _ = command(capsys, "status", tmp_path)
    assert code == 1
    assert "\nanchors       1 (sequence number 0); the one of sequence number 5, the newest, is missing\n" in out


def test_a_version_committed_while_status_lists_misses_nothing(tmp_path: Path) -> None:
    """Its manifest is listed and its patch is not: it came between the two."""
    run = Run(tmp_path)
    run.publish(3)

    class Late(Counting):
        def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
            listed: list[ObjectInfo] = self.inner.list(prefix, after)
            if prefix == "patches" and not self.gets:
                self.gets.append(prefix)
                return listed[:-1]
            return listed

    late = Late(pulse.open_store(tmp_path))
    assert (status(late).problems, "patches" in late.gets) == ((), True)


def test_the_status_of_one_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path).publish()
    assert "\nversions      1, version 0, the newest " in command(capsys, "status", tmp_path)[1]


def test_status_shows_what_the_trainer_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publisher = pulse.Publisher(tmp_path)
    for version, step in enumerate((10, 11, 7)):  # resumed from a checkpoint of step 6
        publisher.publish({"w": np.zeros(4, np.float32)}, version=version, metadata={"step": step, "loss": 0.25})
        assert pulse.status(tmp_path).metadata == {"step": step, "loss": 0.25}
    assert "\nnoted of it   step 7, loss 0.25\n" in command(capsys, "status", tmp_path)[1]


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, args)])
    return stop.value.code, *capsys.readouterr()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a run's directory: what they print, as text and as JSON, and that a dry run deletes nothing."""
    store = pulse.open_store(tmp_path / "store")
    Run(store, anchor_every=3).publish(11)
    store.put("heartbeats/worker-3.json", msgspec.json.encode(Heartbeat("worker-3", 8, 4, 0, "no [b]", 0.1, 5)))

    def listing() -> list[ObjectInfo]:
        return [info for prefix in ("manifests", "patches", "trails", "anchors") for info in store.list(prefix)]

    code, out, err = command(capsys, "status", tmp_path)
    assert (code, err) == (1, "")  # worker-3 fails
    assert "versions      11, 0 to 20, the newest " in out
    assert out.splitlines()[-1].split()[:4] == ["worker-3", "failing", "8", "6"]
    assert out.splitlines()[-1].rstrip().endswith("no [b]")
    code, out, err = command(capsys, "status", tmp_path, "--json")
    shown, expected = json.loads(out), json.loads(msgspec.json.encode(status(store)))
    for found in (shown, expected):
        assert 0 <= found["listing"].pop("age_s") < 600
        assert 0 <= found["subscribers"][0].pop("lag_s") < 600
    assert shown == expected | {"alarms": []}
    before = listing()
    settings = ["--retain", 2, "--keep-every", 2, "--grace", 0]
    code, dry, err = command(capsys, "prune", tmp_path, *settings, "--dry-run", "--json")
    assert listing() == before
    code, out, err = command(capsys, "prune", tmp_path, *settings, "--dry-run")
    assert "would delete  7 versions and " in out
    assert out.endswith("all from version 18 (sequence number 9) on, and permanently sequence numbers 0, 6\n"), out
    assert listing() == before
    code, out, err = command(capsys, "prune", tmp_path, *settings, "--json")
    assert (code, out) == (0, dry)
    assert json.loads(out)["nbytes"] == sum(info.nbytes for info in {*before} - {*listing()})
    assert json.loads(out)["kept_nbytes"] == sum(info.nbytes for info in listing())
    assert json.loads(out)["kept"] == History(store).sequences() == [0, 6, 9, 10]
    code, out, err = command(capsys, "prune", tmp_path, *settings)
    assert "deletes  nothing" in out
    assert "worker-3" in command(capsys, "status", tmp_path)[1]
    assert verify(store).ok


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("s3:/bucket/run", 2),  # slips in a URL
        ("s4://bucket/run", 2),
        ("https:/host/run", 2),
        ("missing", 2),
        ("file", 2),
        ("empty", 2),  # neither a store nor anything else
        ("begun", 1),  # a store, without a version
    ],
)
@pytest.mark.parametrize("options", [[], ["--watch", "0.1"]], ids=["once", "watching"])
def test_status_exits_with_2_where_there_is_no_store(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    expected: int,
    options: list[str],
) -> None:
    """Also while it watches: where the target is a slip by itself, else when it is stopped."""

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pulse_rl.cli.stores.time.sleep", stop)
    (tmp_path / "file").write_bytes(b"no store")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "manifests").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "status", target, *options)
    assert (code, out) == (expected, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_what_the_commands_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifests").mkdir()
    assert command(capsys, "status", tmp_path)[2].endswith("holds no version yet\n")
    assert "deletes  nothing" in command(capsys, "prune", tmp_path, "--retain", 3)[1]
    assert command(capsys, "prune", tmp_path)[0] == 2
    assert command(capsys, "prune", tmp_path, "--retain", 0)[0] == 2
    assert command(capsys, "prune", tmp_path, "--retain", 1, "--grace", "nan")[0] == 2
    patch = tmp_path / "p.safetensors"
    weights = {"w": np.arange(9, dtype=np.uint16)}
    patch.write_bytes(pulse.diff(weights, weights, base=0, target=1))
    code, _, err = command(capsys, "status", patch)
    assert (code, err) == (2, f"error: {patch}: expected a store or the directory of a run, found a patch\n")
    url = f"http://127.0.0.1:{servers.web(tmp_path)}/"
    code, _, err = command(capsys, "prune", url, "--retain", 1)
    assert code == 1
    assert "a web server has no reliable listing" in err


def test_the_command_has_the_library_s_grace() -> None:
    assert stores.prune.__defaults__ is not None
    assert GRACE_S in stores.prune.__defaults__
