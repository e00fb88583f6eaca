"""Where the rounds of a policy's trainers end.

A round ends in a version. It is the unit in which batches are handed out and checkpoints written, and after which a run
stops.

    without overlap         0 ──────── H ──────── 2H ──────── 3H
    with an overlap of n    0 ──────── H ── H+n ──── 2H ── 2H+n ──── 3H

The trainers begin an exchange at every multiple of H steps. With overlap it ends n steps later, and so does the round:
the first one has H + n steps and all others H, but for the last one of a run, which ends with the last step.
"""


def round_end(step: int, *, length: int, overlap: int) -> int:
    """The step at which a round ends that begins at this step. length: steps between two exchanges."""
    at_exchange = step % length == 0  # as no step was taken since the last exchange ended
    return step + length + (overlap if at_exchange else 0)
