"""pulse-rl: the weight channel of RL post-training.

    import pulse_rl as pulse

    patch = pulse.diff(old, new, base=3, target=4)     # the bits that changed, as one small file
    pulse.apply(weights, patch)                        # in place, bit-identical, all or nothing

    publisher = pulse.Publisher(pulse.open_store("file:///runs/a"))
    publisher.publish(model, version=step)             # on the trainer's side
    subscriber = pulse.Subscriber(pulse.open_store("file:///runs/a"))
    subscriber.sync(model)                             # on the rollout workers' side

    with pulse.PulseLoCo(model, inner_optimizer, sync_every=8): ...   # between trainers

Everything public is listed in `__all__`, or lies in `pulse_rl.study`, `.integrations`, `.testing`, `.flow` or
`.watch`. It is imported when it is first used, so `import pulse_rl` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pulse_rl.version import __version__ as __version__

if TYPE_CHECKING:
    from pulse_rl import flow as flow
    from pulse_rl import integrations as integrations
    from pulse_rl import study as study
    from pulse_rl import testing as testing
    from pulse_rl import watch as watch
    from pulse_rl.errors import (
        BaseMismatchError,
        CannotListError,
        CannotReadRangeError,
        CheckpointFormatError,
        EngineError,
        ExchangeError,
        FormatError,
        IntegrityError,
        MissingExtraError,
        ObjectExistsError,
        ObjectNotFoundError,
        PatchFormatError,
        PulseError,
        StoreError,
        UnmappedError,
        VersionNotFoundError,
        VersionSkewError,
    )
    from pulse_rl.folders.mirror import Mirrored, mirror
    from pulse_rl.folders.publish import publish_folders
    from pulse_rl.history.assets import load_assets
    from pulse_rl.history.history import History
    from pulse_rl.history.operate.copying import CopyReport, copy_history
    from pulse_rl.history.operate.status import Status, status
    from pulse_rl.history.operate.verify import VerifyReport, verify
    from pulse_rl.loco.elastic import Membership
    from pulse_rl.loco.meeting.group import StoreGroup
    from pulse_rl.loco.optimizer import DiLoCo, PulseLoCo
    from pulse_rl.loco.outcome import LocoReport
    from pulse_rl.patch.verbs import PatchInfo, apply, diff, inspect
    from pulse_rl.planner import Plan, plan
    from pulse_rl.store.base import ObjectInfo, RangedStore, Store
    from pulse_rl.store.opening import open_store
    from pulse_rl.sync.channel.channel import Channel
    from pulse_rl.sync.channel.reports import ChannelReport
    from pulse_rl.sync.publish.publisher import Publisher
    from pulse_rl.sync.publish.report import PublishReport
    from pulse_rl.sync.subscribe.staging import Staged
    from pulse_rl.sync.subscribe.subscriber import Subscriber
    from pulse_rl.sync.subscribe.sync import SyncReport
    from pulse_rl.weights.digests import digest
    from pulse_rl.weights.layout import TensorSpec
    from pulse_rl.weights.pieces import Shard
    from pulse_rl.weights.views.quantised import Quantised
    from pulse_rl.weights.views.view import Fp4, Fp8, Int8

_HOME = {
    "Channel": "sync.channel.channel",
    "ChannelReport": "sync.channel.reports",
    "CopyReport": "history.operate.copying",
    "DiLoCo": "loco.optimizer",
    "Fp4": "weights.views.view",
    "Fp8": "weights.views.view",
    "Int8": "weights.views.view",
    "History": "history.history",
    "LocoReport": "loco.outcome",
    "Membership": "loco.elastic",
    "Mirrored": "folders.mirror",
    "ObjectInfo": "store.base",
    "PatchInfo": "patch.verbs",
    "Plan": "planner",
    "PublishReport": "sync.publish.report",
    "Publisher": "sync.publish.publisher",
    "PulseLoCo": "loco.optimizer",
    "Quantised": "weights.views.quantised",
    "RangedStore": "store.base",
    "Shard": "weights.pieces",
    "Staged": "sync.subscribe.staging",
    "Status": "history.operate.status",
    "Store": "store.base",
    "StoreGroup": "loco.meeting.group",
    "Subscriber": "sync.subscribe.subscriber",
    "SyncReport": "sync.subscribe.sync",
    "TensorSpec": "weights.layout",
    "VerifyReport": "history.operate.verify",
    "apply": "patch.verbs",
    "copy_history": "history.operate.copying",
    "diff": "patch.verbs",
    "digest": "weights.digests",
    "inspect": "patch.verbs",
    "load_assets": "history.assets",
    "mirror": "folders.mirror",
    "open_store": "store.opening",
    "plan": "planner",
    "publish_folders": "folders.publish",
    "status": "history.operate.status",
    "verify": "history.operate.verify",
}
_ROOMS = ("flow", "integrations", "study", "testing", "watch")

__all__ = [
    "BaseMismatchError",
    "CannotListError",
    "CannotReadRangeError",
    "Channel",
    "ChannelReport",
    "CheckpointFormatError",
    "CopyReport",
    "DiLoCo",
    "EngineError",
    "ExchangeError",
    "FormatError",
    "Fp4",
    "Fp8",
    "History",
    "Int8",
    "IntegrityError",
    "LocoReport",
    "Membership",
    "Mirrored",
    "MissingExtraError",
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "PatchFormatError",
    "PatchInfo",
    "Plan",
    "PublishReport",
    "Publisher",
    "PulseError",
    "PulseLoCo",
    "Quantised",
    "RangedStore",
    "Shard",
    "Staged",
    "Status",
    "Store",
    "StoreError",
    "StoreGroup",
    "Subscriber",
    "SyncReport",
    "TensorSpec",
    "UnmappedError",
    "VerifyReport",
    "VersionNotFoundError",
    "VersionSkewError",
    "apply",
    "copy_history",
    "diff",
    "digest",
    "inspect",
    "load_assets",
    "mirror",
    "open_store",
    "plan",
    "publish_folders",
    "status",
    "verify",
]
_HOME |= dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"pulse_rl.{name}")  # which makes it an attribute
    if name not in _HOME:
        raise AttributeError(f"module 'pulse_rl' has no attribute {name!r}")
    value = getattr(import_module(f"pulse_rl.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
