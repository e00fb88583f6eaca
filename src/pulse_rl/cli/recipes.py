"""The options of `pulse-rl train` as changes of a recipe."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulse_rl.flow.recipe import Recipe

DEFAULT = "math"  # the recipe of a run without --recipe
OUT = "runs/main"  # and its directory

# Options that every recipe has as a setting of the same name, for the whole run.
SHARED = ("out", "store", "steps", "seed", "deterministic", "checkpoint_every", "address")
# The other options, each with its settings in a recipe of one policy and one pool.
SETTINGS = {
    "model": ("{policy}.model",),
    "dither": ("{policy}.dither",),
    "task": ("workflow.task",),
    "prompts": ("{policy}.tasks_per_step",),
    "group_size": ("workflow.group_size",),
    "chunk": ("{pool}.slots",),
    "max_new_tokens": ("workflow.max_new_tokens",),
    "temperature": ("workflow.temperature",),
    "lr": ("{policy}.lr",),
    "warmup": ("{policy}.warmup",),
    "betas": ("{policy}.betas",),
    "weight_decay": ("{policy}.weight_decay",),
    "clip": ("{policy}.loss.clip",),
    "grad_clip": ("{policy}.grad_clip",),
    "max_staleness": ("{policy}.max_staleness",),
    "sync": ("{policy}.sync",),
    "codec": ("{policy}.codec",),
    "anchor_every": ("{policy}.anchor_every",),
    "trainers": ("{policy}.trainers",),
    "trainer_sync": ("{policy}.trainer_sync",),
    "trainer_store": ("{policy}.trainer_store",),
    "elastic": ("{policy}.elastic",),
    "sync_every": ("{policy}.sync_every",),
    "overlap": ("{policy}.overlap",),
    "workers": ("{pool}.workers",),
    "engine": ("{pool}.kind",),
    "threads": ("{policy}.threads", "{pool}.threads"),
}
RESUMED = ("address", "checkpoint_every", "steps", "threads", "workers")  # may be given with --resume


def new(recipe: str | None, sets: list[str], given: Mapping[str, object]) -> "Recipe":
    """The recipe of a new run. given: options of the command line; sets: those of --set, which come after them.

    Raises ValueError for what is not understood, or not possible.
    """
    from pulse_rl.flow import recipe_file

    if recipe is not None:
        changes = _shared(given) + sets
        found = recipe_file.load(recipe, changes)
        if not any(text.partition("=")[0].strip() == "out" for text in changes):
            found = recipe_file.load(recipe, [*changes, _set("out", numbered(found.out))])
        return found
    given = {"out": numbered(OUT), **given}
    default = recipe_file.read(DEFAULT)
    (policy,), (pool,) = default["policies"], default["pools"]
    with _options(policy):
        return recipe_file.load(DEFAULT, _shared_or_set(given, policy, pool["name"]) + sets)


def resumed(directory: Path, sets: list[str], given: Mapping[str, object]) -> list[str]:
    """The changes with which a run continues.

    Raises FileNotFoundError if there is no run, ValueError for an option that may not be given with --resume.
    """
    from pulse_rl.flow import recipe_file

    found = recipe_file.saved(directory)
    given = {name: value for name, value in given.items() if name != "out"}
    if fixed := [name for name in given if name not in RESUMED]:
        raise ValueError(
            f"--resume keeps the settings of the run in {directory}: only {_names(RESUMED)} may be given with it, "
            f"found {_names(fixed)}"
        )
    if found.only is None or len(found.pools) > 1:
        return _shared(given) + sets
    return _shared_or_set(given, found.only, found.pools[0].name) + sets


def numbered(name: str) -> str:
    """The first of name, name-2, name-3, … that holds no run."""
    from pulse_rl.flow.directory import free

    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(out for out in names if free(Path(out)))


def _shared(given: Mapping[str, object]) -> list[str]:
    """Options as changes of any recipe. Raises ValueError for one that belongs into the recipe."""
    from pulse_rl.flow import recipe_file

    for name, value in given.items():
        if name not in SHARED:
            key = name if name in recipe_file.SHORT else SETTINGS[name][0]
            change = _set(key.format(policy="policies.NAME", pool="pools.NAME"), value)
            raise ValueError(f"{_names([name])} is a setting of the recipe: change it there or by --set {change}")
    return [_set(name, value) for name, value in given.items()]


def _shared_or_set(given: Mapping[str, object], policy: str, pool: str) -> list[str]:
    """Options as changes of a recipe of one policy and one pool."""
    changes = []
    for name, value in given.items():
        keys = (name,) if name in SHARED else SETTINGS[name]
        changes += [_set(key.format(policy=f"policies.{policy}", pool=f"pools.{pool}"), value) for key in keys]
    return changes


def _set(key: str, value: object) -> str:
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


@contextmanager
def _options(policy: str) -> Iterator[None]:
    """Let a ValueError about a setting of the recipe name the option that gives it."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace(f"policies.{policy}.loss: clip", "--clip").replace("workflow: task", "--task")
        settings = [(key, name) for name, keys in SETTINGS.items() for key in keys]
        for key, name in sorted(settings, reverse=True):  # sync_every before sync
            text = text.replace(key.format(policy=f"policies.{policy}", pool="pools[0]"), _names([name]))
        raise ValueError(text) from None


def _names(names: Sequence[str]) -> str:
    """Settings as options of the command line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
