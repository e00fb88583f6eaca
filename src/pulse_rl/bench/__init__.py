"""Measurements, each beside its floor and beside what a user would write himself. See bench/README.md."""
