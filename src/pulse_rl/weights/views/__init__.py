"""Views: the same weights in the precision that engines load. What is quantised, by which rule, and how it is kept.

`rules` has the arithmetic of each library, and `formats` the names, shapes and config of the checkpoints that engines
load; `view` is how a user says both. `quantised` holds the codes and scales of live weights, and keeps up with them.
Nothing here reads a file or knows of versions.
"""
