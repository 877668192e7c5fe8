"""The torch operators: checks of shapes, choice of a kernel, and gradients.

It may import `fused`, `families` and `vector`.
"""
