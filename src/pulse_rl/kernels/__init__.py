"""The hot loops, by where they run: `cpu` (Numba) and `gpu` (Numba-CUDA).

The naive twins of `tests/naive` have the functions, arguments and results of `cpu`; `gpu` has some of them. The
ones that every room uses are imported as `cpu.scatter`; a codec's, a study's or PULSELoCo's come from modules of those
names. Kernels take and fill arrays. They check nothing, except where they decode untrusted bytes: the caller proves
every index in range.
"""
