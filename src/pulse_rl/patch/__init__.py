"""A patch: the changes from one version to another, as one safetensors file.

`format` is the file's layout and limits, `encode` makes a patch of two states, `apply` proves one against live weights
and writes it, `overlay` reads older states through what was overwritten. `verbs` are diff, apply and inspect on weights
in memory, `files` the same on checkpoints. Nothing here knows a store or a history.
"""
