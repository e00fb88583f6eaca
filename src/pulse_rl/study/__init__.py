"""The sparsity study: how sparse the updates of a training run are, measured on its bits, and why."""
