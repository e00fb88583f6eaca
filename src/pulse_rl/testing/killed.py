"""A receiver whose process is killed: what is left is repaired, and it never reports what it does not hold."""

import pickle
from collections.abc import Callable
from contextlib import suppress

from pulse_rl.testing.child import Child, Children
from pulse_rl.testing.faults import Fault
from pulse_rl.testing.models import LLM
from pulse_rl.testing.outages import SLOW_POINTS, needs_faults
from pulse_rl.testing.protocol import Adapter, CanRestart, Unsupported
from pulse_rl.testing.recorded import record
from pulse_rl.testing.trial import ReceiverTrial

POINTS = 5  # of the calls of the store at which a child is killed


def _begin(adapter: Adapter) -> ReceiverTrial:
    trial = ReceiverTrial(adapter, record(LLM, 9, anchor_every=3))
    trial.sync()
    return trial


def _adapter(adapter: Adapter) -> Adapter:
    needs_faults(adapter)
    if adapter.remote:
        return adapter
    try:
        pickle.dumps(adapter)
    except Exception as error:  # noqa: BLE001 - whatever its classes raise
        raise Unsupported(f"the adapter cannot be pickled, to make its receiver in another process: {error}") from None
    return Children(adapter)


def _recovers(trial: ReceiverTrial) -> None:
    receiver = trial.receiver
    if not isinstance(receiver, CanRestart):
        raise Unsupported("the receiver cannot be restarted")
    trial.plan(None)
    receiver.restart()
    trial.truthful()
    trial.sync()


def _kill(trial: ReceiverTrial, call: Callable[[], object]) -> None:
    with suppress(Exception):  # the process is gone
        call()
    _recovers(trial)


def killed(adapter: Adapter) -> None:
    """Killed at calls of the store, from the first to the last of a sync, and started again."""
    adapter = _adapter(adapter)
    with _begin(adapter) as trial:
        trial.source.show(2)
        trial.plan(None)
        trial.sync()
        count = trial.source.control.calls
    step = -(-count // (SLOW_POINTS if adapter.remote else POINTS))
    with _begin(adapter) as trial:
        for call in range(1, count + 1, step):
            trial.source.show()
            trial.plan(Fault("die", call))
            _kill(trial, trial.receiver.sync)


def killed_writing(adapter: Adapter) -> None:
    """Killed when it writes to a certain tensor, so that some of the others are written, and started again."""
    adapter = _adapter(adapter)
    with _begin(adapter) as trial:
        receiver = trial.receiver
        if not isinstance(receiver, Child) or not receiver.in_place:
            raise Unsupported("the receiver does not write to memory that the suite shares with its process")
        names = list(LLM.tensors)
        for name in (names[0], names[len(names) // 2], names[-1]):
            trial.source.show()
            _kill(trial, lambda name=name: receiver.sync_until_written(name))  # type: ignore[misc]
