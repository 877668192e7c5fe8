"""What computes: one object behind the operators and the extraction path.

    cpu          compiled for this processor, on threads
    cuda         the same block functions on a GPU: one warp for LANES channels
    interpreted  as cuda, with an interpreter of its PTX in the place of the driver; on the CPU

It may import `warp`, `fused`, `families` and `vector`.
"""
