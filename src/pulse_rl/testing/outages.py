"""A store that fails, and objects that are damaged: a receiver goes another way, or raises and stays where it is."""

from collections.abc import Callable, Iterator

from pulse_rl.testing.faults import Fault, Kind
from pulse_rl.testing.models import LLM
from pulse_rl.testing.protocol import Adapter, Unsupported
from pulse_rl.testing.recorded import STEP, Recorded, record
from pulse_rl.testing.trial import ReceiverTrial

SLOW_POINTS = 5  # of a receiver in other processes, which takes long to make


def _recorded() -> Recorded:
    return record(LLM, 4, anchor_every=3)


def needs_faults(adapter: Adapter) -> None:
    if adapter.reads != "store":
        raise Unsupported("the receiver does not read through Source.store")


def _first_load(adapter: Adapter) -> ReceiverTrial:
    return ReceiverTrial(adapter, _recorded(), shown=4)


def _two_behind(adapter: Adapter) -> ReceiverTrial:
    trial = ReceiverTrial(adapter, _recorded())
    trial.sync()
    trial.source.show(2)
    return trial


BEGINNINGS: tuple[Callable[[Adapter], ReceiverTrial], ...] = (_first_load, _two_behind)


def calls_of(
    adapter: Adapter,
    begin: Callable[[Adapter], ReceiverTrial],
    act: Callable[[ReceiverTrial], object],
    points: int = 99,
) -> Iterator[int]:
    """The calls of the store that something makes, by number from 1: all, or `points` of them, spread evenly."""
    with begin(adapter) as trial:
        trial.plan(None)
        act(trial)
        count = trial.source.control.calls
    step = max(1, -(-count // (min(points, SLOW_POINTS) if adapter.remote else points)))
    yield from range(1, count + 1, step)


def _try_each(adapter: Adapter, first_load: Kind, patches: Kind, *, lasting: bool = False, points: int = 99) -> None:
    """Let calls of the store go wrong, each in a trial.

    first_load, patches: how, while a version is loaded and while patches are followed. points: at most so many calls.
    """
    needs_faults(adapter)
    for begin, kind in zip(BEGINNINGS, (first_load, patches), strict=True):
        for call in calls_of(adapter, begin, lambda trial: trial.sync(), points):
            with begin(adapter) as trial:
                trial.plan(Fault(kind, call, lasting))
                if trial.attempt(trial.receiver.sync) is None:
                    trial.holds(trial.source.newest)
                trial.plan(None)
                trial.sync()


def failing_call(adapter: Adapter) -> None:
    """Each call of the store fails in turn. The next sync succeeds."""
    _try_each(adapter, "raise", "raise")


def outage(adapter: Adapter) -> None:
    """From some call on the store fails, until it is back."""
    _try_each(adapter, "raise", "raise", lasting=True, points=3)


def torn_read(adapter: Adapter) -> None:
    """Each read in turn returns other bytes: one flipped bit, or half of them."""
    _try_each(adapter, "flip", "shorten")


def _with_objects(adapter: Adapter, change: Callable[[ReceiverTrial], object]) -> None:
    """Change objects of a history, then let a newcomer and a receiver that follows meet them."""
    for shown in (4, 2):
        with ReceiverTrial(adapter, _recorded(), shown=shown) as trial:
            if shown == 2:
                trial.sync()
                trial.source.show(2)
            change(trial)
            if trial.attempt(trial.receiver.sync) is None:
                trial.truthful()
            trial.source.replace(trial.source.recorded.directory)
            trial.sync()


def _needs_objects(adapter: Adapter) -> list[str]:
    if adapter.reads == "weights":
        raise Unsupported("the receiver reads no store")
    recorded = _recorded()
    return [
        str(file.relative_to(recorded.directory)) for file in sorted(recorded.directory.rglob("*.*")) if file.is_file()
    ]


def torn_object(adapter: Adapter) -> None:
    """Each object that leads to the newest version is cut off, or has a flipped bit."""
    late = [name for name in _needs_objects(adapter) if _sequence(name) >= 2]
    for number, name in enumerate(late[:: 3 if adapter.remote else 1]):
        kind: Kind = "shorten" if number % 2 and not name.startswith("anchors") else "flip"
        _with_objects(adapter, lambda trial, name=name, kind=kind: trial.source.damage(name, kind))  # type: ignore[misc]


def exchanged_objects(adapter: Adapter) -> None:
    """Two objects of a kind have each other's bytes: patches, anchors, trails, manifests."""
    names = _needs_objects(adapter)
    for kind in ("patches", "trails", "manifests", "anchors"):
        pair = [name for name in names if name.startswith(kind) and name.endswith(_ENDS[kind])][-2:]
        _with_objects(adapter, lambda trial, pair=pair: trial.source.exchange(*pair))  # type: ignore[misc]


_ENDS = {"patches": ".safetensors", "trails": ".zst", "manifests": ".json", "anchors": ".safetensors"}


def _sequence(name: str) -> int:
    return int(name.split("/")[1][:12])


def missing_object(adapter: Adapter) -> None:
    """Each object of the newest version is missing."""
    newest = [name for name in _needs_objects(adapter) if _sequence(name) == 3]
    for name in newest:
        _with_objects(adapter, lambda trial, name=name: trial.source.remove(name))  # type: ignore[misc]


def versions_after(adapter: Adapter) -> None:
    """After a failure the receiver follows on: one version after the other."""
    needs_faults(adapter)
    with ReceiverTrial(adapter, _recorded()) as trial:
        trial.sync()
        for version in range(1, 4):
            trial.source.show()
            trial.plan(Fault("raise", version, lasting=True))
            trial.attempt(trial.receiver.sync)
            trial.plan(None)
            trial.sync()
            trial.holds(version * STEP)
