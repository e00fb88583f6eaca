"""Anchors: θ and momentum after a round, as newcomers start from them; and the pruning of what lies before one.

Of each fragment one object: a zstd frame of its θ and then its momentum, float32 and little-endian. Where trainers send
sparsely the momentum is mostly zeros. An anchor counts from when its document is put, after all its objects.
"""

from contextlib import suppress

import numpy as np
import zstandard

from pulse_rl.codecs.zstd import decompress
from pulse_rl.errors import FormatError, IntegrityError, StoreError, translate
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.board import Board
from pulse_rl.loco.meeting.documents import Anchor, FragmentObject
from pulse_rl.loco.outcome import StateAfter
from pulse_rl.log.objects import fetch
from pulse_rl.store.base import Store


def write(board: Board, masters: Masters, run: str, round: int) -> Anchor:
    """Put the objects of an anchor; returns its document, which is not put yet."""
    parts = []
    for number, fragment in enumerate(masters.fragments):
        segments = [masters.segments[each] for each in fragment]
        raw = np.concatenate([*(one.shared for one in segments), *(one.momentum for one in segments)]).tobytes()
        data = zstandard.ZstdCompressor(1).compress(raw)
        board.store.put(names.anchor_part_name(round, board.life, number), data)
        parts.append(FragmentObject.of(data))
    return Anchor(
        run=run,
        round=round,
        theta=masters.digest(),
        momentum=masters.momentum_digest(),
        life=board.life,
        parts=tuple(parts),
    )


def put(board: Board, masters: Masters, round: int) -> None:
    """Put an anchor of the run, unless another trainer has put one of this round."""
    anchor = write(board, masters, board.run_id, round)
    if not board.post(names.anchor_name(round), anchor):
        delete(board.store, anchor)


def delete(store: Store, anchor: Anchor) -> None:
    """Delete the objects of an anchor that does not count; what fails is left to a later pruning."""
    with suppress(StoreError):
        for number in range(len(anchor.parts)):
            store.delete(names.anchor_part_name(anchor.round, anchor.life, number))


def read(store: Store, masters: Masters, anchor: Anchor) -> StateAfter:
    """Read and check all of an anchor; changes nothing. Raises IntegrityError and StoreError."""
    name = names.anchor_name(anchor.round)
    if len(anchor.parts) != len(masters.fragments):
        raise IntegrityError(
            f"{name} in {store.url}: expected {len(masters.fragments)} fragments, as this model has, found "
            f"{len(anchor.parts)}",
            name=name,
        )
    state = StateAfter(anchor.round, [], [], sum(part.nbytes for part in anchor.parts))
    for number, (fragment, part) in enumerate(zip(masters.fragments, anchor.parts, strict=True)):
        sizes = [masters.segments[each].size for each in fragment]
        raw = _read_part(store, part, names.anchor_part_name(anchor.round, anchor.life, number), 8 * sum(sizes))
        found = np.split(np.frombuffer(raw, "<f4").astype(np.float32, copy=False), np.cumsum(sizes * 2)[:-1])
        state.theta.extend(found[: len(sizes)])
        state.momentum.extend(found[len(sizes) :])
    digest, momentum = (masters.total_digest(each) for each in (state.theta, state.momentum))
    if (digest, momentum) != (anchor.theta, anchor.momentum):
        raise IntegrityError(
            f"{name} in {store.url}: expected θ and momentum of the digests {anchor.theta} and {anchor.momentum}, "
            f"found {digest} and {momentum}",
            name=name,
            expected=anchor.theta,
            found=digest,
        )
    return state


def newest(board: Board, masters: Masters, since: int = 0) -> StateAfter | None:
    """Read the newest anchor, if there is one of a round from `since` on. Raises as `read`."""
    rounds = [round for round in board.anchors() if round >= since]
    return read(board.store, masters, board.anchor(rounds[-1])) if rounds else None


def _read_part(store: Store, part: FragmentObject, name: str, nbytes: int) -> bytes:
    data = fetch(store, part.ref(name), nbytes + (nbytes >> 8) + 1024)
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=name)):
        raw = decompress(memoryview(data), nbytes, name)
    if len(raw) != nbytes:
        raise IntegrityError(f"{name}: expected {nbytes} bytes, found {len(raw)}", name=name)
    return raw


def prune(board: Board, newest: int, retain: int) -> None:
    """Delete what is older than the newest anchor that has `retain` rounds after it.

    newest: the last committed round. A trainer that is started again takes the rounds since its checkpoint, so as many
    are kept as a checkpoint may be old. First the store says where the rounds begin from then on, so that a trainer
    that slept for long does not commit one of the deleted rounds again. Raises StoreError; the next pruning deletes
    what is left then.
    """
    last = max((round for round in board.anchors() if round <= newest - retain), default=0)
    if not last:
        return
    board.begin_at(last + 1)
    for folder, before in ((names.ROUNDS, last + 1), (names.PAYLOADS, last + 1), (names.ANCHORS, last)):
        for info in board.store.list(folder):
            round = names.round_of(info.name)
            if round is not None and round < before:
                board.store.delete(info.name)
