"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side.

`publisher` holds the state and the verbs. It keeps a `baseline`, asks `successor` whether the next version may follow,
and has `encoding` make and prove its patch; `delivery` puts the version into the history and commits it, with patches
over many versions from `skips`; `turn` refuses a second thread. `subscriber` brings live weights to a version and
proves it: `counting` recounts their digest, `loading` takes a whole version, `polling` waits for one. Both return
`reports`. How a history is stored, read and searched is not here but in `history`.
"""
