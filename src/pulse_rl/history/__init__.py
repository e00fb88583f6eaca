"""The history of one run in a store: its versions, anchors and patches.

Formats: `manifest` is the commit of a version, `signing` signs it, `trail` lists the patches between recent versions
and finds the cheapest chain of them, `beginning` says where a pruned history begins, `ending` that a run has ended.
Writing: `anchor` writes a full checkpoint, `log` commits. Reading: `log` reads versions, which `newest` and `find` find
(`base` is what they need of it), `search` finds the patches and anchors that lead to one, `fetch` reads those,
`restore` rebuilds the weights, `assets` fetches an anchor's small files. `heartbeat` is what subscribers report. The
sub-room `operate` has what is done with a history besides: status, verify, prune, copy. Live weights belong to `sync`.
"""
