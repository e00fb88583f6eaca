"""Trainers that reach each other only through an object store.

names, documents    the objects, and the sealed JSON of the small ones
board               reading and writing them; the put-if-absent that decides
payloads, anchors   what a round sends; the state that newcomers start from, and what is deleted before it
commits, repair     the end of a round: who is waited for, what counts, and what then cannot be read
joining             how a trainer takes part
group               the public side, and what a round needs of all this
"""
