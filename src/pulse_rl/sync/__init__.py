"""PULSESync: the publisher on the trainer's side, the subscriber on the rollout workers' side.

    publish      `publisher` has the state and the verbs; it keeps a `baseline`, asks `successor` whether the next
                 version may follow, has `encoding` make and prove its patch, and `delivery` put and commit it
    subscribe    `subscriber` has the calls: each is one `sync`, which finds a version and takes live weights there;
                 `proof` says what they hold, `held` what each rank holds of them, `landings` writes what is proved
                 or keeps it, `loading` takes a whole version
    shares       what each rank holds and owns of weights that several hold together

`turn` refuses a second thread; each side has its `report`. How a history is stored, read and searched is not here but
in `history`.
"""
