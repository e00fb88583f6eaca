"""Which version live weights hold, by counting all their bits: the one that they should hold, or any of a history.

Ranks that hold shares add up what they count. Replicas, and tensors that a version ties, are counted such that the sum
is a version's digest only where they are equal; where it is not, `unequal` says which differ.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.reading import Reading
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.live import by_name, live_digest, tied_differ
from pulse_rl.sync.shares import Share, unequal_replicas
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import whole

_ALTERED = "something other than this subscriber has written to them, or they are other weights"


def count(ranks: Ranks, held: HeldWeights, tied: Mapping[str, str]) -> str:
    """The digest of all live weights. A collective.

    tied: the tied tensors of the version that they may hold. Where replicas or tied tensors differ, it is the digest of
    no weights. Raises BaseMismatchError if a tied copy differs from the tensor that it is tied to, in one process.
    """
    held.tie(tied)
    if not held.shared:
        return digests.to_hex(live_digest(by_name(held.share.held, tied)))
    counted = ranks.share("count the weights", lambda: _counted(held, tied, ranks.rank), int, alike=True)
    return digests.to_hex(sum(counted))


def _counted(held: HeldWeights, tied: Mapping[str, str], rank: int) -> int:
    """What this rank adds to the digest. Tensors without elements are the first rank's."""
    total = digests.state_digest({name: bits for name, bits in held.memory.items() if bits.size})
    if rank == 0:
        for name, spec in held.plan.tensors.items():
            if not whole(spec.shape).size and name not in tied:
                total += digests.mix(digests.seed(name, spec.dtype, spec.shape))
    return total & digests.MASK


def unequal(ranks: Ranks, held: HeldWeights, tied: Mapping[str, str]) -> IntegrityError | None:
    """Find replicas, or tensors that a version ties, that differ in weights whose sum is wrong. A collective.

    Returns the error that names them; None without any.
    """
    if not held.shared:
        return None
    held.tie(tied)
    share = held.share
    if share.plan.replicated:
        found = ranks.share("compare replicas", lambda: share.replicas(ranks.rank), dict[str, int])
        error = unequal_replicas(ranks, found, partial(share.replica_digests, ranks.rank))
        if error is not None:
            return IntegrityError(str(error), ranks=error.ranks)
    aliases = sorted(tied.keys() & share.plan.tensors.keys())
    if aliases:
        terms = ranks.share("compare tied tensors", lambda: _difference(share, tied), int, alike=True)
        if sum(terms) & digests.MASK:
            return IntegrityError(str(tied_differ(tied[aliases[0]])))
    return None


def _difference(share: Share, tied: Mapping[str, str]) -> int:
    """What this rank owns of tied tensors less what it owns of the tensors that they are tied to, as digests."""
    total = 0
    for alias, owner in tied.items():
        if alias in share.plan.tensors:
            total += _terms(owner, share.own.get(alias)) - _terms(owner, share.own.get(owner))
    return total & digests.MASK


def _terms(name: str, tensor: Bits | None) -> int:
    return digests.state_digest({name: tensor}) if tensor is not None else 0


def check(ranks: Ranks, held: HeldWeights, tied: Mapping[str, str], state: State) -> str:
    """Count live weights that should hold a version. A collective. Returns their digest.

    tied: the tied tensors of that version. Raises IntegrityError if they do not hold it.
    """
    try:
        found = count(ranks, held, tied)
    except BaseMismatchError as error:  # a tied copy
        raise IntegrityError(f"{error}: {_ALTERED}", expected=state.digest) from None
    if found != state.digest:
        if differing := unequal(ranks, held, tied):
            raise IntegrityError(f"{differing}: {_ALTERED}", expected=state.digest, ranks=differing.ranks)
        raise IntegrityError(
            f"the live weights: expected digest {state.digest} of version {state.version}, found {found}: {_ALTERED}",
            expected=state.digest,
            found=found,
        )
    return found


def recognise(reading: Reading, held: HeldWeights, target: Manifest) -> State | None:
    """Find out whether live weights already hold a version from which patches lead to the target. A collective."""
    try:
        found = count(reading.ranks, held, target.tied)
    except BaseMismatchError:
        return None

    def look() -> State | None:
        return next((state for state in _candidates(reading, target) if state.digest == found), None)

    return reading.lead("recognise the weights", look, State | None)  # type: ignore[arg-type]


def _candidates(reading: Reading, target: Manifest) -> Iterator[State]:
    """The versions from which patches may lead to the target: those of its trail, and its newest anchor's."""
    yield state_of(target)
    if target.trail is not None:
        try:
            trail = reading.history.trail(target)
            yield from dict.fromkeys(link.to for link in reversed(trail.links() if trail else []))
        except PulseError as error:
            reading.faults.add(target.trail.name, error)
    with suppress(VersionNotFoundError, IntegrityError):  # reported later, if that anchor is needed
        yield state_of(reading.history.read(target.anchor_sequence))
