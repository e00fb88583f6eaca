"""The history of one run in a store: its versions, anchors and patches. It is a log, which the room `log` is about.

Formats: `manifest` is the commit of a version, `trail` lists the patches between recent versions and finds the cheapest
chain of them, `ending` says that a run has ended. Writing: `anchor` writes a full checkpoint, `log` commits.
Reading: `reading` is one call that does; `versions` reads manifests and knows which there are, `find` finds that of a
version, `search` finds the patches and anchors that lead to one, `follow` follows them, `restore` rebuilds the weights,
`assets` fetches an anchor's small files. `heartbeat` is what subscribers report. The sub-room `operate` has what
is done with a history besides: status, verify, prune, copy. Live weights belong to `sync`.
"""
