"""Histories: far behind, pruned, another run, another model, weights that are not what they should be."""

from contextlib import suppress

from pulse_rl.testing.models import LLM, PublishedModel
from pulse_rl.testing.protocol import Adapter, Unsupported
from pulse_rl.testing.recorded import STEP, Recorded, record
from pulse_rl.testing.trial import ReceiverTrial, needs_ranks, needs_store


def _long() -> Recorded:
    return record(LLM, 21, codec="context")


def _short(seed: int = 0) -> Recorded:
    return record(LLM, 5, seed=seed)


def empty_history(adapter: Adapter) -> None:
    """A history without a version is an error, or a wait: no version is reported and no weight is touched."""
    needs_store(adapter)
    with ReceiverTrial(adapter, _short(), shown=0) as trial:
        trial.refused(trial.receiver.sync, "a sync to an empty history")
        trial.source.show()
        trial.sync()


def unknown_version(adapter: Adapter) -> None:
    """A version that was never published is refused, and the one before stays."""
    needs_store(adapter)
    with ReceiverTrial(adapter, _short()) as trial:
        trial.sync()
        trial.refused(lambda: trial.receiver.sync(STEP * 77 + 1), "a sync to a version that was never published")
        trial.refused(lambda: trial.receiver.sync(STEP), "a sync to a version that is not published yet")
        trial.holds(0)
        trial.source.show()
        trial.sync()


def checkpoint(adapter: Adapter) -> None:
    """A receiver that begins with the bits of a version, as after loading a checkpoint, is brought to the newest."""
    recorded = _short()
    with ReceiverTrial(adapter, recorded, start=recorded.states[STEP], shown=4) as trial:
        trial.sync()


def catch_up(adapter: Adapter) -> None:
    """Twenty versions behind, once by many small steps and once by a big one."""
    with ReceiverTrial(adapter, _long()) as trial:
        trial.sync()
        trial.source.show(3)
        trial.sync()
        trial.source.show(17)
        trial.sync()


def late_start(adapter: Adapter) -> None:
    """A receiver with arbitrary bits joins a long history."""
    with ReceiverTrial(adapter, _long(), shown=18) as trial:
        trial.sync()
        trial.source.show(3)
        trial.sync()


def pruned(adapter: Adapter) -> None:
    """The patches from the version that is held are pruned."""
    needs_store(adapter)
    recorded = record(LLM, 14, anchor_every=4, retain=3)
    with ReceiverTrial(adapter, recorded, shown=2) as trial:
        trial.sync()
        trial.source.show(12)
        trial.source.prune()
        trial.sync()


def older_version(adapter: Adapter) -> None:
    """An older version is loaded, or refused."""
    with ReceiverTrial(adapter, _short(), shown=4) as trial:
        trial.sync()
        if trial.attempt(lambda: trial.receiver.sync(STEP)) is None:
            trial.holds(STEP)
        else:
            trial.holds(3 * STEP)
        trial.source.show()
        trial.sync()


def wrong_base(adapter: Adapter) -> None:
    """The weights are another run's, or a version's but for one bit: the patches from that version do not fit them."""
    recorded = _short()
    nearly = {name: bits.copy() for name, bits in recorded.states[0].items()}
    nearly["model.layers.1.norm.weight"][3] ^= 1
    for start in (nearly, _short(seed=1).states[0]):
        with ReceiverTrial(adapter, recorded, start=start, shown=2) as trial:
            trial.sync()


def disturbed(adapter: Adapter) -> None:
    """Something else has written to the weights: the next sync repairs them, or it fails and the one after repairs."""
    with ReceiverTrial(adapter, _short()) as trial:
        disturb = trial.disturbance()
        for _ in range(2):
            trial.sync()
            disturb()
            trial.source.show()
            with suppress(Exception):
                trial.receiver.sync()
            trial.truthful()
            trial.sync()


def another_run(adapter: Adapter) -> None:
    """Another run has taken the history's place: its versions have the same numbers, and other bits."""
    needs_store(adapter)
    with ReceiverTrial(adapter, _short(), shown=4) as trial:
        trial.sync()
        trial.replace_run(_short(seed=1))
        trial.attempt(trial.receiver.sync)


def _refuses(adapter: Adapter, model: PublishedModel, why: str) -> None:
    try:
        trial = ReceiverTrial(adapter, _short(), model=model)
    except Unsupported:
        raise
    except Exception:  # noqa: BLE001 - refused early
        return
    with trial:
        trial.refused(trial.receiver.sync, why)


def another_model(adapter: Adapter) -> None:
    """Weights of other shapes or dtypes, or without a tensor of the history, are refused and not touched."""
    name = "model.layers.1.down.weight"
    tensors = dict(LLM.tensors)
    _refuses(adapter, LLM._replace(tensors={**tensors, name: ("bfloat16", (48, 32))}), "a tensor of another shape")
    _refuses(adapter, LLM._replace(tensors={**tensors, name: ("float16", (32, 48))}), "a tensor of another dtype")
    del tensors[name]
    _refuses(adapter, LLM._replace(tensors=tensors), "a missing tensor")


def ranks_together(adapter: Adapter) -> None:
    """Ranks report one version after each sync."""
    with ReceiverTrial(adapter, _short()) as trial:
        needs_ranks(trial)
        trial.sync()
        trial.source.show()
        trial.sync()
