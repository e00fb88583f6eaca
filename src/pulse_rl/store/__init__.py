"""Object stores: named, immutable objects, of whose contents nothing is known here. From a bucket to bytes:

    opening     a URL (`urls`) → a store: of obstore (`objects`, in `directory` and `remote`), perhaps with a cache
       ↓
    cache       has the object been downloaded on this machine? then its file (`cached_files` in a safe `folder`)
       ↓  no
    patient     asks the store below; what may pass (`requests` says what) is tried again, for a stated time
       ↓
    objects     one request of obstore; its exceptions become ours

`base` is the protocol that all of these have, so any of them may be left out, and `around` what those in the middle
share. `ranges` reads parts of objects through whichever store it is given, in few requests.
"""
