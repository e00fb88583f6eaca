"""Which version a sync goes to: the newest of the history, or one that was asked for, of the same history as before."""

from pulse_rl.errors import IntegrityError, VersionNotFoundError
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest, check_same_history
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import add_recovery_hint
from pulse_rl.history.search import check_line
from pulse_rl.history.trail import State, state_of


def find_target(reading: Reading, version: int | None, reached: Manifest | None, highest: State | None) -> Manifest:
    """The version to sync to.

    version: that was asked for; None for the newest. reached: of the last sync that succeeded; None before the first.
    highest: the newest version that was ever held. Raises as `Subscriber.sync`.
    """
    history = reading.history
    target = history.find(version) if version is not None else _find_newest(history, highest)
    if reached is None:  # nothing tells which history it should be, but a version swapped in is noticed
        check_line(history, target, reading.faults)
    else:
        try:
            check_same_history(target, reached)
        except IntegrityError as error:
            error.add_note("if that is intended, follow it with a new Subscriber")
            raise
    if version is None:
        _check_not_older(history, target, highest)
    return target


def _find_newest(history: History, highest: State | None) -> Manifest:
    url = history.store.url
    with add_recovery_hint():
        head = history.head()
    if head is None and highest is not None:
        raise IntegrityError(
            f"{url} has gone back: this Subscriber has held version {highest.version}, and it holds no version any "
            "more; if that is intended, follow what comes next with a new Subscriber",
            expected=highest.digest,
        )
    if head is None:
        raise VersionNotFoundError(f"{url} holds no version yet", url=url)
    return head


def _check_not_older(history: History, head: Manifest, highest: State | None) -> None:
    """Raise IntegrityError if the newest version is none that follows the newest one that was ever held."""
    if highest is not None and highest != state_of(head) and highest.sequence >= head.sequence:
        # At the same place in the history lies another version: nothing is missing there.
        changed = "holds other versions than before" if highest.sequence == head.sequence else "has gone back"
        raise IntegrityError(
            f"{history.store.url} {changed}: this Subscriber has held version {highest.version} (digest "
            f"{highest.digest}), its newest is {head.version} ({head.digest}); if that is intended, follow it with "
            "a new Subscriber",
            expected=highest.digest,
            found=head.digest,
        )
