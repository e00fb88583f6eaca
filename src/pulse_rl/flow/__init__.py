"""The run, as a dataflow: one policy or several, workflows of many turns, and workers that come and go.

What a workflow is written with is here, and a policy without a model to try it out:

    from pulse_rl.flow import Conversation, Rewards, Scripted, play

Public names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_rl.flow.playing.calculator import Calculator
    from pulse_rl.flow.playing.scripted import Echo, Scripted
    from pulse_rl.flow.playing.tools import Python, Toolbox, ToolError, Tools
    from pulse_rl.flow.playing.workflow import Conversation, Policy, Rewards, play
    from pulse_rl.flow.registry import Plugin
    from pulse_rl.flow.samples import Episode, Turn

_HOME = {
    "Calculator": "playing.calculator",
    "Conversation": "playing.workflow",
    "Echo": "playing.scripted",
    "Episode": "samples",
    "Plugin": "registry",
    "Policy": "playing.workflow",
    "Python": "playing.tools",
    "Rewards": "playing.workflow",
    "Scripted": "playing.scripted",
    "ToolError": "playing.tools",
    "Toolbox": "playing.tools",
    "Tools": "playing.tools",
    "Turn": "samples",
    "play": "playing.workflow",
}

__all__ = [
    "Calculator",
    "Conversation",
    "Echo",
    "Episode",
    "Plugin",
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
