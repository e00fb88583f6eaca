"""Ranks that work together over torch.distributed: collectives, and one clear error when a rank fails.

    collectives   a process group, and what is exchanged in it
    private       one of our own beside the caller's, which knows the ranks that are lost
    ranks         work that succeeds on all ranks or on none; one process alone is one rank
    agreement     what must be alike on all ranks

What ranks exchange, and what is to be done after a failure, is their owner's: the text for it is a `Wording`.
torch is imported when a group is made.
"""
