"""The hot loops, by where they run: `cpu` (Numba), `gpu` (Numba-CUDA), and `reference`, the naive twins of tests.

`cpu` and `reference` have the same functions with the same arguments and the same results; `gpu` has some of them. The
ones that every room uses are imported as `cpu.scatter`; a codec's, a study's or PULSELoCo's come from modules of those
names. Kernels take and fill arrays. They check nothing, except where they decode untrusted bytes: the caller proves
every index in range.
"""
