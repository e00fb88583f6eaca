"""The history of one run in a store: its versions, anchors and patches.

Written and read: `manifest` is the commit of a version, `signing` signs it, `trail` lists the patches between recent
versions and finds the cheapest chain of them, `anchor` writes a full checkpoint, `log` finds, reads and commits
versions, `restore` rebuilds the weights of a version. Operated: `prune` deletes what is not kept, `heartbeat` is what
subscribers report, `status`, `contents` and `verify` describe and check what is there. Live weights belong to `sync`.
"""
