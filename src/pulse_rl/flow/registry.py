"""Plug-ins of a run, by name: built in, from another package's entry points, or by import path.

A plug-in is a class or function. Its settings are the keyword arguments of its signature, so a wrong setting is found
before anything starts, and so is a value of another type than the signature's. A name is looked up in this order:

    "package.module:name"   imported as it is
    "grpo"                  one of BUILTIN
    anything else           an entry point of the group "pulse_rl.plugins.<kind>", for example in a pyproject.toml:
                            [project.entry-points."pulse_rl.plugins.workflow"]
                            chess = "my_package.chess:Chess"

Nothing is imported before a plug-in is loaded.
"""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from pulse_rl.errors import MissingExtraError, one_line
from pulse_rl.flow import values

GROUP = "pulse_rl.plugins"
_HERE = "pulse_rl.flow"
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

# kind → name → where it is
BUILTIN: dict[str, dict[str, str]] = {
    "workflow": {
        "math": f"{_HERE}.workflows.math:Math",
        "solver-verifier": f"{_HERE}.workflows.solver_verifier:SolverVerifier",
        "tool-use": f"{_HERE}.workflows.tool_use:ToolUse",
        "gym": f"{_HERE}.workflows.environments:Gym",
        "verifiers": f"{_HERE}.workflows.environments:Verifiers",
    },
    "reward": {
        "score": f"{_HERE}.playing.rewards:score",
        "exact": f"{_HERE}.playing.rewards:exact",
    },
    "advantage": {
        "grpo": f"{_HERE}.training.losses:grpo_advantages",
        "dr_grpo": f"{_HERE}.training.losses:dr_grpo_advantages",
        "rloo": f"{_HERE}.training.losses:rloo_advantages",
    },
    "loss": {
        "grpo": f"{_HERE}.training.losses:GrpoLoss",
        "dr_grpo": f"{_HERE}.training.losses:DrGrpoLoss",
        "dapo": f"{_HERE}.training.losses:DapoLoss",
        "gspo": f"{_HERE}.training.losses:GspoLoss",
        "reinforce": f"{_HERE}.training.losses:ReinforceLoss",
        "tis": f"{_HERE}.training.losses:TisLoss",
    },
    "tool": {
        "calculator": f"{_HERE}.playing.calculator:Calculator",
        "python": f"{_HERE}.playing.tools:Python",
    },
    "curator": {
        "all": f"{_HERE}.data.curators:All",
        "drop_solved": f"{_HERE}.data.curators:DropSolved",
        "greso": f"{_HERE}.data.curators:Greso",
    },
    "filter": {
        "all": f"{_HERE}.data.filters:keep_all",
        "variance": f"{_HERE}.data.filters:drop_equal",
    },
    "replay": {"recent": f"{_HERE}.data.replay:Recent"},
}


class Plugin(msgspec.Struct, frozen=True):
    """A plug-in as a recipe names it.

    Attributes:
        name: A registered name or an import path.
        settings: Its keyword arguments.
    """

    name: str
    settings: dict[str, Any] = {}

    def to_toml(self) -> str | dict[str, Any]:
        """Write it as a recipe does.

        Returns:
            Its name; with settings, a table of the name and these.
        """
        return {"name": self.name, **self.settings} if self.settings else self.name


def names(kind: str) -> list[str]:
    """All names of a kind, of entry points too."""
    return sorted({*BUILTIN[kind], *(point.name for point in importlib.metadata.entry_points(group=f"{GROUP}.{kind}"))})


def load(kind: str, name: str) -> Any:
    """Import a plug-in. Raises ValueError that says what was expected, and which names are near."""
    path = BUILTIN[kind].get(name)
    if path is None and _PATH.fullmatch(name):
        path = name
    if path is None:
        found = {point.name: point.value for point in importlib.metadata.entry_points(group=f"{GROUP}.{kind}")}
        path = found.get(name)
    if path is None:
        raise ValueError(
            f'expected {", ".join(names(kind))}, or an import path "package.module:name", found {name!r}'
            f"{near(name, names(kind))}"
        )
    module_name, _, attribute = path.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except MissingExtraError:
        raise
    except ImportError as error:
        raise ValueError(f"{name!r}: {module_name} cannot be imported: {one_line(error, 200)}") from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ValueError(f"{name!r}: {module_name} cannot be imported: {error.msg} ({where})") from error
    except AttributeError as error:
        raise ValueError(f"{name!r}: module {module_name} has no {attribute}") from error


def check(kind: str, plugin: Plugin, *, key: str, given: tuple[str, ...] = ()) -> Any:
    """Load a plug-in, check its settings against its signature, and return it.

    key: where the recipe names it, for errors. given: keyword arguments that the run gives itself.
    Raises ValueError that names the key.
    """
    try:
        loaded = load(kind, plugin.name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if not callable(loaded):
        raise ValueError(f"{key}: {plugin.name!r}: expected a class or function, found {type(loaded).__name__}")
    known = settings_of(loaded)
    settable = [name for name in known if name not in given]
    for name in plugin.settings:
        if name in given or (name not in known and "**" not in known):
            has = f"it has {', '.join(n for n in settable if n != '**')}" if settable else "it has none"
            raise ValueError(f"{key}: {plugin.name!r} has no setting {name!r}; {has}{near(name, settable)}")
    missing = [name for name in settable if known[name] is inspect.Parameter.empty and name not in plugin.settings]
    if missing:
        raise ValueError(f"{key}: {plugin.name!r} needs its setting {missing[0]!r}, which has no default")
    _check_types(loaded, plugin.settings, key)
    return loaded


def _check_types(loaded: Callable[..., Any], settings: Mapping[str, Any], key: str) -> None:
    """Compare settings with the types of a signature, as far as it has any that a TOML value can have."""
    try:
        types = get_type_hints(loaded.__init__ if inspect.isclass(loaded) else loaded)
    except (NameError, TypeError):  # a name that only a type checker imports; a callable object
        return
    for name, value in settings.items():
        try:
            values.convert(value, types.get(name, Any), f"{key}.{name}")
        except TypeError:  # a type that no TOML value has
            continue


def settings_of(loaded: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a plug-in and their defaults; "**" where it takes any.

    A class's settings are all arguments of its `__init__`; a function's are those that are keyword-only.
    """
    by_name = {inspect.Parameter.KEYWORD_ONLY, *([_EITHER] if inspect.isclass(loaded) else [])}
    found: dict[str, Any] = {}
    for parameter in inspect.signature(loaded).parameters.values():
        if parameter.kind in by_name:
            found[parameter.name] = parameter.default
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found["**"] = None
    return found


def build(kind: str, plugin: Plugin, *, key: str | None = None, **given: Any) -> Any:
    """A class's instance, or a function with its settings bound.

    given: what the run gives; each is passed only to a plug-in that has an argument of that name.
    Raises ValueError that names the key.
    """
    loaded = check(kind, plugin, key=key or kind, given=tuple(given))
    known = settings_of(loaded)
    settings = {**plugin.settings, **{name: value for name, value in given.items() if name in known}}
    if not inspect.isclass(loaded):
        return functools.partial(loaded, **settings) if settings else loaded
    try:
        return loaded(**settings)
    except ValueError as error:
        raise ValueError(f"{key or kind}: {error}") from error


def near(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """ "; did you mean …?" for a name that is near to known ones, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
