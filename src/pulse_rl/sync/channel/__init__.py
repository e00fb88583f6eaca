"""SparseRL-Sync: the pipeline of a publisher and a subscriber, delivered over a process group instead of a store.

    channel   the verbs send and receive
    exchange  one call, step by step, on all ranks or on none
    sender    encodes as a publisher does, and gives the bytes
    receiver  stages and applies as a subscriber does, from bytes that arrive
    sides     which rank holds and owns what, among the senders and among the receivers
    wire      bytes in bounded buckets
    tiles     all bits of the weights, for a receiver without the base, and to compare every bit
    reports   what one send did; the cost model

Source of the idea: SparseRL-Sync, arXiv 2605.07330. Nothing here knows a store, nor how changes become bytes.
"""
