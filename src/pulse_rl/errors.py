"""The exceptions of pulse-rl: one root, one class for each cause, and fields that a caller can act on.

    PulseError
    ├── FormatError                 bytes are not what their format says: truncated, malformed, over a limit
    │   ├── PatchFormatError        … of a patch
    │   ├── CheckpointFormatError   … of a safetensors file or its index
    │   └── VersionSkewError        they are of a newer format than this release knows: upgrade it
    ├── BaseMismatchError           these weights are not the ones that a patch or a history expects (also ValueError)
    ├── IntegrityError              bits differ from what their hash, digest or signature promised
    ├── ExchangeError               ranks could not work together: one is lost or failed, or they do not agree
    ├── StoreError                  a store could not be read or written
    │   ├── ObjectNotFoundError     it holds no object of that name (also FileNotFoundError)
    │   ├── ObjectExistsError       it holds that object already, put with mode="create" (also FileExistsError)
    │   ├── CannotListError         its objects can be read by name but not listed, as behind a web server
    │   ├── CannotReadRangeError    its objects can only be read whole, as behind some web servers
    │   └── VersionNotFoundError    the history does not hold that version (also LookupError)
    ├── UnmappedError               an engine cannot follow a history in the memory of its weights
    ├── EngineError                 an inference engine is out of reach, refused, or failed at what it was asked for
    ├── ProcessDiedError            a process of a run is gone: killed, out of memory, or its node was lost
    └── MissingExtraError           an optional dependency is not installed (also ImportError)

A field is None, or empty, where it does not apply or is not known. Builtin exceptions serve where they fit: TypeError
for something that is no tensor, ValueError for a bad argument, FileNotFoundError for a path, TimeoutError for a wait.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

# The extras of these do not bring them: their builds have several names, or they pin most of what they need.
FRAMEWORKS = ("axolotl", "verl", "vllm")


class PulseError(Exception):
    """The root of every error that pulse-rl raises on its own account."""


class FormatError(PulseError):
    """The bytes are not what their format says. Nothing was changed.

    Attributes:
        source: What held the bytes: a path, or an object's name; None for bytes in memory.
    """

    def __init__(self, message: str, *, source: str | None = None) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source


class PatchFormatError(FormatError):
    """The bytes are not a patch that this release can read. Nothing was changed.

    Attributes:
        source: What held the bytes: a path, or an object's name; None for bytes in memory.
    """


class CheckpointFormatError(FormatError):
    """The bytes are not a safetensors file that this release can read. Nothing was changed.

    Attributes:
        source: What held the bytes: a path, or an object's name; None for bytes in memory.
    """


class VersionSkewError(FormatError):
    """The bytes are sound, and of a newer format than this release knows: upgrade it. Nothing was changed.

    Attributes:
        source: What held the bytes: a path, or an object's name; None for bytes in memory.
        written_by: The software that wrote them, as "pulse-rl 0.3.0"; None where they do not say it.
        found_version: The version of their format.
        known_version: The newest version of that format that this release knows.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        written_by: str | None = None,
        found_version: int | None = None,
        known_version: int | None = None,
    ) -> None:
        super().__init__(message, source=source)
        self.written_by = written_by
        self.found_version = found_version
        self.known_version = known_version


def skew(
    what: str, found: int, known: int, *, written_by: str | None = None, source: str | None = None
) -> VersionSkewError:
    """The error for what is of a newer format. what: its format, as "the history"."""
    return VersionSkewError(
        f"{what} is of format version {found}, written by a newer pulse-rl"
        f"{f' ({printable(written_by)})' if written_by else ''}: expected at most {known}, which this release knows; "
        "upgrade pulse-rl",
        source=source,
        written_by=written_by,
        found_version=found,
        known_version=known,
    )


class BaseMismatchError(PulseError, ValueError):
    """The weights are not the ones that the patch, or the history, was made from. They are as they were.

    Attributes:
        missing: Names of tensors that were expected and not found.
        unexpected: Names of tensors that were found and not expected.
        reshaped: Names of tensors of another shape.
        retyped: Names of tensors of another dtype.
        expected: The digest that was expected, 16 hex digits; None where names, shapes or dtypes differ.
        found: The digest that was found, likewise.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        reshaped: Sequence[str] = (),
        retyped: Sequence[str] = (),
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.reshaped = tuple(reshaped)
        self.retyped = tuple(retyped)
        self.expected = expected
        self.found = found


class IntegrityError(PulseError):
    """Bits differ from what their hash, digest or signature promised. They were not accepted.

    Attributes:
        name: The object, tensor or file whose bits they are; None for a whole state of weights.
        expected: What was promised: a digest (16 hex digits), a hash (64), or a size in bytes.
        found: What the bits give instead, in the same form.
        ranks: Ranks that must hold the same bits and do not: of trainers, those that differ from the majority; of
            replicas, two that differ.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        expected: str | int | None = None,
        found: str | int | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.name = name
        self.expected = expected
        self.found = found
        self.ranks = tuple(ranks)


class ExchangeError(PulseError):
    """Ranks could not work together; between trainers, the shared weights are those of the round before.

    Attributes:
        ranks: The ranks at fault, if they are known.
        round: The round that could not be exchanged, from 1 as in LocoReport; None outside of a round.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), round: int | None = None) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.round = round


class StoreError(PulseError):
    """A store could not be read or written, or refused a commit.

    Attributes:
        url: The store, without credentials.
        name: The object, or the prefix that was to be listed.
        temporary: Whether the failure may pass: a timeout, a connection that was refused or lost, a server's error, too
            many requests. Then it is worth another attempt.
    """

    def __init__(
        self, message: str, *, url: str | None = None, name: str | None = None, temporary: bool = False
    ) -> None:
        super().__init__(message)
        self.url = url
        self.name = name
        self.temporary = temporary


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The store holds no object of that name.

    Attributes:
        url: The store, without credentials.
        name: The object.
        temporary: False.
    """


class ObjectExistsError(StoreError, FileExistsError):
    """The store holds an object of that name already, and it was to be created.

    Attributes:
        url: The store, without credentials.
        name: The object.
        temporary: False.
    """


class CannotListError(StoreError):
    """The store's objects can be read by name but not listed, as behind a plain web server.

    Attributes:
        url: The store, without credentials.
        name: The prefix that was to be listed.
        temporary: False.
    """


class CannotReadRangeError(StoreError):
    """The store's objects can only be read whole, as behind a web server that ignores ranges.

    Attributes:
        url: The store, without credentials.
        name: The object.
        temporary: False.
    """


class VersionNotFoundError(StoreError, LookupError):
    """The history does not hold the version that was asked for.

    Attributes:
        url: The store, without credentials.
        name: None.
        version: The version; None where any would have done, and the history is empty.
    """

    def __init__(self, message: str, *, url: str | None = None, version: int | None = None) -> None:
        super().__init__(message, url=url)
        self.version = version


class UnmappedError(PulseError):
    """An engine cannot follow a history in the memory of its weights. They are as they were.

    Attributes:
        name: The tensor, or the engine's parameter or module; None where it is not one alone.
        reason: Why, without the name.
    """

    def __init__(self, message: str, *, name: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason


class EngineError(PulseError):
    """An inference engine is out of reach, refused what it was asked for, or failed at it.

    Attributes:
        url: The engine.
        during: What it was asked for: "reach", "follow", "stage", "apply", "verify" or "resume".
        kind: The class of the engine's own error, as "IntegrityError"; None where there was no answer.
        status: The status of the answer, as HTTP numbers it; None without one.
        temporary: Whether another attempt may succeed: it did not answer, as while it restarts, or its store failed.
        version: The version that it is proved to hold after that; None where that is not known.
        paused: Whether it has stopped to generate, and stays so until an update succeeds; None where it is not known.
        fields: The fields of the engine's own error.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        during: str | None = None,
        kind: str | None = None,
        status: int | None = None,
        temporary: bool = False,
        version: int | None = None,
        paused: bool | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.url = url
        self.during = during
        self.kind = kind
        self.status = status
        self.temporary = temporary
        self.version = version
        self.paused = paused
        self.fields = dict(fields or {})


class ProcessDiedError(PulseError):
    """A process of a run is gone: killed, out of memory, or its node was lost.

    Attributes:
        process: Its name in the run, as "worker-0".
        memory: Whether Ray ended it because the memory of its node ran out.
    """

    def __init__(self, message: str, *, process: str | None = None, memory: bool = False) -> None:
        super().__init__(message)
        self.process, self.memory = process, memory


class MissingExtraError(PulseError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        name: The module that could not be imported.
        extra: The extra of pulse-rl that installs it.
    """

    def __init__(self, message: str, *, name: str | None = None, extra: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.extra = extra


@contextmanager
def translate(*foreign: type[Exception], to: Callable[[str], Exception]) -> Iterator[None]:
    """Turn a foreign library's exceptions into ours.

    foreign: the classes to catch. to: makes our exception from the foreign one's text. A VersionSkewError is never
    turned into anything else: only an upgrade helps.
    """
    try:
        yield
    except VersionSkewError:
        raise
    except foreign as error:
        raise to(str(error)) from None


def printable(text: str) -> str:
    """Text from outside as one line without control or invisible characters, so that a terminal shows it as it is."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


def without_secrets(url: str) -> str:
    """A URL that is refused, for its message: what precedes an @, or follows a ?, may be a password or a signature."""
    shown = re.sub(r"^(\s*[\w+.-]+:?/+)?.*@", r"\1…@", url, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?…", shown, flags=re.DOTALL)


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error and its notes as one printable line of at most `limit` characters.

    Of an operating system's error: the file and what is wrong with it, instead of how Python shows it.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        name = error.filename2 or error.filename
        text = f"{os.fsdecode(name)}: {error.strerror}" if name is not None else error.strerror
    line = printable("; ".join([text, *getattr(error, "__notes__", [])]))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def shown(names: Sequence[object]) -> str:
    """Names in a message, or numbers: the first 8 of them."""
    return ", ".join(map(str, names[:8])) + (" …" if len(names) > 8 else "")


def install_hint(extra: str) -> str:
    """How to install an extra: from where this installation came, so that what is named exists.

    An index is only named to who has installed from one. A source tree that is used in place names itself.
    """
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        installed = metadata.distribution("pulse-rl")
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or installed.read_text("RECORD") is None:
        return f'pip install ".[{extra}]" in a clone of pulse-rl\'s repository'
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610; an index leaves none
    if not origin:
        return f'pip install "pulse-rl[{extra}]"'
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install --editable "{url2pathname(urlsplit(origin["url"]).path)}[{extra}]"'
    url = origin["url"]
    if version := origin.get("vcs_info"):
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f'pip install "pulse-rl[{extra}] @ {url}"'


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module. Raises MissingExtraError, which names the extra to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise _missing(module, extra) from error


def require_installed(module: str, extra: str) -> None:
    """Raise MissingExtraError, which names the extra to install, unless a module is there. It is not imported."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise _missing(module, extra)


def _missing(module: str, extra: str) -> MissingExtraError:
    framework = module.split(".")[0]
    first = f"install {framework} first as its documentation says, then " if framework in FRAMEWORKS else ""
    message = f"{module} is needed for this and is not installed: {first}{install_hint(extra)}"
    return MissingExtraError(message, name=module, extra=extra)
