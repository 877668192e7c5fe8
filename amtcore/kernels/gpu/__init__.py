"""The block kernels for a GPU: LANES is a warp, a vector is one number in each of its threads.

    families, fused --target--> LLVM IR --assemble--> PTX --launching--> a GPU, or the interpreter

It may import `fused`, `families` and `vector`.
"""
