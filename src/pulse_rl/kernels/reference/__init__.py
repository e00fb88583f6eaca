"""The same loops in plain Python, as naive as can be. Only tests import them, to compare the kernels with."""
