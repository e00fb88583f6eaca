"""The calls that a stateful fuzzer makes, each compared with the naive model."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.history.assets import read_assets
from pulse_rl.store.base import Store
from tests.sync.stateful_machine import Clients, Follower, Trainer
from tests.sync.stateful_weights import expect
from tests.sync.stateful_world import UNSURE, Attempt, Wire

NOTE = "note.txt"  # an asset
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()


class Calls(Clients):
    """The clients of one history, and what must hold of their calls."""

    def published(
        self, trainer: Trainer, *, anchor: bool | None = None, foreground: bool = False, version: int | None = None
    ) -> str:
        """Publish by one trainer, and compare with the model. version: None for a drawn one."""
        draw, disk, publisher = self.random, trainer.wire.disk, trainer.publisher
        anchor = draw.random() < 0.12 if anchor is None else anchor
        background = draw.random() < 0.3 and not foreground
        trainer.bits = self.model.changed(draw, trainer.bits)
        weights = self.model.tensors(trainer.bits)
        highest = max(disk.highest(), trainer.flying.version if trainer.flying else -1)
        low = version is None and disk.head is not None and draw.random() < 0.04 and not anchor
        if version is None:
            version = disk.head.version if low and disk.head else highest + draw.choice((1, 1, 1, 3, 1000))
        given: int | None = version
        # Whether it is known which version is the next.
        sure = not (low or disk.hurt or self.hooked or any(map(callable, trainer.wire.plan.values())))
        sure &= trainer.flying is not None or trainer.last in (None, disk.head)  # in the background it does not look
        if sure and disk.head is not None and self.is_current(trainer) and draw.random() < 0.15:
            given, version = None, max(disk.head.version, trainer.flying.version if trainer.flying else -1) + 1
        noted, note = {"reward": version / 7}, None if draw.random() < 0.6 else b"of %d" % version
        attempt = Attempt(version, trainer.bits, digest=pulse.digest(weights), by=trainer, metadata=noted, note=note)
        trainer.wire.attempts.append(attempt)
        current, hurt, flying = self.is_current(trainer), disk.hurt, trainer.flying
        fresh, overtaken = publisher.version is None, f"it held {trainer.last}, the newest was {disk.head}"
        trainer.release()
        report, error = None, None
        try:
            report = publisher.publish(
                weights,
                version=given,
                anchor=anchor,
                background=background,
                metadata=noted,
                assets=None if note is None else {NOTE: note},
            )
        except (pulse.PulseError, ValueError) as caught:
            error = caught
        if error is not None:
            trainer.release()
            self.turns.settle()
        lost = flying is not None and flying.sequence is None  # what was in flight was not committed
        unsure = flying is not None and (lost or flying.disturbed)  # whether it was, may not be known
        if publisher._pipeline._in_flight is None or error is None:
            trainer.flying = None
        what = f"{version}{' anchor' * anchor}{' background' * background}"
        if report is not None:
            self.counts["published"] += 1
            expect(not lost, f"publish returned, and version {flying and flying.version} in flight was lost silently")
            expect((report.version, report.digest) == (version, attempt.digest), f"publish reports {report}")
            expect(not low or (background and not current), f"version {version} was accepted, and is not new")
            if background:
                trainer.flying = attempt
                if draw.random() < 0.5:
                    trainer.wire.calls_left = draw.randrange(9)
            else:
                expect(attempt.sequence is not None, "publish returned, and nothing was committed")
            outcome = f"by {self.name(trainer)}: published {what}"
        else:
            outcome = f"by {self.name(trainer)}: {what} refused: {type(error).__name__}: {str(error)[:150]}"
            reason = attempt.sequence is None or trainer.wire.fired or self.hooked
            expect(reason, f"publish raised, and committed: {error!r}")
            wire = trainer.wire
            undisturbed = not (wire.fired or wire.dead or self.hooked or unsure or low or hurt or disk.hurt)
            expect(not (undisturbed and current), f"publish was refused without a reason: {error!r}")
        if not current and not (hurt or self.hooked):
            expect(
                error is not None or fresh or background, f"a publisher that was overtaken has published: {overtaken}"
            )
        self.settle(trainer)
        return outcome + self.fired(trainer.wire)

    def is_current(self, trainer: Trainer) -> bool:
        """Whether a publisher may go on: nobody else has committed since."""
        head, last = trainer.wire.disk.head, trainer.last
        if trainer.flying is not None and trainer.flying.sequence is not None:
            last = trainer.flying  # it is committed, which the publisher finds out by its next call
        if head is last or (last is None and trainer.publisher.version is None):
            return True
        return head is not None and last is not None and head.by is trainer and head.place > last.place

    def settle(self, trainer: Trainer) -> None:
        """Find out where a publisher now believes the history to end."""
        publisher, disk = trainer.publisher, trainer.wire.disk
        if publisher.version is None:
            trainer.last = None
            return
        here = (publisher.version, publisher.digest)
        if trainer.last is not None and (trainer.last.version, trainer.last.digest) == here:
            return
        found = [a for a in (*disk.committed_here, *trainer.wire.attempts) if (a.version, a.digest) == here]
        found = [a for a in found if a.sequence is not None]
        expect(found, f"a publisher believes in version {here}, which nobody committed")
        trainer.last = next((a for a in found if a.by is trainer), found[0])

    def flushed(self, trainer: Trainer, verb: Callable[[], Any]) -> str:
        trainer.release()
        flying, trainer.flying = trainer.flying, None
        try:
            verb()
        except pulse.PulseError as error:
            unsure = flying is not None and (flying.sequence is None or flying.disturbed)
            expect(unsure or trainer.wire.fired, f"flush raised {error!r}")
            outcome = f"{self.name(trainer)}: {type(error).__name__}: {str(error)[:150]}"
        else:
            expect(flying is None or flying.sequence is not None, "flush returned, and the version is lost")
            outcome = f"{self.name(trainer)}: {flying.version if flying else 'nothing'} in flight"
        self.settle(trainer)
        return outcome

    def end_run(self) -> str:
        """Mark the run as ended; a version after that makes the mark void."""
        trainer = self.random.choice(self.trainers)
        self.plan_faults(trainer.wire)
        trainer.release()
        self.turns.settle()
        flying, trainer.flying = trainer.flying, None
        disk, current, hurt = trainer.wire.disk, self.is_current(trainer) or flying is not None, trainer.wire.disk.hurt
        try:
            trainer.publisher.end()
        except pulse.PulseError as error:
            reason = trainer.wire.fired or trainer.wire.dead or hurt or disk.hurt or disk.head is None or not current
            expect(reason or flying is not None, f"the run could not be ended: {error!r}")
            outcome = f"{self.name(trainer)}: {type(error).__name__}: {str(error)[:150]}"
        else:
            expect(disk.ended or hurt, "end returned, and its mark does not name the newest version")
            outcome = f"{self.name(trainer)}: at {disk.head and disk.head.version}"
        self.settle(trainer)
        return outcome + self.fired(trainer.wire)

    def synced(self, follower: Follower, how: Literal["sync", "stage", "later"] = "sync") -> str:
        """Sync one follower, and compare with the model.

        how: "stage" for stage and apply; "later" for stage alone.
        """
        draw, disk, subscriber = self.random, follower.wire.disk, follower.subscriber
        pin = None
        if draw.random() < 0.2 and disk.line:
            pin = draw.choice([*(a.version for a in disk.line.values()), disk.highest() + 1])
        before, top, hurt, held = dict(disk.line), follower.top, disk.hurt, subscriber.version
        prunings = disk.prunings
        report, error = None, None
        try:
            if how == "sync":
                report = subscriber.sync(follower.live, version=pin)
            else:
                follower.staged, follower.obsolete = subscriber.stage(follower.live, version=pin), False
                expect(follower.read() == follower.seen, "stage has written")
        except pulse.PulseError as caught:
            error = caught
        if how == "stage" and error is None:
            report = self.applied(follower)
        follower.obsolete |= how != "later" or error is not None
        name = f"follower {self.followers.index(follower)}" if follower in self.followers else "a new follower"
        who = f"{name}{'' if follower.wire.listing else ' (web)'}{f' to {pin}' if pin is not None else ''}"
        disturbed = follower.wire.fired or hurt or disk.hurt or disk.prunings != prunings or follower.wire.dead
        view = follower.view
        lacking = disk.head is not None and disk.head.state(view)[1] is None
        heads = [a for a in disk.line.values() if a.place >= max(before, default=0)]
        head = disk.head
        gone_back = top is not None and head is not None and head is not top and head.place <= top.place
        gone_back |= top is not None and head is not None and head.history != top.history  # begun anew
        if error is None and report is None:
            outcome = f"{who}: {held}, staged {follower.staged and follower.staged.version}"
        elif report is None:
            outcome = f"{who}: refused: {type(error).__name__}: {str(error)[:150]}"
            if not disturbed:
                first = disk.began()
                there = any(
                    a.version == pin
                    and a.state(view)[1] is not None
                    and (sequence >= first or follower.wire.listing)
                    and (top is None or a.history == top.history)
                    for sequence, a in before.items()
                )
                may = there if pin is not None else bool(heads) and not gone_back and not lacking
                expect(not may or self.hooked, f"{who} was refused without a reason: {error!r}")
        else:
            self.counts["synced"] += 1
            outcome = f"{who}: {held} to {report.version} by {report.route}"
            expect((report.version, report.digest) == (subscriber.version, subscriber.digest), f"it reports {report}")
            bits = follower.read()
            known, here = {**disk.lost, **before, **disk.line}, (report.version, report.digest)
            found = [a for a in known.values() if a.state(view) == here]
            if pin is not None:
                expect(report.version == pin, f"{who} reports {report.version}")
            elif not disturbed:
                expect(any(a in heads for a in found), f"{who} reports {report.version}, the newest is {disk.head}")
            if found and pin is None and top is not None and not gone_back:
                expect(found[-1].place >= top.place, f"{who} went back to {report.version}")
            if report.route == "anchor" or follower.recounts:
                expect(bits == self.ledger.get(here), f"{who}: other bits than reported")
        held_now = {**disk.lost, **before, **disk.line}.values()
        for attempt in held_now:  # also after an error, and where it was only recognised
            if attempt.state(view) == (subscriber.version, subscriber.digest) and (
                follower.top is None or (attempt.history == follower.top.history and attempt.place > follower.top.place)
            ):
                follower.top = attempt
        self.check_follower(follower)
        return outcome + self.fired(follower.wire)

    def applied(self, follower: Follower) -> pulse.SyncReport:
        """Apply what was staged, which nothing in between has made obsolete."""
        staged, follower.staged = follower.staged, None
        assert staged is not None  # the caller has looked
        promised = (staged.version, staged.digest)
        report: pulse.SyncReport = staged.apply()
        expect((report.version, report.digest) == promised, f"{promised} was staged, and {report} applied")
        return report

    def apply_staged(self) -> str:
        """What was staged in an earlier step is applied, or refused where the weights have moved on."""
        followers = [follower for follower in self.followers if follower.staged is not None]
        if not followers:
            return "nothing is staged"
        follower = self.random.choice(followers)
        before = follower.read()
        try:
            outcome = f"{self.applied(follower).version}"
        except pulse.BaseMismatchError as error:
            expect(follower.obsolete, f"a staged version was refused without a reason: {error!r}")
            expect(follower.read() == before, "a staged version was refused, and written")
            outcome = "refused"
        else:
            held = (follower.subscriber.version, follower.subscriber.digest)
            known = (a for disk in self.disks for a in disk.committed_here if a.state(follower.view) == held)
            follower.top = max([*known, *filter(None, [follower.top])], key=lambda attempt: attempt.place)
        self.check_follower(follower)
        return outcome

    def load_all(self) -> str:
        """Every version that was not pruned can be loaded, by a new subscriber each, and in each of its views."""
        disk = self.any_disk()
        wire = Wire(disk, Random(0))
        loaded = 0
        for attempt in self.random.sample(list(disk.line.values()), min(len(disk.line), 6)):
            view = self.random.choice((None, *attempt.views))
            form = self.model.forms[view]
            live = form.tensors(form.drawn(self.random))
            before = form.read(live)
            subscriber = pulse.Subscriber(wire, patience=0, view=view)
            try:
                report = subscriber.sync(live, version=attempt.version)
                assets = read_assets(subscriber.history, subscriber.history.find(attempt.version))
            except pulse.PulseError as error:
                expect(disk.hurt, f"version {attempt.version} ({view}) cannot be loaded: {error!r}")
                if subscriber.version is None:
                    expect(form.read(live) == before, f"{error!r}, and the weights are not as they were")
                continue
            expected = self.ledger[attempt.state(view)]
            expect(form.read(live) == expected, f"version {attempt.version} ({view}) was loaded with other bits")
            expect((report.metadata or None) == attempt.metadata, f"version {attempt.version} has {report.metadata}")
            note = UNSURE if disk.hurt else disk.note_of(attempt, view)
            expect(note in (assets.get(NOTE), UNSURE), f"version {attempt.version} has the assets {assets}")
            loaded += 1
        return f"{loaded} versions"

    def look(self) -> str:
        """status, verify, and whether the run has ended, by whoever may ask."""
        disk = self.any_disk()
        if any(trainer.flying for trainer in self.trainers) or not disk.line:
            return "not now"
        wire: Store = Wire(disk, Random(0))
        with suppress(pulse.PulseError):
            status, head = pulse.status(wire), disk.head
            expect(disk.hurt or (status.newest, status.digest) == (head and head.state(None)), f"it tells {status}")
            expect(disk.hurt or status.ended == disk.ended, f"the run has ended: {disk.ended}, status says not so")
        for view in (None, *(disk.head.views if disk.head else ())):
            with suppress(pulse.PulseError):
                told = pulse.Subscriber(wire, patience=0, view=view).ended
                expect(disk.hurt or told == disk.ended, f"the run has ended: {disk.ended}, told {told} of {view}")
        if self.signed:
            stranger = pulse.Subscriber(wire, patience=0, public_key=STRANGER)
            live = self.model.tensors(self.model.drawn(self.random))
            calls: list[Callable[[], object]] = [stranger.latest, partial(stranger.sync, live)]
            for call in calls:
                with suppress(pulse.PulseError):
                    expect(False, f"what another key has signed was taken: {call()}")
            expect(not stranger.ended, "a mark that another key has signed was taken for one")
        try:
            report = pulse.verify(wire)
        except pulse.PulseError as error:
            expect(disk.hurt, f"verify was refused without a reason: {error!r}")
            return f"{type(error).__name__}"
        expect(disk.hurt or report.ok, f"verify finds {report.problems} in a sound history")
        wrong = set(report.good_versions) - {a.version for a in (*disk.line.values(), *disk.lost.values())}
        expect(not wrong, f"verify calls {sorted(wrong)} good versions")
        missed = [name for name in disk.damaged_objects() if not any(name in problem for problem in report.problems)]
        expect(not missed, f"verify does not name {missed}, which are damaged, but {report.problems}")
        return f"ok {report.ok}"

    def ask(self) -> str:
        """What a follower says of the history before it syncs: its newest version, and whether the run has ended."""
        if not self.followers:
            return "nobody"
        follower = self.random.choice(self.followers)
        disk, subscriber = follower.wire.disk, follower.subscriber
        held, head = (subscriber.version, subscriber.digest), disk.head
        newest = head.state(follower.view) if head else (None, None)
        other = head is not None and (newest[1] is None or (held[0] == newest[0] and held[1] != newest[1]))
        try:
            told = (subscriber.latest(), subscriber.ended)
        except pulse.PulseError as error:
            expect(disk.hurt or other, f"latest or ended was refused without a reason: {error!r}")
            return f"{type(error).__name__}"
        expect(not other or disk.hurt, f"latest says {told}, {held} is held, and the newest is {newest}")
        expect(disk.hurt or told == (newest[0], disk.ended), f"told {told}, the newest is {newest}, ended {disk.ended}")
        return f"{told}"
