"""Following a history: weights are taken from version to version by the cheapest chain of patches.

Each patch is fetched while the one before is used, proved against the weights, and handed on to a `Landing`, which
writes it at once or keeps it for later. Objects that are missing or damaged are avoided.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, StoreError
from pulse_rl.history.fetch import limit_of
from pulse_rl.history.log import History
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import Fetched, check_promised, fetch_patch
from pulse_rl.history.search import FaultLog, find_links
from pulse_rl.history.trail import PatchLink, State, cheapest
from pulse_rl.patch.apply import KEEP_NBYTES, Application
from pulse_rl.patch.live import Copies, resolve
from pulse_rl.weights.layout import Layout


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
        """The weights to bring to another version."""

    @property
    def keep_nbytes(self) -> float:
        """Memory that the decoded changes of the next patch may take until it is written."""

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        """The weights as they will be when the next patch is written."""

    def land(self, application: Application, to: State) -> None:
        """Write a proved patch that leads to a version, or keep it."""


class Written:
    """Each patch is written to the weights at once."""

    keep_nbytes: float = KEEP_NBYTES

    def __init__(self, weights: Layout, effort: Effort) -> None:
        self.weights = weights
        self._effort = effort

    def before(self, live: Mapping[str, Copies]) -> Mapping[str, Copies]:
        return live

    def land(self, application: Application, to: State) -> None:
        with self._effort.timing("apply_s"):
            application.write()


def follow(
    history: History,
    landing: Landing,
    held: State,
    target: Manifest,
    effort: Effort,
    faults: FaultLog,
    *,
    sure: bool,
) -> State:
    """Bring weights from the version that they hold to another, by the cheapest chain of patches.

    sure: whether the weights were proved just now, so that a patch that does not fit them is itself at fault. Faulty
    objects are reported to faults and avoided: then the next cheapest chain is taken. Returns the version that was
    reached, which is not the target where no chain is left.
    Raises IntegrityError or BaseMismatchError where the weights may not hold what was assumed, or hold a version that
    is not in this history any more, and StoreError where the store is unreachable.
    """
    begin = held
    while held.sequence != target.sequence:
        chain = cheapest(find_links(history, held.sequence, target, faults), held.sequence, target.sequence)
        if chain is None:
            break
        with closing(_fetched(history, chain, faults, effort, limit_of(landing.weights.nbytes))) as fetched:
            for link in chain:
                if (patch := next(fetched, None)) is None:
                    break
                try:
                    check_promised(patch, link, held, target.tied)
                except (IntegrityError, BaseMismatchError) as error:
                    if isinstance(error, BaseMismatchError) and held == begin and not sure:
                        raise  # another version has this place now: the patch is not at fault
                    faults.add(link.ref.name, error)
                    break
                try:
                    application = prove(patch, landing.weights, effort, landing)
                except (FormatError, IntegrityError, BaseMismatchError) as error:
                    if not sure and not isinstance(error, FormatError):
                        raise
                    # From other bits than the base's, some codecs do not decode either.
                    if not sure and any(part.codec.conditional for part in patch.parts):
                        name = link.ref.name
                        raise IntegrityError(f"{name} on these weights: {error}", name=name) from error
                    faults.add(link.ref.name, error)
                    break
                landing.land(application, link.to)
                held = link.to
                del patch, application  # else memory holds three patches: one more is being fetched
    return held


def _fetched(
    history: History, chain: Sequence[PatchLink], faults: FaultLog, effort: Effort, limit: int
) -> Generator[Fetched, None, None]:
    """The patches of a chain, each fetched while the one before is used. Ends at the first that cannot be fetched.

    limit: bytes that a patch may have.
    """
    ahead = ThreadPoolExecutor(1, thread_name_prefix="pulse-fetch")
    try:
        pending = ahead.submit(fetch_patch, history.store, chain[0].ref, limit)
        for link, following in zip(chain, [*chain[1:], None], strict=True):
            try:
                with effort.timing("fetch_s"):
                    patch = pending.result()
            except (FormatError, IntegrityError, StoreError) as error:
                faults.add(link.ref.name, error)
                return
            if following is not None:
                pending = ahead.submit(fetch_patch, history.store, following.ref, limit)
            yield patch
            del patch
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


def prove(fetched: Fetched, weights: Layout, effort: Effort, landing: Landing | None = None) -> Application:
    """Prove a patch against weights that hold its base; write nothing. Raises IntegrityError or BaseMismatchError.

    landing: what becomes of it; None to write it before any other.
    """
    live = resolve(fetched.by_name(), fetched.first.tied, weights)
    landing = landing or Written(weights, effort)
    application = Application(fetched.parts, live, landing.keep_nbytes, landing.before(live))
    try:
        application.prove(int(fetched.first.header.base_digest, 16))
    finally:
        effort.decode_s += application.decode_s
        effort.prove_s += application.prove_s
    effort.nbytes += fetched.nbytes
    effort.patches += 1
    effort.changes += fetched.changes
    return application
