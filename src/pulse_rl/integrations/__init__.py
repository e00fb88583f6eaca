"""One file for each framework, imported by its users only. They adapt; they decide nothing.

`transformers` has callbacks for Transformers' Trainer, which publish the weights and measure their sparsity.
"""
