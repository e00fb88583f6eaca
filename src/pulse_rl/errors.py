"""The exceptions of pulse-rl: one root, one class per cause.

    PulseError
    ├── PatchFormatError       the bytes are no patch we can read: truncated, malformed, over a limit, too new
    ├── BaseMismatchError      a sound patch, but these weights are not its base (also a ValueError)
    ├── IntegrityError         bits are not what their hash or digest promised
    ├── ExchangeError          trainers could not exchange a round: one is lost, or they do not agree on what to do
    ├── StoreError             a store could not be read or written, or another publisher wrote to it
    │   └── VersionNotFoundError   the history does not hold that version (also a LookupError)
    └── MissingExtraError      an optional dependency is not installed (also an ImportError)

Builtin exceptions serve where they fit: TypeError for something that is no tensor, ValueError for a bad
argument, FileNotFoundError for a path, TimeoutError for a wait.
"""

from types import ModuleType


class PulseError(Exception):
    """The root of every error that pulse-rl raises on its own account."""


class PatchFormatError(PulseError):
    """The bytes are not a patch that this version can read."""


class BaseMismatchError(PulseError, ValueError):
    """The weights at hand are not the ones that the patch (or the history) was made from."""


class IntegrityError(PulseError):
    """Bits differ from what their hash or digest promised; nothing was accepted."""


class ExchangeError(PulseError):
    """Trainers could not exchange a round; the shared weights are those of the round before."""


class StoreError(PulseError):
    """A store could not be read or written, or refused a commit."""


class VersionNotFoundError(StoreError, LookupError):
    """The history does not hold the version that was asked for."""


class MissingExtraError(PulseError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise MissingExtraError naming the extra to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module} is needed for this and is not installed: pip install 'pulse-rl[{extra}]'"
        ) from error
