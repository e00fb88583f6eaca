"""Faults for real: processes killed with SIGKILL at random points, stores that fail, truncate and flip bits.

    python -m tests.sync.test_faults --kills 500    # of publishers and as many of subscribers

A process is killed in one of two ways, drawn by seed: from outside after a random time, which hits anything, or
by itself at its k-th operation (a call of the store, a part of a stream, a write to live weights, of which only
half is done then), which hits the rare places often.
"""

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch

import pulse_rl as pulse
from pulse_rl.history.operate.verify import VerifyReport, verify
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.weights.bits import HostBits
from tests.forked import forking

SHAPES = {"embed": (96, 33), "mlp.up": (64, 41), "norm": (64,), "scale": (), "none": (0, 3)}  # of BF16 tensors
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
ANCHOR_EVERY, RETAIN = 3, 5
CODECS: tuple[Literal["gap", "context"], ...] = ("gap", "context")
LEDGER, SEEN = "ledger.jsonl", "seen.jsonl"  # what publishers were about to commit; what a subscriber synced to

Weights = dict[str, torch.Tensor]


def weights_over(bits: Any) -> Weights:
    """Weights whose memory is this array (SIZE,) of uint16, which may be mapped from a file."""
    found, at = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        found[name] = torch.from_numpy(bits[at : at + size]).view(torch.bfloat16).reshape(shape)
        at += size
    return found


def first_bits(seed: int = 0) -> Any:
    """BF16 bits as of trained weights."""
    return (np.random.default_rng(seed).normal(0, 0.02, SIZE).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )


def step(bits: Any, random: np.random.Generator) -> None:
    """Change BF16 bits as an optimizer does: a few move by one."""
    where = random.choice(SIZE, int(random.integers(1, SIZE // 20)), replace=False)
    bits[where] += random.choice(np.array([1, 65535], np.uint16), len(where))


def write_line(path: Path, **facts: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Doomed:
    """A store whose process kills itself at the k-th operation; parts of streams count, and what else calls `tick`."""

    def __init__(self, inner: Store, k: int | None) -> None:
        self._inner = inner
        self._left = k

    def __getattr__(self, name: str) -> Any:  # not an operation
        return getattr(self._inner, name)

    def tick(self) -> bool:
        """Count an operation. Returns whether it is the last one."""
        if self._left is not None:
            self._left -= 1
        return self._left == 0

    def _act(self, act: Callable[[], Any]) -> Any:
        if self.tick():
            die()
        return act()

    def put(self, name: str, data: Any, *, mode: Any = "overwrite") -> None:
        parts = data if isinstance(data, bytes) else self._parts(data)
        self._act(lambda: self._inner.put(name, parts, mode=mode))

    def _parts(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            yield self._act(lambda part=part: part)  # type: ignore[misc]

    def get(self, name: str) -> memoryview:
        return self._act(lambda: self._inner.get(name))  # type: ignore[no-any-return]

    def stream(self, name: str) -> Iterator[memoryview]:
        return self._parts(self._inner.stream(name))

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        return self._act(lambda: self._inner.list(prefix, after))  # type: ignore[no-any-return]

    def delete(self, name: str) -> None:
        self._act(lambda: self._inner.delete(name))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


# The doomed processes.


def publish_until_killed(store: Doomed, directory: Path, codec: Any, seed: int) -> None:
    """Continue the history, each attempt with other weights; the ledger lists each version before it is published."""
    random = np.random.default_rng(seed)
    publisher = pulse.Publisher(store, anchor_every=ANCHOR_EVERY, retain=RETAIN, grace=0, codec=codec)
    version = publisher.resume()
    bits = first_bits()
    weights = weights_over(bits)
    if version is not None:
        pulse.Subscriber(store).sync(weights)
    while True:
        version = 0 if version is None else version + 1
        step(bits, random)
        write_line(directory / LEDGER, version=version, digest=pulse.digest(weights))
        publisher.publish(weights, version=version)


def sync_until_killed(store: Doomed, directory: Path, codec: Any, seed: int) -> None:
    """Take weights in a file to versions drawn at random; the last write before a kill is half done."""
    random = np.random.default_rng(seed)

    def torn(write: Callable[..., None]) -> Callable[..., None]:
        def one(bits: HostBits, start: int, *what: Any) -> None:
            if store.tick():
                write(bits, start, *(part[: len(part) // 2] for part in what))
                die()
            write(bits, start, *what)

        return one

    HostBits.scatter, HostBits.write = torn(HostBits.scatter), torn(HostBits.write)  # type: ignore[method-assign]
    weights = weights_over(np.memmap(directory / "weights", np.uint16, "r+"))
    subscriber = pulse.Subscriber(store)
    newest = subscriber.latest()
    assert newest is not None
    while True:
        subscriber.sync(weights, version=int(random.integers(max(0, newest - RETAIN + 1), newest + 1)))


def watch(directory: Path) -> None:
    """Follow a history for ever; log the recounted digest after each sync, and every error."""
    bits = first_bits(1)
    weights = weights_over(bits)
    subscriber = pulse.Subscriber(directory / "store")
    before = pulse.digest(weights)
    while True:
        try:
            report = subscriber.sync(weights)
        except pulse.PulseError as error:
            after = pulse.digest(weights)
            write_line(directory / SEEN, error=str(error), moved=after not in (before, subscriber.digest))
        else:
            after = pulse.digest(weights)
            if report.route != "none":
                write_line(directory / SEEN, version=report.version, digest=after, reported=report.digest)
        before = after
        time.sleep(0.01)  # a hundred looks a second see every state that lasts, and leave the processor to the killed


# Their end.


def doom(pipe: Connection, role: Callable[..., None], directory: Path, codec: str, seed: int, k: int | None) -> None:
    os.environ["PULSE_THREADS"] = "1"
    torch.set_num_threads(1)
    signal.alarm(60)  # one that hangs ends too, and not by SIGKILL
    pipe.send("begun")
    role(Doomed(pulse.open_store(directory / "store"), k), directory, codec, seed)


def kill_one(role: Callable[..., None], directory: Path, codec: str, seed: int) -> None:
    """Run one process until it is killed; it must not end otherwise."""
    random = np.random.default_rng([seed, 7])
    after = float(random.uniform(0, 0.1)) if random.random() < 0.5 else None
    k = int(random.integers(1, 60)) if after is None else None
    context = forking()
    here, there = context.Pipe()
    process = context.Process(target=doom, args=(there, role, directory, codec, seed, k))
    process.start()
    if after is not None:
        here.recv()
        time.sleep(after)
        process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (role.__name__, codec, seed, process.exitcode)


@contextmanager
def watching(directory: Path) -> Iterator[None]:
    """A process follows the history until the end, and must not end before."""
    watcher = forking().Process(target=watch, args=(directory,))
    watcher.start()
    try:
        yield
    finally:
        watcher.kill()
        watcher.join()
    assert watcher.exitcode == -signal.SIGKILL, "the following subscriber has ended: see its traceback above"


def whole(store: Path) -> VerifyReport:
    """Verify a history after a kill: every listed version can be loaded; at most, a pruning is unfinished."""
    report = verify(pulse.open_store(store))
    assert not report.bad_versions, report.problems
    assert all(re.fullmatch(r"manifests \d+ to \d+ are missing", problem) for problem in report.problems), report
    return report


def kill_publishers(directory: Path, kills: int) -> dict[str, int]:
    """Kill publishers, of either codec in turn, while a subscriber follows; verify the history after every kill."""
    store = directory / "store"
    published: dict[int, str] = {}
    interrupted = 0
    with watching(directory):
        for seed in range(kills):
            kill_one(publish_until_killed, directory, CODECS[seed % 2], seed)
            if not (store / "manifests").exists():
                continue
            report = whole(store)
            interrupted += bool(report.problems) or bool(report.leftovers)
            offered = {(line["version"], line["digest"]) for line in lines(directory / LEDGER)}
            for manifest in pulse.History(store).manifests():
                # Each version is what one attempt offered, whole, and it never changes.
                assert (manifest.version, manifest.digest) in offered
                assert published.setdefault(manifest.version, manifest.digest) == manifest.digest
        _undisturbed(store, published)
        newest = max(published)
        _until(lambda: any(line.get("version") == newest for line in lines(directory / SEEN)))
    seen = lines(directory / SEEN)
    assert not [line for line in seen if line.get("moved")], "a failed sync moved the weights"
    # Versions that were committed and pruned between two looks are in the ledger alone.
    offered = {(line["version"], line["digest"]) for line in lines(directory / LEDGER)} | set(published.items())
    for line in seen:
        if "version" in line:
            assert line["digest"] == line["reported"] == published.get(line["version"], line["digest"])
            assert (line["version"], line["digest"]) in offered
    syncs = sum("version" in line for line in seen)
    return {"kills": kills, "versions": newest + 1, "remains": interrupted, "syncs": syncs, "errors": len(seen) - syncs}


def _undisturbed(store: Path, published: dict[int, str]) -> None:
    """A publisher that nobody kills continues the history, and retention deletes what the killed ones left."""
    publisher = pulse.Publisher(store, anchor_every=ANCHOR_EVERY, retain=RETAIN, grace=0)
    version = publisher.resume()
    assert version is not None
    assert publisher.digest == published[version]
    bits = first_bits()
    pulse.Subscriber(store).sync(weights_over(bits))
    for later in range(version + 1, version + 3 * RETAIN):
        step(bits, np.random.default_rng(later))
        published[later] = publisher.publish(weights_over(bits), version=later).digest
        assert published[later] == pulse.digest(weights_over(bits))
    report = verify(pulse.open_store(store))
    assert report.ok, report.problems


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s for the subscriber to reach the newest version"
        time.sleep(0.02)


def kill_subscribers(directory: Path, kills: int) -> dict[str, int]:
    """Kill subscribers in the middle of sync; another one takes their weights, in a file, to the newest version."""
    bits, random = first_bits(), np.random.default_rng(0)
    digests = set()
    for version in range(3 * RETAIN):
        if version % RETAIN == 0:  # patches of either codec
            codec: Any = CODECS[version // RETAIN % 2]
            publisher = pulse.Publisher(directory / "store", anchor_every=ANCHOR_EVERY, codec=codec)
            publisher.resume()
        digests.add(publisher.publish(weights_over(bits), version=version).digest)
        step(bits, random)
    first_bits(1).tofile(directory / "weights")
    torn = 0
    for seed in range(kills):
        kill_one(sync_until_killed, directory, "", seed)
        weights = weights_over(np.memmap(directory / "weights", np.uint16, "r+"))
        torn += pulse.digest(weights) not in digests
        subscriber = pulse.Subscriber(directory / "store")
        report = subscriber.sync(weights)
        assert (report.version, subscriber.version) == (publisher.version, publisher.version)
        assert pulse.digest(weights) == report.digest == publisher.digest
    return {"kills": kills, "half-written": torn}


def test_killed_publishers_leave_a_whole_history(tmp_path: Path) -> None:
    """Every version, and the follower's live weights, against what the publisher offered."""
    found = kill_publishers(tmp_path, kills=20)
    assert found["remains"] > 3  # the kills did hit the middle of publish
    assert found["versions"] > 6
    assert found["syncs"] > 3


def test_killed_subscribers_end_in_the_newest_version(tmp_path: Path) -> None:
    """The digest of the weights' file against the publisher's, after a restart."""
    half_written = 0  # kills in the middle of a write, which is a short time of each sync
    for attempt in range(5):
        scratch = tmp_path / str(attempt)
        scratch.mkdir()
        half_written += kill_subscribers(scratch, kills=30)["half-written"]
        if half_written > 3:
            return
    raise AssertionError(f"expected more than 3 of 150 kills in the middle of a write, found {half_written}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each kind (default 100)")
    options = parser.parse_args()
    for kill in (kill_publishers, kill_subscribers):
        with tempfile.TemporaryDirectory(prefix="pulse-rl-faults-") as scratch:
            start = time.monotonic()
            found = kill(Path(scratch), options.kills)
        facts = ", ".join(f"{what} {count}" for what, count in found.items())
        print(f"{kill.__name__:17} {facts}; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
