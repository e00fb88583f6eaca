"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side.

`publisher` finds and encodes changes against its baseline, `delivery` puts a version into the history and commits it,
`skips` makes patches over many versions. `subscriber` brings live weights to a version and proves it. `reports` is what
both return. How a history is stored and read is in `history`.
"""
