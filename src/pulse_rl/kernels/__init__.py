"""The hot loops, by where they run: `cpu` (Numba), and `reference`, their naive twins, which tests hold them against.

Kernels take and fill arrays. They check nothing: every index that comes from outside is proved in range before.
"""
