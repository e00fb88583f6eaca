"""The hot loops on the CPU, compiled by Numba at first use; they release the GIL, so that threads run them at once.

`casts` casts to bfloat16; `changes` finds, reads, writes and merges changed elements, `states` finds those of many
segments at once, also of float32 that is read as bfloat16, `tiles` sorts them into tiles, and `spots` checks and writes
those of many tiles; `digests` sums a digest's terms; `gaps` codes the words of the `gap` codec; `moves`, `rangecoder`
and `context` code the `context` codec, `coding` many of its segments at once; `loco` and `study` serve those rooms,
`quantising` the views of weights; `exchanged` asks tensors where they lie. `arrays` holds what they share. Kernels
allocate no memory. Those that decode untrusted bytes check every position before they use it, and return a status
instead of raising.

`compiled` has the decorator that makes kernels of functions, and keeps their machine code on disk; `warmup` compiles
all of them beforehand.
"""

from pulse_rl.kernels.cpu.arrays import LANES, buffer
from pulse_rl.kernels.cpu.casts import cast_bfloat16
from pulse_rl.kernels.cpu.changes import (
    SLACK,
    find_changes,
    gather,
    gather_rows,
    scatter,
    scatter_rows,
    unions,
)
from pulse_rl.kernels.cpu.digests import digest_delta, digest_range, digest_rows, positions
from pulse_rl.kernels.cpu.gaps import gap_decode, gap_encode
from pulse_rl.kernels.cpu.spots import WHOLE, Elements, Spots, Windows, copy_spots, spots_delta, windowed, write_spots
from pulse_rl.kernels.cpu.states import Differences, digest_spots, find_in_spots
from pulse_rl.kernels.cpu.tiles import Cut, Grid, TileChanges, split

__all__ = [
    "LANES",
    "SLACK",
    "WHOLE",
    "Cut",
    "Differences",
    "Elements",
    "Grid",
    "Spots",
    "TileChanges",
    "Windows",
    "buffer",
    "cast_bfloat16",
    "copy_spots",
    "digest_delta",
    "digest_range",
    "digest_rows",
    "digest_spots",
    "find_changes",
    "find_in_spots",
    "gap_decode",
    "gap_encode",
    "gather",
    "gather_rows",
    "positions",
    "scatter",
    "scatter_rows",
    "split",
    "spots_delta",
    "unions",
    "windowed",
    "write_spots",
]
