"""Which version live weights hold, by counting all their bits: the one that they should hold, or any of a history."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.search import FaultLog
from pulse_rl.history.trail import State, state_of
from pulse_rl.patch.live import by_name, live_digest
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout

_ALTERED = "something other than this subscriber has written to them, or they are other weights"


def check(live: Layout, tied: Mapping[str, str], held: State) -> str:
    """Count live weights that should hold a version. Returns their digest.

    tied: the tied tensors of that version. Raises IntegrityError if they do not hold it.
    """
    try:
        found = digests.to_hex(live_digest(by_name(live, tied)))
    except BaseMismatchError as error:  # a tied copy
        raise IntegrityError(f"{error}: {_ALTERED}", expected=held.digest) from None
    if found != held.digest:
        raise IntegrityError(
            f"the live weights: expected digest {held.digest} of version {held.version}, found {found}: {_ALTERED}",
            expected=held.digest,
            found=found,
        )
    return found


def recognise(history: History, live: Layout, target: Manifest, faults: FaultLog) -> State | None:
    """Find out whether live weights already hold a version from which patches lead to the target."""
    try:
        found = digests.to_hex(live_digest(by_name(live, target.tied)))
    except BaseMismatchError:
        return None
    return next((state for state in _candidates(history, target, faults) if state.digest == found), None)


def _candidates(history: History, target: Manifest, faults: FaultLog) -> Iterator[State]:
    """The versions from which patches may lead to the target: those of its trail, and its newest anchor's."""
    yield state_of(target)
    if target.trail is not None:
        try:
            trail = history.trail(target)
            yield from dict.fromkeys(link.to for link in reversed(trail.links() if trail else []))
        except PulseError as error:
            faults.add(target.trail.name, error)
    with suppress(VersionNotFoundError, IntegrityError):  # reported later, if that anchor is needed
        yield state_of(history.read(target.anchor_sequence))
