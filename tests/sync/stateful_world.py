"""What the stateful fuzzer runs on: stores that fail as told, and a naive model of every version that was committed.

A `Disk` is a store and what the model knows of it; a `Wire` leads one publisher or subscriber to it, and fails or
changes the calls that a case draws. The model learns of a commit where its manifest reaches the disk, from the bytes
of the manifest alone, so it needs nothing of the library to know what is committed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.dtypes import DTYPES
from pulse_rl.errors import CannotListError
from pulse_rl.log.beginning import read_first
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.store.objects import ObjectStore
from pulse_rl.store.ranges import whole_range
from tests.history.mutations import members
from tests.sync.stateful_turns import Turns
from tests.sync.stateful_weights import BIG, VIEWS, Bits, Model

UNSURE = b"?"  # an asset of which nobody knows what it is
State = tuple[int, str | None]  # a version, and its digest
FOLDERS = ("manifests", "patches", "trails", "anchors")


@dataclass(eq=False)
class Attempt:
    """A version that a publisher was given, and, once it is committed, its place."""

    version: int
    bits: Bits = field(repr=False)
    digest: str = field(kw_only=True)
    by: object = field(kw_only=True, repr=False)  # the publisher
    sequence: int | None = None  # once committed
    history: str | None = None  # its id, likewise
    disturbed: bool = False  # whether a call failed while it was in flight
    metadata: dict[str, Any] | None = None
    note: bytes | None = None  # an asset, put with an anchor
    views: dict[str, str] = field(default_factory=dict)  # once committed: the digest in each view
    anchors: set[str | None] = field(default_factory=set)  # likewise: the views that have an anchor, None the weights
    anchor_number: int = 0

    @property
    def place(self) -> int:
        """Its sequence number; -1 before it is committed."""
        return -1 if self.sequence is None else self.sequence

    def state(self, view: str | None) -> State:
        """What whoever holds it reports: its version, and its digest in a view; None where it lacks that."""
        return self.version, self.digest if view is None else self.views.get(view)


class Disk:
    """A store, and what the model knows of it."""

    def __init__(self, inner: Store, model: Model, ledger: dict[State, Bits], turns: Turns) -> None:
        self.inner, self.model = inner, model
        self.ledger = ledger  # every version that was ever committed anywhere, and its views, by version and digest
        self.turns = turns
        self.times: dict[str, float] = {}  # when each object was written
        self.line: dict[int, Attempt] = {}  # the versions whose manifests exist and are sound, by sequence number
        self.committed_here: list[Attempt] = []  # also those that were pruned since
        self.lost: dict[int, Attempt] = {}  # those whose manifests were damaged on purpose
        self.damaged: dict[str, bytes] = {}  # objects that were damaged on purpose, as they were
        self.mixed = False  # whether damaged manifests of another history are left before this one
        self.wrongs: list[str] = []  # found where no exception can be raised
        self.prunings = 0  # manifests deleted by the library
        self.marked: Attempt | None = None  # the version that the mark of the run's end names

    @property
    def head(self) -> Attempt | None:
        return self.line[max(self.line)] if self.line else None

    @property
    def ended(self) -> bool:
        return self.marked is not None and self.marked is self.head

    @property
    def hurt(self) -> bool:
        return bool(self.damaged or self.lost or self.mixed)

    def note_of(self, attempt: Attempt, view: str | None = None) -> bytes | None:
        """The asset of the newest anchor at or before a version."""
        anchors = [a for a in self.line.values() if view in a.anchors and a.place <= attempt.place]
        return max(anchors, key=lambda a: a.place).note if anchors else None

    def began(self) -> int:
        """Where the history begins for readers that cannot list."""
        return read_first(self.inner)

    def highest(self) -> int:
        """The highest version that this disk ever held."""
        return max((attempt.version for attempt in (*self.line.values(), *self.lost.values())), default=-1)

    def committed(self, name: str, data: bytes, attempts: "list[Attempt]", source: "Disk | None") -> None:
        """A manifest has reached the disk: of an attempt, or of a version that is copied from another disk."""
        document, _ = members(data)
        sequence, version, digest = document["sequence"], document["version"], document["digest"]
        found = [a for a in attempts if (a.version, a.digest) == (version, digest) and a.sequence is None]
        if source is not None:
            here = (sequence, version, digest)
            copied = next((a for a in reversed(source.committed_here) if (a.sequence, *a.state(None)) == here), None)
            if copied is None:  # what is pruned meanwhile may still be copied
                self.wrongs.append(f"version {version} was copied as {sequence}, and was never there")
            else:
                self.line = dict(sorted((self.line | {sequence: copied}).items()))
                self.committed_here.append(copied)
            return
        head, began = self.head, self.began()
        if found and sequence < began and (began, head) != (0, None):
            self.ledger[version, digest] = found[-1].bits
            return  # its publisher was overtaken, sees it, and deletes it
        if not found:
            self.wrongs.append(f"version {version} ({digest}) was committed, and nobody published it")
            return
        if sequence in self.line or (head and (sequence < max(self.line) or version <= head.version)):
            self.wrongs.append(f"version {version} was committed as {sequence}, over {sorted(self.line)}")
        oldest_kept = sequence
        if not self.line and any(lost.history != document.get("history") for lost in self.lost.values()):
            # Its publisher saw no sound version: it has begun another history, with what is left of this one before it.
            oldest_kept = 0
            self.mixed |= any(int(info.name[10:22]) < sequence for info in self.listed("manifests"))
        self.lost = {number: lost for number, lost in self.lost.items() if number < oldest_kept}
        self.damaged = {
            n: old
            for n, old in self.damaged.items()
            if not (n.startswith("manifests/") and int(n[10:22]) >= oldest_kept)
        }
        found[-1].sequence, found[-1].history = sequence, document.get("history")
        before = self.line.get(sequence - 1) or self.lost.get(sequence - 1)
        self.line[sequence] = made = found[-1]
        self.committed_here.append(made)
        self.ledger[version, digest] = made.bits
        if (document.get("metadata") or None) != (made.metadata or None):
            self.wrongs.append(f"version {version} has the metadata {document.get('metadata')}")
        made.anchor_number = document["anchor_number"]
        views = document.get("views") or {}
        made.anchors = {view for view, one in ({None: document} | views).items() if one.get("anchor")}
        for view, entry in views.items():
            made.views[view] = entry["digest"]
            self._see(made, view, before)

    def _see(self, made: Attempt, view: str, before: Attempt | None) -> None:
        """Compare a view of a version with what is quantised anew, after the version before."""
        here = made.state(view)
        held = self.ledger.get(before.state(view)) if before is not None else None
        # Sticky scales begin anew where a publisher began with an anchor.
        for known in (held, None) if view in made.anchors else (held,):
            self.ledger[here] = self.model.seen(view, made.bits, known)
            if pulse.digest(self.model.forms[view].tensors(self.ledger[here])) == here[1]:
                return
        self.wrongs.append(f"version {made.version} has other bits in view {view} than quantised anew")

    def marked_by(self, data: bytes) -> None:
        """The mark of the run's end has reached the disk."""
        self.marked = self.line.get(members(data)[0]["sequence"])

    def deleted(self, name: str) -> None:
        """An object was deleted by the library."""
        self.damaged.pop(name, None)
        if name == "end.json":
            self.marked = None
        if name.startswith("manifests/"):
            self.prunings += 1
            if int(name[10:22]) == max((*self.line, *self.lost), default=-1):
                self.wrongs.append(f"the newest version was deleted: {name}")
            self.line.pop(int(name[10:22]), None)
            self.lost.pop(int(name[10:22]), None)

    def put(self, name: str, data: bytes, *, mode: Any = "overwrite") -> None:
        self.inner.put(name, data, mode=mode)
        self.times[name] = self.turns.now

    def listed(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        return [info._replace(modified=self.times[info.name]) for info in self.inner.list(prefix, after)]

    def empty(self) -> None:
        """Somebody deletes everything."""
        for name in [*self.names(), "first.json", "end.json"]:
            self.inner.delete(name)
        self.line, self.lost, self.damaged, self.mixed, self.marked = {}, {}, {}, False, None
        self.prunings += 1

    def names(self) -> list[str]:
        return [info.name for folder in FOLDERS for info in self.listed(folder)]

    def damaged_objects(self) -> list[str]:
        """What was damaged on purpose, and a sound manifest names."""
        named = [bytes(self.inner.get(f"manifests/{sequence:012}.json")) for sequence in self.line]
        there = {name: bytes(self.inner.get(name)) for name in self.names() if name in self.damaged}
        changed = [name for name, data in self.damaged.items() if there.get(name) != data]
        return [name for name in changed if any(name.encode() in data for data in named)]

    def damage(self, name: str, data: bytes | None) -> None:
        """Replace an object by other bytes; None deletes it."""
        if name not in self.damaged:
            self.damaged[name] = bytes(self.inner.get(name))
        if name.startswith("manifests/") and int(name[10:22]) in self.line:
            self.lost[int(name[10:22])] = self.line.pop(int(name[10:22]))
        if data is None:
            self.inner.delete(name)
        else:
            self.put(name, data)

    def repair(self) -> None:
        """Put back whatever was damaged."""
        began, there = self.began(), set(self.names())
        for name, data in self.damaged.items():
            sequence = int(name.split("/")[1][:12])
            # What a pruning would have deleted is not put back.
            kept = sequence >= began or sequence in self.line or f"manifests/{sequence:012}.json" in there
            if name in there or kept:
                self.put(name, data)
            elif name.startswith("manifests/"):
                del self.lost[sequence]
        self.damaged = {}
        self.line = dict(sorted((self.line | self.lost).items()))
        self.lost = {}

    def copy(self, inner: Store) -> "Disk":
        """Another disk with the same objects."""
        made = Disk(inner, self.model, self.ledger, self.turns)
        for name in ["first.json", "end.json", *reversed(self.names())]:
            try:
                made.put(name, bytes(self.inner.get(name)))
            except pulse.ObjectNotFoundError:
                continue
        made.line, made.lost, made.damaged = dict(self.line), dict(self.lost), dict(self.damaged)
        made.committed_here, made.mixed, made.marked = list(self.committed_here), self.mixed, self.marked
        return made


class Call(NamedTuple):
    """One call of a store: which operation, on which folder, the how-manieth of them in this step."""

    op: str
    folder: str
    number: int


@dataclass(eq=False)
class Wire:
    """A store that leads to a disk, and fails at the calls that a case draws.

    plan: what happens at which call: "before" (fails, without effect), "after" (fails, having taken effect), "flip" and
    "cut" (what is read arrives changed), "lose" (what is written is stored changed), "die" (this and all later calls
    fail), "out" (this and some more calls fail), or a function, which is called before the call takes effect.
    """

    disk: Disk
    random: Random
    listing: bool = True
    source: Disk | None = None  # where it is copied from
    temporary: bool = False  # what the failures say of themselves
    plan: "dict[Call, str | Callable[[], None]]" = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    dead: bool = False
    failing: int = 0  # calls that still fail, in an outage
    fired: list[str] = field(default_factory=list)  # in this step
    calls_left: int | None = None  # until its calls wait for `release`; None while they do not

    def __post_init__(self) -> None:
        self.url = f"fuzz://{'' if self.listing else 'web'}{'copy' if self.source else ''}"

    def begin(self) -> None:
        """A step begins."""
        self.plan, self.fired, self.counts, self.temporary, self.failing = {}, [], Counter(), False, 0

    def release(self) -> None:
        """Let calls that wait go on."""
        self.calls_left = None

    def _call(self, op: str, name: str) -> str:
        """What is to happen to a call."""
        self.disk.turns.call(f"{op} {name}")
        if self.calls_left is not None:
            self.calls_left -= 1
            self.disk.turns.until(lambda: self.calls_left is None or self.calls_left >= 0)
        folder = name.split("/")[0]
        self.counts[op, folder] += 1
        what = self.plan.pop(Call(op, folder, self.counts[op, folder]), "")
        if what:
            how = what if isinstance(what, str) else "hook"
            self.fired.append(f"{op} {folder} {self.counts[op, folder]}: {how}")
        if what == "die":
            self.dead = True
        if what == "out":
            self.failing = self.random.randint(2, 12)
        if self.failing or self.dead:
            self.failing = max(0, self.failing - 1)
            raise self._error(op, name)
        if what == "before":
            raise self._error(op, name)
        if callable(what):
            what()
            return ""
        return what

    def _error(self, op: str, name: str) -> pulse.StoreError:
        return pulse.StoreError(f"cannot {op} {name}: as drawn", url=self.url, name=name, temporary=self.temporary)

    def _altered(self, what: str, data: bytes) -> bytes:
        if what in ("cut", "lose") or not data:
            return data[: self.random.randrange(len(data) + 1)]
        other = bytearray(data)
        other[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(other)

    def put(self, name: str, data: bytes | Iterable[bytes], *, mode: Any = "overwrite") -> None:
        whole = data if isinstance(data, bytes) else b"".join(data)
        what = self._call("put", name)
        self.disk.put(name, whole, mode=mode)
        if name.startswith("manifests/"):
            self.disk.committed(name, whole, self.attempts, self.source)
        elif name == "end.json" and what != "lose":
            self.disk.marked_by(whole)
        elif what == "lose" and name != "end.json":
            self.disk.damage(name, self._altered(what, whole))
        if what == "after":
            raise self._error("put", name)

    def check_create(self) -> None:
        self._call("check", "")

    def get(self, name: str) -> memoryview:
        what = self._call("get", name)
        data = self.disk.inner.get(name)
        if what == "after":
            raise self._error("get", name)
        return memoryview(self._altered(what, bytes(data))) if what else data

    def stream(self, name: str) -> Iterator[memoryview]:
        what = self._call("stream", name)
        data = bytes(self.disk.inner.get(name))
        if what in ("flip", "cut"):
            data = self._altered(what, data)
        for start in range(0, len(data), 10_000):
            yield memoryview(data)[start : start + 10_000]
            if what == "after":
                raise self._error("stream", name)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        if not self.listing:
            raise CannotListError(f"cannot list {prefix}", url=self.url, name=prefix)
        what = self._call("list", prefix)
        found = self.disk.listed(prefix, after)
        if what == "after":
            raise self._error("list", prefix)
        return found

    def delete(self, name: str) -> None:
        what = self._call("delete", name)
        self.disk.inner.delete(name)
        self.disk.deleted(name)
        if what == "after":
            raise self._error("delete", name)


class TaggedWire(Wire, ObjectStore):
    """A Wire to a store that knows tags, by which a history at rest is followed, and reads parts of objects."""

    def read_changed(self, name: str, tag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        what = self._call("read", name)
        data = bytes(self.disk.inner.get(name))
        if what == "after":
            raise self._error("read", name)
        found = blake3(data).hexdigest()
        return None if tag == found else (self._altered(what, data) if what else data, found)

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        what = self._call("range", name)
        data = bytes(self.disk.inner.get(name))[start:stop]
        if what == "after":
            raise self._error("read a part of", name)
        found = whole_range(self, name, start, stop, memoryview(data))
        return memoryview(self._altered("flip", data)) if what else found


def warm_up() -> None:
    """Compile the kernels, so that no step spends time on them."""
    for codec in ("gap", "context"):
        store, model = pulse.open_store("memory://"), Model(Random(1))
        names = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
        model.shapes, model.tied = {BIG: ("bfloat16", (50, 100))} | {name: (name, (5000,)) for name in names}, {}
        live, bits = model.tensors(model.drawn(Random(0))), model.drawn(Random(2))
        publisher, subscriber = pulse.Publisher(store, codec=codec, views=VIEWS), pulse.Subscriber(store)
        for version in range(9):
            publisher.publish(model.tensors(bits), version=version)
            subscriber.sync(live, version=version)
            bits = {
                name: data[:99] + bytes(byte ^ 1 for byte in data[99:131]) + data[131:] for name, data in bits.items()
            }
        pulse.Subscriber(store, verify_live=True).sync(live, version=3)
        pulse.verify(store)
