"""Following a history: weights are taken from version to version by the cheapest chain of patches.

Each patch is fetched while the one before is used, proved against the weights, and handed on to a `Landing`, which
writes it at once or keeps it for later. Objects that are missing or damaged are avoided.

Ranks may follow together, each with a share of the weights. Then the first chooses the chain, what each proves is added
up, and a fault that one of them meets is all the others' too: so all make the same decisions.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, StoreError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import Fetched, check_promised, fetch_patch, has_share
from pulse_rl.history.search import FaultLog, Faults, find_links
from pulse_rl.history.trail import PatchLink, State, cheapest, cost
from pulse_rl.log.objects import limit_of
from pulse_rl.patch.apply import KEEP_NBYTES, Application
from pulse_rl.patch.live import Copies, resolve
from pulse_rl.weights import digests
from pulse_rl.weights.layout import HasLayout, Layout


@dataclass
class Effort:
    """What it took to reach a version: bytes, patches, changes and seconds. decode_s and prove_s add up threads."""

    nbytes: int = 0
    patches: int = 0
    changes: int = 0
    fetch_s: float = 0.0  # spent waiting: less than the transfers took where they overlapped other work
    decode_s: float = 0.0
    apply_s: float = 0.0
    prove_s: float = 0.0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to one of the fields."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


class Landing(Protocol):
    """What becomes of patches that are proved."""

    @property
    def weights(self) -> Layout:
        """What this process holds of the weights to bring to another version."""

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        """The tensors of the whole model by every name, also those that this process holds nothing of."""

    @property
    def full_nbytes(self) -> int:
        """Of the whole model."""

    @property
    def keep_nbytes(self) -> float:
        """Memory that the decoded changes of the next patch may take until it is written."""

    @property
    def later(self) -> bool:
        """Whether patches are written by a later call, and other work goes on until then."""

    @property
    def added(self) -> int:
        """How often `complete` has added pieces to the weights."""

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        """The weights as they will be when the next patch is written."""

    def missing(self, fetched: Fetched) -> int:
        """How many boxes of old bits this process lacks, which decoding the patch reads. Called for each patch."""

    def complete(self) -> None:
        """Fetch the boxes that are missing for the last patch. A collective, where one of the processes misses any."""

    def land(self, application: Application, to: State) -> None:
        """Write a proved patch that leads to a version, or keep it. A collective."""


class Written:
    """Each patch is written to the weights at once: those of one process, in files or in memory."""

    added, later = 0, False
    keep_nbytes: float = KEEP_NBYTES

    def __init__(self, weights: Layout, effort: Effort) -> None:
        self.weights = weights
        self._effort = effort

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        return self.weights.all_names()

    @property
    def full_nbytes(self) -> int:
        return self.weights.nbytes

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        return live

    def missing(self, fetched: Fetched) -> int:
        return 0

    def complete(self) -> None:
        pass

    def land(self, application: Application, to: State) -> None:
        with self._effort.timing("apply_s"):
            application.write()


class _Choice(msgspec.Struct):
    """A chain that one process has chosen, and what it found wrong on the way."""

    chain: list[PatchLink] | None
    faults: Faults


def find_chain(
    history: History, held: State, target: Manifest, faults: FaultLog, ranks: Ranks, limit: int | None = None
) -> list[PatchLink] | None:
    """The cheapest chain of patches between two versions; None without one, or where it costs `limit` bytes or more.

    Raises StoreError where the store is unreachable.
    """

    def choose() -> _Choice:
        links = find_links(history, held.sequence, target, faults, limit)
        chain = cheapest(links, held.sequence, target.sequence)
        if chain is not None and limit is not None and cost(chain) >= limit:
            chain = None
        return _Choice(chain, faults.state())

    choice = ranks.lead("find patches", choose, _Choice)
    faults.take(choice.faults)
    return choice.chain


def follow(
    history: History,
    landing: Landing,
    held: State,
    target: Manifest,
    effort: Effort,
    faults: FaultLog,
    *,
    sure: bool,
    ranks: Ranks,
    chain: list[PatchLink] | None = None,
) -> State:
    """Bring weights from the version that they hold to another, by the cheapest chain of patches. A collective.

    sure: whether the weights were proved just now, so that a patch that does not fit them is itself at fault. Faulty
    objects are reported to faults and avoided: then the next cheapest chain is taken. Returns the version that was
    reached, which is not the target where no chain is left. chain: the cheapest one, if it is known.
    Raises IntegrityError or BaseMismatchError where the weights may not hold what was assumed, and StoreError where
    the store is unreachable.
    """
    while held.sequence != target.sequence:
        chain = chain or find_chain(history, held, target, faults, ranks)
        if chain is None:
            break
        with closing(_Ahead(history, chain, landing)) as ahead:
            for link in chain:
                try:
                    fetched = _fetch(ahead.next, link, held, target, landing, effort, ranks)
                except (FormatError, IntegrityError, StoreError) as error:
                    faults.add(link.ref.name, error)
                    break
                try:
                    application = _prove(link, fetched, landing, effort, ranks)
                except (FormatError, IntegrityError, BaseMismatchError) as error:
                    if not sure and not isinstance(error, FormatError):
                        raise
                    # From other bits than the base's, some codecs do not decode either.
                    if not sure and any(part.codec.conditional for part in fetched.parts):
                        name = link.ref.name
                        raise IntegrityError(f"{name} on these weights: {error}", name=name) from error
                    faults.add(link.ref.name, error)
                    break
                landing.land(application, link.to)
                held = link.to
                del fetched, application  # else memory holds three patches: one more is being fetched
        chain = None
    return held


class _Ahead:
    """The patches of a chain, in order. Each is fetched while the one before is used."""

    def __init__(self, history: History, chain: Sequence[PatchLink], landing: Landing) -> None:
        self._store, self._landing = history.store, landing
        self._left = list(reversed(chain))
        self._limit = limit_of(landing.full_nbytes)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pulse-fetch")
        self._submit()

    def _submit(self) -> None:
        if self._left:
            weights, self._added = self._landing.weights, self._landing.added
            self._pending = self._pool.submit(fetch_patch, self._store, self._left[-1].ref, self._limit, weights)

    def next(self) -> Fetched:
        """Wait for the next patch. Raises as `fetch_patch`."""
        fetched = self._pending.result()
        link, added = self._left.pop(), self._added
        self._submit()
        if added == self._landing.added or has_share(fetched, self._landing.weights):
            return fetched
        return fetch_patch(self._store, link.ref, self._limit, self._landing.weights)  # pieces were added meanwhile

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _fetch(
    wait: Callable[[], Fetched],
    link: PatchLink,
    held: State,
    target: Manifest,
    landing: Landing,
    effort: Effort,
    ranks: Ranks,
) -> Fetched:
    """Wait for the next patch, and check where it leads. A collective. Raises as `fetch_patch`."""

    def receive() -> tuple[Fetched, int]:
        with effort.timing("fetch_s"):
            fetched = wait()
        check_promised(fetched, link, held, target.tied)
        return fetched, landing.missing(fetched)

    fetched, missing = ranks.do_and_share(f"fetch {link.ref.name}", receive, int, alike=True)
    if any(missing):
        landing.complete()
    return fetched


def _prove(link: PatchLink, fetched: Fetched, landing: Landing, effort: Effort, ranks: Ranks) -> Application:
    """Decode and prove a patch. A collective. Raises PatchFormatError, IntegrityError or BaseMismatchError."""

    def decode() -> tuple[Application, int]:
        live = resolve(fetched.by_name(), fetched.first.tied, landing.weights, everywhere=landing.tensors)
        application = Application(fetched.parts, live, landing.keep_nbytes, landing.before(live))
        try:
            return application, application.own_delta(sparing=landing.later) & digests.MASK
        finally:
            effort.decode_s += application.decode_s
            effort.prove_s += application.prove_s

    application, deltas = ranks.do_and_share(f"prove {link.ref.name}", decode, int, alike=True)
    delta = sum(deltas) & digests.MASK
    application.prove(int(fetched.first.header.base_digest, 16), lambda mine: delta)
    effort.nbytes += fetched.nbytes
    effort.patches += 1
    effort.changes += fetched.changes
    return application


def prove(fetched: Fetched, weights: Layout, effort: Effort) -> Application:
    """Prove a patch against weights that hold its base; write nothing. Raises IntegrityError or BaseMismatchError."""
    application = Application(fetched.parts, resolve(fetched.by_name(), fetched.first.tied, weights))
    try:
        application.prove(int(fetched.first.header.base_digest, 16))
    finally:
        effort.decode_s += application.decode_s
        effort.prove_s += application.prove_s
    effort.nbytes += fetched.nbytes
    effort.patches += 1
    effort.changes += fetched.changes
    return application
