"""Recipes as files: find one by name or path, apply `--set`, turn the document into typed settings, and write it.

A document is what a TOML file holds: plain tables. Every key is checked here by name and by type, `recipe_check` checks
what the values mean.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from pulse_rl.disk import read_file
from pulse_rl.errors import require
from pulse_rl.flow import registry, values
from pulse_rl.flow.directory import FORMER, POLICIES, RECIPE
from pulse_rl.flow.recipe import AutoscaleRecipe, EvaluationRecipe, PolicyRecipe, PoolRecipe, Recipe, WorkflowRecipe
from pulse_rl.flow.recipe_check import check as check_recipe
from pulse_rl.flow.registry import Plugin

# What other libraries call a setting, and what it is called here.
OTHERS = {
    "learning_rate": "lr",
    "warmup_steps": "warmup",
    "max_grad_norm": "grad_clip",
    "batch_size": "tasks_per_step",
    "num_generations": "group_size",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "total_steps": "steps",
    "save_steps": "checkpoint_every",
    "output_dir": "out",
    "model_name": "model",
    "num_workers": "workers",
}
FREE = ("steps", "checkpoint_every", "address", "pools", "autoscale", "threads")  # may change with --resume
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "workflow": WorkflowRecipe,
    "autoscale": AutoscaleRecipe,
    "pools": PoolRecipe,
    "evaluation": EvaluationRecipe,
}


def built_in() -> list[str]:
    """The names of the recipes in the package."""
    files = resources.files("pulse_rl.flow") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def load(name: str | Path, sets: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe.

    name: of a recipe in the package, or a path of a TOML file. sets: "key=value", as `--set` takes them.
    Raises ValueError that names the key, what was expected and what was found; OSError if a file cannot be read.
    """
    document = read(str(name))
    if isinstance(path := document.get("path", ""), str):
        beside = Path() if str(name) in built_in() else Path(name).expanduser().parent
        document["path"] = str((beside / path).absolute())
    for text in sets:
        set_value(document, text)
    document.setdefault("out", f"runs/{document.get('name', Recipe().name)}")
    return check_recipe(parse(document))


def read(name: str) -> dict[str, Any]:
    """The document of a recipe, by its name in the package or the path of its file. Raises as `load`."""
    if name in built_in():
        data = (resources.files("pulse_rl.flow") / "recipes" / f"{name}.toml").read_bytes()
    else:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(
                f"recipe: expected one of {', '.join(built_in())}, or a TOML file, found {name!r}"
                f"{registry.near(name, built_in())}"
            )
        data = read_file(path)
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected TOML: {error}") from None


def set_value(document: dict[str, Any], text: str) -> None:
    """Change a document by one `--set key=value`, in place.

    The value is TOML; what is no TOML is a string. A key has dots: "policies.solver.lr", "pools.near.workers" by a
    pool's name, "pools.0.workers" by its place. A key of policies or pools without their names, as "lr", "loss.clip"
    or "workers", is set in all of them.
    """
    path, equals, value_text = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set: expected key=value, for example policies.solver.lr=1e-6, found {text!r}")
    value = _value(value_text.strip())
    for table in _tables_with(document, keys[0]):
        _set_in(table, keys, value, text)


def _tables_with(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The document where it may have a key, else all policies and pools that may."""
    if key in Recipe.__struct_fields__:
        return [document]
    tables: list[Any] = []
    if key in PolicyRecipe.__struct_fields__ and isinstance(policies := document.get("policies"), dict):
        tables += policies.values()
    if key in PoolRecipe.__struct_fields__ and isinstance(pools := document.setdefault("pools", [{}]), list):
        tables += pools
    return [table for table in tables if isinstance(table, dict)] or [document]


def _set_in(document: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    """Set a value at a path of keys. text: what was asked, for errors."""
    place: Any = document
    for depth, key in enumerate(keys[:-1]):
        if isinstance(place, list):
            place = _element(place, key, text)
            continue
        if keys[0] == "policies" and depth == 1 and key not in place:
            raise ValueError(
                f"--set {text}: expected one of {', '.join(place)} after policies, found {key!r}"
                f"{registry.near(key, list(place))}"
            )
        inner = place.get(key, {})
        if isinstance(inner, str):
            inner = {"name": inner}  # a plug-in that was only named gets settings
        if not isinstance(inner, dict | list):
            raise ValueError(f"--set {text}: expected a table at {'.'.join(keys[: depth + 1])}, found {inner!r}")
        place[key] = inner
        place = inner
    if isinstance(place, list):
        raise ValueError(f"--set {text}: expected the name of one of its tables before the last key")
    place[keys[-1]] = value


def _element(tables: list[Any], key: str, text: str) -> dict[str, Any]:
    """One of several tables, by its name or place."""
    for number, table in enumerate(tables):
        if isinstance(table, dict) and key in (str(number), table.get("name")):
            return table
    names = [str(table.get("name", number)) for number, table in enumerate(tables)]
    raise ValueError(f"--set {text}: expected one of {', '.join(names)}, found {key!r}{registry.near(key, names)}")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse(document: Mapping[str, Any]) -> Recipe:
    """The typed settings of a document. Raises ValueError for unknown keys and wrong types; values are not checked."""
    document = dict(document)
    _check_keys(Recipe, document, "")
    given: dict[str, Any] = {}
    for key, value in document.items():
        if key == "policies":
            given[key] = {
                name: _struct(PolicyRecipe, table, f"policies.{name}")
                for name, table in _table(value, "policies").items()
            }
        elif key == "tools":
            given[key] = {name: _plugin(tool, f"tools.{name}", name) for name, tool in _table(value, key).items()}
        elif key == "workflow":
            given[key] = _workflow(_table(value, key))
        elif key in ("pools", "evaluation"):
            if not isinstance(value, list):
                raise ValueError(f"{key}: expected tables [[{key}]], found {values.found(value)}")
            given[key] = [_struct(_SECTIONS[key], table, f"{key}[{i}]") for i, table in enumerate(value)]
        elif key == "autoscale":
            given[key] = _struct(AutoscaleRecipe, value, key)
        else:
            given[key] = _field(Recipe, key, value, key)
    return _with_losses(Recipe(**given), document)


def _with_losses(recipe: Recipe, document: Mapping[str, Any]) -> Recipe:
    """Where a pool samples with a view, a policy has the loss `tis`, if its document names none."""
    if not any(pool.view for pool in recipe.pools):
        return recipe
    policies = {
        name: policy if "loss" in document["policies"][name] else msgspec.structs.replace(policy, loss=Plugin("tis"))
        for name, policy in recipe.policies.items()
    }
    return msgspec.structs.replace(recipe, policies=policies)


def _workflow(table: dict[str, Any]) -> WorkflowRecipe:
    """Keys that are not a recipe's are settings of the workflow."""
    own = [name for name in WorkflowRecipe.__struct_fields__ if name != "settings"]
    given = {name: _field(WorkflowRecipe, name, table[name], f"workflow.{name}") for name in own if name in table}
    return WorkflowRecipe(**given, settings={name: value for name, value in table.items() if name not in own})


def _struct(kind: type[Any], table: Any, key: str) -> Any:
    table = _table(table, key)
    _check_keys(kind, table, f"{key}.")
    return kind(**{name: _field(kind, name, value, f"{key}.{name}") for name, value in table.items()})


def _check_keys(kind: type[msgspec.Struct], table: Mapping[str, Any], prefix: str) -> None:
    known = kind.__struct_fields__
    for name in table:
        if name not in known:
            raise ValueError(
                f"{prefix}{name}: expected one of the keys of {prefix[:-1] or 'a recipe'}, found {name!r}"
                + (_meant(name, known) or f"; all are {', '.join(known)}")
            )


def _meant(name: str, known: Sequence[str]) -> str:
    """Which key was meant: by another library's name for it, in another table, or with another spelling."""
    meant = OTHERS.get(name, name)
    if meant in known:
        return f"; did you mean {meant}?"
    tables = {"": Recipe, "policies.NAME.": PolicyRecipe} | {
        f"{section}{'.NAME' * (section == 'pools')}.": kind for section, kind in _SECTIONS.items()
    }
    fields = {field for kind in tables.values() for field in kind.__struct_fields__}
    if meant not in fields:
        if near := registry.near(name, list(known)):
            return near
        close = next(iter(difflib.get_close_matches(meant, [*fields, *OTHERS], n=1, cutoff=0.75)), meant)
        meant = OTHERS.get(close, close)
    elsewhere = [f"{table}{meant}" for table, kind in tables.items() if meant in kind.__struct_fields__]
    return f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""


def _table(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{key}: expected a table, found {values.found(value)}")
    return value


def _field(kind: type[msgspec.Struct], name: str, value: Any, key: str) -> Any:
    """A value as the type of its field."""
    wanted = get_type_hints(kind, include_extras=True)[name]
    if Plugin in (wanted, *get_args(wanted)):
        default = next(field for field in msgspec.structs.fields(kind) if field.name == name).default
        return _plugin(value, key, default.name if isinstance(default, Plugin) else None)
    return values.convert(value, wanted, key)


def _plugin(value: Any, key: str, default: str | None) -> Plugin:
    """default: the plug-in whose settings a table without a name gives."""
    if isinstance(value, str):
        return Plugin(value)
    name = value.get("name", default) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"{key}: expected a name, or a table with a name and settings, found {values.found(value)}")
    return Plugin(name, {key: setting for key, setting in value.items() if key != "name"})


def to_document(recipe: Recipe) -> dict[str, Any]:
    """The document of a recipe, with every setting; TOML has no null, so what is None is left out."""
    document: dict[str, Any] = _plain(recipe)
    document["workflow"] |= document["workflow"].pop("settings")
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Plugin):
        return value.to_toml()
    if isinstance(value, msgspec.Struct):
        return {name: _plain(v) for name in value.__struct_fields__ if (v := getattr(value, name)) is not None}
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def save(recipe: Recipe) -> None:
    """Write recipe.toml into the run's directory, whole or not at all.

    Stores are written as absolute paths: the run may be continued from another working directory.
    """
    from pulse_rl.disk import write_stream  # keeps --help fast

    tomli_w = require("tomli_w", "run")
    recipe.directory.mkdir(parents=True, exist_ok=True)
    document = to_document(recipe.with_absolute_paths()) | {"out": recipe.out}
    write_stream(recipe.directory / RECIPE, [tomli_w.dumps(document).encode()])


def saved(directory: Path) -> Recipe:
    """The recipe of a run, as it was checked when the run began.

    Raises FileNotFoundError if there is none, ValueError if it is broken, or of an older release.
    """
    if not (directory / RECIPE).is_file() and not (directory / FORMER).is_file():
        raise FileNotFoundError(f"no run in {directory}: expected a {RECIPE} there")
    recipe = parse(read(str(directory / RECIPE))) if (directory / RECIPE).is_file() else None
    if recipe is None or (recipe.only and (directory / POLICIES).is_dir()):
        raise ValueError(
            f"expected a run of this release of pulse-rl in {directory}, found one of an older release, which kept "
            "other files: continue it with that release, or begin a new run"
        )
    return recipe


def resumed(directory: Path, sets: Iterable[str] = ()) -> Recipe:
    """The recipe with which a run continues: only some settings may change, and the pools' workers.

    Raises ValueError for a setting that would make it another run.
    """
    before = saved(directory)
    document = to_document(before)
    for text in sets:
        key = text.partition("=")[0].strip()
        if not _may_change(key):
            raise ValueError(
                f"--resume keeps the recipe of the run in {directory}: only {', '.join(FREE)} may be set with it, "
                f"found {key}"
            )
        set_value(document, text)
    document["out"] = str(directory)
    recipe = check_recipe(parse(document))
    if recipe.deterministic and {pool.view for pool in before.pools} != {pool.view for pool in recipe.pools}:
        raise ValueError(
            "pools.view: expected no other view than before with deterministic = true, as it would change the bits, "
            "and the tasks of the open round name versions that have none of it"
        )
    return recipe


def _may_change(key: str) -> bool:
    """Whether a setting decides only how long a run goes on, where, and with which processes."""
    first, last = key.split(".")[0], key.split(".")[-1]
    of_pools = first in PoolRecipe.__struct_fields__ and first not in Recipe.__struct_fields__
    return first in FREE or of_pools or (first == "policies" and last == "threads")
