"""What operates a history: what a person or a monitor does with one that others write and follow.

`status` and `describe` summarize a store, `subscribers` judges what heartbeats report, `verify` proves a history by
`walk`, `prune` deletes what is not kept and `partial` finds unfinished uploads, `copying` copies a history, `targets`
tells what a path names, `runs` where the store of a run is. The rooms above use it; what publishes, finds and restores
versions is in `history` itself and needs none of it.
"""
