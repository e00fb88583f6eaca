"""Stage and apply: nothing is touched before apply, apply is the pause, and what was staged fits or is refused."""

import time
from contextlib import suppress

from pulse_rl.testing.models import LLM
from pulse_rl.testing.protocol import Adapter, ConformanceError, StagedVersion
from pulse_rl.testing.recorded import STEP, record
from pulse_rl.testing.trial import ReceiverTrial

BESIDE_S = 0.1  # of a call of apply that the receiver need not account for


def _trial(adapter: Adapter) -> ReceiverTrial:
    return ReceiverTrial(adapter, record(LLM, 5, anchor_every=3))


def _stage_next(trial: ReceiverTrial) -> StagedVersion:
    """Stage a version for weights that hold the one before."""
    trial.sync()
    trial.source.show()
    return trial.stage()


def stage(adapter: Adapter) -> None:
    """Stage touches no weight, whether it is for a first load or for a patch; apply brings the version."""
    with _trial(adapter) as trial:
        for shown in range(1, 5):
            staged = trial.stage()
            if staged.version != trial.source.newest:
                raise ConformanceError(f"stage: expected version {trial.source.newest}, found {staged.version}")
            trial.apply(staged)
            trial.source.show(shown < 4)


def stage_many(adapter: Adapter) -> None:
    """A version that is several patches ahead is staged at once."""
    with _trial(adapter) as trial:
        trial.sync()
        trial.source.show(4)
        trial.apply(trial.stage())


def newer_version(adapter: Adapter) -> None:
    """A newer version appears between stage and apply: the staged one is applied, then the newer one."""
    with _trial(adapter) as trial:
        staged = _stage_next(trial)
        trial.source.show()
        trial.apply(staged)
        trial.sync()


def obsolete(adapter: Adapter) -> None:
    """The weights have moved on since a version was staged: apply refuses it, or the weights are that version."""
    with _trial(adapter) as trial:
        staged = _stage_next(trial)
        trial.source.show(2)
        trial.sync()
        if trial.attempt(staged.apply) is not None:
            trial.holds(3 * STEP)
        trial.sync()


def discarded(adapter: Adapter) -> None:
    """What is discarded leaves no trace, and is not applied any more."""
    with _trial(adapter) as trial:
        staged = _stage_next(trial)
        before = trial.bits()
        staged.discard()
        trial.unchanged(before, "after discard")
        trial.refused(staged.apply, "an apply of what was discarded")
        trial.sync()


def applied_twice(adapter: Adapter) -> None:
    """A second apply is refused, or changes nothing."""
    with _trial(adapter) as trial:
        staged = _stage_next(trial)
        trial.apply(staged)
        trial.attempt(staged.apply)
        trial.holds(STEP)


def staged_and_disturbed(adapter: Adapter) -> None:
    """Something else writes to the weights between stage and apply: apply refuses, and the next sync repairs them."""
    with _trial(adapter) as trial:
        disturb = trial.disturbance()
        staged = _stage_next(trial)
        disturb()
        applied = False
        with suppress(Exception):
            staged.apply()
            applied = True
        if applied:
            trial.truthful()
        trial.sync()


def pause(adapter: Adapter) -> None:
    """Apply reads nothing from the store, and reports what it took: no more than it did, and not much less."""
    taken, reported = list[float](), list[float]()
    with _trial(adapter) as trial:
        for shown in range(1, 5):
            staged = trial.stage()
            trial.plan(None)
            begun = time.perf_counter()
            reported.append(staged.apply())
            taken.append(time.perf_counter() - begun)
            if trial.source.control.calls:
                raise ConformanceError(f"apply: expected no call of the store, found {trial.source.control.calls}")
            trial.truthful()
            trial.source.show(shown < 4)
    for measured, claimed in zip(taken, reported, strict=True):
        if not 0 < claimed <= measured:
            raise ConformanceError(
                f"apply: expected between 0 and {measured:.4f} s to be reported, which the call took, found {claimed}"
            )
    beside = min(measured - claimed for measured, claimed in zip(taken, reported, strict=True))
    if beside > BESIDE_S:
        raise ConformanceError(
            f"apply: {beside:.3f} s of the pause or more are not reported, expected at most {BESIDE_S}"
        )
