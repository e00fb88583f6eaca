"""Payloads as objects: one of each fragment, put before the offer that names it, read and proved by hash.

A payload that is not what its offer promises, or cannot be read, is the fault of the rank that sent it. A store that
fails is nobody's.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError, IntegrityError, ObjectNotFoundError
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.board import Board
from pulse_rl.loco.meeting.documents import FragmentObject, Offer
from pulse_rl.loco.members import Trainer
from pulse_rl.loco.sums import Mean
from pulse_rl.log.objects import fetch
from pulse_rl.parallel import submit
from pulse_rl.store.base import Store

REQUESTS_AT_ONCE = 8


def send(board: Board, trainer: Trainer, sends: list[Sends], timings: Timings) -> tuple[FragmentObject, ...]:
    """Put this trainer's payloads of its next round; returns what they are, by fragment."""
    parts = []
    for number, fragment in enumerate(trainer.masters.fragments):
        data = trainer.contribution.encode(fragment, sends)
        timings.spent("encode")
        board.store.put(names.payload_name(trainer.counters.round + 1, board.rank, board.life, number), data)
        timings.spent("exchange")
        timings.sent_nbytes += len(data)
        parts.append(FragmentObject.of(data))
    return tuple(parts)


def receive(
    store: Store, trainer: Trainer, offers: Sequence[Offer], sends: list[Sends], own: int | None, timings: Timings
) -> list[Mean]:
    """The mean of each segment over these offers.

    own: the rank whose payload is made of these sends, and is not read; None for none.
    Raises ExchangeError with the rank whose payload is at fault, FloatingPointError for a mean that overflows, and
    StoreError.
    """
    means: list[Mean] = []
    for number, fragment in enumerate(trainer.masters.fragments):
        payloads = _fetch(store, trainer.contribution, fragment, number, offers, own)
        timings.spent("exchange")
        timings.received_nbytes += sum(map(len, payloads.values()))
        means += trainer.contribution.add_up(fragment, payloads, sends, own)
        timings.spent("decode")
    return means


def sent_indices(store: Store, masters: Masters, contribution: Contribution, offer: Offer) -> list[NDArray[np.uint32]]:
    """Which elements of each segment an offer sends; nothing where trainers keep no residual. Raises as `receive`."""
    found: list[NDArray[np.uint32]] = []
    for number, fragment in enumerate(masters.fragments):
        payloads = _fetch(store, contribution, fragment, number, [offer], None)
        found += contribution.indices(fragment, offer.rank, payloads[offer.rank])
    return found


def _fetch(
    store: Store, contribution: Contribution, fragment: range, number: int, offers: Sequence[Offer], own: int | None
) -> dict[int, memoryview]:
    """The payloads of a fragment by rank; that of `own` is empty."""

    def read(offer: Offer) -> memoryview:
        if offer.rank == own:
            return memoryview(b"")
        name = names.payload_name(offer.round, offer.rank, offer.life, number)
        try:
            return memoryview(fetch(store, offer.parts[number].ref(name), contribution.limit(fragment)))
        except (IndexError, IntegrityError, ObjectNotFoundError) as error:
            reason = error if not isinstance(error, IndexError) else f"it has no fragment {number}"
            raise ExchangeError(f"rank {offer.rank}: payload: {reason}", ranks=(offer.rank,)) from error

    if len(offers) < 2:
        return {offer.rank: read(offer) for offer in offers}
    with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, len(offers)), thread_name_prefix="pulse-payload") as pool:
        futures = {offer.rank: submit(pool, read, offer) for offer in offers}
        return {rank: future.result() for rank, future in futures.items()}
