"""Is the API reference whole? Every public name has a docstring in the one shape, and a page of the reference shows it.

    python tests/reference.py        # prints what is missing; exit code 1 if anything is

The shape (Google's, as mkdocstrings reads it): a first sentence; `Args:` that names every parameter; `Returns:` where
something is returned; `Attributes:` that names every field of a data class or an error. A class documents the arguments
of its `__init__` in its own docstring. What a function raises cannot be read off its code; a docstring that speaks of
raising must do so in a section `Raises:`.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.errors import MissingExtraError

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
_INTEGRATIONS = (
    "transformers",
    "lightning",
    "axolotl",
    "fsdp",
    "deepspeed",
    "megatron",
    "peft",
    "masters",
    "sglang",
    "delivery",
    "trl",
    "skyrl",
    "verl",
    "vllm",
)
MODULES = (
    "pulse_rl",
    "pulse_rl.study",
    "pulse_rl.testing",
    "pulse_rl.flow",
    "pulse_rl.watch",
    *(f"pulse_rl.integrations.{name}" for name in _INTEGRATIONS),
)

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$")
_ENTRY = re.compile(r"    (?:\*{0,2})([A-Za-z_]\w*)(?: \([^)]*\))?:(?: |$)")


def absent(module: str) -> bool:
    """Whether a module cannot be imported, as its framework is not installed here."""
    try:
        importlib.import_module(module)
    except MissingExtraError:
        return True
    return False


def public() -> Iterator[tuple[str, Any]]:
    """Every public name with what it stands for, as ("pulse_rl.diff", <function>)."""
    for module in filterfalse(absent, MODULES):
        room = importlib.import_module(module)
        own = (name for name, value in vars(room).items() if getattr(value, "__module__", None) == module)
        names = getattr(room, "__all__", None) or [name for name in own if not name.startswith("_")]
        for name in names:
            yield f"{module}.{name}", getattr(room, name)


def sections(docstring: str) -> dict[str, list[str]]:
    """Section name → its lines; the text before the first section is under the empty name."""
    found: dict[str, list[str]] = {"": []}
    at = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if match := _SECTION.fullmatch(line):
            at = match[1]
            found[at] = []
        elif at and line and not line.startswith(" "):
            found[""].append(line)  # text after a section
            at = ""
        else:
            found[at].append(line)
    return found


def entries(lines: list[str]) -> set[str]:
    """The names that a section describes."""
    return {match[1] for line in lines if (match := _ENTRY.match(line))}


def fields(value: type) -> list[str]:
    """The public fields of a data class, a struct, a named tuple or an error."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif issubclass(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    elif issubclass(value, tuple) and hasattr(value, "_fields"):
        names = list(value._fields)
    elif issubclass(value, Exception):
        names = [name for name in _parameters(value.__init__) if name != "message"]
    else:
        names = []
    return [name for name in names if not name.startswith("_")]


def methods(value: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that pulse-rl gives a class, inherited ones too; not a framework's hooks."""
    foreign = [base for base in value.__mro__ if not base.__module__.startswith("pulse_rl")]
    seen = {name for base in foreign for name in vars(base)}
    for base in value.__mro__:
        if not base.__module__.startswith("pulse_rl"):
            continue
        for name, member in vars(base).items():
            plain = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and name not in seen and inspect.isfunction(plain):
                seen.add(name)
                yield name, member


def _parameters(function: Any) -> list[str]:
    if not inspect.isfunction(function):
        return []
    found = inspect.signature(function).parameters
    return [name for name, one in found.items() if name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD]


def _wrong_text(parts: dict[str, list[str]]) -> Iterator[str]:
    text = parts[""]
    first = " ".join(text[: text.index("")] if "" in text else text)
    if not re.search(r"[.:!?]( |$)", first):
        yield f"expected a first sentence, found {first[:60]!r}"
    if "Raises" not in parts and any(re.match(r"Raises [A-Z]", line) for line in text):
        yield "speaks of raising outside a section Raises"


def wrong(name: str, value: Any) -> Iterator[str]:
    """What is wrong with the docstrings of a public name and its public methods."""
    if isinstance(value, type):
        yield from _wrong_class(name, value)
    else:
        yield from _wrong_function(name, value)


def _wrong_class(name: str, value: type) -> Iterator[str]:
    docstring = vars(value).get("__doc__")
    if not docstring:
        yield f"{name}: no docstring"
        return
    parts = sections(docstring)
    yield from (f"{name}: {what}" for what in _wrong_text(parts))
    described = entries(parts.get("Attributes", [])) | entries(parts.get("Args", []))
    wanted = fields(value)
    if not wanted and not issubclass(value, Exception) and not getattr(value, "_is_protocol", False):
        wanted = _parameters(value.__init__)
    if missing := [field for field in wanted if field not in described]:
        yield f"{name}: says nothing of {', '.join(missing)}"
    own = {method for method, _ in methods(value)} | set(getattr(value, "__annotations__", {})) | set(wanted)
    for strange in sorted(entries(parts.get("Attributes", [])) - own - _assigned(value)):
        yield f"{name}: describes {strange}, which it does not have"
    for method, member in methods(value):
        yield from _wrong_function(f"{name}.{method}", member)


def _assigned(value: type) -> set[str]:
    """Attributes that the classes of pulse-rl set on themselves."""
    sources = [inspect.getsource(base) for base in value.__mro__ if base.__module__.startswith("pulse_rl")]
    return set(re.findall(r"self\.([a-z]\w*)(?::[^=\n]+)? = ", "\n".join(sources)))


def _wrong_function(name: str, value: Any) -> Iterator[str]:
    function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not function.__doc__:
        yield f"{name}: no docstring"
        return
    parts = sections(function.__doc__)
    yield from (f"{name}: {what}" for what in _wrong_text(parts))
    if isinstance(value, property):
        return
    described, wanted = entries(parts.get("Args", [])), _parameters(function)
    if missing := [one for one in wanted if one not in described]:
        yield f"{name}: says nothing of {', '.join(missing)}"
    if strange := sorted(described - set(inspect.signature(function).parameters)):
        yield f"{name}: describes {', '.join(strange)}, which it does not take"
    returned = inspect.signature(function).return_annotation
    if returned not in (None, "None", "Self", "NoReturn") and not {"Returns", "Yields"} & parts.keys():
        yield f"{name}: no section Returns"


def shown() -> set[str]:
    """The names that the pages of the reference show."""
    return {name for page in PAGES.glob("*.md") for name in re.findall(r"(?m)^::: (\S+)$", page.read_text())}


def problems() -> list[str]:
    """Everything that is missing, a line each."""
    found: list[str] = []
    names: list[str] = []
    for name, value in public():
        names.append(name)
        found += wrong(name, value)
    found += [f"{name}: on no page in docs/reference/" for name in names if name not in shown()]
    seen = {name.rpartition(".")[0] for name in shown()}
    found += [f"{module}: on no page in docs/reference/" for module in filter(absent, MODULES) if module not in seen]
    for name in sorted(shown() - set(names)):  # what public functions return
        module, _, attribute = name.rpartition(".")
        if not absent(module):
            found += wrong(name, getattr(importlib.import_module(module), attribute))
    return found


if __name__ == "__main__":
    missing = problems()
    print("\n".join(missing), file=sys.stderr)
    sys.exit(1 if missing else 0)
