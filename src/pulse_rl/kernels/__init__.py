"""The hot loops, by where they run: `cpu` (Numba), and `reference`, the naive twins that tests compare them with.

Each of the two has the same functions with the same arguments and the same results. The ones that every room uses are
imported as `cpu.scatter`; a codec's, a study's or PULSELoCo's come from modules of those names. Kernels take and fill
arrays. They check nothing, except where they decode untrusted bytes: the caller proves every index in range.
"""
