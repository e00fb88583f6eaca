"""Sources of a study: the versions of one run, read segment by segment.

`base` is the protocol of a source. `checkpoints` reads files; `history` reads what a publisher stored. Nothing is
counted here.
"""
