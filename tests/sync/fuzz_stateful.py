"""Whole histories against a naive model: publishers, subscribers, prunings and copies, while disks and wires fail.

    make fuzz-stateful                                    # without end; or ARGS="--seconds 1200 --seed 7"
    python -m tests.sync.fuzz_stateful --seed 7 --case 4711    # repeat one history, and print each of its steps

Each case is one history of STEPS steps, drawn from its seed: of publishes (patches, anchors, in the background, of few
changes, many, none, of NaNs and zeros; with views, and without), syncs (of the weights or a view, to the newest
version, to a pinned one, by several subscribers, of which some sleep), prunings, restarts of publishers and
subscribers, ends of the run, two publishers racing, copies of the store that are gone on with, relays and mirrors of
it, other runs begun in it, alterations of live weights behind the subscriber's back, and faults on disk and on the wire
at any call. The threads take turns, which are drawn too, so a case repeats call by call. After every step is checked
that

- no subscriber reports a version whose bits are not those that were published as it, and none goes back by itself;
- after an error the weights are as they were, or hold the version that the subscriber reports;
- a step that nothing disturbed has succeeded, with exactly the newest version; one that failed has committed nothing;
- all versions can be loaded, but those that were pruned or damaged, and each view holds what is quantised anew;
- whoever tells of a history tells the truth: verify, status, latest, ended; and nothing hangs.
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
from pathlib import Path
from random import Random

import torch

import pulse_rl as pulse
from tests.sync.stateful_machine import BEGUN
from tests.sync.stateful_sites import Sites
from tests.sync.stateful_turns import Turns, taken_by
from tests.sync.stateful_weights import Tensors, expect
from tests.sync.stateful_world import TaggedWire, Wire, warm_up

STEPS = 60


class Machine(Sites):
    """One history."""

    def run(self, steps: int, *, verbose: bool = False) -> None:
        """Take so many steps, then check that everything recovers."""
        verbs: dict[Callable[[], str], float] = {
            self.publish: 25,
            self.sync: 22,
            self.apply_staged: 6,
            self.raced_publish: 3,
            self.raced_sync: 4,
            self.flush: 3,
            self.resume: 2,
            self.end_run: 2,
            self.restart_publisher: 3,
            self.prune: 5,
            self.new_follower: 4,
            self.alter: 6,
            self.verify_live: 2,
            self.wait: 2,
            self.damage: 3,
            self.repair: 3,
            self.backup: 1.5,
            self.swap: 1.5,
            self.copy: 6,
            self.relay: 6,
            self.mirror: 4,
            self.begin_anew: 1.2,
            self.publish_parts: 2,
            self.load_all: 4,
            self.look: 4,
            self.ask: 4,
        }
        for number in range(steps):
            (verb,) = self.random.choices(list(verbs), list(verbs.values()))
            self.step(f"{number} {verb.__name__}", verb, verbose)
        self.step("end", self.end, verbose)

    def publish(self) -> str:
        trainer = self.random.choice([self.trainers[-1]] * 5 + self.trainers)
        self.plan_faults(trainer.wire)
        return self.published(trainer)

    def sync(self) -> str:
        if not self.followers:
            return self.new_follower()
        follower = self.random.choice(self.followers)
        self.plan_faults(follower.wire, rate=0.25)
        return self.synced(follower, self.random.choice(("sync", "sync", "sync", "stage", "later")))

    def raced_publish(self) -> str:
        """Two publishers on one history: while one publishes, the other one does."""
        one = self.trainers[-1]
        other = self.trainer(one.wire.disk)
        if other.wire.disk.head is not None and self.random.random() < 0.5:
            other.bits = self.model.changed(self.random, one.bits)
        self.add(other)
        self.trainers.remove(one)
        self.trainers.append(one)
        within = self.meanwhile(one.wire, lambda: self.published(other, foreground=True))
        outcome = self.published(one, foreground=True)
        self.turns.until(lambda: within != [BEGUN])
        return f"{outcome}; meanwhile {within}"

    def raced_sync(self) -> str:
        """While one syncs, another one publishes, and perhaps prunes."""
        if not self.followers:
            return self.new_follower()
        follower = self.random.choice(self.followers)
        trainer = self.trainers[-1]
        within = self.meanwhile(follower.wire, lambda: self.published(trainer, foreground=True))
        outcome = self.synced(follower)
        self.turns.until(lambda: within != [BEGUN])
        return f"{outcome}; meanwhile {within}"

    def flush(self) -> str:
        trainer = self.random.choice(self.trainers)
        return self.flushed(trainer, self.random.choice((trainer.publisher.flush, trainer.publisher.close)))

    def resume(self) -> str:
        trainer = self.random.choice(self.trainers)
        self.plan_faults(trainer.wire)
        trainer.release()
        self.turns.settle()
        disk, current, hurt = trainer.wire.disk, self.is_current(trainer), trainer.wire.disk.hurt
        flying, trainer.flying = trainer.flying, None
        try:
            found = trainer.publisher.resume()
        except pulse.PulseError as error:
            unsure = flying is not None and (flying.sequence is None or flying.disturbed)
            reason = trainer.wire.fired or hurt or disk.hurt or not current or unsure
            expect(reason or trainer.wire.dead, f"resume was refused without a reason: {error!r}")
            outcome = f"{self.name(trainer)}: {type(error).__name__}: {str(error)[:150]}"
        else:
            newest = disk.head.version if disk.head else None
            expect(found == newest or hurt or trainer.wire.fired, f"resume returns {found}, the newest is {newest}")
            outcome = f"{self.name(trainer)}: {found}"
        self.settle(trainer)
        return outcome + self.fired(trainer.wire)

    def restart_publisher(self) -> str:
        """The publisher is closed, killed, or goes on as one that nobody has stopped, and a new one begins."""
        old = self.trainers[-1]
        kind = self.random.choice(("closed", "killed", "killed", "left"))
        if kind == "closed":
            self.flushed(old, old.publisher.close)
        elif kind == "killed":
            old.kill()
            self.trainers.remove(old)
        else:
            old.release()
            self.turns.settle()
        new = self.trainer(old.wire.disk)
        if self.random.random() < 0.8:
            new.bits = old.bits
        self.add(new)
        return kind

    def new_follower(self) -> str:
        """A subscriber is started, or started anew on weights that are there, or follows from now on."""
        draw, disk = self.random, self.any_disk()
        if self.followers and draw.random() < 0.4:
            place = draw.randrange(len(self.followers))
            old = self.followers[place]
            self.followers[place] = self.follower(old.wire.disk, old)
            return f"follower {place} anew: {self.synced(self.followers[place])}"
        made = self.follower(disk)
        self.followers = [*self.followers[-4:], made]
        return self.synced(made)

    def alter(self) -> str:
        """Something other than the subscriber writes to live weights, or replaces them."""
        if not self.followers:
            return "nobody"
        draw, follower = self.random, self.random.choice(self.followers)
        tensors = follower.tensors()
        form = follower.form
        name = draw.choice([name for name in form.shapes if tensors[name].numel()])
        kind = draw.choice(("counted", "silent", "storage", "other", "pointer"))
        if kind == "other":  # another model altogether
            follower.live = form.tensors(form.drawn(draw))
            follower.altered = self.everything(form)
            follower.staged = None  # it belongs to the model before
        elif kind in ("storage", "pointer"):
            fresh = tensors[name].detach().clone()
            if kind == "storage":
                fresh.reshape(-1).view(torch.uint8)[0] ^= 1
            aliases = [name, *(alias for alias, owner in form.tied.items() if owner == name)]
            if isinstance(follower.live, torch.nn.Module):
                for tensor in {id(tensors[alias]): tensors[alias] for alias in aliases}.values():
                    tensor.data = fresh
            else:
                follower.live |= dict.fromkeys(aliases, fresh)
            follower.altered |= {(name, 0)}
        else:
            view = tensors[name].detach().reshape(-1).view(torch.uint8)
            place = draw.randrange(len(view)) if tensors[name].dtype != torch.bool else 0
            if kind == "counted":
                view[place] ^= 1
            else:
                view.numpy()[place] ^= 1
            follower.altered |= {(name, place)}
        follower.seen = follower.read()
        seen_at_once = kind != "silent"
        follower.obsolete |= seen_at_once
        self.check_follower(follower)
        if seen_at_once and draw.random() < 0.7:
            said = self.synced(follower)
            if follower.subscriber.version is not None:
                expect(not follower.altered, f"{kind}: {said}, and the weights are still altered")
            return f"{kind} {name}: {said}"
        return f"{kind} {name}"

    def everything(self, form: Tensors) -> set[tuple[str, int]]:
        return {(name, at) for name, data in form.drawn(Random(0)).items() for at in range(len(data))}

    def verify_live(self) -> str:
        if not self.followers:
            return "nobody"
        follower = self.random.choice(self.followers)
        subscriber, altered, version = follower.subscriber, set(follower.altered), follower.subscriber.version
        try:
            found = subscriber.verify(follower.live)
        except pulse.IntegrityError:
            expect(altered, "verify found an alteration where there is none")
            expect(subscriber.version is None, "verify found an alteration, and a version is still reported")
            follower.altered, follower.obsolete = set(), True
            return "altered"
        except pulse.VersionNotFoundError:
            expect(version is None, "verify says that the weights were not synced")
            return "nothing yet"
        expect(not altered and found == subscriber.digest, f"verify did not find {len(altered)} altered bytes")
        return "sound"

    def wait(self) -> str:
        if not self.followers:
            return "nobody"
        follower = self.random.choice(self.followers)
        disk, want = follower.wire.disk, self.random.randint(0, follower.wire.disk.highest() + 1)
        newest, hurt = disk.head.version if disk.head else None, disk.hurt
        held, lacking = follower.subscriber, disk.head is not None and disk.head.state(follower.view)[1] is None
        other = held.version == newest and disk.head and held.digest != disk.head.state(follower.view)[1]
        try:
            found = follower.subscriber.wait(want, 0)
        except TimeoutError:
            expect(hurt or newest is None or newest < want, f"wait({want}) did not see version {newest}")
            return f"{want}: not yet"
        except pulse.PulseError as error:
            ended = disk.ended and newest is not None and newest < want
            expect(hurt or lacking or other or ended, f"wait was refused without a reason: {error!r}")
            return f"{want}: {type(error).__name__}"
        expect(hurt or found == newest, f"wait({want}) returned {found}, the newest is {newest}")
        return f"{want}: {found}"

    def end(self) -> str:
        """Whatever has happened, a new publisher goes on by an anchor, and everybody can have its version."""
        self.rest()
        disk = self.trainers[-1].wire.disk
        last = self.trainer(disk)
        self.trainers.append(last)
        expect("published" in (said := self.published(last, anchor=True, foreground=True)), said)
        for kind in (Wire, TaggedWire):
            live = self.model.tensors(self.model.drawn(self.random))
            pulse.Subscriber(kind(disk, Random(0)), patience=0).sync(live)
            head = disk.head
            expect(head is not None and self.model.read(live) == head.bits, "the newest version has other bits")
        return said


def run_case(seed: int, case: int, steps: int = STEPS, *, verbose: bool = False) -> Machine:
    """Run one history. Returns what was counted and traced; raises its finding, with what led there as notes."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-stateful-"))
    name = f"{seed}/{case}"
    turns, log = Turns(Random(f"turns of {name}")), list[str]()
    try:
        with taken_by(turns, name):
            machine = Machine(name, directory, turns, log)
            machine.run(steps, verbose=verbose)
    except BaseException as error:
        for line in log[-12:]:
            error.add_note(line)
        error.add_note(f"python -m tests.sync.fuzz_stateful --seed {seed} --case {case} --steps {steps}")
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    machine.counts["steps"] = len(machine.log)
    return machine


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="the number of the first history")
    parser.add_argument("--case", type=int, help="run only this history, and print its steps")
    parser.add_argument("--keep-going", action="store_true", help="go on after a finding")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.case is not None:
        warm_up()
        print(run_case(given.seed, given.case, given.steps, verbose=True).turns.trace)
        return 0
    warm_up()
    start, counts, found = time.monotonic(), Counter[str](), 0
    for case in itertools.count(given.first):
        if time.monotonic() - start > given.seconds:
            break
        try:
            counts += run_case(given.seed, case, given.steps).counts
        except Exception as error:  # noqa: BLE001 — any exception is a finding
            found += 1
            notes = "\n    ".join(error.__notes__)
            print(f"FOUND seed {given.seed} case {case}: {type(error).__name__}: {error}\n    {notes}", flush=True)
            if not given.keep_going:
                return 1
        counts["histories"] += 1
        if case % 50 == 49:
            print(f"{time.monotonic() - start:.0f} s: {dict(counts)}, {found} found something", flush=True)
    print(f"seed {given.seed}, {time.monotonic() - start:.0f} s: {dict(counts)}, {found} found something")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
