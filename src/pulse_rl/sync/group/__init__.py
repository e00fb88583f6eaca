"""What ranks of one process group agree on: who holds and who owns what, and that a step has succeeded on all."""
