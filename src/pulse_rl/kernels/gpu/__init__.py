"""The hot loops on a CUDA device, compiled by Numba-CUDA at first use, with the results of the ones on the CPU.

`device` has arrays, launches and reads by address. `regions` describes memory that one launch reads; `bits` leads from
a bit for each element to results in order. `changes` finds, reads and writes changed elements; `digests` sums a
digest's terms; `casts` casts to bfloat16; `spots` does these for many segments of a patch; `moves` and `coding` serve
the `context` codec.

Kernels are queued on torch's current stream, and nothing waits for them but what returns host values. The caller proves
every index in range, as on the CPU; the decoder of the `context` codec checks every position itself. What runs on the
device is not decided here: `weights.devices` leads to it, where a tensor lies on one.
"""

import numpy as np

if not hasattr(np, "row_stack"):  # NumPy 2.5 has it no longer, and Numba-CUDA 0.30.4 asks for it when it is loaded
    np.row_stack = np.vstack
