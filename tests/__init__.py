"""Tests, in rooms as the source. What one room does is in the folder of its name; what holds for all rooms is here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # where `python -m tests.…` runs
