"""One process of an engine: it opens the history, finds the live weights, stages in a thread, and applies when told.

An engine calls it between its steps, in the thread that runs them, and all ranks get the same calls in the same order.
What takes long is done in a thread, one job after the other, so all ranks do the same jobs too, and each job's ranks
agree (`Ranks.do`) before they go on: none waits for one that has failed.

Two things are done in the engine's own thread: finding the map and proving what is derived, since the model's loader
runs for it and no step may run meanwhile (the thread asks, and the next call does it), and applying.

A history is opened and proved before the one that is followed is let go of, so a wrong address changes nothing. Where
it has the same tensors, the map that was proved stands: the weights need hold no version of the new history.

No call raises for what went wrong with a history or a store: the state says it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from pulse_rl.engines.pins import pinned
from pulse_rl.engines.ranks import Applied, RankState
from pulse_rl.engines.states import During, Failure, Follow, Mapped, Prepared, failure_of, not_staged
from pulse_rl.errors import BaseMismatchError, IntegrityError, PulseError, VersionNotFoundError, one_line
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor_share import tensors_of
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, check_same_history
from pulse_rl.kernels.cpu.beside import start_compiling
from pulse_rl.logs import logger
from pulse_rl.store.base import Store
from pulse_rl.store.opening import open_store
from pulse_rl.sync.freed import return_freed
from pulse_rl.sync.subscribe.staging import Staged
from pulse_rl.sync.subscribe.subscriber import WORDING, Subscriber
from pulse_rl.weights.layout import TensorSpec

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
_Jobs: TypeAlias = "SimpleQueue[tuple[During, Callable[[], object]] | None]"  # None ends the thread
log = logger(__name__)

_HELP_S = 0.01  # between two looks whether a job wants something done in the engine's thread


class Views(Protocol):
    """The published tensors in an engine's memory: `engines.views.LiveViews`."""

    @property
    def ignored(self) -> tuple[str, ...]: ...

    def weights(self) -> dict[str, Any]: ...

    def prove(self, history: History, checkpoint: Path | None, ranks: Ranks | None) -> int | None: ...

    def prove_derived(self) -> object: ...

    def refresh(self) -> object: ...


# The tensors of a history, and the further names of tied ones → the name that stands for them.
FindViews = Callable[[dict[str, TensorSpec], dict[str, str]], Views]


class _Opened(NamedTuple):
    """A history that is followed."""

    history: Follow
    subscriber: Subscriber
    head: Manifest  # the newest when it was opened
    tensors: dict[str, TensorSpec]
    views: Views
    mapped: Mapped


def _heartbeat(name: str | None, replica: int) -> str | None:
    """A replica's own id, of at most 64 letters too."""
    return f"{name[:60]}.{replica}" if name and replica else name


def _open_store(wanted: Follow) -> Store:
    return open_store(wanted.store, cache=wanted.cache or False)


class EngineReceiver:
    """What one process of an engine does for a history. Calls come from one thread, the engine's.

    find_views: finds the weights of the history's tensors in this process. group: of the ranks that hold shares of one
    model, for this alone; None for one process. checkpoint: the files that the engine has loaded. compiles: whether
    this process compiles what is missing of the kernels, at once: one process of a host should. opens: opens the store
    of a history. replica: which replica of the model in its server this is a rank of; each writes its own heartbeat.
    """

    def __init__(
        self,
        find_views: FindViews,
        *,
        group: dist.ProcessGroup | None = None,
        checkpoint: Path | None = None,
        compiles: bool = True,
        opens: Callable[[Follow], Store] = _open_store,
        replica: int = 0,
    ) -> None:
        self._find_views, self._group, self._checkpoint, self._opens = find_views, group, checkpoint, opens
        self._replica = replica
        self._instance = secrets.token_hex(8)
        self._lock = threading.Lock()  # of what follows, which both threads write
        self._wanted: Follow | None = None  # the last order
        self._failure: Failure | None = None
        self._prepared: Prepared | None = None
        self._pending = 0  # jobs that are not done
        # Written by the thread that works: a job, or `apply` when no job is left.
        self._ranks: Ranks | None = None
        self._opened: _Opened | None = None  # what it follows
        self._staged: Staged | None = None
        self._synced = False  # whether it was brought to a version since the start
        # Whether the weights, or what the engine has computed from them, are of no version: it must not generate.
        self._stopped = False
        self._asleep = False  # whether the memory of the weights is given away
        self._jobs: _Jobs | None = None  # of the thread; None where none runs
        self._thread: threading.Thread | None = None  # the last one
        self._for_engine: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._compiling: threading.Thread | None = None
        if compiles:
            self._compiling = start_compiling()

    def state(self) -> RankState:
        """What this process holds."""
        self._help()
        with self._lock:
            opened = self._opened
            follow = opened.history if opened else None
            held = opened.subscriber if opened and not self._stopped else None
            return RankState(
                instance=self._instance,
                follow=follow,
                pending=None if self._wanted == follow else self._wanted,
                version=held.version if held else None,
                digest=held.digest if held else None,
                synced=self._synced,
                stopped=self._stopped,
                working=self._pending > 0,
                prepared=self._prepared,
                mapped=opened.mapped if opened else None,
                failure=self._failure,
            )

    def follow(self, wanted: Follow) -> RankState:
        """Follow a history as soon as it is opened; until then, and if that fails, the one before. What it follows
        already is opened again only where another history is in its store by now."""
        with self._lock:
            self._wanted = wanted
        self._add("follow", lambda: self._open(wanted, again=True))
        return self.state()

    def stage(self, version: int | None) -> RankState:
        """Stage a version, or the newest, in the thread."""
        wanted = self._wanted  # on all ranks the same, which it might not be when the job begins
        self._add("stage", lambda: self._stage(version, wanted))
        return self.state()

    def verify(self) -> RankState:
        """Recount the live weights, in the thread."""
        self._add("verify", self._verify)
        return self.state()

    def apply(self, version: int | None) -> Applied:
        """Write what is staged. No step of the engine may run meanwhile."""
        while self._pending:  # a request came in between: its end is the same on all ranks
            self._help(_HELP_S)
        start = time.perf_counter()
        failure = None
        try:
            self._apply(version)
        except Exception as error:  # noqa: BLE001 - the engine lives on, and the answer says it
            log.warning("cannot apply a version: %s", one_line(error))
            failure = failure_of("apply", error)
        self._drop_staged()
        with self._lock:
            self._failure = failure
        return Applied(self.state(), time.perf_counter() - start)

    def sleep(self, *, loses: bool) -> None:
        """Read no weight until `wake_up`: the engine gives away their memory. loses: what they hold, too."""
        while self._pending:  # a job, which may read them
            self._help(_HELP_S)
        self._drop_staged()
        self._asleep = True
        self._stopped |= loses and self._opened is not None

    def wake_up(self) -> None:
        """The weights have memory again, in the same place."""
        self._asleep = False
        if self._stopped:
            self.verify()  # which finds that they hold no version, so that the next update loads one

    def close(self) -> None:
        """Forget the history and what is staged, with its temporary files, and end the thread. `follow` begins anew."""
        with self._lock:
            self._wanted = None
            jobs, self._jobs = self._jobs, None
            self._pending += jobs is not None
        if jobs is not None:  # otherwise there is nothing to forget; and when Python ends, no thread can be started
            jobs.put(("follow", self._forget))
            jobs.put(None)  # a thread that went on would keep the engine's weights alive

    # What the thread does.

    def _work(self, jobs: _Jobs, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        while (found := jobs.get()) is not None:
            during, job = found
            failure = None
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the state says it
                log.warning("cannot %s: %s", during, one_line(error))
                failure = failure_of(during, error)
            with self._lock:
                self._failure = failure
                self._pending -= 1

    def _forget(self) -> None:
        self._drop_staged()
        with self._lock:
            self._opened, self._synced = None, False

    def _open(self, wanted: Follow | None, *, again: bool = False) -> _Opened:
        """Open a history and find the weights, unless it is followed already. Raises what went wrong, on all ranks.

        again: also where the store holds another one by now. Only who says `follow` means that one.
        """
        before, start = self._opened, time.perf_counter()
        if wanted is None:
            raise VersionNotFoundError("the engine was not told yet which history to follow")
        if before is not None and before.history == wanted and not (again and self._is_replaced(before)):
            return before
        self._drop_staged()  # of a history that is not wanted any more
        if self._ranks is None:
            self._ranks = Ranks.of(self._group, WORDING)
        do = self._ranks.do
        with self._ranks.collective():
            allowed = do("look what is pinned", lambda: pinned(wanted))
            store = do("open the store", lambda: self._opens(allowed))
            subscriber = Subscriber(
                store,
                public_key=allowed.public_key,
                heartbeat=_heartbeat(allowed.heartbeat, self._replica),
                patience=allowed.patience,
                view=allowed.view,
                group=self._group,
                overwrite=False,
            )
            head = do("read the newest version", subscriber.history.newest)
            tensors = do("read which tensors it has", lambda: tensors_of(subscriber.history, head))
            if before is not None and (before.tensors, before.head.tied) == (tensors, head.tied):
                views = before.views
            else:
                if self._compiling is not None:
                    self._compiling.join()
                find = partial(self._find_views, tensors, head.tied)
                views = do("find the weights", lambda: self._in_engine(find))
                views.prove(subscriber.history, self._checkpoint, self._ranks)
                do("prove what is derived from the weights", lambda: self._in_engine(views.prove_derived))
            subscriber.overwrite = True  # the memory is proved, whether by a version or by the engine's own files
        mapped = Mapped(len(views.weights()), tuple(views.ignored), time.perf_counter() - start)
        opened = _Opened(wanted, subscriber, head, tensors, views, mapped)
        with self._lock:
            self._opened, self._synced = opened, False
        return opened

    def _is_replaced(self, opened: _Opened) -> bool:
        """Whether a store holds another history than when it was opened. What cannot be read tells nothing."""
        assert self._ranks is not None

        def look() -> bool:
            try:
                check_same_history(opened.subscriber.history.newest(), opened.head)
            except PulseError as error:
                return isinstance(error, IntegrityError)
            return False

        with self._ranks.collective():
            return any(self._ranks.share("look at the history", look, bool, alike=True))

    def _stage(self, version: int | None, wanted: Follow | None) -> None:
        opened = self._open(wanted)
        self._drop_staged()
        start = time.perf_counter()
        staged = opened.subscriber.stage(opened.views.weights(), version=version)
        spent = time.perf_counter() - start
        return_freed()  # not in the pause: this takes about a millisecond
        with self._lock:
            self._staged = staged
            self._prepared = Prepared(
                version=staged.version,
                digest=staged.digest,
                route=staged.route,
                nbytes=staged.nbytes,
                changes=staged.changes,
                fetched_nbytes=staged.fetched_nbytes,
                stage_s=spent,
            )

    def _verify(self) -> None:
        if self._opened is None:
            raise VersionNotFoundError("no version to verify: the engine follows no history yet")
        self._opened.subscriber.verify(self._opened.views.weights())

    # What the engine's thread does.

    def _apply(self, version: int | None) -> None:
        if self._ranks is None or self._opened is None:
            raise VersionNotFoundError("no version is staged: the engine follows no history yet")
        subscriber, views = self._opened.subscriber, self._opened.views
        with self._ranks.collective():
            staged = self._ranks.do("apply", lambda: self._take(version))
            before = subscriber.version
            try:
                staged.apply()
            except BaseMismatchError:
                raise  # nothing was written
            except BaseException:
                self._stopped |= before is None or subscriber.version != before
                raise
            self._stopped = True
            self._ranks.do("rebuild what is derived from the weights", views.refresh)
            self._stopped, self._synced = False, True

    def _take(self, version: int | None) -> Staged:
        if self._staged is None or version not in (None, self._staged.version):
            raise not_staged(version, self._staged.version if self._staged else None)
        return self._staged

    def _help(self, seconds: float = 0.0) -> None:
        """Do in this thread, the engine's, what a job waits for."""
        try:
            work, result = self._for_engine.get(timeout=seconds) if seconds else self._for_engine.get_nowait()
        except Empty:
            return
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised in the job
            result.set_exception(error)

    def _in_engine(self, work: Callable[[], T]) -> T:
        """Have something done in the engine's thread, at its next call."""
        result: Future[T] = Future()
        self._for_engine.put((work, result))
        return result.result()

    # What both use.

    def _add(self, during: During, job: Callable[[], object]) -> None:
        with self._lock:
            if self._asleep:
                self._failure = Failure(during, "RuntimeError", "the engine sleeps: wake it up first", temporary=True)
                return
            self._pending += 1
            if self._jobs is None:
                self._jobs = SimpleQueue()
                work = partial(self._work, self._jobs, self._thread)
                self._thread = threading.Thread(target=work, name="pulse-rl", daemon=True)
                self._thread.start()
            self._jobs.put((during, job))

    def _drop_staged(self) -> None:
        with self._lock:
            staged, self._staged, self._prepared = self._staged, None, None
        if staged is not None:
            staged.discard()
