"""Object stores: `base` is the protocol, `objects` opens buckets, directories, memory and web servers through obstore.

A store holds named, immutable objects and knows nothing of their contents.
"""
