"""Names that the server's process and the workers share."""

METHOD = "pulse_rl"  # which `transfer` adds to vLLM's workers
