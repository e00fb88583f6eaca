"""How the changes of segments become bytes, and back.

`base` is the protocol. `context` codes changes against the old bits (its probability tables are in `model`), `gap` is
the paper's, `raw` the plainest; `choose` picks one. `zstd` decompresses untrusted bytes within a limit. A codec knows
segments; it knows nothing of files, names or versions.
"""
