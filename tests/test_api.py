"""The public surface: what is exported, and what importing it costs."""

import subprocess
import sys

import pytest

import pulse_rl as pulse
from pulse_rl import errors


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


def test_digest_is_the_function_after_everything_is_imported() -> None:
    """A submodule of the same name would shadow it."""
    code = "import pulse_rl as p; p.diff({}, {}); p.Publisher; p.Subscriber; assert callable(p.digest)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pulse.nothing


def test_every_error_hangs_below_the_root() -> None:
    for name in pulse.__all__:
        value = getattr(pulse, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, pulse.PulseError)


def test_missing_extra_names_it() -> None:
    with pytest.raises(pulse.MissingExtraError, match=r"pip install 'pulse-rl\[run\]'"):
        errors.require("no_such_module_here", "run")


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["diff", "--help"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys; from pulse_rl.cli.main import app\n"
        f"try: app({command!r})\nexcept SystemExit: pass\n"
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
        "assert (w['a'] == new['a']).all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
