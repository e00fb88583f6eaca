"""One file for each framework, imported by its users only. What is here adapts; it decides nothing.

`transformers` has callbacks for Transformers' Trainer, which publish the weights and measure their sparsity.
"""
