"""PULSELoCo: trainers that exchange only what the next forward pass can see, and DiLoCo, its dense baseline."""

from pulse_rl.errors import require

require("torch", "torch")
