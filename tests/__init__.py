"""Tests, in rooms as the source. What one room does is in the folder of its name; what holds for all rooms is here."""

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]  # where `python -m tests.…` runs


def script(path: Path) -> Any:
    """A script that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
