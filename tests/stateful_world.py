"""What the stateful fuzzer runs on: stores that fail as told, and a naive model of every version that was committed.

A `Disk` is a store and what the model knows of it; a `Wire` leads one publisher or subscriber to it, and fails or
changes the calls that a case draws. The model learns of a commit where its manifest reaches the disk, from the bytes
of the manifest alone, so it needs nothing of the library to know what is committed.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from mutations import members
from patch_tools import from_bytes, raw_bytes

import pulse_rl as pulse
from pulse_rl.dtypes import DTYPES
from pulse_rl.errors import CannotListError
from pulse_rl.store.base import ObjectInfo, Store
from pulse_rl.store.objects import ObjectStore

Bits = dict[str, bytes]  # every tensor's bytes, by name
FOLDERS = ("manifests", "patches", "trails", "anchors")
SPECIAL = {  # little-endian bit patterns of both zeros, NaNs of several payloads and both signs, infinity, subnormal
    "bfloat16": (0x0000, 0x8000, 0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0x0001),
    "float16": (0x0000, 0x8000, 0x7E00, 0xFE01, 0x7C01, 0x7C00, 0x0001),
    "float32": (0x00000000, 0x80000000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F800000, 0x00000001),
    "float64": (0, 1 << 63, 0x7FF8 << 48, (0xFFF8 << 48) + 1, (0x7FF0 << 48) + 1, 0x7FF0 << 48, 1),
}


class Wrong(AssertionError):
    """Something was done that must not be."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Model:
    """The tensors of a run, and how a trainer changes their bits."""

    def __init__(self, random: Random) -> None:
        dtypes = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "big": (random.choice(("bfloat16", "float32", "uint8")), (random.randint(40, 90), 257))
        }
        for number in range(random.randint(0, 4)):
            shape: tuple[int, ...] = random.choice(
                ((), (0, 3), (1,), (random.randint(2, 300),), (random.randint(2, 20), 7))
            )
            self.shapes[f"w{number}"] = (random.choice(dtypes), shape)
        self.tied = {"tied": random.choice(list(self.shapes))} if random.random() < 0.3 else {}

    def drawn(self, random: Random) -> Bits:
        """Any state."""
        made = {}
        for name, (dtype, shape) in self.shapes.items():
            nbytes = DTYPES[dtype][1]
            for size in shape:
                nbytes *= size
            data = random.randbytes(nbytes)
            made[name] = bytes(byte & 1 for byte in data) if dtype == "bool" else data
        return made

    def changed(self, random: Random, bits: Bits) -> Bits:
        """The state after a step: of few changes, many, all, none, or of special values only."""
        kind = random.choice(("few", "few", "few", "some", "many", "all", "none", "special"))
        if kind == "all":
            return self.drawn(random)
        share = {"few": 0.001, "some": 0.02, "many": 0.5, "none": 0, "special": 0.01}[kind]
        made = {}
        for name, data in bits.items():
            dtype, size = self.shapes[name][0], DTYPES[self.shapes[name][0]][1]
            other, count = bytearray(data), len(data) // size
            for place in random.sample(range(count), min(count, -(-int(count * share * 1000) // 1000))):
                at = place * size
                if kind == "special" and dtype in SPECIAL:
                    other[at : at + size] = random.choice(SPECIAL[dtype]).to_bytes(size, "little")
                else:
                    other[at + random.randrange(size)] ^= 1 if dtype == "bool" else 1 << random.randrange(8)
            made[name] = bytes(other)
        return made

    def tensors(self, bits: Bits) -> dict[str, torch.Tensor]:
        """New torch tensors of a state; tied names have the same tensor."""
        made = {name: from_bytes("torch", dtype, shape, bits[name]) for name, (dtype, shape) in self.shapes.items()}
        return made | {alias: made[owner] for alias, owner in self.tied.items()}

    def read(self, tensors: Any) -> Bits:
        """The bits of live weights. Raises Wrong if tied ones differ."""
        for alias, owner in self.tied.items():
            expect(raw_bytes(tensors[alias]) == raw_bytes(tensors[owner]), f"the tied {alias} and {owner} differ")
        return {name: raw_bytes(tensors[name]) for name in self.shapes}


@dataclass(eq=False)
class Attempt:
    """A version that a publisher was given, and, once it is committed, its place."""

    version: int
    bits: Bits = field(repr=False)
    digest: str = field(kw_only=True)
    by: object = field(kw_only=True, repr=False)  # the publisher
    sequence: int | None = None  # once committed
    history: str | None = None  # its id, likewise

    @property
    def place(self) -> int:
        """Its sequence number; -1 before it is committed."""
        return -1 if self.sequence is None else self.sequence


class Disk:
    """A store, and what the model knows of it."""

    def __init__(self, inner: Store, ledger: dict[tuple[int, str], Bits]) -> None:
        self.inner = inner
        self.ledger = ledger  # every version that was ever committed anywhere, by version and digest
        self.line: dict[int, Attempt] = {}  # the versions whose manifests exist and are sound, by sequence number
        self.lost: dict[int, Attempt] = {}  # those whose manifests were damaged on purpose
        self.damaged: dict[str, bytes] = {}  # objects that were damaged on purpose, as they were
        self.wrongs: list[str] = []  # found where no exception can be raised
        self.prunings = 0  # manifests deleted by the library
        self._lock = threading.Lock()

    @property
    def head(self) -> Attempt | None:
        return self.line[max(self.line)] if self.line else None

    @property
    def hurt(self) -> bool:
        return bool(self.damaged or self.lost)

    def began(self) -> int:
        """Where the history begins for readers that cannot list."""
        try:
            return int(bytes(self.inner.get("first.json")))
        except (pulse.ObjectNotFoundError, ValueError):
            return 0

    def highest(self) -> int:
        """The highest version that this disk ever held."""
        return max((attempt.version for attempt in (*self.line.values(), *self.lost.values())), default=-1)

    def committed(self, name: str, data: bytes, attempts: "list[Attempt]") -> None:
        """A manifest has reached the disk."""
        document, _ = members(data)
        sequence, version, digest = document["sequence"], document["version"], document["digest"]
        with self._lock:
            found = [a for a in attempts if (a.version, a.digest) == (version, digest) and a.sequence is None]
            head, began = self.head, self.began()
            if found and sequence < began and (began, head) != (0, None):
                self.ledger[version, digest] = found[-1].bits
                return  # its publisher was overtaken, sees it, and deletes it
            if not found:
                self.wrongs.append(f"version {version} ({digest}) was committed, and nobody published it")
                return
            if sequence in self.line or (head and (sequence < max(self.line) or version <= head.version)):
                self.wrongs.append(f"version {version} was committed as {sequence}, over {sorted(self.line)}")
            if not self.line:  # its publisher saw no version at all: it has begun another history
                oldest_kept, self.lost = 0, {}
            else:
                oldest_kept = sequence
            self.lost = {number: lost for number, lost in self.lost.items() if number < sequence}
            self.damaged = {
                n: old
                for n, old in self.damaged.items()
                if not (n.startswith("manifests/") and int(n[10:22]) >= oldest_kept)
            }
            found[-1].sequence, found[-1].history = sequence, document.get("history")
            self.line[sequence] = found[-1]
            self.ledger[version, digest] = found[-1].bits

    def deleted(self, name: str) -> None:
        """An object was deleted by the library."""
        with self._lock:
            self.damaged.pop(name, None)
            if name.startswith("manifests/"):
                self.prunings += 1
                self.line.pop(int(name[10:22]), None)
                self.lost.pop(int(name[10:22]), None)

    def names(self) -> list[str]:
        return [info.name for folder in FOLDERS for info in self.inner.list(folder)]

    def damage(self, name: str, data: bytes | None) -> None:
        """Replace an object by other bytes; None deletes it."""
        if name not in self.damaged:
            self.damaged[name] = bytes(self.inner.get(name))
        if name.startswith("manifests/") and int(name[10:22]) in self.line:
            self.lost[int(name[10:22])] = self.line.pop(int(name[10:22]))
        if data is None:
            self.inner.delete(name)
        else:
            self.inner.put(name, data)

    def repair(self) -> None:
        """Put back whatever was damaged."""
        began = self.began()  # what was pruned meanwhile is not put back
        self.lost = {sequence: lost for sequence, lost in self.lost.items() if sequence >= began}
        for name, data in self.damaged.items():
            sequence = int(name.split("/")[1][:12])
            if sequence >= began or sequence in self.line:
                self.inner.put(name, data)
        self.damaged = {}
        self.line = dict(sorted((self.line | self.lost).items()))
        self.lost = {}

    def copy(self, inner: Store) -> "Disk":
        """Another disk with the same objects."""
        for name in ["first.json", *reversed(self.names())]:
            try:
                inner.put(name, bytes(self.inner.get(name)))
            except pulse.ObjectNotFoundError:
                continue
        made = Disk(inner, self.ledger)
        made.line, made.lost, made.damaged = dict(self.line), dict(self.lost), dict(self.damaged)
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
    fail), or a function, which is called before the call takes effect.
    """

    disk: Disk
    random: Random
    listing: bool = True
    temporary: bool = False  # what the failures say of themselves
    plan: "dict[Call, str | Callable[[], None]]" = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    dead: bool = False
    fired: list[str] = field(default_factory=list)  # in this step
    gates: dict[int, threading.Event] = field(default_factory=dict)  # the commit of a version waits for it

    def __post_init__(self) -> None:
        self.url = "fuzz://" + ("" if self.listing else "web")
        self._guard = threading.Lock()

    def begin(self) -> None:
        """A step begins."""
        self.plan, self.fired, self.counts, self.temporary = {}, [], Counter(), False

    def _call(self, op: str, name: str) -> str:
        """What is to happen to a call."""
        folder = name.split("/")[0]
        with self._guard:
            self.counts[op, folder] += 1
            what = self.plan.pop(Call(op, folder, self.counts[op, folder]), "")
            if what:
                how = what if isinstance(what, str) else "hook"
                self.fired.append(f"{op} {folder} {self.counts[op, folder]}: {how}")
            if what == "die":
                self.dead = True
            if self.dead:
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
        gate = self.gates.get(members(whole)[0]["version"]) if name.startswith("manifests/") else None
        if gate is not None:
            gate.wait(30)
        what = self._call("put", name)
        self.disk.inner.put(name, whole, mode=mode)
        if name.startswith("manifests/"):
            self.disk.committed(name, whole, self.attempts)
        elif what == "lose":
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
        found = self.disk.inner.list(prefix, after)
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
    """A Wire to a store that knows tags, so that a history at rest is followed by them."""

    def read_changed(self, name: str, tag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        what = self._call("read", name)
        data = bytes(self.disk.inner.get(name))
        if what == "after":
            raise self._error("read", name)
        found = blake3(data).hexdigest()
        return None if tag == found else (self._altered(what, data) if what else data, found)


def warm_up() -> None:
    """Compile the kernels, so that no step spends time on them."""
    for codec in ("gap", "context"):
        store, model = pulse.open_store("memory://"), Model(Random(1))
        names = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
        model.shapes, model.tied = {name: (name, (5000,)) for name in names}, {}
        live, bits = model.tensors(model.drawn(Random(0))), model.drawn(Random(2))
        publisher, subscriber = pulse.Publisher(store, codec=codec), pulse.Subscriber(store)
        for version in range(9):
            publisher.publish(model.tensors(bits), version=version)
            subscriber.sync(live, version=version)
            bits = {
                name: data[:99] + bytes(byte ^ 1 for byte in data[99:131]) + data[131:] for name, data in bits.items()
            }
        pulse.Subscriber(store, verify_live=True).sync(live, version=3)
        pulse.verify(store)
