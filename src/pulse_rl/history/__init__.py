"""The history of one run in a store: its versions, anchors and patches.

Formats: `manifest` is the commit of a version, `signing` signs it, `trail` lists the patches between recent versions
and finds the cheapest chain of them. Writing: `anchor` writes a full checkpoint, `log` commits. Reading: `log` finds
and reads versions, `search` finds the patches and anchors that lead to one, `fetch` reads those, `restore` rebuilds
the weights. Operating: `prune` deletes what is not kept, `heartbeat` is what subscribers report, `status` and
`describe` summarize a store, `verify` proves one by `walk`, `targets` tells what a path names. Live weights belong to
`sync`.
"""
