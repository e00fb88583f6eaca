"""Signatures of the reference show defaults as values: `grace: float = 3600.0`, where the code has `GRACE_S`.

An extension of Griffe, which reads the code for the documentation; zensical.toml names this file.
"""

import importlib
from typing import Any

import griffe


class Values(griffe.Extension):
    """Puts the values of our constants in the place of their names."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called with each function that was read."""
        for parameter in func.parameters:
            if not isinstance(parameter.default, griffe.Expr):
                continue
            module, _, name = parameter.default.canonical_path.rpartition(".")
            if name.isupper() and module.startswith("pulse_rl."):
                value = getattr(importlib.import_module(module), name)
                parameter.default = f"{value:_}" if isinstance(value, int) else repr(value)
