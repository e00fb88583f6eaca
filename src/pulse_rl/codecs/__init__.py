"""Codecs: how the changes of a block of segments become bytes and back. One file each."""
