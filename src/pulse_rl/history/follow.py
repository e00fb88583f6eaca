"""Following a history: weights are taken from version to version by the cheapest chain of patches.

Each patch is fetched while the one before is used, proved against the weights, and handed on to a `Landing`, which
writes it at once or keeps it for later. Objects that are missing or damaged are avoided.

Ranks may follow together, each with a share of the weights. Then the first chooses the chain, what each proves is added
up, and a fault that one of them meets is all the others' too: so all make the same decisions.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from pulse_rl.errors import BaseMismatchError, FormatError, IntegrityError, StoreError
from pulse_rl.history.manifest import Manifest
from pulse_rl.history.patches import Fetched, check_promised, fetch_patch, has_share
from pulse_rl.history.reading import Reading
from pulse_rl.history.search import agree_on_chain
from pulse_rl.history.trail import PatchLink, State
from pulse_rl.log.objects import limit_of
from pulse_rl.patch.apply import KEEP_NBYTES, Application
from pulse_rl.patch.live import Copies, resolve
from pulse_rl.patch.overlay import Older
from pulse_rl.weights import digests
from pulse_rl.weights.layout import HasLayout, Layout


class Landing:
    """What becomes of patches that are proved: here each is written at once, to whole weights of one process.

    weights: what this process holds of the weights to bring to another version.
    """

    later = False  # whether patches are written by a later call, and other work goes on until then

    def __init__(self, reading: Reading, weights: Layout) -> None:
        self.reading = reading
        self._weights = weights

    @property
    def weights(self) -> Layout:
        """What this process holds now."""
        return self._weights

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        """The tensors of the whole model by every name, also those that this process holds nothing of."""
        return self._weights.all_names()

    @property
    def full_nbytes(self) -> int:
        """Of the whole model."""
        return self._weights.nbytes

    @property
    def keep_nbytes(self) -> float:
        """Memory that the decoded changes of the next patch may take until it is written."""
        return KEEP_NBYTES

    def before(self, live: Mapping[str, Copies]) -> Older | None:
        """The weights as they will be when the next patch is written; None for as they are."""
        return None

    def missing(self, fetched: Fetched) -> int:
        """How many boxes of old bits this process lacks, which decoding the patch reads. Called for each patch."""
        return 0

    def complete(self) -> None:
        """Fetch the boxes that are missing for the last patch. A collective, where one of the processes misses any."""

    def land(self, application: Application, to: State) -> None:
        """Write a proved patch that leads to a version, or keep it. A collective."""
        self._write("write to files", application.write)

    def _write(self, what: str, write: Callable[[], None]) -> None:
        def timed() -> None:
            with self.reading.effort.timing("apply_s"):
                write()

        self.reading.ranks.do(what, timed, alike=True)


def follow(
    landing: Landing, held: State, target: Manifest, *, sure: bool, chain: list[PatchLink] | None = None
) -> State:
    """Bring weights from the version that they hold to another, by the cheapest chain of patches. A collective.

    sure: whether the weights were proved just now, so that a patch that does not fit them is itself at fault. Faulty
    objects are avoided: then the next cheapest chain is taken. chain: the cheapest one, if it is known. Returns the
    version that was reached, which is not the target where no chain is left.
    Raises IntegrityError or BaseMismatchError where the weights may not hold what was assumed, and StoreError where
    the store is unreachable.
    """
    reading = landing.reading
    while held.sequence != target.sequence:
        chain = chain or agree_on_chain(reading, held, target)
        if chain is None:
            break
        with closing(_Ahead(landing, chain)) as ahead:
            for link in chain:
                try:
                    fetched = _fetch(ahead, link, held, target)
                except (FormatError, IntegrityError, StoreError) as error:
                    reading.faults.add(link.ref.name, error)
                    break
                try:
                    application = _prove(landing, link, fetched)
                except (FormatError, IntegrityError, BaseMismatchError) as error:
                    if not sure and not isinstance(error, FormatError):
                        raise
                    # From other bits than the base's, some codecs do not decode either.
                    if not sure and any(part.codec.conditional for part in fetched.parts):
                        name = link.ref.name
                        raise IntegrityError(f"{name} on these weights: {error}", name=name) from error
                    reading.faults.add(link.ref.name, error)
                    break
                landing.land(application, link.to)
                held = link.to
                del fetched, application  # else memory holds three patches: one more is being fetched
        chain = None
    return held


class _Ahead:
    """The patches of a chain, in order. Each is fetched while the one before is used."""

    def __init__(self, landing: Landing, chain: Sequence[PatchLink]) -> None:
        self.landing = landing
        self._store = landing.reading.history.store
        self._left = list(reversed(chain))
        self._limit = limit_of(landing.full_nbytes)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pulse-fetch")
        self._submit()

    def _submit(self) -> None:
        if self._left:
            self._weights = self.landing.weights
            self._pending = self._pool.submit(fetch_patch, self._store, self._left[-1].ref, self._limit, self._weights)

    def next(self) -> Fetched:
        """Wait for the next patch. Raises as `fetch_patch`."""
        fetched = self._pending.result()
        link, before, weights = self._left.pop(), self._weights, self.landing.weights
        self._submit()
        if weights is before or has_share(fetched, weights):
            return fetched
        return fetch_patch(self._store, link.ref, self._limit, weights)  # pieces were added meanwhile

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _fetch(ahead: _Ahead, link: PatchLink, held: State, target: Manifest) -> Fetched:
    """Wait for the next patch, and check where it leads. A collective. Raises as `fetch_patch`."""
    landing, reading = ahead.landing, ahead.landing.reading

    def receive() -> tuple[Fetched, int]:
        with reading.effort.timing("fetch_s"):
            fetched = ahead.next()
        check_promised(fetched, link, held, target.tied)
        return fetched, landing.missing(fetched)

    fetched, missing = reading.ranks.do_and_share(f"fetch {link.ref.name}", receive, int, alike=True)
    if any(missing):
        landing.complete()
    return fetched


def _prove(landing: Landing, link: PatchLink, fetched: Fetched) -> Application:
    """Decode and prove a patch. A collective. Raises PatchFormatError, IntegrityError or BaseMismatchError."""
    effort = landing.reading.effort

    def decode() -> tuple[Application, int]:
        live = resolve(fetched.by_name(), fetched.first.tied, landing.weights, everywhere=landing.tensors)
        application = Application(fetched.parts, live, landing.keep_nbytes, landing.before(live))
        try:
            return application, application.own_delta(sparing=landing.later) & digests.MASK
        finally:
            effort.decode_s += application.decode_s
            effort.prove_s += application.prove_s

    application, deltas = landing.reading.ranks.do_and_share(f"prove {link.ref.name}", decode, int, alike=True)
    delta = sum(deltas) & digests.MASK
    application.prove(int(fetched.first.header.base_digest, 16), lambda mine: delta)
    effort.nbytes += fetched.nbytes
    effort.patches += 1
    effort.changes += fetched.changes
    return application


def prove(fetched: Fetched, weights: Layout) -> Application:
    """Prove a patch against weights that hold its base; write nothing. Raises IntegrityError or BaseMismatchError."""
    application = Application(fetched.parts, resolve(fetched.by_name(), fetched.first.tied, weights))
    application.prove(int(fetched.first.header.base_digest, 16))
    return application
