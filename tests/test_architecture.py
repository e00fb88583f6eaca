"""The rooms of the package: which may import which, module by module, and that no two modules need each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pulse_rl

PACKAGE = Path(pulse_rl.__file__).parent

# From the ground up: a room imports only rooms of earlier rows of this list, and its own modules.
ROOMS = [
    {"errors", "dtypes", "units", "disk"},
    {"logs"},
    {"parallel", "kernels", "documents"},
    {"weights", "group"},
    {"checkpoint", "codecs"},
    {"patch"},
    {"store"},
    {"history"},
    {"sync", "loco"},
    {"channel"},
    {"html", "planner"},
    {"study"},
    {"engines"},
    {"integrations"},
    {"rl"},
    {"flow"},
    {"bench", "testing"},
    {"cli"},
]
ORDER = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}


def _modules() -> dict[str, Path]:
    """Every module below the package's root, by its name there: "sync.publisher", and "sync" for a room itself."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = file
    return found


MODULES = _modules()


def _imports(name: str) -> set[str]:
    """The modules that one imports: at its top, inside of a function, or for type checking alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pulse_rl":
            module = node.module.removeprefix("pulse_rl").removeprefix(".")
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                found |= {full} if full in MODULES else {module} & MODULES.keys()
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("pulse_rl.") for alias in node.names} & MODULES.keys()
    return found


def test_every_room_has_a_row() -> None:
    assert {name.split(".")[0] for name in MODULES} == ORDER.keys()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_lower_rooms(name: str) -> None:
    room = name.split(".")[0]
    for imported in _imports(name):
        other = imported.split(".")[0]
        assert other == room or ORDER[other] < ORDER[room], f"{name} imports {imported}"


def test_a_history_is_published_and_read_without_what_operates_it() -> None:
    for name in MODULES:
        if name.startswith("history.") and not name.startswith("history.operate"):
            assert not any(module.startswith("history.operate") for module in _imports(name)), name


def test_no_two_modules_need_each_other() -> None:
    try:
        TopologicalSorter({name: _imports(name) for name in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' → '.join(error.args[1])}")


def test_only_tests_import_the_naive_twins() -> None:
    for name in MODULES:
        if not name.startswith("kernels.reference"):
            assert not any(module.startswith("kernels.reference") for module in _imports(name)), name


@pytest.mark.parametrize("room", sorted(name for name, file in MODULES.items() if file.name == "__init__.py"))
def test_a_room_says_what_happens_in_it(room: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[room].read_text()))
