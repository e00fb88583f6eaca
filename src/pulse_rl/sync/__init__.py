"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side.

`publisher` holds the state and the verbs. It keeps a `baseline`, asks `successor` whether the next version may follow,
and has `encoding` make and prove its patch; `delivery` puts the version into the history and commits it, with patches
over many versions from `skips`. `subscriber` brings live weights to a version and proves it. Both return `reports`.
How a history is stored, read and searched is not here but in `history`.
"""
