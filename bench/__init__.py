"""Benchmarks: each measures against its lower bound, or against what a user would write. See README.md here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # where processes start that import this package
