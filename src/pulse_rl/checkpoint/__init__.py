"""Checkpoints: safetensors files, alone or as shards in a directory, mapped into memory.

`header` reads and writes a file's header, `files` opens checkpoints, `shards` writes them as Transformers reads them.
Nothing here knows patches or versions.
"""
