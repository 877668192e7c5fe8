"""The vector type that kernels are written in: lanes, threads, result memory, the cache on disk.

It may import nothing but `amtcore.errors`.
"""
