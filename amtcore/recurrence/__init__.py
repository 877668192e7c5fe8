"""The sequential kernels: one folder a family, each with a plain loop and its fast twins.

A family holds `reference.py` (plain loop, any device, slow), `cpu.py` (numba block kernel over
vector lanes) and `op.py` (the torch.library operator that picks one). `chain` runs several
families block by block while the data stay in cache, and pools the last one into frames.
"""
