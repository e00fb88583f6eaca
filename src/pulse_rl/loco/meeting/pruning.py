"""Pruning: rounds that lie before an anchor, and before the newest ones that are kept, are deleted.

A trainer that is started again takes the rounds since its checkpoint, so as many are kept as a checkpoint may be old.
First the store says where the rounds begin from then on, so that a trainer that slept for long does not commit one of
the deleted rounds again. An interrupted pruning is ended by the next.
"""

from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.board import Board


def prune(board: Board, newest: int, retain: int) -> int:
    """Delete what is older than the newest anchor that has `retain` rounds after it; returns how many objects.

    newest: the last committed round. Raises StoreError; the next pruning deletes what is left then.
    """
    last = max((round for round in board.anchors() if round <= newest - retain), default=0)
    if not last:
        return 0
    if board.first() <= last:
        board.begin_at(last + 1)
    deleted = 0
    for folder, before in ((names.ROUNDS, last + 1), (names.PAYLOADS, last + 1), (names.ANCHORS, last)):
        for info in board.store.list(folder):
            round = names.round_of(info.name)
            if round is not None and round < before:
                board.store.delete(info.name)
                deleted += 1
    return deleted
