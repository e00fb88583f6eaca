"""Trainers that reach each other only through an object store.

    names, documents    the objects, and the sealed JSON of the small ones
    board               reading and writing them; the put-if-absent that decides
    parcels, anchors    payloads, and the state that newcomers start from
    commits             the end of a round: who is waited for, and what counts
    joining, pruning    how a trainer takes part, and what is deleted
    members, group      what a round needs of all this, and the public side

What a payload holds is not known here (`contributions`), nor what an outer step is (`masters`).
"""
