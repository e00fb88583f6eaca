"""Watching: what the channel and runs report, as metrics and alarms where operators look.

Nothing is measured here. Reports, the status of a store and the records of a run become the same measurements, which
are exported, and alarms, which are the same everywhere. The channel is reached through its public names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.watch.exporters import Exporter, to_opentelemetry, to_prometheus

__all__ = ["Exporter", "to_opentelemetry", "to_prometheus"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pulse_rl.watch' has no attribute {name!r}")
    return getattr(import_module("pulse_rl.watch.exporters"), name)
