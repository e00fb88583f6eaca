"""Benchmarks: each measures against its lower bound and against the code that a user would write. See bench/README.md.

Benchmarks that need root or files of the repository are not here but in the repository's `bench/`.
"""
