"""The sequential kernels: torch operators, what computes them, chains of them, families, vectors.

A family holds `reference.py` (plain loop, any device, slow) and `cpu.py` (numba block kernel over
vector lanes); its operator in `ops` asks one of the `backends`: this processor, or a GPU, for which
`warp` compiles the same block kernels once more. `fused` runs several families block by block while
the data stay in cache, and pools the last one into frames. Each may import those named after it,
and `amtcore.errors`.
"""
