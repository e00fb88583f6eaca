"""The run as a dataflow: several policies, workflows of many turns, and workers that come and go.

What a workflow is written with is here, and a policy without a model to try it out:

    from pulse_rl.flow import Conversation, Rewards, Scripted, play

Public names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.flow.calculator import Calculator
    from pulse_rl.flow.samples import Episode, Turn
    from pulse_rl.flow.scripted import Echo, Scripted
    from pulse_rl.flow.tools import Python, Toolbox, ToolError, Tools
    from pulse_rl.flow.workflow import Conversation, Policy, Rewards, play

_HOME = {
    "Calculator": "calculator",
    "Conversation": "workflow",
    "Echo": "scripted",
    "Episode": "samples",
    "Policy": "workflow",
    "Python": "tools",
    "Rewards": "workflow",
    "Scripted": "scripted",
    "ToolError": "tools",
    "Toolbox": "tools",
    "Tools": "tools",
    "Turn": "samples",
    "play": "workflow",
}

__all__ = [
    "Calculator",
    "Conversation",
    "Echo",
    "Episode",
    "Policy",
    "Python",
    "Rewards",
    "Scripted",
    "ToolError",
    "Toolbox",
    "Tools",
    "Turn",
    "play",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pulse_rl.flow' has no attribute {name!r}")
    return getattr(import_module(f"pulse_rl.flow.{_HOME[name]}"), name)
