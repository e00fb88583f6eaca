"""Imported by the process that ranks are forked from: classes and kernels, which would take each rank a second."""

import os
from unittest.mock import patch

import torch

from pulse_rl import Channel, Publisher, Subscriber, apply, diff, parallel

__all__ = ["Channel", "Publisher", "Subscriber"]

with patch.dict(os.environ, PULSE_THREADS="1"):  # threads would not survive the fork
    states = [{"w": torch.full((100,), float(version), dtype=torch.bfloat16)} for version in range(3)]
    apply(states[0], diff(*states[:2], base=0, target=1, codec="gap"))
    diff(*states[1:], base=1, target=2, codec="context")
parallel.threads.cache_clear()
