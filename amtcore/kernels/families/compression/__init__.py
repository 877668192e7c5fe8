"""Memoryless nonlinearities: the broken stick, the power law and the square.

It may import `vector` and `over_time`, no other family.
"""
