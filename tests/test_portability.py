"""Imports where Linux's own functions are missing, as on macOS and Windows."""

import subprocess
import sys
from pathlib import Path

import pulse_rl

# What other packages do on such systems is their affair, so they are imported before anything is taken away.
PROGRAM = """
import importlib, logging, os, random, sys, tempfile, threading
import blake3, cryptography.hazmat.primitives.asymmetric.ed25519, msgspec, numba, numpy, obstore, ray, rich, torch
import transformers, typer

for name in ("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "geteuid", "getuid", "O_DIRECTORY"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "pwd", "resource"):
    sys.modules[name] = None  # importing it is an ImportError
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:  # what loads a framework's own classes is imported where that is
        frameworks = ("axolotl", "fastapi", "lightning", "skyrl", "vllm")
        if not name.startswith("pulse_rl.integrations.") or error.name.split(".")[0] not in frameworks:
            raise

import pulse_rl
for name in pulse_rl.__all__:
    getattr(pulse_rl, name)
print(len(pulse_rl.__all__))
"""


def _modules() -> list[str]:
    """Every module of the package."""
    package = Path(pulse_rl.__file__).parent
    names = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_everything_is_imported_without_what_only_linux_has() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *_modules()], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == len(pulse_rl.__all__)
