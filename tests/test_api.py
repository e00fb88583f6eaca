"""The public surface: what is exported, and what importing it costs."""

import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pulse_rl as pulse
from pulse_rl import errors
from tests import ROOT

ERRORS = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]


def test_all_is_complete_and_resolves() -> None:
    assert sorted(pulse.__all__) == sorted(pulse._HOME)
    for name in pulse.__all__:
        assert getattr(pulse, name).__name__ == name


def test_the_study_s_names_resolve_however_its_modules_are_imported() -> None:
    """One lazily loaded name after the other, each what it is called, also once every module is an attribute."""
    code = (
        "import importlib, pkgutil, sys, pulse_rl.study as s\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)\n"
        "assert sorted(s.__all__) == sorted(s._HOME)\n"
        "for module in pkgutil.iter_modules(s.__path__): importlib.import_module(f'pulse_rl.study.{module.name}')\n"
        "for name in s.__all__: assert getattr(s, name).__name__ == name, name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pulse.nothing


@pytest.mark.parametrize("room", ["flow", "study", "integrations", "testing", "watch"])
def test_public_rooms_are_attributes_and_cost_nothing_before(room: str) -> None:
    code = (
        "import sys, pulse_rl as p\n"
        f"assert 'pulse_rl.{room}' not in sys.modules and '{room}' in dir(p)\n"
        f"assert p.{room}.__name__ == 'pulse_rl.{room}'\n"
        "assert not {'torch', 'numpy', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Signatures

# What has a default and is given by its place: each has one meaning in its verb.
BY_PLACE = {"after", "device", "group", "number", "plugins", "provider", "registry", "settings", "text", "version"}


def test_options_are_given_by_name() -> None:
    """In every public function and class, and its methods. What only we make, as reports, is made as we like."""
    by_place = set()
    for room in (pulse, pulse.study, pulse.testing, pulse.watch, pulse.flow):
        for value in [getattr(room, name) for name in room.__all__]:
            made_by_us = value not in (pulse.Fp4, pulse.Fp8, pulse.Int8) and (
                hasattr(value, "__match_args__") or issubclass_of_error(value)
            )
            calls = [] if made_by_us else [value]
            if inspect.isclass(value):
                calls += [call for name, call in vars(value).items() if name[0] != "_" and inspect.isfunction(call)]
            for call in calls:
                by_place |= {
                    parameter.name
                    for parameter in inspect.signature(call).parameters.values()
                    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is not parameter.empty
                }
    assert by_place == BY_PLACE


def issubclass_of_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


@pytest.mark.slow
def test_types_are_known_to_who_uses_the_package(tmp_path: Path) -> None:
    """A user's program under mypy's strictest settings, where nothing of this repository is checked or configured."""
    shutil.copy(ROOT / "tests" / "typed_sample.py", tmp_path)
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--no-incremental"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "typed_sample.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# Errors


def test_every_error_hangs_below_the_root() -> None:
    for name in pulse.__all__:
        value = getattr(pulse, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, pulse.PulseError)


def test_every_error_that_a_verb_raises_is_public() -> None:
    """That a process of a run died is for the command line: no verb of the API runs any."""
    public = {name for name in pulse.__all__ if getattr(pulse, name) in ERRORS}
    assert {error.__name__ for error in ERRORS} - public == {"ProcessDiedError"}


def test_the_module_draws_every_error_under_its_parent() -> None:
    """The tree in the docstring, read line by line, against the classes."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([\s│├└─]*)([A-Za-z]+Error)\b", line):
            depth, name = len(found[1]), found[2]
            above = [(d, parent) for d, parent in above if d < depth]
            drawn[name] = above[-1][1] if above else "Exception"
            above.append((depth, name))
    assert drawn == {error.__name__: error.__bases__[0].__name__ for error in ERRORS}


def fields_of(kind: type[Exception]) -> list[str]:
    """The keyword arguments of an error, each of which becomes a field."""
    if kind is pulse.PulseError:  # which takes what Exception takes
        return []
    parameters = inspect.signature(kind).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_keeps_its_fields_through_pickle(kind: type[Exception]) -> None:
    """As on the way from a process of a run to the one that waits for it."""
    values: dict[str, Any] = {"ranks": [1, 2], "round": 3, "version": 7, "missing": ["a"], "unexpected": ["b"]}
    values |= {"reshaped": ["c"], "retyped": ["d"], "fields": {"name": "e"}}
    fields = {name: values.get(name, f"some {name}") for name in fields_of(kind)}
    error = kind("what happened", **fields)
    error.add_note("what to do")
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert type(found) is kind
        assert {n: list(v) if isinstance(v := getattr(found, n), tuple) else v for n in fields} == fields
        assert str(found) == str(error)
        assert "what happened" in str(found)
        assert found.__notes__ == ["what to do"]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_needs_a_message_alone(kind: type[Exception]) -> None:
    """Fields that are not given are None, or empty, and are listed in the docstring."""
    error = kind("what happened")
    for name in fields_of(kind):
        assert getattr(error, name) in (None, (), False, {})
        assert f"    {name}: " in inspect.cleandoc(kind.__doc__ or "")
    assert str(error) == "what happened"


def test_a_source_stands_before_the_message() -> None:
    assert str(pulse.PatchFormatError("too short", source="a/b.safetensors")) == "a/b.safetensors: too short"


def test_missing_extra_names_it() -> None:
    with pytest.raises(pulse.MissingExtraError, match=r"pip install .*\[run\]") as raised:
        errors.require("no_such_module_here", "run")
    assert (raised.value.name, raised.value.extra) == ("no_such_module_here", "run")


def test_a_module_is_found_without_an_import_which_takes_seconds() -> None:
    with pytest.raises(pulse.MissingExtraError) as raised:
        errors.require_installed("no_such_module_here", "run")
    assert (raised.value.name, raised.value.extra) == ("no_such_module_here", "run")
    sys.modules.pop("this", None)
    errors.require_installed("this", "run")
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\n  two\t three"), "one two three"),
        (ValueError(), "ValueError"),
        (ValueError("\x1b[2Jred \u202e\ud800"), "�[2Jred ��"),
        (FileNotFoundError(2, "No such file or directory", "a\nb"), "a b: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("a sentence"), "a sentence"),
        (pulse.ObjectNotFoundError("no x in y", name="x"), "no x in y"),
    ],
)
def test_an_error_as_one_line(error: Exception, line: str) -> None:
    assert errors.one_line(error) == line
    error.add_note("and\nmore")
    assert errors.one_line(error) == f"{line}; and more"
    assert errors.one_line(error, 5) == f"{line[:4]}…"


def test_only_foreign_errors_are_translated() -> None:
    with pytest.raises(pulse.StoreError, match="^wrapped: no$"), errors.translate(KeyError, OSError, to=_wrapped):
        raise OSError("no")
    with pytest.raises(ValueError, match="^no$"), errors.translate(KeyError, OSError, to=_wrapped):
        raise ValueError("no")


def _wrapped(text: str) -> Exception:
    return pulse.StoreError(f"wrapped: {text}")


# What an import costs


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pulse_rl.cli.app import app\n"
        "for command in (['--help'], ['train', '--help'], ['diff', '--help']):\n"
        "    try: app(command)\n    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'ray', 'obstore', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_patch_verbs_work_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, pulse_rl as p\n"
        "old = {'a': np.arange(9, dtype=np.float32)}; new = {'a': old['a'] + (np.arange(9) == 3)}\n"
        "p.apply(old, p.diff(old, new)); assert p.digest(old) == p.digest(new)\n"
        "pub = p.Publisher(p.open_store('memory://')); pub.publish(new, version=1)\n"
        "sub = p.Subscriber(pub.history.store); w = {'a': np.zeros(9, np.float32)}; sub.sync(w)\n"
        "assert p.digest(w) == p.digest(new)"  # no module of this name has come in front of the function
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plug_in_of_vllm_is_loaded_without_kernels() -> None:
    """vLLM scans all modules as its worker starts, and fails at one of those that compile kernels."""
    code = "import sys, pulse_rl.integrations.vllm.plugin; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
