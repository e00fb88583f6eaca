"""The version of the package, and how what it writes names it."""

__version__ = "0.1.0"
SOFTWARE = f"pulse-rl {__version__}"  # what writes, with its version
