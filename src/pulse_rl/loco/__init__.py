"""PULSELoCo: trainers that exchange only what the next forward pass can see, and DiLoCo, the same without a gate.

    rounds, optimizer       a round, from inner steps to its report; PulseLoCo and DiLoCo themselves
    members                 who takes part: a fixed group, trainers that come and go (elastic, lighthouse), or trainers
                            that reach each other only through a store (meeting)
    contributions           what a trainer adds to a round: found by the gate (gate, log8), as bytes (payload)
    exchange, sums          the mean of what all send
    trainer, masters        the state that the outer step changes; as a dict in checkpoint
    outcome                 what a round gave

Inner steps and their data are the caller's. How weights reach rollout workers is another room's (`sync`), and so are
collectives (`group`).
"""

from pulse_rl.errors import require

require("torch", "torch")
