"""Ranks that publish one model together, or follow its history, of which one fails: by seed, at any point.

    make fuzz-ranks                                            # without end; or ARGS="--cases 500 --seed 7"
    python -m tests.sync.fuzz_ranks --seed 7 --first 41 --cases 1   # repeat one case

Each case is one history. In each of its rounds a group of ranks, of a size that is drawn, goes on from where the
history ends and publishes some versions: patches, anchors, in the background, with skip patches and retention. In the
middle of one of them a rank is killed (kill -9), interrupted (Ctrl-C), or failed by its store. Or the groups follow a
history, one after another, in memory that each finds as the one before left it. Then is checked that

- no rank hangs: all who are left raise or succeed well within the timeout, and each later call of theirs does too;
- who raises names the rank that failed;
- what any rank reports as published is in the store, and every version there restores to the bits that the ranks held;
- the store has no problems but leftovers; and a group of another size goes on;
- a rank that follows holds the bits of the version that it reports, and the next group's first sync repairs the others.
"""

import argparse
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.history.history import History
from tests.group import world as group_world
from tests.sync.rank_faults import Fault, Place
from tests.sync.rank_rounds import TIMEOUT_S, Round, Step, follow, model, publish

PROMPT_S = 15.0  # within which every call ends, whatever happened


@cache
def digest_of(version: int) -> str:
    return pulse.digest(model(version))


class Finding(AssertionError):
    """A promise that was not kept."""


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Finding(text)


class Case:
    """One history."""

    def __init__(self, seed: int, case: int) -> None:
        self.random = Random(f"{seed}/{case}")
        self.counts = Counter[str]()
        self.log: list[str] = []
        self._next = 0  # the next version
        self._reported = -1  # the newest version that a rank has reported

    def play(self, directory: Path) -> None:
        store, draw = str(directory / "store"), self.random
        if draw.random() < 0.4:
            self.play_followers(store, directory)
            return
        long = draw.random() < 0.05  # until two skip patches are due at once
        for _ in range(1 if long else draw.randint(1, 3)):
            self.publish(store, self.drawn(17 if long else draw.randint(2, 5)))
        self.publish(store, self.drawn(2)._replace(fault=None))

    def play_followers(self, store: str, memory: Path) -> None:
        """Groups that follow a history, one after another, in the same memory."""
        draw = self.random
        codec: Any = draw.choice([*CODECS])
        with pulse.Publisher(store, codec=codec, anchor_every=draw.choice((2, 4, 50))) as publisher:
            for version in range(10):
                publisher.publish(model(version), version=version)
        start = 0
        for _ in range(draw.randint(1, 3)):
            count = min(draw.randint(1, 3), 9 - start)
            versions = sorted(draw.sample(range(start, 9), count))
            self.follow(store, memory, self.drawn(count)._replace(versions=versions, options={"patience": 0}))
            start = versions[-1] if draw.random() < 0.7 else 0
        self.follow(store, memory, self.drawn(1)._replace(versions=[9], options={}, fault=None))

    def drawn(self, count: int) -> Round:
        draw = self.random
        versions = list(range(self._next, self._next + count))
        self._next += count
        options: dict[str, Any] = {
            "codec": draw.choice(("auto", "gap", "context")),
            "anchor_every": draw.choice((2, 3, 50)),
            "patience": draw.choice((0, 0.5)),
        }
        if draw.random() < 0.25:
            options |= {"retain": draw.randint(1, 3), "grace": 0}
        size = draw.choice((2, 2, 3, 3, 4))
        kind: Any = draw.choice(("kill", "kill", "kill", "interrupt", "store"))
        place: Any = "store" if kind == "store" else draw.choice(get_args(Place))
        steps = (count - 1, count) if count > 10 else (0, *range(1, count + 1), *range(1, count + 1))
        fault = Fault(
            draw.randrange(size),
            draw.choice(steps),
            kind,
            place,
            1.05 * draw.random(),
            after=draw.random() < 0.5,
            temporary=draw.random() < 0.5,
            lasting=draw.random() < 0.5,
        )
        anchors = [version for version in versions if draw.random() < 0.1]
        return Round(size, versions, draw.random() < 0.3, anchors, options, fault, draw.random() < 0.5)

    def publish(self, store: str, work: Round) -> None:
        """A round of a group that publishes."""
        results = self.results(publish, work, store)
        for step in itertools.chain(*(steps or () for steps in results)):
            if step.version is not None:
                self._reported = max(self._reported, step.version)
        self.check_store(store, work)

    def follow(self, store: str, memory: Path, work: Round) -> None:
        """A round of a group that follows."""
        results = self.results(follow, work, store, memory)
        for rank, steps in enumerate(results):
            for step, version in zip((steps or ())[1:], work.versions, strict=False):
                if not step.error:
                    expect(step.version == version, f"rank {rank}: expected {version}: {step}")
        self.counts["synced"] += sum(step.version is not None for steps in results for step in steps or ())

    def results(self, function: Callable[..., list[Step]], work: Round, store: str, *more: Any) -> list[Any]:
        """Let a group work. Returns the steps of each rank, None for one that was killed, checked."""
        self.log.append(f"{function.__name__} {work}")
        results: list[list[Step] | None] = group_world.run(function, work.size, store, work, *more)
        for rank, steps in enumerate(results):
            expect(not isinstance(steps, BaseException), f"rank {rank}: {steps!r}")
            self.log.append(f"  rank {rank}: {'killed' if steps is None else ''}")
            self.log += [f"    {step}" for step in steps or ()]
        fault = work.fault
        killed = [rank for rank, steps in enumerate(results) if steps is None]
        expected = [fault.rank] if fault is not None and fault.kind == "kill" else []
        expect(killed == expected, f"expected that ranks {expected} are killed, found {killed}")
        for rank, steps in enumerate(results):
            for step in steps or ():
                self.check_step(rank, step, work)
        if fault is None or fault.kind == "store":
            self.check_alike(results, work)
        what = f"{fault.kind} at a {fault.place}" if fault else "no fault"
        self.counts[f"{function.__name__}, {what}"] += 1
        return results

    def check_step(self, rank: int, step: Step, work: Round) -> None:
        fault, where = work.fault, f"rank {rank}: {step}"
        most = 2 * TIMEOUT_S if step.what == "make" else PROMPT_S  # while connections are made, who is lost shows late
        expect(step.seconds < most, f"slow: {where}")
        if not step.error:
            if step.note and fault is not None and fault.rank != rank and fault.kind != "store":
                expect(f"rank {fault.rank} of" in step.note, f"who? {where}")
            return
        expect(fault is not None, f"an error without a fault: {where}")
        assert fault is not None
        self.counts[step.error] += 1
        if step.what == "make":
            expect(step.error in ("ExchangeError", "KeyboardInterrupt", "StoreError"), where)
        elif step.error == "ExchangeError":
            expect(step.ranks == (fault.rank,), f"who? {where}")
        elif step.error == "KeyboardInterrupt":
            expect(fault.kind == "interrupt" and fault.rank == rank, where)
        else:
            expect(step.error == "StoreError" and fault.kind == "store", where)
            expect(fault.rank == rank or f"rank {fault.rank} of" in step.text, f"who? {where}")

    def check_alike(self, results: list[Any], work: Round) -> None:
        """All ranks succeed in a step or none does, and after the fault all succeed again."""
        for number, steps in enumerate(zip(*results, strict=True)):
            expect(len({step.version for step in steps}) == 1, f"not alike: {steps}")
            if work.fault is None or number > work.fault.step:
                expect(not any(step.error for step in steps), f"no fault any more: {steps}")

    def check_store(self, store: str, work: Round) -> None:
        history = History(store)
        manifests = history.manifests()
        if not manifests:
            expect(self._reported < 0, f"nothing is left of version {self._reported}")
            return
        report = pulse.verify(store)
        expect(report.problems == (), f"problems: {report.problems}")
        found = [manifest.version for manifest in manifests]
        expect(report.good_versions == tuple(found), f"expected {found}, found {report.good_versions}")
        expect(found[-1] >= self._reported, f"version {self._reported} was reported, the newest is {found[-1]}")
        wrong = [manifest.version for manifest in manifests if manifest.digest != digest_of(manifest.version)]
        expect(not wrong, f"other bits than those published: versions {wrong}")
        if work.fault is None:
            expect(found[-1] == work.versions[-1], f"expected {work.versions[-1]}, found {found[-1]}")
        self.counts["versions proved"] += len(found)


def run_case(seed: int, number: int, *, verbose: bool = False) -> Counter[str]:
    """Run one case. Returns what was counted; raises its finding, with what led there as notes."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-ranks-"))
    case = Case(seed, number)
    try:
        case.play(directory)
    except BaseException as error:
        for line in case.log[-40:]:
            error.add_note(line)
        error.add_note(f"python -m tests.sync.fuzz_ranks --seed {seed} --first {number} --cases 1")
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if verbose:
            print("\n".join(case.log))
    return case.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--keep-going", action="store_true", help="go on after a finding")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    start, counts, found = time.monotonic(), Counter[str](), 0
    numbers = itertools.count(given.first)
    for done, case in enumerate(numbers if given.cases is None else itertools.islice(numbers, given.cases), 1):
        try:
            counts += run_case(given.seed, case, verbose=given.verbose)
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            found += 1
            notes = "\n    ".join(getattr(error, "__notes__", []))
            print(f"FOUND seed {given.seed} case {case}: {type(error).__name__}: {error}\n    {notes}", flush=True)
            if not given.keep_going:
                return 1
        if done % 20 == 0:
            print(f"{time.monotonic() - start:.0f} s, {done} cases: {dict(counts)}, {found} found", flush=True)
    print(f"seed {given.seed}, {time.monotonic() - start:.0f} s: {dict(counts)}, {found} found something")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
