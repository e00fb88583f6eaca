"""What operates a history: what a person or a monitor does with one that others write and follow.

`status` and `describe` summarize a store, `subscribers` judges what heartbeats report, `verify` proves a history by
`walk`, `prune` deletes what is not kept, `unfinished` finds uploads that were not finished, `copying` copies a history,
`targets` tells what a path names. The rooms above use it; what publishes, finds and restores versions is in `history`
itself and needs none of it.
"""
