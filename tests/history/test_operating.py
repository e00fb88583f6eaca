"""What an operator of a store meets: verdicts and exit codes, what the dead left, and objects of somebody else."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.history.heartbeat import Heartbeat
from pulse_rl.history.history import History
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.store.base import Store
from tests.history.test_status import Run, command, until
from tests.store import servers


def put_beat(store: Store, name: str, sequence: int | None, error: str | None = None) -> None:
    beat = Heartbeat(name, sequence, sequence, 0, error, 0.1, 5, "host-1", "pulse-rl 9.9")
    store.put(f"heartbeats/{name}.json", msgspec.json.encode(beat))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_verdict_for_each_subscriber(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From ok to damaged, and the worst of all for the store; the exit code says the same to a monitor."""
    store = pulse.open_store(tmp_path)
    Run(store).publish(6)

    def verdicts(**options: Any) -> tuple[dict[str, str], str]:
        seen = pulse.status(store, **options)
        assert seen.subscribers is not None
        return {one.id: one.verdict for one in seen.subscribers}, seen.verdict

    assert verdicts() == ({}, "ok")
    put_beat(store, "good", 5)
    put_beat(store, "slow", 3)
    assert verdicts() == ({"good": "ok", "slow": "ok"}, "ok")
    assert command(capsys, "status", tmp_path)[0] == 0
    assert verdicts(max_lag=2)[1] == "ok"
    assert verdicts(max_lag=1) == ({"good": "ok", "slow": "behind"}, "behind")
    assert command(capsys, "status", tmp_path, "--max-lag", 1)[0] == 1
    put_beat(store, "failing", 5, "it failed")
    assert verdicts(max_lag=1)[1] == "failing"
    put_beat(store, "silent", 5)
    age(tmp_path / "heartbeats" / "silent.json", 400)
    assert verdicts()[0]["silent"] == "silent"
    assert verdicts()[1] == "silent"
    assert verdicts(max_silence=500)[1] == "failing"
    (tmp_path / "heartbeats" / "bad.json").write_bytes(b"?")
    assert verdicts()[0]["bad"] == verdicts()[1] == "damaged"
    seen = pulse.status(store, expire=300)
    assert seen.expired == 1
    assert seen.subscribers is not None
    assert [(one.id, one.host, one.software) for one in seen.subscribers if one.id == "good"] == [
        ("good", "host-1", "pulse-rl 9.9")
    ]
    code, out, err = command(capsys, "status", tmp_path, "--json", "--max-lag", 0)
    document = json.loads(out)
    assert (code, err, document["verdict"]) == (1, "", "damaged")
    assert document["subscribers"][-1]["verdict"] == "behind"


def test_a_clock_that_was_ahead_for_a_while(tmp_path: Path) -> None:
    """What it has written days ahead makes nobody silent or gone, once newer versions and heartbeats tell the time."""
    store = pulse.open_store(tmp_path)
    Run(store).publish(3)
    put_beat(store, "w", 2)
    for name in ("anchors/000000000000-*/*.safetensors", "patches/000000000001-*", "manifests/000000000001.json"):
        (path,) = tmp_path.glob(name)
        age(path, -3 * 86400)
    seen = pulse.status(store)
    assert [(one.id, one.verdict) for one in seen.subscribers or ()] == [("w", "ok")]
    assert seen.listing is not None
    assert (seen.expired, seen.listing.age_s < 60) == (0, True)
    assert Retention(1).plan(History(store), leftovers=True).heartbeats == ()


def test_nobody_is_silent_where_the_run_has_ended(tmp_path: Path) -> None:
    with pulse.Publisher(tmp_path) as publisher:
        publisher.publish({"w": np.zeros(3)}, version=0)
        put_beat(pulse.open_store(tmp_path), "w", 0)
        age(tmp_path / "heartbeats" / "w.json", 400)
        assert pulse.status(tmp_path).verdict == "silent"
        publisher.end()
    assert pulse.status(tmp_path).verdict == "ok"


def test_exit_codes_for_monitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 where the store cannot be read, in one line; 1 where there is no version yet."""
    assert command(capsys, "status", tmp_path / "none")[0] == 2
    (tmp_path / "manifests").mkdir()
    assert command(capsys, "status", tmp_path)[0] == 1
    start = time.monotonic()
    code, out, err = command(capsys, "status", f"http://127.0.0.1:{servers.free_port()}/a")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert time.monotonic() - start < 20


def test_status_watches(tmp_path: Path) -> None:
    """One document a look, until Ctrl-C, which is no failure."""
    Run(tmp_path).publish(1)
    program = "from pulse_rl.cli.main import main; main()"
    command = [sys.executable, "-c", program, "status", str(tmp_path), "--json", "--watch", "0.1"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert watching.stdout is not None
    for _ in range(3):
        assert json.loads(watching.stdout.readline())["newest"] == 0
    watching.send_signal(2)
    assert watching.wait(30) == 0


def test_a_waiting_subscriber_is_alive(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_rl.history.heartbeat.EVERY_S", 0.0)
    subscriber = pulse.Subscriber(store, heartbeat="w")
    with pytest.raises(TimeoutError):
        subscriber.wait(0, 0.3)
    until(lambda: bool(store.list("heartbeats")))
    run = Run(store)
    run.publish()
    weights = run.empty()
    subscriber.sync(weights)
    heart = subscriber._heart
    assert heart is not None
    until(lambda: heart._thread is None)
    before = pulse.status(store).subscribers
    store.delete("heartbeats/w.json")
    with pytest.raises(TimeoutError):
        subscriber.wait(1, 0.3)
    until(lambda: bool(store.list("heartbeats")))
    after = pulse.status(store).subscribers
    assert before is not None
    assert after is not None
    assert (after[0].version, after[0].verdict) == (before[0].version, "ok") == (0, "ok")


def test_heartbeats_of_the_dead_are_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = pulse.open_store(tmp_path)
    Run(store).publish(2)
    put_beat(store, "old", 1)
    put_beat(store, "new", 1)
    age(tmp_path / "heartbeats" / "old.json", 2 * 86400)
    assert "1 heartbeat," in command(capsys, "prune", tmp_path, "--retain", 5)[1]
    assert [info.name for info in store.list("heartbeats")] == ["heartbeats/new.json"]
    age(tmp_path / "heartbeats" / "new.json", 100)
    command(capsys, "prune", tmp_path, "--retain", 5, "--expire", 50)
    assert store.list("heartbeats") == []


KILLED = """
import os, sys, numpy as np, pulse_rl as pulse
from pulse_rl.history import anchor
def killed(*arguments):
    for number, part in enumerate(stream(*arguments)):
        if number == 30:
            os.kill(os.getpid(), 9)
        yield part
stream, anchor.stream_shard = anchor.stream_shard, killed
pulse.Publisher(sys.argv[1]).publish({"w": np.zeros(64 << 20, np.uint8)}, version=9, anchor=True)
"""


def test_uploads_of_a_killed_publisher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by status, pruned when nobody writes to them any more, and by no one else's doing."""
    Run(tmp_path / "run").publish(2)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "other")], check=False)
    (left,) = (tmp_path / "other" / "anchors").rglob("*#*")
    size = left.stat().st_size
    assert size > 1 << 20
    target = tmp_path / "run" / "anchors" / left.parent.name / left.name
    target.parent.mkdir()
    left.rename(target)
    for foreign in ("a#b", "patches/x#1", "anchors/notes#1"):
        (tmp_path / "run" / foreign).write_bytes(b"somebody else's")
    store = pulse.open_store(tmp_path / "run")
    listing = pulse.status(store).listing
    assert listing is not None
    assert (listing.partial.count, listing.partial.nbytes) == (1, size)
    retention = Retention(5, None, 0)
    assert retention.plan(History(store), leftovers=True).partial == ()  # perhaps it is under way
    with monkeypatch.context() as ahead:
        now = time.time()
        ahead.setattr(time, "time", lambda: now + 100)  # of the file server, by whose clock it is new
        assert retention.plan(History(store), leftovers=True).partial == ()
    age(target, 100)
    assert Retention(5).plan(History(store), leftovers=True).partial == ()  # within the grace period
    code, out, _ = command(capsys, "prune", tmp_path / "run", "--retain", 5, "--grace", 0)
    assert code == 0
    assert "1 unfinished upload," in out
    assert not target.exists()
    assert (tmp_path / "run" / "patches/x#1").exists()
    assert pulse.verify(store).ok


def test_a_pruning_that_deletes_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path, anchor_every=50).publish(8)
    assert (
        "no version goes: version 10, the oldest to keep, can only be reached from the oldest anchor"
        in (command(capsys, "prune", tmp_path, "--retain", 3, "--grace", 0)[1])
    )
    assert (
        "no version goes: only 0 of 8 versions are older than the grace period of 3600 s"
        in (command(capsys, "prune", tmp_path, "--retain", 3)[1])
    )
    assert "no version goes" not in command(capsys, "prune", tmp_path, "--retain", 8)[1]


@pytest.mark.parametrize("foreign", ["bytes", "loop", "up", "dangling", "dots"])
def test_foreign_objects_stop_nobody(tmp_path: Path, foreign: str) -> None:
    """Among the manifests: a name that is no text, links that lead nowhere or in a circle."""
    run = Run(tmp_path / "run", anchor_every=2, retain=2, grace=0)
    run.publish()
    folder = tmp_path / "run" / "manifests"
    if foreign == "bytes":
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.json")).write_bytes(b"x")
    elif foreign == "dots":
        (folder / "..x").write_bytes(b"x")
    else:
        target = {"loop": "link", "up": str(tmp_path / "run"), "dangling": "nowhere"}[foreign]
        (folder / "link").symlink_to(target)
    subscriber, live = pulse.Subscriber(tmp_path / "run", heartbeat="w"), run.empty()
    for version in (2, 4, 6):
        run.publish()
        assert subscriber.sync(live).version == version
    np.testing.assert_array_equal(live["w"], run.bits["w"])
    assert pulse.verify(tmp_path / "run").problems == ()
    assert pulse.status(tmp_path / "run").problems == ()
    history = History(tmp_path / "run")
    delete_planned(history, Retention(1, None, 0).plan(history, leftovers=True))


def test_a_foreign_object_in_a_bucket_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    servers.use_s3(monkeypatch, servers.moto())
    bucket = servers.s3_bucket()
    where = f"http://127.0.0.1:{servers.moto()}/{bucket}/run/manifests//x"
    urllib.request.urlopen(urllib.request.Request(where, data=b"x", method="PUT")).close()
    run = Run(f"s3://{bucket}/run")
    run.publish(3)
    live = run.empty()
    assert pulse.Subscriber(f"s3://{bucket}/run").sync(live).version == 4
    assert pulse.verify(f"s3://{bucket}/run").problems == ()


def test_a_wrong_key_leaves_no_leftovers(tmp_path: Path) -> None:
    """What unreadable manifests refer to is not known, so it is not called a leftover."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    Run(tmp_path, sign_with=Ed25519PrivateKey.generate()).publish(3)
    report = pulse.verify(tmp_path, public_key=Ed25519PrivateKey.generate().public_key())
    assert not report.ok
    assert report.leftovers == ()
