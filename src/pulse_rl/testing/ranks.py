"""Receivers of several ranks: all of them hold a version, or none."""

from pulse_rl.testing.failure import ConformanceError
from pulse_rl.testing.faults import Fault
from pulse_rl.testing.models import LLM
from pulse_rl.testing.outages import calls_of, needs_faults
from pulse_rl.testing.protocol import Adapter, Unsupported
from pulse_rl.testing.recorded import record
from pulse_rl.testing.trial import ReceiverTrial


def _trial(adapter: Adapter) -> ReceiverTrial:
    trial = ReceiverTrial(adapter, record(LLM, 5, anchor_every=3), shown=2)
    if len(trial.receiver.held()) == 1:
        trial.close()
        raise Unsupported("the receiver has one rank")
    trial.sync()
    trial.source.show()
    return trial


def together(adapter: Adapter) -> None:
    """Ranks report one version after each sync."""
    with _trial(adapter) as trial:
        trial.sync()


def one_fails(adapter: Adapter) -> None:
    """The store fails for one rank: the others do not go on without it, and do not report another version."""
    with _trial(adapter):
        pass
    needs_faults(adapter)
    for call in calls_of(adapter, _trial, lambda trial: trial.sync()):
        with _trial(adapter) as trial:
            trial.plan(Fault("raise", call))
            trial.attempt(trial.receiver.sync)
            versions = {rank.version for rank in trial.receiver.held()}
            if len(versions) > 1:
                raise ConformanceError(
                    f"the store failed for one rank: expected one version on all ranks, found {versions}"
                )
            trial.plan(None)
            trial.sync()
