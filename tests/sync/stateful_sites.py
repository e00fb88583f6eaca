"""What happens to whole stores: prunings, damage, copies, relays, mirrors, and runs that are begun anew."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pulse_rl as pulse
from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.engines.relay import Relay
from pulse_rl.folders.mirror import Mirror
from pulse_rl.history.operate.prune import Retention, delete_planned
from tests.history.parts import even, publish_parts
from tests.history.world import keys
from tests.sync.stateful_calls import Calls
from tests.sync.stateful_machine import BEGUN, Follower, Site, Trainer
from tests.sync.stateful_weights import Bits, expect
from tests.sync.stateful_world import FOLDERS, UNSURE, Attempt, Disk, State, Wire


class Sites(Calls):
    """The stores of one history, and what must hold of them."""

    def prune(self) -> str:
        """Old versions are deleted, by the command; publishers do so too."""
        disk = self.any_disk()
        wire = self.wire(disk)
        self.plan_faults(wire)
        retain = self.random.choice((1, 1, 2, 3, 6))
        rule = Retention(retain, self.random.choice((None, 1, 2, 3)), self.random.choice((0.0, 0.0, 3600.0)))
        before, hurt, first = dict(disk.line), disk.hurt, disk.began()
        kept = sorted(sequence for sequence in before if sequence >= first)[-retain:]
        within = self.perhaps(wire, disk)
        try:
            history = pulse.History(wire, patience=0)
            delete_planned(history, rule.plan(history, leftovers=self.random.random() < 0.5))
            outcome = "done"
        except pulse.PulseError as error:
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
            self.note_calls(wire)
            reason = wire.fired or hurt or not before or self.hooked
            expect(reason, f"pruning was refused without a reason: {error!r}")
        self.turns.until(lambda: within != [BEGUN])
        if rule.keep_every:
            anchors = {at: a.anchor_number for at, a in before.items() if None in a.anchors}
            kept += [at for at, number in anchors.items() if number % rule.keep_every == 0]
        lost = not all(sequence in disk.line for sequence in kept)
        expect(hurt or self.hooked or not lost, f"{rule}, and of {kept} not all are kept")
        gone = len(before) - len(disk.line)
        how = f"retain={rule.retain} keep_every={rule.keep_every} grace={rule.grace}"
        return f"{how}: {outcome}, {gone} gone{self.fired(wire)}; meanwhile {within}"

    def damage(self) -> str:
        draw, disk = self.random, self.trainers[-1].wire.disk
        names = disk.names()
        if not names or any(trainer.flying for trainer in self.trainers):
            return "nothing to damage"
        folder = draw.choice(FOLDERS)
        names = [name for name in names if name.startswith(folder)] or names
        name = draw.choice(names if draw.random() < 0.5 else names[-3:])
        data = bytes(disk.inner.get(name))
        kind = draw.choice(("flip", "cut", "delete", "older", "empty"))
        if kind == "flip":
            place = draw.randrange(len(data)) if data else 0
            bit = bytes(byte ^ 1 << draw.randrange(8) for byte in data[place : place + 1])
            new: bytes | None = data[:place] + bit + data[place + 1 :]
        elif kind == "older":
            new = bytes(disk.inner.get(draw.choice(names)))
        else:
            new = {"cut": data[: draw.randrange(len(data) + 1)], "delete": None, "empty": b""}[kind]
        if new == data:
            return "no difference"
        disk.damage(name, new)
        return f"{kind} {name}"

    def repair(self) -> str:
        disk = self.trainers[-1].wire.disk
        count = len(disk.damaged)
        disk.repair()
        return f"{count} objects"

    def backup(self) -> str:
        """A copy of the store as it is, with which a publisher goes on; the old one may go on too."""
        self.rest()
        disk = self.trainers[-1].wire.disk
        made = disk.copy(self.storage())
        self.disks = [*self.disks[-3:], made]
        if self.random.random() < 0.5:
            new = self.trainer(made)
            new.bits = self.trainers[-1].bits
            self.add(new)
            return f"{len(disk.line)} versions, and a publisher for it"
        return f"{len(disk.line)} versions"

    def swap(self) -> str:
        """A follower or a publisher finds another copy of the store in its place, as when a backup is restored."""
        clients: list[Trainer | Follower] = [*self.followers, *self.trainers]
        client = self.random.choice(clients)
        if isinstance(client, Trainer):
            client.release()
            self.turns.settle()
        old, new = client.wire.disk, self.random.choice(self.disks)
        client.wire.disk = new
        kind = type(client).__name__
        if isinstance(client, Follower):
            return f"{kind} from {len(old.line)} to {len(new.line)} versions: {self.synced(client)}"
        return f"{kind} from {len(old.line)} to {len(new.line)} versions"

    def copy(self) -> str:
        """The library copies a store to another one, empty or with what an earlier copy, or anything else, has left."""
        self.rest()
        source, target = self.any_disk(), self.random.choice(self.disks)
        if source is target or self.random.random() < 0.3:
            target = self.new_disk()
        from_wire, to_wire = self.wire(source), self.wire(target, source=source)
        self.plan_faults(self.random.choice((from_wire, to_wire)))
        parted = any(target.line.get(at, attempt) is not attempt for at, attempt in source.line.items())
        heads = {disk.head.history for disk in (source, target) if disk.head is not None}
        parted |= len(heads) > 1  # two runs need not have a sequence number in common
        hurt, before, ended = source.hurt or target.hurt, len(target.line), target.ended and target.head
        key: dict[str, Any] = {"public_key": keys()[1]} if self.signed else {}
        versions, within = dict(source.line), self.perhaps(from_wire, source)
        try:
            pulse.copy_history(from_wire, to_wire, patience=0, **key)
            outcome = "done"
        except pulse.PulseError as error:
            fired = from_wire.fired or to_wire.fired or self.hooked
            expect(fired or hurt or parted or not source.line, f"copying was refused without a reason: {error!r}")
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
        else:
            expect(hurt or not parted, "a copy was made over another history")
            missing = versions.keys() & source.line.keys() - target.line.keys()
            expect(hurt or not missing, f"{sorted(missing)} were not copied")
            known = target.ended == source.ended or target.head is not source.head
            expect(hurt or known or self.hooked, "the end of the run was not copied")
            lost = ended is target.head is not source.head and not target.ended
            expect(hurt or not lost, "the end of a copy that was gone on with is lost")
        self.turns.until(lambda: within != [BEGUN])
        self.note_calls(from_wire)
        self.note_calls(to_wire)
        counts = f"{len(source.line)} versions to {before}, {len(target.line)} then"
        return f"{counts}: {outcome}{self.fired(from_wire)}{self.fired(to_wire)}; meanwhile {within}"

    def perhaps(self, wire: Wire, disk: Disk) -> list[str]:
        """Perhaps let something happen to a store during the next calls of a wire."""
        trainer = self.trainers[-1]

        def prune() -> str:
            history, retain = pulse.History(Wire(disk, Random(0)), patience=0), self.random.choice((1, 2))
            with suppress(pulse.PulseError):
                delete_planned(history, Retention(retain, None, 0.0).plan(history))
            return "prune"

        acts: list[Callable[[], str]] = [prune]
        if trainer.wire.disk is disk:
            acts += [lambda: self.published(trainer, foreground=True)] * 2
        return self.meanwhile(wire, self.random.choice(acts)) if self.random.random() < 0.3 else []

    def relay(self) -> str:
        """A relay of the store takes a step: it is started, or again, and publishes the newest version onward."""
        draw = self.random
        self.rest()
        if not self.relays or draw.random() < 0.2:
            self.relays = [*self.relays[-1:], Site(self.wire(self.any_disk()), self.wire(self.new_disk()))]
        site = draw.choice(self.relays)
        source, target = site.source.disk, site.target.disk
        if site.process is None or draw.random() < 0.3:
            site.process, site.target = None, self.wire(target)
        faulty = draw.choice((site.source, site.target))
        for wire in (site.source, site.target):
            wire.begin()
        self.plan_faults(faulty, rate=0.3)
        head, held, hurt = source.head, target.head, source.hurt or target.hurt
        # Its store may hold what another publisher or another run has put there.
        known = [a.state(None) for a in source.committed_here if head is not None and a.history == head.history]
        foreign = head is None or (
            held is not None and (not isinstance(held.by, Site) or held.version > head.version)  # in parts
        )
        strange = (
            held is not None and head is not None and (held.state(None) not in known or held.version > head.version)
        )
        if head is not None:
            note = UNSURE if hurt else source.note_of(head)
            site.target.attempts.append(replace(head, by=site, sequence=None, views={}, note=note))
        try:
            self.step_relay(site, head)
        except pulse.EngineError as error:
            fired = site.source.fired or site.target.fired
            expect(fired or hurt or foreign or strange, f"a relay was refused without a reason: {error!r}")
            site.process = draw.choice((None, site.process))
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
        else:
            states = [disk.head and disk.head.state(None) for disk in (source, target)]
            expect(hurt or foreign or states[0] == states[1], f"a relay of {states[0]} has published {states[1]}")
            ended = source.ended == target.ended or not source.ended
            expect(hurt or foreign or ended, "the end of the run was not passed on")
            outcome = f"{states[1]}"
        for wire in (site.source, site.target):
            self.note_calls(wire)
        return outcome + self.fired(site.source) + self.fired(site.target)

    def step_relay(self, site: Site, head: Attempt | None) -> None:
        """What a driver does with a relay that is an engine. Raises EngineError."""
        if site.process is None:
            names = self.settings.keys() & {"retain", "keep_every", "grace"}
            given: dict[str, Any] = {name: self.settings[name] for name in sorted(names)}
            given |= {"sign_with": keys()[0]} if self.signed else {}
            site.process = Relay(site.target, self.model.views, **given)
        if site.process.state().follow is None:
            site.process.follow(site.source, public_key=keys()[1] if self.signed else None)
        state = site.process.state()
        if head is not None and state.version != head.version:
            site.process.stage(head.version)
            site.process.apply(head.version)
        site.process.state()

    def mirror(self) -> str:
        """A mirror of the store takes a step: it is started, or again, and looks once."""
        draw = self.random
        if not self.mirrors or draw.random() < 0.15:
            for site in self.mirrors:
                self.close_mirror(site)
            self.mirrors = [Site(self.wire(self.any_disk()), self.folder / f"mirror{next(self.numbers)}")]
        site = self.mirrors[0]
        source, wire = site.source.disk, site.source
        wire.begin()
        self.plan_faults(wire, rate=0.25)
        before, head = self.mirrored(site), source.head
        try:
            if site.process is None or draw.random() < 0.3:
                self.close_mirror(site)
                key: dict[str, Any] = {"public_key": keys()[1]} if self.signed else {}
                site.process = Mirror(wire, site.target, keep=draw.choice((1, 2)), patience=0, **key)
            site.process.update()
        except (pulse.PulseError, ValueError) as error:
            known = before is None or head is None
            gone = known or before not in {a.state(None) for a in source.line.values()}
            expect(wire.fired or source.hurt or gone, f"a mirror was refused without a reason: {error!r}")
            expect(before in (None, self.mirrored(site)), f"{error!r}, and the folder is another one")
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
        else:
            found = self.mirrored(site)
            expect(source.hurt or (head and head.state(None)) == found, f"a mirror holds {found}, the newest is {head}")
            outcome = f"{found}"
        self.note_calls(wire)
        return outcome + self.fired(wire)

    def mirrored(self, site: Site) -> State | None:
        """The version in the current folder of a mirror, whose bits are compared."""
        folder = site.target / "current"
        if not folder.exists():
            return None
        found = {name: bits.read(0, bits.size).tobytes() for name, bits in open_checkpoint(folder).items()}
        owners = {owner: alias for alias, owner in self.model.tied.items()}
        bits: Bits = {name: found[name if name in found else owners[name]] for name in self.model.shapes}
        version = int(folder.resolve().name[1:])
        digest = pulse.digest(self.model.tensors(bits))
        expect(self.ledger.get((version, digest)) == bits, f"the folder of version {version} has other bits")
        return version, digest

    def close_mirror(self, site: Site) -> None:
        if site.process is not None:
            site.process.close()
            site.process = None

    def begin_anew(self) -> str:
        """Somebody empties the store, and another run begins in it, which soon has versions of the same numbers."""
        self.rest()
        disk = self.trainers[-1].wire.disk
        versions = sorted(a.version for a in disk.line.values())[-self.random.randint(1, 4) :]
        disk.empty()
        new = self.trainer(disk)
        self.add(new)
        told = [self.published(new, foreground=True, version=version) for version in versions]
        return "; ".join(told) or "it was empty"

    def publish_parts(self) -> str:
        """Several ranks publish a version in parts, and one trainer goes on from it."""
        self.rest()
        disk = self.trainers[-1].wire.disk
        head = disk.head
        if head is None or disk.hurt or self.signed:
            return "not now"
        ranks, wire = self.random.choice((2, 3)), Wire(disk, Random(0))
        new = self.model.changed(self.random, head.bits)
        old_tensors, tensors = self.model.tensors(head.bits), self.model.tensors(new)
        wire.attempts.append(Attempt(head.version + 1, new, digest=pulse.digest(tensors), by=head.by))  # as it claims
        codec = self.random.choice(("gap", "context"))
        made = publish_parts(wire, old_tensors, tensors, even(ranks), ranks, codec=codec)
        following = self.trainer(disk)
        following.bits = new
        self.add(following)
        return f"version {made.version} in {ranks} parts"

    def rest(self) -> None:
        """Let what is in flight be committed."""
        for trainer in self.trainers:
            trainer.release()
        self.turns.settle()

    def new_disk(self) -> Disk:
        made = self.disk()
        self.disks = [*self.disks[-4:], made]
        return made
