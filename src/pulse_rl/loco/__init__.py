"""PULSELoCo: trainers that exchange only what the next forward pass can see, and DiLoCo, the same without a gate.

    gate, payload           what one trainer sends of a segment, and its bytes
    exchange                the mean of what all send
    masters, checkpoint     what a trainer holds, and its state as a dict
    contributions, outcome  what a trainer adds to a round, and what the round gave
    members                 who takes part: a fixed group, trainers that come and go (elastic, lighthouse), or trainers
                            that reach each other only through a store (meeting)
    rounds, optimizer       the states of a trainer, and PulseLoCo and DiLoCo themselves

Inner steps and their data are the caller's. How weights reach rollout workers is another room's (`sync`), and so are
collectives (`group`).
"""

from pulse_rl.errors import require

require("torch", "torch")
