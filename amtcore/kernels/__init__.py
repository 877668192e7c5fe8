"""The sequential kernels: torch operators (`ops`), chains of them (`fused`), families, vectors.

A family holds `reference.py` (plain loop, any device, slow) and `cpu.py` (numba block kernel over
vector lanes); its operator in `ops` picks one. `fused` runs several families block by block while
the data stay in cache, and pools the last one into frames. Each may import those named after it,
and `amtcore.errors`.
"""
