"""The history of one run in a store: its versions, anchors and patches. It is a log, which the room `log` is about.

Formats: `manifest` is the commit of a version, `trail` lists the patches between recent versions, `ending` says that a
run has ended. `history` finds and commits versions, on `versions`, which reads their manifests and knows which there
are. Writing: `anchor` writes a full checkpoint. Reading: `reading` is one call that does; `search` finds the cheapest
chain of patches, and the anchors, that lead to a version, `follow` follows them, `restore` rebuilds the weights.
`anchor_share` reads what one process needs of an anchor, `patches` the same of a patch, `assets` an anchor's small
files. `heartbeat` is what subscribers report. The sub-room `operate` has what is done with a history besides: status,
verify, prune, copy. Live weights belong to `sync`.
"""
