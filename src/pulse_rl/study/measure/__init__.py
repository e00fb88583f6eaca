"""Counting, exactly and on stored bits.

`timeline` decides which versions are compared. `sweep` reads every version of a segment once and compares it with
earlier ones; `tally` is what it counts of one step. `totals` adds segments up: by tensor, kind, depth and dtype.
`patches` reads two versions whole: for sizes of patches, and for `precision`, what receivers of lower precision see
change. Nothing here knows a learning rate.
"""
