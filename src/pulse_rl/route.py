"""The way through a history: which patches lead from version to version, and the cheapest chain of them.

Beside the patch from each version to the next there are skip patches, over 4, 16 and 64 versions: from a sequence
number that the span divides to the next such number. So any version is reached from any other over at most three
patches of a kind on the way up to the longer ones, and as many on the way down. The trail tells of all patches
between the last versions in one small object: a subscriber that slept reads it and no manifest in between.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from pulse_rl.errors import IntegrityError, PatchFormatError, PulseError, StoreError
from pulse_rl.manifest import Count, Digest, Hash, Manifest, ObjectRef, Token
from pulse_rl.store.base import ObjectMissingError
from pulse_rl.zstd import decompress

SPANS = (4, 16, 64)  # of skip patches, versions; each divides the next
WINDOW = SPANS[-1]  # versions that a trail reaches back
MAX_TRAIL_NBYTES = 1 << 20
# What one more object costs beside its own bytes: its request and a round trip. Small, so that bytes decide.
REQUEST_NBYTES = 4096


class State(NamedTuple):
    """A version and its place in the history."""

    sequence: int
    version: int
    digest: str


class Step(NamedTuple):
    """One patch: from the version at the sequence number `base` to another."""

    ref: ObjectRef
    base: int
    to: State


class Faults:
    """What was wrong with a history on the way, and the objects to keep away from since."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.said: list[str] = []
        self.damaged = False  # whether any was more than missing or out of reach
        self._unreachable = False

    def add(self, name: str, error: PulseError) -> None:
        """Note a fault of one object. Raises the error if it looks as if the store itself were out of reach."""
        elsewhere = isinstance(error, StoreError) and not isinstance(error, ObjectMissingError)
        if elsewhere and self._unreachable:
            raise error  # another object, the same failure: to try them all would take hours
        self._unreachable |= elsewhere
        self.damaged |= not isinstance(error, StoreError)
        self.names.add(name)
        self.say(str(error))

    def say(self, what: str) -> None:
        """Note what was wrong, once."""
        if what not in self.said:
            self.said.append(what)


class _Version(msgspec.Struct, frozen=True, array_like=True):
    version: Count
    digest: Digest


class _Patch(msgspec.Struct, frozen=True, array_like=True):
    base: Count  # sequence numbers
    target: Count
    token: Token
    nbytes: Count
    blake3: Hash


class Trail(msgspec.Struct, frozen=True):
    """The last versions of a history, at consecutive sequence numbers, and the patches between them."""

    sequence: Count  # of the last version
    versions: tuple[_Version, ...]  # oldest first
    patches: tuple[_Patch, ...]

    @property
    def first(self) -> int:
        """The sequence number of the oldest version."""
        return self.sequence - len(self.versions) + 1

    def states(self) -> list[State]:
        """The versions, oldest first."""
        return [State(self.first + i, v.version, v.digest) for i, v in enumerate(self.versions)]

    def steps(self) -> list[Step]:
        """The patches."""
        states = self.states()
        return [
            Step(ObjectRef(patch_name(p.target, p.token), p.nbytes, p.blake3), p.base, states[p.target - self.first])
            for p in self.patches
        ]

    def extended(self, state: State, steps: Iterable[Step]) -> "Trail":
        """This trail with one more version, and more patches; what lies too far back is dropped."""
        versions = (*self.versions, _Version(state.version, state.digest))[-WINDOW - 1 :]
        first = state.sequence - len(versions) + 1
        new = (_Patch(s.base, s.to.sequence, _token(s.ref.name), s.ref.nbytes, s.ref.blake3) for s in steps)
        return Trail(state.sequence, versions, tuple(p for p in (*self.patches, *new) if p.base >= first))

    def encode(self) -> bytes:
        """zstd of JSON."""
        return zstandard.ZstdCompressor(level=9).compress(msgspec.json.encode(self))


def patch_name(sequence: int, token: str) -> str:
    """The name of the patch to the version at a sequence number."""
    return f"patches/{sequence:012d}-{token}.safetensors"


def _token(name: str) -> str:
    return name.removesuffix(".safetensors")[-16:]


def state_of(manifest: Manifest) -> State:
    return State(manifest.sequence, manifest.version, manifest.digest)


def step_of(manifest: Manifest) -> Step | None:
    """The patch that a manifest names itself, if it has one."""
    return Step(manifest.patch, manifest.sequence - 1, state_of(manifest)) if manifest.patch else None


def trail_from(manifest: Manifest) -> Trail:
    """A trail that begins with a version."""
    return Trail(manifest.sequence, (_Version(manifest.version, manifest.digest),), ())


def decode_trail(data: bytes | bytearray, manifest: Manifest, where: str) -> Trail:
    """The trail of a version. Raises IntegrityError unless it is one, and ends with that version."""
    try:
        trail = msgspec.json.decode(decompress(memoryview(data), MAX_TRAIL_NBYTES, where), type=Trail)
    except (PatchFormatError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} is no trail: {error}") from None
    sound = trail.versions and trail.first >= 0 and trail.states()[-1] == state_of(manifest)
    if not sound or any(not trail.first <= p.base < p.target <= trail.sequence for p in trail.patches):
        raise IntegrityError(f"{where} is no trail to version {manifest.version}")
    return trail


def cheapest(steps: Iterable[Step], start: int, goal: int) -> list[Step] | None:
    """The chain of fewest bytes from one sequence number to a later one; None if the steps do not lead there."""
    best: dict[int, tuple[int, Step | None]] = {start: (0, None)}
    # Every step leads forward, so in order of their ends each is looked at when its beginning is settled.
    for step in sorted(steps, key=lambda step: (step.to.sequence, step.base)):
        if step.base in best:
            cost = best[step.base][0] + step.ref.nbytes + REQUEST_NBYTES
            if step.to.sequence not in best or cost < best[step.to.sequence][0]:
                best[step.to.sequence] = (cost, step)
    if goal not in best:
        return None
    chain: list[Step] = []
    step_back = best[goal][1]
    while step_back is not None:
        chain.append(step_back)
        step_back = best[step_back.base][1]
    return chain[::-1]


def nbytes(steps: Sequence[Step]) -> int:
    """Bytes of the patches of a chain."""
    return sum(step.ref.nbytes for step in steps)
