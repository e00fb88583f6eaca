"""The publishers and subscribers of a stateful fuzzer, what fails for them, and what holds after every step.

What they call is in `stateful_calls`, and the steps are in `fuzz_stateful`.
"""

import faulthandler
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch

import pulse_rl as pulse
from pulse_rl.store.base import Store
from tests.history.world import keys
from tests.sync.stateful_turns import Turns
from tests.sync.stateful_weights import Bits, Model, Tensors, Wrong, expect
from tests.sync.stateful_world import Attempt, Call, Disk, State, TaggedWire, Wire

BEGUN = "begun"  # what came of something that happens meanwhile, until it is over
SECONDS = 300.0  # for one step; the slowest takes well under one


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Raise Wrong where a block hangs; where even that is not possible, print all stacks and end the process."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Wrong(f"{what}: still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Trainer:
    """A publisher, and what the model knows of it."""

    def __init__(self, wire: Wire, publisher: pulse.Publisher, bits: Bits) -> None:
        self.wire, self.publisher, self.bits = wire, publisher, bits
        self.last: Attempt | None = None  # where it believes the history to end
        self.flying: Attempt | None = None

    def release(self) -> None:
        """Let a version in flight be committed."""
        self.wire.release()

    def kill(self) -> None:
        """Let every call of the store fail from now on, as if the process were gone."""
        self.wire.dead = True
        self.release()
        with suppress(pulse.PulseError):
            self.publisher.close()


class Module(torch.nn.Module):
    """Tensors as parameters and buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            inner, _, leaf = name.rpartition(".")
            if inner and not hasattr(self, inner):
                self.add_module(inner, torch.nn.Module())
            module = self.get_submodule(inner)
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                same = (p for p in self.parameters() if p.numel() and p.data_ptr() == tensor.data_ptr())
                tied = next(same, None)
                module.register_parameter(leaf, torch.nn.Parameter(tensor) if tied is None else tied)
            else:
                module.register_buffer(leaf, tensor)


class Follower:
    """A subscriber with its live weights, and what the model knows of it."""

    def __init__(self, wire: Wire, subscriber: pulse.Subscriber, live: Any, recounts: bool, form: Tensors) -> None:
        self.wire, self.subscriber, self.live, self.recounts = wire, subscriber, live, recounts
        self.form, self.view = form, subscriber.history.view
        self.altered: set[tuple[str, int]] = set()  # bytes that were changed where nothing could see it
        self.top: Attempt | None = None  # the highest version that it has reported
        self.staged: pulse.Staged | None = None
        self.obsolete = False  # whether the weights have moved on since it was staged
        self.seen: Bits = {}  # the live bits after the last step

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live.state_dict(keep_vars=True) if isinstance(self.live, torch.nn.Module) else self.live

    def read(self) -> Bits:
        """The live bits."""
        return self.form.read(self.tensors())


class Site:
    """A relay or a mirror of a store, and what leads it there and on."""

    def __init__(self, source: Wire, target: Any) -> None:
        self.source, self.target = source, target  # the target of a relay is a Wire, of a mirror a Path
        self.process: Any = None  # the Relay or Mirror; None before it is started


def sizes(bits: Bits) -> dict[str, int]:
    return {name: len(data) for name, data in bits.items()}


def differences(bits: Bits, others: Bits) -> set[tuple[str, int]]:
    """The places of the bytes that differ."""
    pairs = {
        name: enumerate(zip(data, others[name], strict=True)) for name, data in bits.items() if data != others[name]
    }
    return {(name, place) for name, places in pairs.items() for place, (one, other) in places if one != other}


class Clients:
    """The clients of one history and its copies."""

    def __init__(self, seed: str, directory: Path, turns: Turns, log: list[str]) -> None:
        self.random = Random(seed)
        draw = self.random
        self.turns, self.log = turns, log
        self.ledger: dict[State, Bits] = {}
        self.model = Model(draw)
        self.folder = directory
        self.directory = directory if draw.random() < 0.1 else None
        self.numbers = itertools.count()
        self.disks = [self.disk()]
        self.signed = draw.random() < 0.2
        self.settings: dict[str, Any] = {
            "anchor_every": draw.choice((1, 2, 3, 5, 8, 50)),
            "codec": draw.choice(("gap", "context", "auto")),
            "retain": draw.choice((None, None, 1, 2, 4, 8)),
        }
        if self.settings["retain"]:
            self.settings |= {"keep_every": draw.choice((None, 2, 3)), "grace": draw.choice((0.0, 0.0, 3600.0))}
        self.trainers = [self.trainer(self.disks[0])]
        self.followers: list[Follower] = []
        self.relays: list[Site] = []
        self.mirrors: list[Site] = []
        self.counts: Counter[str] = Counter()
        self.calls: list[Call] = [Call("put", "manifests", 1)]  # that were made so far: each may fail
        self.hooked = False  # whether another client acts inside of the current step

    # Making things

    def disk(self) -> Disk:
        return Disk(self.storage(), self.model, self.ledger, self.turns)

    def any_disk(self) -> Disk:
        """Mostly the one that is published to."""
        return self.trainers[-1].wire.disk if self.random.random() < 0.6 else self.random.choice(self.disks)

    def storage(self) -> Store:
        if self.directory is None:
            return pulse.open_store("memory://")
        return pulse.open_store(self.directory / f"store{next(self.numbers)}")

    def wire(self, disk: Disk, *, listing: bool = True, source: Disk | None = None) -> Wire:
        kind = TaggedWire if self.random.random() < 0.5 else Wire
        return kind(disk, Random(self.random.random()), listing, source)

    def trainer(self, disk: Disk) -> Trainer:
        wire = self.wire(disk)
        patience = self.random.choice((0.0, 0.0, 0.0, 5.0))
        sign: dict[str, Any] = {"sign_with": keys()[0]} if self.signed else {}
        views = self.model.views if self.random.random() < 0.9 else {}
        publisher = pulse.Publisher(wire, patience=patience, views=views, **self.settings, **sign)
        return Trainer(wire, publisher, self.model.drawn(self.random))

    def follower(self, disk: Disk, old: Follower | None = None) -> Follower:
        """A subscriber, with new weights or those of an old one."""
        draw = self.random
        if old is not None:
            live, view = old.live, old.view
        else:
            view = draw.choice((None, *self.model.views))
            form = self.model.forms[view]
            start = form.drawn(draw)
            known = [bits for bits in self.ledger.values() if sizes(bits) == sizes(start)]
            if known and draw.random() < 0.3:  # as after loading an anchor
                start = draw.choice(known)
            live = form.tensors(start)
            if draw.random() < 0.4:
                live = Module(live)
        verify_live = draw.choice((False, False, False, True, 2))
        key: dict[str, Any] = {"public_key": keys()[1]} if self.signed else {}
        wire = self.wire(disk, listing=draw.random() < 0.7)
        patience = draw.choice((0.0, 0.0, 0.0, 5.0))
        subscriber = pulse.Subscriber(wire, verify_live=verify_live, patience=patience, view=view, **key)
        made = Follower(wire, subscriber, live, verify_live is True, self.model.forms[view])
        made.seen = made.read()
        return made

    def plan_faults(self, wire: Wire, *, rate: float = 0.35) -> None:
        """Draw what fails in this step."""
        draw = self.random
        if draw.random() > rate:
            return
        wire.temporary = draw.random() < 0.3
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            call = draw.choice(self.calls)
            op = call.op
            kinds = ["before", "after", "before", "after", "out"]
            if op in ("get", "stream", "read", "range"):
                kinds += ["flip", "cut"]
            if op == "put" and draw.random() < 0.2:
                kinds += ["lose"]
            wire.plan[call] = draw.choice(kinds)

    def note_calls(self, wire: Wire) -> None:
        """Keep which calls a step has made."""
        known = set(self.calls)
        made = [Call(op, folder, count) for (op, folder), count in wire.counts.items()]
        self.calls += [call for call in sorted(made) if call not in known]

    def step(self, name: str, verb: Callable[[], str], verbose: bool) -> None:
        self.hooked = False
        for wire in self.wires():
            wire.begin()
        self.log.append(name)
        with watched(name):
            self.turns.now += self.random.choice((0.0, 0.1, 1.0, 10.0, 100.0, 1000.0))
            outcome = verb()
            self.log[-1] = f"{name}: {outcome}"
            self.turns.settle()
            self.turns.note(self.log[-1])
            for wire in self.wires():
                self.note_calls(wire)
            for trainer in self.trainers:
                if trainer.flying is not None:
                    trainer.flying.disturbed |= bool(trainer.wire.fired)
            self.check()
        self.counts[verb.__name__] += 1
        if verbose:
            print(self.log[-1], flush=True)

    def wires(self) -> list[Wire]:
        return [trainer.wire for trainer in self.trainers] + [follower.wire for follower in self.followers]

    def add(self, trainer: Trainer) -> None:
        """A publisher begins; the oldest one is gone."""
        self.trainers.append(trainer)
        if len(self.trainers) > 4:
            self.trainers.pop(0).kill()

    def check(self) -> None:
        """What holds after every step."""
        for disk in self.disks:
            expect(not disk.wrongs, "; ".join(disk.wrongs))
        for follower in self.followers:
            self.check_follower(follower)

    def check_follower(self, follower: Follower) -> None:
        subscriber, bits = follower.subscriber, follower.read()
        version, digest = subscriber.version, subscriber.digest
        if version is None or digest is None:
            known = bits == follower.seen or bits in self.ledger.values()
            expect(known, "no version is reported, and the weights are neither as they were nor those of a version")
        else:
            promised = self.ledger.get((version, digest))
            if promised is None:
                raise Wrong(f"version {version} ({digest}) is reported, and was never committed")
            other = differences(bits, promised)
            expect(other <= follower.altered, f"version {version} is reported; {len(other)} bytes are not its bits")
            follower.altered = other
        follower.seen = bits

    def name(self, trainer: Trainer) -> str:
        return f"trainer {self.trainers.index(trainer)}" if trainer in self.trainers else "another trainer"

    def fired(self, wire: Wire) -> str:
        return f" [{'; '.join(wire.fired)}]" if wire.fired else ""

    def meanwhile(self, wire: Wire, act: Callable[[], str]) -> list[str]:
        """Let something happen during the next calls of a wire. What came of it is appended to the result.

        Either all of it before one call of the wire takes effect, or in a thread of its own, call by call.
        """
        outcomes: list[str] = []

        def once() -> None:
            if outcomes:
                return
            self.hooked = True
            outcomes.append(BEGUN)
            try:
                outcomes[0] = act()
            except Wrong as error:  # a thread of the library may be running this
                wire.disk.wrongs.append(str(error))
                outcomes[0] = "wrong"

        if self.random.random() < 0.5:
            self.hooked = True
            self.turns.start(once, lambda: True, "meanwhile")
            self.turns.until(lambda: bool(outcomes))
            return outcomes
        for call in self.random.sample(self.calls, min(3, len(self.calls))):  # the first of them that is made
            wire.plan[call] = once
        return outcomes
