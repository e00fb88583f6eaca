"""The hot loops: `reference` is naive Python for the tests, `cpu` is Numba."""
