"""A store that fails, and objects that are damaged: a receiver goes another way, or raises and stays where it is.

Of several ranks all go, or none.
"""

from collections.abc import Callable, Iterator
from functools import partial

from pulse_rl.testing.faults import Fault, Kind
from pulse_rl.testing.models import LLM
from pulse_rl.testing.protocol import Adapter, ConformanceError
from pulse_rl.testing.recorded import STEP, Recorded, record
from pulse_rl.testing.trial import SLOW_POINTS, ReceiverTrial, needs_faults, needs_ranks, needs_store


def _recorded() -> Recorded:
    return record(LLM, 4, anchor_every=3)


def _first_load(adapter: Adapter) -> ReceiverTrial:
    return ReceiverTrial(adapter, _recorded(), shown=4)


def _behind(adapter: Adapter, shown: int = 1) -> ReceiverTrial:
    """A receiver that is two versions behind, and was synced when so many were shown."""
    trial = ReceiverTrial(adapter, _recorded(), shown=shown)
    trial.sync()
    trial.source.show(2)
    return trial


_BEGINNINGS: tuple[Callable[[Adapter], ReceiverTrial], ...] = (_first_load, _behind)


def _calls_of(
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
    for begin, kind in zip(_BEGINNINGS, (first_load, patches), strict=True):
        for call in _calls_of(adapter, begin, lambda trial: trial.sync(), points):
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
    for begin in (_first_load, partial(_behind, shown=2)):
        with begin(adapter) as trial:
            change(trial)
            if trial.attempt(trial.receiver.sync) is None:
                trial.truthful()
            trial.source.replace(trial.source.recorded.directory)
            trial.sync()


def _objects(adapter: Adapter) -> list[str]:
    needs_store(adapter)
    recorded = _recorded()
    files = (file for file in sorted(recorded.directory.rglob("*.*")) if file.is_file())
    return [str(file.relative_to(recorded.directory)) for file in files]


def torn_object(adapter: Adapter) -> None:
    """Each object that leads to the newest version is cut off, or has a flipped bit."""
    late = [name for name in _objects(adapter) if _sequence(name) >= 2]
    for number, name in enumerate(late[:: 3 if adapter.remote else 1]):
        kind: Kind = "shorten" if number % 2 and not name.startswith("anchors") else "flip"
        _with_objects(adapter, lambda trial, name=name, kind=kind: trial.source.damage(name, kind))  # type: ignore[misc]


def exchanged_objects(adapter: Adapter) -> None:
    """Two objects of a kind have each other's bytes: patches, anchors, trails, manifests."""
    names = _objects(adapter)
    for kind, ending in _ENDINGS.items():
        pair = [name for name in names if name.startswith(kind) and name.endswith(ending)][-2:]
        _with_objects(adapter, lambda trial, pair=pair: trial.source.exchange(*pair))  # type: ignore[misc]


_ENDINGS = {"patches": ".safetensors", "trails": ".zst", "manifests": ".json", "anchors": ".safetensors"}


def _sequence(name: str) -> int:
    return int(name.split("/")[1][:12])


def missing_object(adapter: Adapter) -> None:
    """Each object of the newest version is missing."""
    for name in (name for name in _objects(adapter) if _sequence(name) == 3):
        _with_objects(adapter, lambda trial, name=name: trial.source.remove(name))  # type: ignore[misc]


def recovery(adapter: Adapter) -> None:
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


def failing_stage(adapter: Adapter) -> None:
    """Each call of the store fails in turn while a version is staged: no weight is touched, and the next one works."""
    needs_faults(adapter)
    for begin in _BEGINNINGS:
        for call in _calls_of(adapter, begin, lambda trial: trial.staging.stage().discard()):
            with begin(adapter) as trial:
                before = trial.bits()
                trial.plan(Fault("raise", call))
                trial.attempt(lambda trial=trial: trial.staging.stage().discard())  # type: ignore[misc]
                trial.unchanged(before, "after a stage that met a failing store")
                trial.plan(None)
                trial.apply(trial.stage())


def one_rank_fails(adapter: Adapter) -> None:
    """The store fails for one rank: the others do not go on without it, and do not report another version."""
    with _behind(adapter) as trial:
        needs_ranks(trial)
    needs_faults(adapter)
    for call in _calls_of(adapter, _behind, lambda trial: trial.sync()):
        with _behind(adapter) as trial:
            trial.plan(Fault("raise", call))
            trial.attempt(trial.receiver.sync)
            versions = {rank.version for rank in trial.receiver.held()}
            if len(versions) > 1:
                raise ConformanceError(
                    f"the store failed for one rank: expected one version on all ranks, found {versions}"
                )
            trial.plan(None)
            trial.sync()
