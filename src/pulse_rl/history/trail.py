"""The way through a history: which patches lead from version to version, and the cheapest chain of them.

Beside the patch from each version to the next there are skip patches, over 4, 16 and 64 versions: from a sequence
number that the span divides to the next such number. So any version is reached from any other over at most three
patches of a kind on the way up to the longer ones, and as many on the way down. A trail tells of the patches between
the last versions in one small object, and of the longer ones further back: a subscriber that slept reads it and no
manifest in between.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from pulse_rl.codecs.zstd import decompress
from pulse_rl.errors import IntegrityError, ObjectNotFoundError, PatchFormatError, PulseError, StoreError
from pulse_rl.history.manifest import Count, Digest, Hash, Manifest, ObjectRef, Token, patch_name

REACH = {1: 64, 4: 64, 16: 128, 64: 512}  # by span, versions: how far back a trail tells of such patches
SPANS = tuple(span for span in REACH if span > 1)  # of skip patches; each divides the next
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
        elsewhere = isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError)
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


class _Patch(msgspec.Struct, frozen=True, array_like=True):
    base: Count  # sequence numbers
    target: Count
    version: Count  # at the target
    digest: Digest
    token: Token
    nbytes: Count
    blake3: Hash


class Trail(msgspec.Struct, frozen=True):
    """What patches there are up to a version, within reach."""

    sequence: Count
    patches: tuple[_Patch, ...] = ()

    def steps(self) -> list[Step]:
        """The patches, in order of the versions that they lead to."""
        return [
            Step(
                ObjectRef(patch_name(p.target, p.token), p.nbytes, p.blake3),
                p.base,
                State(p.target, p.version, p.digest),
            )
            for p in sorted(self.patches, key=lambda p: (p.target, p.base))
        ]

    def extended(self, sequence: int, steps: Iterable[Step]) -> "Trail":
        """This trail up to a later version, with more patches; what is out of reach is dropped."""
        new = (
            _Patch(s.base, s.to.sequence, s.to.version, s.to.digest, _token(s.ref.name), s.ref.nbytes, s.ref.blake3)
            for s in steps
        )
        within = (p for p in (*self.patches, *new) if p.base >= sequence - REACH[p.target - p.base])
        return Trail(sequence, tuple(within))

    def encode(self) -> bytes:
        """zstd of JSON."""
        return zstandard.ZstdCompressor(level=9).compress(msgspec.json.encode(self))


def _token(name: str) -> str:
    return name.removesuffix(".safetensors")[-16:]


def state_of(manifest: Manifest) -> State:
    return State(manifest.sequence, manifest.version, manifest.digest)


def step_of(manifest: Manifest) -> Step | None:
    """The patch that a manifest names itself, if it has one."""
    return Step(manifest.patch, manifest.sequence - 1, state_of(manifest)) if manifest.patch else None


def decode_trail(data: bytes | bytearray, manifest: Manifest, where: str) -> Trail:
    """The trail of a version. Raises IntegrityError unless it is one, and leads to that version."""
    try:
        trail = msgspec.json.decode(decompress(memoryview(data), MAX_TRAIL_NBYTES, where), type=Trail)
    except (PatchFormatError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where} is no trail: {error}") from None
    states = {step.to for step in trail.steps()}
    if (
        trail.sequence != manifest.sequence
        or state_of(manifest) not in states
        or len(states) != len({state.sequence for state in states})
        or any(p.target > manifest.sequence or p.target - p.base not in REACH for p in trail.patches)
    ):
        raise IntegrityError(f"{where} is no trail to version {manifest.version}")
    return trail


def costs(steps: Iterable[Step], goal: int, avoid: Collection[str] = ()) -> dict[int, int]:
    """For each sequence number from which a chain leads to a later one: what the cheapest chain costs, bytes.

    avoid: names of patches not to use.
    """
    return {sequence: cost for sequence, (cost, _) in _ways(steps, goal, avoid).items()}


def cheapest(steps: Iterable[Step], start: int, goal: int) -> list[Step] | None:
    """The chain of fewest bytes from one sequence number to a later one; None if the steps do not lead there."""
    ways = _ways(steps, goal)
    if start not in ways:
        return None
    chain: list[Step] = []
    while start != goal:
        step = ways[start][1]
        assert step is not None  # only the goal has none
        chain.append(step)
        start = step.to.sequence
    return chain


def _ways(steps: Iterable[Step], goal: int, avoid: Collection[str] = ()) -> dict[int, tuple[int, Step | None]]:
    """For each sequence number the cost of the cheapest chain to the goal, and its first step."""
    best: dict[int, tuple[int, Step | None]] = {goal: (0, None)}
    # Every step leads forward, so backwards from the goal each is looked at when its end is settled.
    for step in sorted(steps, key=lambda step: (-step.to.sequence, -step.base)):
        if step.to.sequence in best and step.ref.name not in avoid:
            cost = best[step.to.sequence][0] + step.ref.nbytes + REQUEST_NBYTES
            if step.base not in best or cost < best[step.base][0]:
                best[step.base] = (cost, step)
    return best


def cost(chain: Sequence[Step]) -> int:
    """Bytes of the patches of a chain, and what their requests cost beside."""
    return sum(step.ref.nbytes + REQUEST_NBYTES for step in chain)
