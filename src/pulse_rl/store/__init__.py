"""Object stores: `base` is the protocol, `objects` opens buckets, directories, memory and web servers through obstore.

`urls` reads what a user names, `failures` turns obstore's exceptions into ours, `patient` retries what may pass. A
store holds named, immutable objects and knows nothing of their contents.
"""
