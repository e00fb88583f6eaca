"""The hot loops on the CPU, compiled by Numba at first use; they release the GIL, so that threads run them at once."""
