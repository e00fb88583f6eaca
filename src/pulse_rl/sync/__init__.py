"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side.

    publish      `publisher` has the state and the verbs; it keeps a `baseline`, asks `successor` whether the next
                 version may follow, has `encoding` make and prove its patch, and `delivery` put and commit it
    subscribe    `subscriber` brings live weights to a version and proves it: `routes` decides how, `landings` writes
                 what is proved or keeps it, `loading` takes a whole version, `counting` recounts a digest
    shares       what each rank holds and owns of weights that several hold together

`turn` refuses a second thread; each side has its `report`. How a history is stored, read and searched is not here but
in `history`.
"""
