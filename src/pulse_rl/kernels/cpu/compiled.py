"""Compile kernels, and keep their machine code on disk. `kernel` is the one decorator of them all.

A kernel is compiled when it is first called with arguments of some types. Its machine code is looked for in `places()`
before that, and kept in the first of them that can be written afterwards. Where none can be, as in a container whose
package and home are read-only, each process compiles anew and one warning says so. A place that can only be read is
as good as any other to read from: so an image that `pulse-rl warmup` filled needs nothing that is writable.

Numba's own cache refuses a directory that it cannot write, and fails a call where a disk is full or a file is broken.
It also compares a kernel with the source of its file only, and kernels call each other across files: here all of
them share one stamp. Numba's `_Cache`, of which `Cache` is one, is private; `tests/kernels/test_compiled.py` holds
what is used.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple

from numba import config, njit
from numba.core import event
from numba.core.caching import IndexDataCacheFile, NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, CompileResult
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import FixupArgs, GenericRewrites, IRProcessing, ReconstructSSA, TranslateByteCode

from pulse_rl.logs import logger
from pulse_rl.units import count

log = logger(__name__)

ROOM = Path(__file__).parent
VARIABLES = ("PULSE_CACHE", "NUMBA_CACHE_DIR")  # set to a directory for machine code; the first counts first
SAY_EVERY = 5.0  # seconds of compiling between two lines of the log


def _hash_sources() -> str:
    """Of every kernel's source as it is now, 16 hex digits; "no-source" where there is none to read."""
    try:
        sources = [*sorted(ROOM.parent.glob("*/*.py")), ROOM.parent.parent / "dtypes.py"]
        return sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    except OSError:
        return "no-source"


# Made before any kernel is imported. One made at the first call would be that of sources that were edited, or upgraded,
# since the import: the machine code of the old ones would be kept for the new ones.
_STAMP = _hash_sources()


def stamp() -> str:
    """The hash of every kernel's source of which this process has imported the kernels."""
    return _STAMP


@cache
def places() -> tuple[Path, ...]:
    """The directories for machine code, best first: those of VARIABLES, the package's own, and the user's cache."""
    if _kept.only is not None:
        return (_kept.only.absolute() / stamp(),)
    chosen = [Path(os.environ[name]).absolute() / stamp() for name in VARIABLES if os.environ.get(name)]
    with suppress(RuntimeError):  # a user without a home
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return (*chosen, ROOM / "__pycache__", home.absolute() / "pulse-rl" / stamp())
    return (*chosen, ROOM / "__pycache__")


class Compiling(NamedTuple):
    """What this process has compiled so far, instead of finding it in a place."""

    kernels: int
    seconds: float


class Warmed(NamedTuple):
    """What a warm-up did."""

    places: tuple[Path, ...]  # where all kernels are now
    kernels: int  # how many were compiled, and not found there
    seconds: float


class _Kept:
    """Where machine code was found and kept."""

    def __init__(self) -> None:
        self.only: Path | None = None  # instead of the usual places
        self.places: dict[Path, None] = {}
        self.refused: Exception | None = None  # why the last place could not be written


_kept = _Kept()


@contextmanager
def keeping(directory: Path | None) -> Iterator[Callable[[], tuple[Path, ...]]]:
    """Look for machine code in this directory only, and keep it there. None: as usual.

    Yields a function that returns where it was found or kept. Raises OSError at the end if some could not be kept.
    """
    _kept.only, _kept.places, _kept.refused = directory, {}, None
    places.cache_clear()
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=directory).close()  # fails before the work
        yield lambda: tuple(_kept.places)
        if _kept.refused is not None:
            raise OSError(f"cannot keep compiled kernels in {' or '.join(map(str, places()))}: {_kept.refused}")
    finally:
        _kept.only = None
        places.cache_clear()


class _Clock(event.Listener):  # type: ignore[misc]
    """Count the kernels that are compiled, and their seconds; say so in the log. Numba compiles in one thread at a
    time, and a kernel that another one calls while that one is compiled.

    Meanwhile Python collects no garbage: a compiler makes so many objects that it would do so hundreds of times, which
    takes an eighth of the time.
    """

    def __init__(self) -> None:
        self.kernels = 0
        self.seconds = 0.0
        self._said = 0.0
        self._depth = 0
        self._begun = 0.0
        self._collecting = False

    def _ours(self, happening: event.Event) -> bool:
        return str(happening.data["dispatcher"].py_func.__module__).startswith("pulse_rl.")

    def on_start(self, happening: event.Event) -> None:
        if self._ours(happening):
            if self._depth == 0:
                self._begun, self._collecting = time.perf_counter(), gc.isenabled()
                gc.disable()
            self._depth += 1

    def on_end(self, happening: event.Event) -> None:
        if not self._ours(happening):
            return
        self.kernels += 1
        self._depth -= 1
        if self._depth == 0:
            if self._collecting:
                gc.enable()
            self.seconds += time.perf_counter() - self._begun
            if self.seconds - self._said >= SAY_EVERY:
                self._said = self.seconds
                what = count(self.kernels, "kernel"), self.seconds
                log.info("compiled %s in %.1f s so far; `pulse-rl warmup` does it beforehand", *what)

    def so_far(self) -> Compiling:
        return Compiling(self.kernels, self.seconds)


_clock = _Clock()
event.register("numba:compile", _clock)


def so_far() -> Compiling:
    """What this process has compiled so far."""
    return _clock.so_far()


class Cache(NullCache):  # type: ignore[misc]
    """Where the machine code of one kernel is found and kept. No failure to read or write it fails a call.

    A device's kernels have one, too, in `gpu.device`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        room, file = function.__module__.split(".")[-2:]
        python = f"py{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
        self._name = f"{room}.{file}.{function.__qualname__}.{python}"

    def _files(self) -> Iterator[tuple[Path, IndexDataCacheFile]]:
        for place in places():
            yield place, IndexDataCacheFile(str(place), self._name, stamp())

    def _target(self, codegen: Any) -> object:
        """What the code is for."""
        return (*codegen.magic_tuple(), bool(config.BOUNDSCHECK))

    def _rebuilt(self, target_context: Any, kept: Any) -> Any:
        return CompileResult._rebuild(target_context, *kept)

    def _codegen(self, result: Any) -> Any:
        return result.codegen

    def _reduced(self, result: Any) -> Any:
        return result._reduce()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = (signature, self._target(target_context.codegen()))
        for place, file in self._files():
            with suppress(Exception):  # missing, unreadable, cut off, or of another release of Numba
                about, kept = file.load(key)
                # Processes that write at once can leave another one's code under a key.
                if about == (stamp(), key):
                    _kept.places[place] = None
                    return self._rebuilt(target_context, kept)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if _hash_sources() != stamp():  # this kernel's file may have been imported after the change
            _kept.refused = RuntimeError("their sources have changed since this process began")
            return
        key = (signature, self._target(self._codegen(result)))
        for place, file in self._files():
            try:
                place.mkdir(parents=True, exist_ok=True)
                file.save(key, ((stamp(), key), self._reduced(result)))
            except Exception as error:  # noqa: BLE001 - a full disk, no permission, a broken index
                _kept.refused = error
            else:
                _kept.places[place] = None
                return
        _warn()


@cache
def _warn() -> None:
    """Once in a process."""
    log.warning(
        "compiling kernels anew in each process, which takes some seconds: none of %s can be written; "
        "run `pulse-rl warmup` where the image is built, or set PULSE_CACHE to a directory that can be written",
        ", ".join(map(str, places())),
    )


PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, without its passes for what no kernel has: closures, `with`, literals, array expressions."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for each in PASSES:
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


KERNELS: list[Any] = []  # Numba's dispatcher of each


def kernel(function: Callable[..., Any], *, nogil: bool = True) -> Any:
    """Compile a function at its first call with arguments of some types; it releases the GIL.

    nogil: False for one that calls into Python's objects.
    """
    compiled = njit(nogil=nogil, no_cfunc_wrapper=True, _nrt=False, pipeline_class=_Compiler)(function)
    compiled._cache = Cache(function)
    KERNELS.append(compiled)
    return compiled


class _Linked(JITCodeLibrary):  # type: ignore[misc]
    """The code of a part. Only the kernels that call it are optimised and compiled to machine code, with it inside."""

    # Where a function's environment is put: only what is called from Python has one.
    codegen = SimpleNamespace(set_env=lambda name, environment: None)

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _PartCompiler(_Compiler):
    def compile_extra(self, function: Any) -> Any:
        self.state.library = _Linked(self.state.targetctx.codegen(), function.__qualname__)
        return super().compile_extra(function)


def part(function: Callable[..., Any], *, forceinline: bool = False) -> Any:
    """A part of kernels, which only they call."""
    compiler = njit(
        nogil=True,
        forceinline=forceinline,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        _nrt=False,
        pipeline_class=_PartCompiler,
    )
    return compiler(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A small one, compiled into each of them: by LLVM, which takes a third less time than Numba's inlining."""
    return part(function, forceinline=True)
