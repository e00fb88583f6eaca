"""Segments: runs of a tensor that are compared, coded and applied independently, and so in parallel."""

SEGMENT = 1 << 20  # elements: 2 MB of BF16, so that both sides of a comparison stay in the L2 and L3 caches


def segments(size: int) -> list[tuple[int, int]]:
    """Cut a tensor of `size` elements into ranges [start, stop) of at most SEGMENT elements."""
    return [(start, min(start + SEGMENT, size)) for start in range(0, size, SEGMENT)]
