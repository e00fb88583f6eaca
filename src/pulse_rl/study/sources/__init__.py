"""What is studied: the versions of a run. `base` is the protocol; `checkpoints` and `history` are its two sources."""
