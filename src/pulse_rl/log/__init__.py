"""A log in a store: sealed documents that are put once, if absent, and that name all other objects.

`sealed` proves a document by its hash and `signing` by a key, `objects` puts, lists and reads, `beginning` says where a
pruned log begins. A history is one, and so are the rounds of trainers that meet in a store. What the documents say is
not known here.
"""
