"""The study: how sparse a run's updates are, and why.

    report = study(Checkpoints(["checkpoint-10", "checkpoint-11"]), Settings(lr=1e-6, betas=(0.9, 0.999)))
    report.density.mean

One direction, a room for each part:

    sources/ ──versions──▶ measure/ ──counts──▶ explain/ ──results──▶ show/
    checkpoints, history   exact, on bits       findings, theory      plots, page

`verb` is study(), which runs the first three; `results` is the report that it returns; `layers` and `values` read a
tensor's name and its bits. `monitor` measures a training loop while it runs, without stored versions. Public names are
imported when first used. No module or room is named as a public name is: importing it would shadow that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.study.monitor import Sparsity, SparsityMonitor
    from pulse_rl.study.results import Report, Settings
    from pulse_rl.study.sources.checkpoints import Checkpoints
    from pulse_rl.study.sources.history import Stored
    from pulse_rl.study.verb import study

_HOME = {
    "Checkpoints": "sources.checkpoints",
    "Report": "results",
    "Settings": "results",
    "Sparsity": "monitor",
    "SparsityMonitor": "monitor",
    "Stored": "sources.history",
    "study": "verb",
}

__all__ = ["Checkpoints", "Report", "Settings", "Sparsity", "SparsityMonitor", "Stored", "study"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pulse_rl.study' has no attribute {name!r}")
    return getattr(import_module(f"pulse_rl.study.{_HOME[name]}"), name)
