"""What the errors of a lost exchange say to trainers."""

from pulse_rl.group.collectives import Wording

TRAINERS = Wording(
    failed="the exchange between trainers failed: a worker or the network is lost, or one took fewer inner steps than "
    "the others",
    advice="the shared weights are those of the last whole round: start the trainers again from their last checkpoint",
)
