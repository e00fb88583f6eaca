"""How the changes of segments become bytes, and back.

`base` is the protocol. `context` codes changes given the old bits (`model` is its statistics), `gap` is the paper's
codec. `choose` picks a codec to write with. `zstd` decompresses untrusted bytes within a limit. A codec knows segments;
it knows nothing of files, names or versions.
"""
