"""How the changes of segments become bytes, and back.

`base` is the protocol. `context` codes changes given the old bits (`model` is its statistics), `gap` is the paper's
codec, and `raw` writes indices and values as they are. `choose` picks a codec to write with; `raw` is only read. `zstd`
decompresses untrusted bytes within a limit. A codec knows segments; it knows nothing of files, names or versions.
"""
