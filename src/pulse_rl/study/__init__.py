"""The study: how sparse a run's updates are, and why. Public names are imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.study.monitor import Sparsity, SparsityMonitor

_HOME = {"Sparsity": "monitor", "SparsityMonitor": "monitor"}

__all__ = ["Sparsity", "SparsityMonitor"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pulse_rl.study' has no attribute {name!r}")
    return getattr(import_module(f"pulse_rl.study.{_HOME[name]}"), name)
