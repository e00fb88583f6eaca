"""Payloads as objects: one of each fragment, put before the offer that names it, read and proved by hash.

A payload that is not what its offer promises, or cannot be read, is the fault of the rank that sent it. A store that
fails is nobody's.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import ExchangeError, IntegrityError, ObjectNotFoundError
from pulse_rl.loco import exchange
from pulse_rl.loco.exchange import Fragment, Timings
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.board import Board
from pulse_rl.loco.meeting.documents import FragmentObject, Offer
from pulse_rl.loco.payload import indices_of
from pulse_rl.loco.sums import Mean
from pulse_rl.loco.trainer import Trainer
from pulse_rl.log.objects import fetch
from pulse_rl.parallel import at_once

REQUESTS_AT_ONCE = 8


def send(board: Board, trainer: Trainer, sends: list[Sends], timings: Timings) -> tuple[FragmentObject, ...]:
    """Put this trainer's payloads of its next round; returns what they are, by fragment."""
    parts = []
    for number, fragment in enumerate(trainer.masters.fragments):
        data = trainer.contribution.fragment(fragment, sends).encode()
        timings.spent("encode")
        board.store.put(names.payload_name(trainer.round + 1, board.rank, board.life, number), data)
        timings.spent("exchange")
        timings.sent_nbytes += len(data)
        parts.append(FragmentObject.of(data))
    return tuple(parts)


def receive(
    board: Board, trainer: Trainer, offers: Sequence[Offer], sends: list[Sends], timings: Timings
) -> list[Mean]:
    """The mean of each segment over these offers.

    sends: what this life of the trainer has offered, if it has; its own payload is not read.
    Raises ExchangeError with the rank whose payload is at fault, FloatingPointError for a mean that overflows, and
    StoreError.
    """
    own = board.rank if any((offer.rank, offer.life) == (board.rank, board.life) for offer in offers) else None
    others = [offer for offer in offers if offer.rank != own]
    means: list[Mean] = []
    for number, segments in enumerate(trainer.masters.fragments):
        fragment = trainer.contribution.fragment(segments, None if own is None else sends)
        timings.spent("decode")
        payloads = _fetch(board, fragment, number, others)
        timings.spent("exchange")
        timings.received_nbytes += sum(map(len, payloads.values()))
        if own is not None:
            payloads[own] = memoryview(b"")
        means += exchange.add_up(payloads, fragment, own)
        timings.spent("decode")
    return means


def sent_indices(board: Board, trainer: Trainer, offer: Offer) -> list[NDArray[np.uint32]]:
    """Which elements of each segment an offer sends. Raises as `receive`."""
    found: list[NDArray[np.uint32]] = []
    for number, segments in enumerate(trainer.masters.fragments):
        fragment = trainer.contribution.fragment(segments, None)
        payload = _fetch(board, fragment, number, [offer])[offer.rank]
        decoders = exchange.open_from(offer.rank, payload, fragment)
        found += [indices_of(decode(), one) for decode, one in zip(decoders, fragment.segments, strict=True)]
    return found


def _fetch(board: Board, fragment: Fragment, number: int, offers: Sequence[Offer]) -> dict[int, memoryview]:
    """The payloads of a fragment by rank."""

    def read(offer: Offer) -> memoryview:
        name = names.payload_name(offer.round, offer.rank, offer.life, number)
        try:
            return memoryview(fetch(board.store, offer.parts[number].ref(name), fragment.limit))
        except (IndexError, IntegrityError, ObjectNotFoundError) as error:
            reason = error if not isinstance(error, IndexError) else f"it has no fragment {number}"
            raise ExchangeError(f"rank {offer.rank}: payload: {reason}", ranks=(offer.rank,)) from error

    found = at_once(read, offers, REQUESTS_AT_ONCE, "pulse-payload")
    return {offer.rank: payload for offer, payload in zip(offers, found, strict=True)}
