"""The rooms of the package: which may import which, module by module, and that no two of them need each other."""

import ast
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pulse_rl

PACKAGE = Path(pulse_rl.__file__).parent

# From the ground up: a room imports only rooms of earlier rows of this list, and its own modules.
ROOMS = [
    {"errors", "dtypes", "units", "disk", "version"},
    {"logs"},
    {"parallel", "kernels", "documents", "observers"},
    {"weights", "group"},
    {"checkpoint", "codecs"},
    {"patch"},
    {"store"},
    {"log"},
    {"history"},
    {"sync", "loco"},
    {"folders"},
    {"html", "planner"},
    {"study"},
    {"engines"},
    {"watch"},
    {"integrations"},
    {"flow"},
    {"testing"},
    {"pulse_rl"},  # the package itself, which has the public names of all rooms before
    {"cli"},
]
ORDER = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}

# The channel, and what uses it as a user would: by the names of `pulse_rl.__all__`.
CHANNEL = {"checkpoint", "codecs", "patch", "store", "log", "history", "sync", "loco"}
AROUND = {"integrations", "study", "watch", "flow", "cli"}
# What they use from inside all the same, and why.
INSIDE = {
    "integrations": {"patch": "master weights are written with the proof and the undo of an apply"},
    "study": {
        "checkpoint": "it compares checkpoints tensor by tensor, without loading them",
        "codecs": "it compares all codecs on the same changes",
        "history": "it goes through the patches of a history one by one",
        "log": "likewise, and fetches them",
        "patch": "likewise, within a patch",
    },
    "watch": {"history.operate": "the verdicts of subscribers are metrics"},
    "flow": {
        "codecs.choose": "the name of a codec is checked before any process starts",
        "loco": "DDP adds gradients in the order, and with the errors, of PULSELoCo",
        "sync.freed": "a trainer keeps memory that it has freed, as each step takes as much again",
    },
    "cli": {
        "checkpoint": "files are mapped and not loaded",
        "codecs.choose": "a bad name of a codec is a bad command line",
        "patch": "patches are written to files, and applied to copies, that need not fit into memory",
        "history.operate": "a target may be a patch, a checkpoint or a store; prune and inspect are no functions",
        "history.restore": "a study's temporary files",
    },
}


def _modules() -> dict[str, Path]:
    """Every module by its name in the package: "sync.publisher", and "sync" for a room itself."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "pulse_rl"] = file
    return found


MODULES = _modules()


@cache
def _nodes(name: str) -> list[ast.AST]:
    """Imports and classes of a module, wherever in it, and the module itself."""
    kinds = (ast.Module, ast.ClassDef, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(node, kinds)]


def _imports(name: str) -> set[str]:
    """The modules that one imports: at its top, inside of a function, or for type checking alone."""
    found = set()
    for node in _nodes(name):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pulse_rl":
            module = node.module.removeprefix("pulse_rl").removeprefix(".")
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                home = module or pulse_rl._HOME.get(alias.name, "pulse_rl")  # a public name stands for its module
                found |= {full} if full in MODULES else {home} & MODULES.keys()
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "pulse_rl"]
            found |= {name.removeprefix("pulse_rl.") for name in names} & MODULES.keys()
    return found


def _folder(name: str) -> str:
    """The folder in a room that a module lies in; a module that lies in none stands for itself."""
    parent = name.rpartition(".")[0]
    return parent if "." in parent else name


def test_every_room_has_a_row() -> None:
    assert {name.split(".")[0] for name in MODULES} == ORDER.keys()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_lower_rooms(name: str) -> None:
    room = name.split(".")[0]
    for imported in _imports(name):
        other = imported.split(".")[0]
        assert other == room or ORDER[other] < ORDER[room], f"{name} imports {imported}"


def _from_inside(name: str) -> set[str]:
    """The modules of the channel that a module imports from, past the public names."""
    nodes = [node for node in _nodes(name) if isinstance(node, ast.ImportFrom)]
    modules = {(node.module or "").removeprefix("pulse_rl.") for node in nodes}
    return {module for module in modules if module.split(".")[0] in CHANNEL}


@pytest.mark.parametrize("room", sorted(AROUND))
def test_what_is_around_the_channel_uses_its_public_names(room: str) -> None:
    found = {module for name in MODULES if name.split(".")[0] == room for module in _from_inside(name)}
    allowed = {part: {module for module in found if f"{module}.".startswith(f"{part}.")} for part in INSIDE[room]}
    assert found == set().union(*allowed.values())
    assert all(allowed.values()), "an exception that nobody needs any more"


def test_a_history_is_published_and_read_without_what_operates_it() -> None:
    for name in MODULES:
        if name.startswith("history.") and not name.startswith("history.operate"):
            assert not any(module.startswith("history.operate") for module in _imports(name)), name


@pytest.mark.parametrize("unit", [str, _folder], ids=["modules", "folders"])
def test_no_two_of_them_need_each_other(unit: Callable[[str], str]) -> None:
    """No two modules, and no two folders of a room: none has a module that needs one of a folder above."""
    needed: dict[str, set[str]] = {}
    for name in MODULES:
        needed.setdefault(unit(name), set()).update({unit(other) for other in _imports(name)} - {unit(name)})
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' → '.join(error.args[1])}")


# Names that two classes have all the same, and why.
SHARED = {
    "Report": "both are public: what a study gives, and what the conformance suite gives",
}


def test_no_two_classes_have_one_name() -> None:
    """Of the classes without an underscore, in or outside of another class."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in _nodes(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1}.keys() == SHARED.keys()


@pytest.mark.parametrize("room", sorted(name for name, file in MODULES.items() if file.name == "__init__.py"))
def test_a_room_says_what_happens_in_it(room: str) -> None:
    module = _nodes(room)[0]
    assert isinstance(module, ast.Module)
    assert ast.get_docstring(module)
