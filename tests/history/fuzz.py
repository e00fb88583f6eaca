"""Hostile patches and histories, 100,000 of them: only our own errors, and never a wrong bit.

    make fuzz-history                                   # or: python -m tests.history.fuzz --cases 100000 --seed 0
    python -m tests.history.fuzz --seed 0 --case 4711   # repeat one of them, with the traceback of its finding

Each case is one mutation (`mutations.py`) of a patch, given to `inspect` and `apply`; of a manifest, given to its
parser; or of one object of a small history, from which a subscriber then syncs. Checked is that

- only PulseError is raised, or what else the docstring of `apply` promises;
- the live weights are bit for bit as they were, or a state of the history, or, where a mutation is a valid patch to
  another state, a state with the promised digest;
- the live bits have the digest of the version that a subscriber reports;
- no case takes SECONDS, nor ALLOWED bytes of memory: twice the limits of one patch in docs/format.md. A limit on the
  data of the process (RLIMIT_DATA) enforces that. tracemalloc would not count the memory of zstd, Rust and the
  kernels, and the resident size not what is reserved and never touched.

The cases run in child processes, so that a crash is a finding like any other.
"""

import argparse
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import zstandard

import pulse_rl as pulse
from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs import choose
from pulse_rl.history import manifest
from pulse_rl.log.signing import Keys
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.table import MAX_TABLE_NBYTES
from tests.forked import forking
from tests.history import mutations, world
from tests.patch.tools import seal, snapshot, take_apart
from tests.store.through import Through, unlisted

CODECS = tuple(choose.CODECS)
SECONDS = 20.0  # for one case; the slowest valid one takes well under one
ALLOWED = 2 * (safetensors_header.MAX_HEADER_NBYTES + MAX_TABLE_NBYTES + patch_format.MAX_BLOCK_NBYTES)


class Wrong(AssertionError):
    """A case did what it must not do."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Limit the time of a block, and the memory that the process takes beyond what it has now."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Wrong(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        signal.signal(signal.SIGALRM, before)


def patch_case(random: Random) -> str:
    """A mutated patch is inspected and applied to weights that hold its base."""
    subjects = world.patches()
    subject = random.choice(subjects[world.BIG :] if random.random() < 0.02 else subjects[: world.BIG])
    if random.random() < 1 / 1500:
        data = mutations.bomb(random, subject.patch, random.choice(mutations.BOMBS))
    else:
        donor = random.choice(subjects[: world.BIG]).patch
        data = mutations.mutated_patch(random, subject.patch, donor)
        if random.random() < 0.15 and _readable(data):
            with suppress(zstandard.ZstdError, ValueError):  # where what it would change is broken already
                data = mutations.mutated_patch(random, data, donor)
    outcome, reached = apply_patch(subject, data)
    if reached is not None:  # a forger would put in the digest that it leads to: then it must be accepted
        metadata, streams = take_apart(data)
        metadata["target_digest"] = reached
        forged, _ = apply_patch(subject, seal(metadata, streams))
        expect(forged == "accepted", f"a patch whose digests are right was {forged}")
        outcome = "forged"
    return f"patch {outcome}"


def _readable(data: bytes) -> bool:
    try:
        pulse.inspect(data)
    except pulse.PulseError:
        return False
    return True


def apply_patch(subject: world.Subject, data: bytes) -> tuple[str, str | None]:
    """The outcome; and the digest that the patch leads to, if only the digest that it promises is wrong."""
    weights = subject.weights()
    before = snapshot(weights)
    try:
        info: pulse.PatchInfo | None = pulse.inspect(data)
    except (pulse.PatchFormatError, pulse.VersionSkewError):
        info = None
    try:
        applied = pulse.apply(weights, data)
    except pulse.PulseError as error:
        expect(
            info is not None or isinstance(error, (pulse.PatchFormatError, pulse.VersionSkewError)),
            f"inspect refuses, apply raises {error!r}",
        )
        expect(snapshot(weights) == before, f"apply failed and left other weights: {error!r}")
        return f"refused: {type(error).__name__}", reached_digest(error)
    expect(info == applied, "inspect and apply return different things")
    expect(pulse.digest(weights) == applied.digests["target"], "applied, and the digest is not the target's")
    if applied.digests["target"] == subject.target_digest:
        expect(snapshot(weights) == subject.target, "applied, with the target's digest and other bits")
    return "accepted", None


def reached_digest(error: pulse.PulseError) -> str | None:
    """The digest that a patch leads to, where that is another than it promises."""
    if isinstance(error, pulse.IntegrityError) and error.name is None and isinstance(error.found, str):
        return error.found
    return None


def manifest_case(random: Random) -> str:
    """A mutated manifest is parsed."""
    history = world.history(random.choice(CODECS))
    sequence = random.randrange(world.VERSIONS)
    data = history.objects[manifest.manifest_name(sequence)]
    donor = history.objects[manifest.manifest_name(random.randrange(world.VERSIONS))]
    mutated = mutations.mutated_manifest(random, data, donor)
    signed = random.random() < 0.3
    try:
        parsed = manifest.parse(mutated, sequence, Keys(None, world.keys()[1]) if signed else None, "it")
    except (pulse.IntegrityError, pulse.VersionSkewError):
        return "manifest refused"
    expect(not signed or parsed == manifest.parse(data, sequence, None, "it"), "an unsigned manifest was believed")
    expect(parsed.sequence == sequence, "a manifest of another number was believed")
    return "manifest accepted"


def history_case(random: Random) -> str:
    """One object of a history is mutated, and a subscriber that holds some version of it, or none, syncs."""
    history = world.history(random.choice(CODECS))
    (kind,) = random.choices(["manifests", "patches", "trails", "anchors", "first.json"], [8, 8, 4, 5, 1])
    names = history.like(kind)
    name = random.choice(names if random.random() < 0.5 else names[-2:])  # a subscriber reads the last ones first
    changed, forged = mutate_object(random, history, name)
    signed = random.random() < 0.2
    store: Any = (
        Through(history.store, before=unlisted) if name == "first.json" or random.random() < 0.1 else history.store
    )
    subscriber = pulse.Subscriber(store, public_key=world.keys()[1] if signed else None)
    held = None if random.random() < 0.4 else random.randrange(world.VERSIONS - 1)
    weights = history.weights(held, copied=random.random() < 0.3)
    if held is not None and random.random() < 0.5:
        subscriber.sync(weights, version=history.versions[held])
        expect(subscriber.version == history.versions[held], "the sound history was not followed")
    before = snapshot(weights)
    for path, data in changed.items():
        history.store.put(path, data)
    try:
        report = subscriber.sync(weights, version=random.choice([None, None, None, history.versions[-1]]))
        outcome = "around" if report.recovered else "synced"
    except pulse.PulseError as error:
        outcome = f"refused: {type(error).__name__}"
    finally:
        for path in changed:
            history.store.put(path, history.objects[path])
    live = snapshot(weights)
    if subscriber.version is not None:
        once = {name: tensor for name, tensor in weights.items() if name != world.TIED}
        expect(pulse.digest(once) == subscriber.digest, f"{outcome}: the digest is not that of the live weights")
    states = [before, *history.states.values(), *forged]
    expect(live in states, f"{outcome}: the live weights are no state of the history")
    if signed and subscriber.version is not None:
        expect(subscriber.version in history.versions, "a version that was never signed was believed")
    return f"{kind} {'forged, ' if forged else ''}{outcome}"


def mutate_object(random: Random, history: world.History, name: str) -> tuple[dict[str, bytes], list[dict[str, bytes]]]:
    """The objects of a history that change when one is mutated, by name; mostly with all hashes updated.

    Also returns the states that become versions of the history, where the mutation is a valid patch to another state.
    """
    data, donor = history.objects[name], history.objects[random.choice(history.like(name.split("/")[0]))]
    if name.startswith("manifests/"):
        return {name: mutations.mutated_manifest(random, data, donor)}, []
    if name.startswith("patches/"):
        new = mutations.mutated_patch(random, data, donor)
        step = history.step_to(name)
        made = forge(new, history.weights(step - 1, copied=False)) if step and random.random() < 0.7 else None
        if made is not None:
            return history.repaired(name, made.patch, made.digest), [made.state]
    elif name.startswith("trails/"):
        new = mutations.mutated_frame(random, data, lambda text: mutations.mutated_document(random, text))
    elif name.endswith(".json"):
        new = mutations.mutated_document(random, data)
    else:
        new = mutations.mutated_anchor(random, data, donor)
    if name == "first.json" or random.random() < 0.15:
        return {name: new}, []
    return history.repaired(name, new), []


class Forged(NamedTuple):
    """A patch that was mutated and then given the digest that it leads to."""

    patch: bytes
    digest: str
    state: dict[str, bytes]


def forge(data: bytes, base: Any) -> Forged | None:
    """A mutated patch with the digest that it leads to from this base; None where another check refuses it."""
    try:
        pulse.apply(base, data)
    except pulse.PulseError as error:
        reached = reached_digest(error)
        if reached is None:
            return None
        metadata, streams = take_apart(data)
        made = seal(metadata | {"target_digest": reached}, streams)
        expect(pulse.apply(base, made).digests["target"] == reached, "another digest than was counted")
        return Forged(made, reached, snapshot(base))
    return None


CASES = {patch_case: 0.6, manifest_case: 0.12, history_case: 0.28}


def run_case(seed: int, number: int) -> str:
    """Run one case and return its outcome. Raises its finding."""
    random = Random(f"{seed}/{number}")
    (case,) = random.choices(list(CASES), list(CASES.values()))
    with bounded(SECONDS, ALLOWED):
        return case(random)


class Finding(NamedTuple):
    """A case that did what it must not do."""

    number: int
    what: str


def warm_up() -> None:
    """Compile the kernels and start the threads, so that no case spends time on them."""
    for subject in world.patches():
        pulse.apply(subject.weights(), subject.patch)
    for history in map(world.history, CODECS):
        for held in (None, 0, world.VERSIONS - 2):
            pulse.Subscriber(history.store).sync(history.weights(held, copied=False))


class Outcome(NamedTuple):
    """How a case ended. found: whether it did what it must not do."""

    took_s: float
    what: str
    found: bool


def work(pipe: Connection, seed: int, part: range) -> None:
    """A child's part: cases one after another; each number is sent before the case, and its outcome after it."""
    os.environ["PULSE_THREADS"] = "1"  # the processes share the cores
    warm_up()
    for number in part:
        pipe.send(number)
        start = time.perf_counter()
        try:
            what, found = run_case(seed, number), False
        except BaseException as error:  # noqa: BLE001 — any exception is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            what, found = f"{type(error).__name__} at {place}: {str(error)[:300]!r}", True
        pipe.send(Outcome(time.perf_counter() - start, what, found))


class Child:
    """A process that runs a part of the cases."""

    def __init__(self, seed: int, part: range) -> None:
        self.part, self.number, self.known = part, part.start - 1, True
        context = forking()
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(there, seed, part))
        self.process.start()
        there.close()


def run(seed: int, cases: int, processes: int) -> tuple[Counter[str], list[Finding], float]:
    """Run cases in child processes. Returns how often each outcome occurred, the findings, and the slowest case, s."""
    share = -(-cases // processes)
    children = [Child(seed, range(at, min(at + share, cases))) for at in range(0, cases, share)]
    outcomes: Counter[str] = Counter()
    findings: list[Finding] = []
    slowest = 0.0
    while children:
        ready = wait([child.pipe for child in children])
        for child in [child for child in children if child.pipe in ready]:
            try:
                message = child.pipe.recv()
            except EOFError:
                children.remove(child)
                child.process.join()
                if died := child.process.exitcode:
                    after = " after it" if child.known else ""
                    findings.append(Finding(child.number, f"the process died: {died}{after}"))
                    if rest := range(child.number + 1, child.part.stop):
                        children.append(Child(seed, rest))
                continue
            child.known = isinstance(message, Outcome)
            if not child.known:
                child.number = message
                continue
            slowest = max(slowest, message.took_s)
            if message.found:
                findings.append(Finding(child.number, message.what))
            else:
                outcomes[message.what] += 1
    return outcomes, findings, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", type=int, help="run only this one, in this process, with its traceback")
    given = parser.parse_args()
    if given.case is not None:
        warm_up()
        print(run_case(given.seed, given.case))
        return 0
    warm_up()  # if this fails, so would every case
    start = time.perf_counter()
    outcomes, findings, slowest = run(given.seed, given.cases, given.processes)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8d}  {outcome}")
    for finding in findings:
        print(f"FOUND: --seed {given.seed} --case {finding.number}: {finding.what}")
    print(
        f"{given.cases} cases of seed {given.seed} in {time.perf_counter() - start:.0f} s, "
        f"the slowest {slowest:.2f} s: {len(findings)} found something"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
