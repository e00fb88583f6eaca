"""Object stores: `base` is the protocol, `objects` opens buckets, directories, memory and web servers through obstore.

`urls` reads what a user names, `requests` sets how obstore asks and what its failures mean, `patient` retries what
may pass, `ranges` reads parts of objects, and `cache` keeps objects in `cached_files` for all processes of a machine,
in a `folder` that is safe from other users; `around` passes calls on. A store holds named, immutable objects and knows
nothing of their contents.
"""
