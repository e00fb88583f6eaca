"""SparseRL-Sync: the changes of PULSESync, sent over a process group instead of a store.

    channel   the verbs send and receive
    steps     what they do, step by step, on all ranks or on none
    sender    what a sender does in each step
    receiver  what a receiver does in each step
    meeting   what the ranks say to each other at the start, and who needs what
    sides     which rank holds and owns what, among the senders and among the receivers
    wire      bytes in bounded buckets
    sparse    the changes: found and coded by each sender, kept and proved by each receiver
    dense     all bits: for a receiver without the base, and to compare every bit
    reports   what one send did; the cost model

Source of the idea: SparseRL-Sync, arXiv 2605.07330. Nothing here knows a store, nor how changes become bytes.
"""
